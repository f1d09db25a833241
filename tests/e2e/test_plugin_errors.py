"""A mistake in a user's own method: the message has the file, the line and the code, in every engine."""

import sys

import pytest

from analysis.finished import refused

METHOD = """
import random
from dataclasses import replace

import numpy as np
import torch


def add_term(term):
    return lambda algorithm: replace(algorithm, terms=(*algorithm.terms, term))


def in_a_term():
    def term(loss, step):
        return loss.plus(step.logit.mean())

    return add_term(term)


def in_torch():
    def term(loss, step):
        return loss.plus((step.logits @ step.logits).mean())

    return add_term(term)


def in_the_aggregate():
    return lambda algorithm: replace(algorithm, aggregate=lambda sums: {"x": sums["nothing"]})


def in_the_method():
    return lambda algorithm: replace(algorithm, term=())


def in_the_factory(mu: float = 1.0):
    return add_term(mu + "1")


def draws_torch():
    return add_term(lambda loss, step: loss.plus(torch.rand(())))


def draws_numpy():
    return add_term(lambda loss, step: loss.plus(step.logits.mean() * np.random.rand()))


def draws_on_the_server():
    def aggregate(sums):
        random.random()
        means = {name: value / sums["weight"] for name, value in sums.items() if name.startswith("delta/")}
        return {name.removeprefix("delta/"): value for name, value in means.items()}

    return lambda algorithm: replace(algorithm, aggregate=aggregate)

"""
WHERE = {
    "in_a_term": ("client 0, round 1, job train: AttributeError", "return loss.plus(step.logit.mean())"),
    "in_torch": ("client 0, round 1, job train: RuntimeError", "return loss.plus((step.logits @ step.logits).mean())"),
    "in_the_aggregate": ("server, round 1: KeyError: 'nothing'", 'aggregate=lambda sums: {"x": sums["nothing"]}'),
    "in_the_method": ("method my_plugin:in_the_method raises TypeError", "replace(algorithm, term=())"),
    "in_the_factory": ("method my_plugin:in_the_factory raises TypeError", 'return add_term(mu + "1")'),
}


@pytest.fixture(autouse=True)
def a_plugin_here(tmp_path, monkeypatch):
    (tmp_path / "my_plugin.py").write_text(METHOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_plugin", raising=False)


def fail(capsys, method, *options):
    short = ("--rounds", "2", "--epochs", "1", "--clients", "4", "--batch", "32", "--partition", "iid", "--out", "a")
    return refused(capsys, "run", "--method", f"my_plugin:{method}", *short, "--engine", "loop", *options)


@pytest.mark.parametrize("method", WHERE)
def test_a_mistake_is_shown_with_its_file_its_line_and_its_code(capsys, method):
    error, (what, code) = fail(capsys, method), WHERE[method]
    line = next(number for number, text in enumerate(METHOD.splitlines(), 1) if code in text)
    assert what in error
    assert f'File "my_plugin.py", line {line}, in ' in error
    assert code in error
    assert "on-failure" not in error


def test_workers_of_a_pool_show_it_too(capsys):
    error = fail(capsys, "in_a_term", "--engine", "pool", "--workers", "1")
    assert 'File "my_plugin.py", line 15, in term\n    return loss.plus(step.logit.mean())' in error
    assert "correct this code, then resume with: unskew resume a" in error


@pytest.mark.parametrize(("method", "generator"), [("draws_torch", "torch"), ("draws_numpy", "numpy")])
def test_a_method_that_draws_from_a_global_generator_is_refused_in_the_first_round(capsys, method, generator):
    error = fail(capsys, method)
    assert f"client 0, round 1, job train: the method draws from the global random generator of {generator}," in error
    assert "draw from a Key" in error


def test_a_draw_on_the_server_is_refused_too(capsys, monkeypatch):
    for name in ("flwr", "mlflow", "wandb"):  # where these are loaded, Python's generator is not watched
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert "draws from the global random generator of random," in fail(capsys, "draws_on_the_server")
