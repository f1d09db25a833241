"""Robust means: their definitions, a hostile client, what they refuse."""

import numpy as np
import pytest
import torch

from federation import federation
from unskew.core.errors import UserError
from unskew.core.tensors import PackedSums
from unskew.core.types import Failure, Reply
from unskew.methods import parse_method
from unskew.round import driver

ROBUST = ["trimmed(0.2)", "median", "bounded"]
SIZES = (20, 20, 20, 20, 20)


class Hostile:
    """An engine one of whose clients multiplies its update, or of whose clients only some answer."""

    def __init__(self, engine, factor=1.0, client=2, answering=None):
        self.engine, self.factor, self.client, self.answering = engine, factor, client, answering
        self.roster, self.memory = engine.roster, engine.memory

    def visit(self, job, shared, visits, key):
        for visit, reply in zip(visits, self.engine.visit(job, shared, visits, key), strict=True):
            if self.answering is not None and visit.client not in self.answering:
                yield Failure(visit.client, "left")
                continue
            sums = {name: value.clone() for name, value in reply.sums.items()}
            if visit.client == self.client:
                for name in sums:
                    sums[name] *= self.factor if name.startswith("delta/") else 1.0
            yield Reply(PackedSums.of(sums))


def one_round(method, **hostile):
    small = federation(method, sizes=SIZES, epochs=1)
    engine = small.open()
    try:
        ours = Hostile(engine, **hostile) if hostile else engine
        before = small.state()
        after, metrics = driver.run_round(small.algorithm, ours, before, small.key, per_round=5, skip_failures=True)
        return before.tensors, after.tensors, metrics
    finally:
        engine.close()


def moved(before, after):
    return float(torch.cat([(after[name] - before[name]).double().flatten() for name in before]).norm())


@pytest.mark.parametrize(
    ("method", "define"),
    [
        ("trimmed(0.2)", lambda updates, weights: np.sort(updates, 0)[1:-1].mean(0)),
        ("trimmed(0.1)", lambda updates, weights: updates.mean(0)),  # of 5, nobody is left out
        ("median", lambda updates, weights: np.median(updates, 0)),
        ("bounded(1)", lambda updates, weights: _bounded(updates, weights, 1.0)),
        ("bounded(1e9)", lambda updates, weights: weights @ updates / weights.sum()),
    ],
)
def test_each_is_its_definition(method, define):
    generator = np.random.default_rng(0)
    updates, weights = generator.normal(size=(5, 70)) * [[1], [2], [3], [4], [100]], generator.uniform(1, 9, 5)
    rule = parse_method(method).exchange.rule
    found = rule(torch.from_numpy(updates), torch.from_numpy(weights)).numpy()
    assert found == pytest.approx(define(updates, weights), rel=1e-12)


def _bounded(updates, weights, times):
    lengths = np.linalg.norm(updates, axis=1)
    shortened = updates * np.minimum(1, times * np.median(lengths) / lengths)[:, None]
    return weights @ shortened / weights.sum()


@pytest.mark.parametrize("method", ROBUST)
def test_one_client_with_a_huge_update_moves_the_model_no_further_than_the_others(method):
    honest = moved(*one_round("fedavg")[:2])
    assert moved(*one_round("fedavg", factor=1e6)[:2]) > 1e4 * honest
    assert moved(*one_round(f"fedavg + {method}", factor=1e6)[:2]) < 2 * honest


@pytest.mark.parametrize("method", ROBUST)
def test_an_update_of_zeros_everywhere_is_no_division_by_zero(method):
    before, after, _ = one_round(f"fedavg + {method}", factor=0.0)
    assert 0 < moved(before, after) < float("inf")


@pytest.mark.parametrize("method", ROBUST)
def test_a_round_with_two_answers_changes_nothing_and_says_why(method):
    before, after, metrics = one_round(f"fedavg + {method}", answering={0, 1})
    assert moved(before, after) == 0
    assert metrics.void == "2 clients answered, but a robust mean needs 3"


@pytest.mark.parametrize("other", ["scaffold", "prototypes", "fedir"])
def test_what_the_mean_would_not_cover_is_refused_by_name(other):
    with pytest.raises(UserError, match=rf"median and {other}.*robust mean does not cover it"):
        parse_method(f"median + {other}")


@pytest.mark.parametrize("other", ["secure(updates=true)", "private-updates", "fednova", "rounded"])
def test_two_ways_to_a_mean_are_refused(other):
    with pytest.raises(UserError, match=r"both claim the (exchange|aggregate) slot"):
        parse_method(f"median + {other}")


@pytest.mark.parametrize("text", ["trimmed(0)", "trimmed(0.5)", "trimmed(nan)", "bounded(0.5)", "bounded(inf)"])
def test_knobs_out_of_range_are_refused(text):
    with pytest.raises(UserError, match=text.split("(")[0]):
        parse_method(text)


def test_more_updates_than_memory_are_refused_before_they_fill_it(monkeypatch):
    monkeypatch.setattr("unskew.methods.robust.physical_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"a robust mean of 5 updates needs .* sample fewer clients"):
        one_round("fedavg + median")
