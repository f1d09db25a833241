"""Sums on the wire take fewer bytes and lose no bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation import federation
from unskew.core.types import Visit
from unskew.engines.blueprint import build
from unskew.engines.flower.messages import MODEL, PLAIN, SINGLE, BadMessage, WireContext, compact, factor_of, restore
from unskew.round import statistics
from unskew.round.client import Train
from unskew.round.jobs import answer

NUMBERS = st.floats(allow_nan=False, width=64)
ODD = [0.0, -0.0, 1.0, 255.0, 256.0, 2.0**32 - 1, 2.0**32, 0.1, -1.0, 5e-324, 1.7e308, float("inf")]


def bits(value):
    return value.contiguous().view(torch.int64).tolist()


def round_trip(sums, context):
    sent = compact(sums, context)
    back = {name: restore(name, form, value, context) for name, form, value in sent}
    assert {name: bits(value) for name, value in back.items()} == {name: bits(value) for name, value in sums.items()}
    return {name: (form, value.numel() * value.element_size()) for name, form, value in sent}


@given(st.lists(NUMBERS | st.sampled_from(ODD), max_size=8), st.floats(1e-3, 1e6))
def test_any_numbers_come_back_bit_for_bit(values, weight):
    sums = {"stat/x": torch.tensor(values, dtype=torch.float64), "delta/params/w": torch.tensor(values).double()}
    old = torch.linspace(-1, 1, len(values))
    round_trip(sums, WireContext({"params/w": old}, weight))


NEW = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8)


@given(NEW, st.integers(1, 10**6))
def test_an_update_to_any_weights_comes_back_bit_for_bit(new, weight):
    old = torch.linspace(-3, 3, len(new))
    delta = (old.double() - torch.tensor(new).double()) * weight
    round_trip({"delta/params/w": delta}, WireContext({"params/w": old}, float(weight)))


@pytest.mark.parametrize("method", ["fedavg", "fednova", "scaffold", "moon"])
def test_what_training_answers_takes_half_the_bytes(method):
    small = federation(method, dtype="float32", epochs=3)
    state, side = small.state(), build(small.blueprint, small.data)
    shared = statistics.build_shared(state)
    visit = Visit(1, 30.0)
    reply = answer(side, Train(1), shared, visit, small.key)
    forms = round_trip(reply.sums, WireContext(shared, visit.weight, factor_of(reply.sums, visit.weight)))
    updates = {name: form for name, (form, _) in forms.items() if name.startswith("delta/")}
    assert set(updates.values()) == {MODEL}


def test_masked_words_go_as_they_are_and_counts_take_half_the_bytes():
    sums = {
        "delta/params/w": torch.tensor([0, -(2**63), 2**63 - 1]),
        "scaled": torch.tensor(-5),
        "counts": torch.tensor([300.0, 1e6, -4.0], dtype=torch.float64),
    }
    context = WireContext({"params/w": torch.zeros(3)}, 1.0, factor_of(sums, 1.0))
    forms = round_trip(sums, context)
    assert forms == {"delta/params/w": (PLAIN, 24), "scaled": (PLAIN, 8), "counts": (SINGLE, 12)}
    assert context.factor == 1
    words = restore("delta/params/w", PLAIN, sums["delta/params/w"], context)
    assert words.dtype == torch.int64


def test_a_running_count_of_batches_goes_as_a_whole_number():
    old, new = torch.tensor(7), torch.tensor(12)
    sums = {"delta/buffers/n": (old.double() - new.double()) * 30}
    assert round_trip(sums, WireContext({"buffers/n": old}, 30.0))["delta/buffers/n"] == (MODEL, 8)


@pytest.mark.parametrize(("form", "sent", "wrong"), [
    ("none", torch.zeros(2), "its form cannot have type"),
    (MODEL, torch.zeros(2, dtype=torch.int64), "differs in shape or type"),
    (PLAIN, torch.zeros(2, dtype=torch.uint8), "cannot have type"),
    (MODEL, torch.zeros(3), "differs in shape or type"),
    (MODEL, torch.zeros(2, dtype=torch.float64), "differs in shape or type"),
    (PLAIN, torch.zeros(2), "cannot have type"), (SINGLE, torch.zeros(2, dtype=torch.float64), "cannot have type"),
])  # fmt: skip
def test_a_form_that_cannot_be_is_refused(form, sent, wrong):
    with pytest.raises(BadMessage, match=wrong):
        restore("delta/params/w", form, sent, WireContext({"params/w": torch.zeros(2)}, 1.0))
