"""Random features and heads, for the tests of calibrations."""

import torch
from torch import nn

from unskew.core.key import Key


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=Key(seed).torch(), dtype=dtype)


def linear(inputs, outputs, *, bias=True, dtype=torch.float32, seed=0):
    """A layer with the values of a seed."""
    made = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    with torch.no_grad():
        for place, value in enumerate(made.parameters()):
            value.copy_(normal(*value.shape, seed=seed + place))
    return made


def weights(head):
    return [value.detach().clone() for value in head.parameters()]


def same(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def same_statistics(left, right):
    """To the last bit."""
    assert left.about() == right.about()
    for name, value in left.tensors().items():
        other = right.tensors()[name]
        assert (value.dtype, value.device.type) == (other.dtype, "cpu")
        assert torch.equal(value, other), name
