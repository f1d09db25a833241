"""The sums of a training round in fixed point: whole numbers that can be masked and added modulo 2⁶⁴."""

from collections.abc import Mapping

import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.types import Sums
from unskew.round.jobs import NOT_FINITE

BITS = 32  # binary places of a training's sums: steps of 2^-32


def as_steps(sums: Sums, clients: int, who: str, bits: int = BITS) -> dict[str, Tensor]:
    """Every sum in steps of 2^-bits, int64; refused, naming ``who``, where a sum over ``clients`` could overflow."""
    if not tensors.finite(sums):
        raise UserError(f"{who}: {NOT_FINITE}")
    limit = (2**63 - 1) // clients
    rounded = {}
    for name, value in sums.items():
        steps = (value * 2.0**bits).round()
        if bool((steps.abs() >= 2.0**63).any()) or bool((steps.long().abs() > limit).any()):
            raise UserError(
                f"{who}: {name} reaches {float(value.abs().max()):.3g}, and in a sum over {clients} visits there is "
                f"room for {limit * 2.0**-bits:.3g} each; smaller --lr, or fewer clients a round, or leave secure out"
            )
        rounded[name] = steps.long()
    return rounded


def from_steps(rounded: Mapping[str, Tensor], bits: int = BITS) -> Sums:
    """The sums that these steps add up to."""
    return {name: torch.as_tensor(value.double() * 2.0**-bits) for name, value in rounded.items()}
