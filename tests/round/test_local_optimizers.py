"""The clients' optimisers: torch.optim is the reference, in the same bits where it has the same fused call."""

import re
from dataclasses import replace

import pytest
import torch

from federation import federation, same
from unskew import methods
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Local
from unskew.round.local_optimizers import clip_gradients, is_weight, make_optimizer, parse_optimizer, uses_sgd

SHAPES = [(4, 3, 3, 3), (4,), (5, 7), (5,), ()]


def tensors_of(seed, scale=1.0):
    generator = Key(seed).torch()
    return [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def moved(local, steps=5, scale=1.0):
    """The parameters after some steps of ours."""
    values = tensors_of(0)
    update = make_optimizer(values, local)
    for step in range(steps):
        gradients = tensors_of(step + 1, scale)
        update(clip_gradients(gradients, local.clip) if local.clip else gradients)
    return values


def torch_moved(make, steps=5, scale=1.0, clip=None, groups=None):
    """The same with an optimiser of torch's."""
    values = [torch.nn.Parameter(value) for value in tensors_of(0)]
    made = make(values if groups is None else groups(values))
    for step in range(steps):
        for value, gradient in zip(values, tensors_of(step + 1, scale), strict=True):
            value.grad = gradient
        if clip:
            torch.nn.utils.clip_grad_norm_(values, clip)
        made.step()
    return [value.detach() for value in values]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("text", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_and_adamw_are_torchs_to_the_last_bit(text, kind, weight_decay):
    local = Local(optimizer=f"{text}(beta1=0.8, beta2=0.95, eps=1e-6)", lr=0.03, weight_decay=weight_decay)
    want = torch_moved(
        lambda values: kind(values, lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay, fused=True)
    )
    assert equal(moved(local), want)


@pytest.mark.parametrize("text", ["sgd", "adam", "adamw"])
def test_decay_of_weights_is_a_second_group_of_torchs(text):
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options = {"momentum": 0.9} if text == "sgd" else {}

    def groups(values):
        weights = [value for value in values if value.ndim > 1]
        others = [value for value in values if value.ndim <= 1]
        return [{"params": weights, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]

    local = Local(optimizer=text, lr=0.05, weight_decay=0.3, decay="weights")
    want = torch_moved(lambda each: kinds[text](each, lr=0.05, fused=True, **options), groups=groups)
    assert equal(moved(local), want)
    assert not equal(moved(local), moved(Local(optimizer=text, lr=0.05, weight_decay=0.3)))
    assert [is_weight(value) for value in tensors_of(0)] == [True, False, True, False, False]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_clipping_is_torchs_clip_grad_norm_to_the_last_bit(scale):
    local = Local(lr=0.05, momentum=0.5, weight_decay=0.0, clip=2.0)
    want = torch_moved(lambda each: torch.optim.SGD(each, lr=0.05, momentum=0.5, fused=True), scale=scale, clip=2.0)
    assert equal(moved(local, scale=scale), want)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adm", "did you mean 'adam'"),
        ("adam(beta1=1)", "must be at least 0 and below 1"),
        ("adamw(eps=0)", "eps must be above 0"),
        ("adam(amsgrad=true)", "no knob 'amsgrad'"),
        ("sgd(0.9)", "takes no values"),
        ("adam + sgd", "give one optimizer"),
    ],
)
def test_what_is_no_optimiser_is_refused_in_a_sentence(text, message):
    with pytest.raises(UserError, match=message):
        parse_optimizer(text)


@pytest.mark.parametrize("method", ["scaffold", "fednova"])
@pytest.mark.parametrize("text", ["adam", "adamw(beta1=0.5)"])
def test_methods_that_count_sgds_steps_refuse_adam_by_name(method, text):
    with pytest.raises(UserError, match=rf"{method} needs SGD, not --optimizer {re.escape(text)}: .*"):
        methods.parse_method(method, Local(optimizer=text))
    assert not uses_sgd(Local(optimizer=text))
    methods.parse_method(method, Local(optimizer="sgd"))


MANY = "moon + prototypes + fedir + fedlc + clsprox + fedprox + fedavgm"
SETTINGS = {"optimizer": "adam", "clip": 0.5, "decay": "weights", "lr": 0.005, "dtype": "float32", "epochs": 1}


def test_loop_and_pool_agree_on_all_of_it():
    small = federation(MANY, schedule="cosine(warmup=1)", **SETTINGS)
    assert same(small.run(3), small.run(3, "pool", 2))


def test_a_correction_is_added_to_what_was_clipped():
    """So that SCAFFOLD's controls stay means of clipped gradients: with a correction of 1, w moves by about η·K."""
    small = federation(sizes=(40,), epochs=1, clip=1e-6, weight_decay=0.0, momentum=0.0, lr=0.1)

    def ones(shared, memory):
        return {name: torch.ones_like(value) for name, value in shared.items() if name.startswith("params/")}

    start, end = small.state(), replace(small, value=replace(small.algorithm, correction=ones)).run(1)
    for name in ones(start.tensors, {}):
        assert torch.allclose(start.tensors[name] - end.tensors[name], torch.tensor(0.3).double(), atol=1e-4)


def test_fedprox_on_weights_leaves_biases_out():
    both = [federation(text, lr=0.05, dtype="float32") for text in ("fedprox(5, on=weights)", "fedprox(5)", "fedavg")]
    weights, every, plain = (each.run(2).tensors for each in both)
    assert not any(torch.equal(weights[name], other[name]) for other in (every, plain) for name in plain)
    with pytest.raises(UserError, match=r"fedprox\(on=bias\): choose from: all, weights"):
        methods.parse_method("fedprox(on=bias)")
