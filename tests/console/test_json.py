"""--json: every command that prints a result has it, and standard output is JSON alone."""

import json

import pytest

from analysis.finished import command
from unskew.console.main import COMMANDS, load_command

ACTING = {  # commands that print no result
    "schema", "federation init", "federation server", "federation node", "federation check", "federation stop",
    "federation demo",
}  # fmt: skip


def test_every_command_that_prints_a_result_takes_json():
    found = {}
    for name in COMMANDS:
        loaded = load_command(name)
        parts = {f"{name} {sub}": one for sub, one in getattr(loaded, "commands", {}).items()}
        for full, one in (parts or {name: loaded}).items():
            found[full] = any("--json" in parameter.opts for parameter in one.params)
    assert {name for name, has in found.items() if not has} == ACTING


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["data", "list"], {"name", "what", "classes", "shape", "sizes", "where"}),
        (["data", "check", "digits"], {"path", "size", "status", "detail", "notes", "summary"}),
        (
            ["partition", "--clients", "3", "--out", "p.npz"],
            {"scheme", "seed", "clients", "sizes", "emd", "hash", "file"},
        ),
        (
            ["reproduce", "ccvr/table1", "--data", "digits", "--show", "--out", "results"],
            {"recipe", "title", "command", "findings", "differences", "facts", "cells"},
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_standard_output_is_json_alone(words, keys, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = json.loads(command(capsys, *words, "--json")[1])
    assert keys <= set(found[0] if isinstance(found, list) else found)
