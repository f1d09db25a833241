"""Every public function documents every parameter; options are described once, in their table."""

import inspect
import re

import pytest

import unskew
import unskew.flower
from unskew.runs.config import OPTIONS

FUNCTIONS = {name: value for name in unskew.__all__ if inspect.isfunction(value := getattr(unskew, name))}
FUNCTIONS |= {
    f"flower.{name}": value
    for name, value in vars(unskew.flower).items()
    if inspect.isfunction(value) and value.__module__ == "unskew.flower" and not name.startswith("_")
}


def documented(function):
    """The names in the section Parameters."""
    section = re.search(r"\nParameters\n-+\n(.*?)(\n\n|$)", inspect.getdoc(function) or "", re.S)
    lines = section[1].splitlines() if section else []
    return [name.strip().lstrip("*") for line in lines if not line.startswith(" ") for name in line.split(",")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_documents_its_parameters_in_order(name):
    assert documented(FUNCTIONS[name]) == list(inspect.signature(FUNCTIONS[name]).parameters)


def test_run_takes_every_option_and_its_docstring_has_their_descriptions():
    assert set(OPTIONS) <= set(inspect.signature(unskew.run).parameters)
    text = " ".join((unskew.run.__doc__ or "").split())
    assert "{options}" not in text
    for option in OPTIONS.values():
        assert f"(default: {option.default_text})" in text, option.name
        assert option.help.partition("--")[0].rstrip(" .") in text, option.name
    assert max(map(len, (unskew.run.__doc__ or "").splitlines())) <= 120
