"""Any text at any knob: every method, calibration, partition, form, recording and measure, through their tables.

What is refused is refused when the text is read, before any training, with one message. A new row of a table is covered
without a change here.
"""

import inspect
from types import NoneType
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analysis import MEASURES, parse_measure
from unskew.calibration import CALIBRATIONS, parse_calibration
from unskew.calibration.covariances import FORMS, parse_form
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.language import MAX_COUNT, MAX_TEXT
from unskew.data.partition import SCHEMES, partition_examples
from unskew.data.sources import load
from unskew.engines import NAMES, check_name
from unskew.methods import METHODS, parse_methods
from unskew.models import NETWORKS, build
from unskew.runs.recording import RECORDED, parse_recording

LABELS = np.arange(60) % 3


def deal(text):
    return partition_examples(text, LABELS, clients=3, key=Key(0), classes=3)


TABLES = {
    "method": (METHODS, parse_methods),
    "calibration": (CALIBRATIONS, parse_calibration),
    "partition": (SCHEMES, deal),
    "form": (FORMS, parse_form),
    "recording": (RECORDED, parse_recording),
    "measure": ({name: measure.take for name, measure in MEASURES.items()}, parse_measure),
}


def kind_of(annotation):
    """The type of a knob's values; of one that need not be given, that of the given ones."""
    plain = [each for each in get_args(annotation) if each is not NoneType]
    kind = plain[0] if len(plain) == 1 else annotation
    return {"int": int, "float": float, "bool": bool, "str": str}.get(kind, kind)


KNOBS = [
    (table, name, knob.name, kind_of(knob.annotation))
    for table, (functions, _) in TABLES.items()
    for name, function in functions.items()
    for knob in inspect.signature(function).parameters.values()
    if not (table == "measure" and knob.name == "run")
]
HUGE = [MAX_COUNT + 1, -MAX_COUNT - 1, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**40, 10**308]
NEVER = ["1e999", "-1e999", "9" * 400, "0" * 5000, "1.2.3", "nan%", "'", "(", "1 2", "\ud800", "\0", "null,,", "{}"]
ODD = [
    "nan", "inf", "null", "none", "true", "''", "'\ud800'", "'a\0b'", "'ü'", "1e-400", "1e308", "-0.0", "-1", "0",
    "5e-324",
]  # fmt: skip


def read(table, text):
    """Whether a text is taken; if it is not, it is refused with one short message."""
    try:
        TABLES[table][1](text)
    except UserError as error:
        said = str(error)
    else:
        return True
    assert len(said) < 1200
    return False


def test_every_table_has_knobs():
    assert {table for table, *_ in KNOBS} == set(TABLES)


@pytest.mark.parametrize(("table", "name", "knob", "kind"), KNOBS)
def test_a_number_that_no_knob_has_is_refused_when_it_is_read(table, name, knob, kind):
    if kind is not float:
        for value in HUGE:
            assert not read(table, f"{name}({knob}={value})"), value
    elif table in ("method", "calibration"):
        for value in ("1e39", "-1e39", "1e308", "1e-39", "5e-324", 10**40):
            assert not read(table, f"{name}({knob}={value})"), value
    for value in NEVER:
        assert not read(table, f"{name}({knob}={value})"), value


@pytest.mark.parametrize(("table", "name", "knob", "kind"), KNOBS)
def test_an_odd_value_is_taken_or_refused_with_one_message(table, name, knob, kind):
    taken = {value for value in ODD if read(table, f"{name}({knob}={value})")}
    words = {"nan", "inf", "null", "none", "''", "'\ud800'", "'a\0b'", "'ü'"}
    if kind in (int, float, bool):
        assert not taken & words
    if kind in (int, bool):
        assert not taken & {"1e-400", "1e308", "-0.0", "5e-324"}
    if kind in (int, float):
        assert "true" not in taken


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=60) | st.text("abcdefed(),=+0123456789.'\" -", max_size=60))
@pytest.mark.parametrize("table", TABLES)
def test_any_text_is_taken_or_refused_with_one_message(table, text):
    if not text.strip().startswith("file:"):
        read(table, text)


LONG = [
    "a" * 100_000,
    "fedavg(" + "1" * 100_000,
    "fedavg + " * 20_000,
    "(" * 100_000,
    " " * 100_000,
    "'" * 99_999,
    "1" * 99_999 + "x",
    "fedavg(" + "a=1, " * 20_000 + ")",
]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
@pytest.mark.parametrize("table", TABLES)
def test_a_text_of_100_000_characters_is_refused_for_its_length(table, text):
    with pytest.raises(UserError, match="characters; the limit is 10,000"):
        TABLES[table][1](text)


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_a_text_of_any_allowed_length_gets_a_short_answer(text):
    for table in TABLES:
        assert not read(table, text[:MAX_TEXT])
        assert not read(table, "ccvr(" + text[: MAX_TEXT - 10])


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "\ud800", "tiny-cnn(3)", "tiny-cnn\n", "1e999"])
def test_a_name_of_a_network_an_engine_or_a_data_set_is_known_or_refused(name):
    for read in (lambda: build(name, (1, 8, 8), 10), lambda: check_name(name), lambda: load(name, None)):
        with pytest.raises(UserError, match=r"model|engine|data|name|cannot read") as error:
            read()
        assert len(str(error.value)) < 6000
    assert name not in NETWORKS
    assert name not in NAMES
