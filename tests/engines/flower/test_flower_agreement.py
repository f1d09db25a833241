"""What server and node tell each other before the first round arrives as it was, or is refused."""

import json
from dataclasses import replace

import msgspec
import pytest

from nodes import slice_of_digits
from unskew.core.types import Local
from unskew.engines.blueprint import Blueprint
from unskew.engines.flower.messages import BadMessage, ClientFacts, Description, RunAgreement

SAID = Description(
    "hospital", "1.0", (ClientFacts("hospital", None, 5, 2),), ("cat", "dog"), (3, 32, 32), (0.5, 0.5, 0.5),
    (0.2, 0.2, 0.2), True, "shift",
)  # fmt: skip
BLUEPRINT = Blueprint("fedavg", "tiny-cnn", (1, 8, 8), 2, Local())
AGREED = RunAgreement("0" * 32, BLUEPRINT, ("cat", "dog"), (0.5,), (0.2,), {"hospital": 0})


def sent(record):
    return json.loads(msgspec.json.encode(record.to_json() if isinstance(record, RunAgreement) else record))


def test_a_description_and_an_agreement_arrive_as_they_were():
    assert Description.from_json(sent(SAID)) == SAID
    assert RunAgreement.from_json(sent(AGREED)) == AGREED
    assert RunAgreement.from_json(sent(AGREED)).digest == AGREED.digest


def test_a_description_has_sizes_and_names_but_no_label_count():
    said = slice_of_digits(0).describe()
    known = "node version clients classes shape mean std augment augmentation data"
    assert set(sent(said)) == set(known.split())
    assert set(sent(said)["clients"][0]) == {"name", "number", "examples", "test"}


def test_agreements_that_differ_in_anything_have_other_digests():
    others = [
        replace(AGREED, run="1" * 32), replace(AGREED, classes=("dog", "cat")), replace(AGREED, mean=(0.4,)),
        replace(AGREED, numbers={"hospital": 1}), replace(AGREED, blueprint=replace(BLUEPRINT, method="fedprox(0.1)")),
    ]  # fmt: skip
    assert len({each.digest for each in (AGREED, *others)}) == 6


@pytest.mark.parametrize(("fields", "wrong"), [
    ({"node": ""}, r"\$.node"), ({"node": "a\x1b[31m"}, "unprintable"), ({"node": "x" * 201}, r"\$.node"),
    ({"clients": []}, r"\$.clients"),
    ({"clients": [{"name": "a", "number": None, "examples": 1, "test": 0}] * 2}, "its clients"),
    ({"clients": [{"name": "a", "number": -1, "examples": 1, "test": 0}]}, "number"),
    ({"clients": [{"name": "a", "number": 0, "examples": -1, "test": 0}]}, "examples"),
    ({"clients": [{"name": "a", "number": 0, "examples": 2**50, "test": 0}]}, "examples"),
    ({"classes": []}, r"\$.classes"), ({"classes": ["cat", "cat"]}, "contain a duplicate"),
    ({"shape": [3, 32]}, r"\$.shape"), ({"mean": [0.5]}, "normalization"), ({"std": [0.0, 0.1, 0.1]}, r"\$.std"),
    ({"augment": 1}, r"\$.augment"),
])  # fmt: skip
def test_a_description_that_cannot_be_is_refused(fields, wrong):
    with pytest.raises(BadMessage, match=wrong):
        Description.from_json({**sent(SAID), **fields})


@pytest.mark.parametrize(("fields", "wrong"), [
    ({"run": "G" * 32}, r"\$.run"),
    ({"run": "../" + "0" * 29}, r"\$.run"),
    ({"numbers": {}}, r"\$.numbers"),
    ({"numbers": {"a": -1}}, r"\$.numbers"),
    ({"classes": ["cat"]}, "its classes or its normalization do not match"),
    ({"std": [0]}, r"\$.std"),
    ({"blueprint": {}}, "cannot be read"),
    ({"blueprint": []}, r"\$.blueprint"),
    ({"views": 82}, r"\$.views"),
    *(
        ({"blueprint": {**sent(AGREED)["blueprint"], **changes}}, "cannot be read|should be")
        for changes in (
            {"shape": [1, 8]},
            {"dtype": "complex64"},
            {"local": {"epochs": "5"}},
            {"method": 3},
            {"crosses": False},
            {"shape": [1, 8, 10**9]},
        )
    ),
    ({"blueprint": {**sent(AGREED)["blueprint"], "more": 1}}, "cannot be read"),
])  # fmt: skip
def test_an_agreement_that_cannot_be_is_refused(fields, wrong):
    with pytest.raises(BadMessage, match=wrong):
        RunAgreement.from_json({**sent(AGREED), **fields})


def test_what_is_no_object_is_refused():
    for other in (None, [], "x"):
        with pytest.raises(BadMessage):
            RunAgreement.from_json(other)
        with pytest.raises(BadMessage):
            Description.from_json(other)
