"""Differential privacy of updates: clients clip them, the server adds noise to their sum, an accountant counts.

Every client's update, all parameters together, is cut to length S. One client more or less then moves the sum by S at
most, and Gaussian noise of standard deviation z·S on every parameter makes a round a Gaussian mechanism. Clients count
the same, whatever they hold, and the sum is divided by the number of visits that were to come, not by those that came.
Central: the server adds the noise, to a sum that it sees without; under secure aggregation it sees the sum alone.

Reference: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
Algorithm 1 (flat clipping, the estimator with a fixed denominator).
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.plugins import require_extra
from unskew.core.types import Sums, Tensors
from unskew.privacy.fixed_point import BITS


def normal(shape: tuple[int, ...], key: Key | None, *path: str | int) -> Tensor:
    """Standard Gaussian noise from 64 random bits a value: a sign, and the quantile of 63 bits, out to 9.1."""
    size = 8 * torch.Size(shape).numel()
    drawn = os.urandom(size) if key is None else key.fold("noise", *path).numpy().bytes(size)
    bits = torch.from_numpy(np.frombuffer(drawn, dtype="<i8").copy()).reshape(shape)
    share = ((bits & (2**63 - 1)).double() + 0.5) * 2.0**-64  # (0, ½]
    noise: Tensor = torch.special.ndtri(share) * torch.where(bits < 0, 1.0, -1.0)
    return noise


STEP = 0.005  # of a discretised privacy loss
ORDERS = (*range(2, 33), 48, 64)  # of the Rényi divergences


@dataclass(frozen=True)
class Participation:
    """Who comes to a round: so many of all clients, on average (``poisson``) or always."""

    drawn: int
    clients: int
    poisson: bool

    @property
    def everyone(self) -> bool:
        """Whether every client comes to every round."""
        return self.drawn >= self.clients

    @property
    def replaces(self) -> bool:
        """Whether the promise is about a client whose data are replaced, not about one that is there or not."""
        return not (self.everyone or self.poisson)


def compute_epsilon(
    noise: float, delta: float, rounds: int, drawing: Participation, *, replaced: bool = False
) -> float:
    """ε of so many rounds with noise of ``noise`` times the longest update, at δ.

    For a client that is there or not; with ``replaced``, or where a fixed number is drawn, for one whose data are
    replaced by any others. The second covers a single example that a client has or has not.
    """
    accounting = require_extra("dp_accounting")
    if drawing.everyone:
        whole = noise / rounds**0.5
        return float(accounting.get_epsilon_gaussian(whole / 2 if replaced else whole, delta))
    if drawing.poisson:
        losses = _losses(noise, drawing.drawn / drawing.clients, replaced)
        return float(losses.self_compose(rounds).get_epsilon_for_delta(delta))
    accountant = require_extra("dp_accounting.rdp").RdpAccountant(ORDERS, accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = accounting.GaussianDpEvent(noise / 2)  # of the 2·S that a replaced client may move the sum by
    event = accounting.SampledWithoutReplacementDpEvent(drawing.clients, drawing.drawn, gaussian)
    return float(accountant.compose(event, rounds).get_epsilon(delta))


@lru_cache(maxsize=4)
def _losses(noise: float, share: float, replaced: bool) -> Any:
    """The distribution of one round's privacy loss."""
    accounting = require_extra("dp_accounting")
    relation = accounting.NeighboringRelation.REPLACE_ONE if replaced else None
    return require_extra("dp_accounting.pld.privacy_loss_distribution").from_gaussian_mechanism(
        noise,
        sampling_prob=share,
        value_discretization_interval=STEP,
        neighboring_relation=relation or accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )


UPDATE = "delta/params/"
COUNTED = ("metric/examples", "metric/visits")  # the server knows them from the roster: they stay as they are


@dataclass(frozen=True)
class PrivateUpdates:
    """Clipping to length ``clip``, noise of ``noise`` times that on the sum, ε counted at ``delta``."""

    clip: float
    noise: float
    delta: float
    poisson: bool
    release: bool = False  # noise from the operating system, not from the run's seed

    @property
    def repeatable(self) -> bool:
        """Whether the noise follows from the key."""
        return not self.release

    def clip_update(self, sums: Sums) -> Sums:
        """The client's update cut to length, its weight and how much it visited; its loss stays with it."""
        others = [name for name in sums if name.startswith(("delta/buffers/", "stat/"))]
        if others:
            raise UserError(
                f"private-updates: {others[0]} would be sent beside the update, and no noise covers it; take a network "
                "without running statistics (GroupNorm), or leave private-updates out"
            )
        if float(sums["weight"]) != 1:
            raise UserError(f"private-updates: clients count 1 each, this visit {float(sums['weight']):g}")
        update = {name: value for name, value in sums.items() if name.startswith(UPDATE)}
        length = tensors.flat(update).norm()
        factor = torch.clamp(self._shorter(update) / length, max=1.0) if length > 0 else torch.ones_like(length)
        kept = {name: sums[name] for name in ("weight", "scaled", *COUNTED)}
        return kept | {name: value * factor for name, value in update.items()}

    def add_noise(self, sums: Sums, params: Tensors, expected: int, key: Key) -> Sums:
        """The sum of the updates with noise; of nobody it is noise alone, as it must be. Its weight is ``expected``."""
        zero = torch.zeros((), dtype=torch.float64)
        update = {
            f"delta/{name}": sums.get(f"delta/{name}", torch.zeros_like(value, dtype=torch.float64))
            for name, value in params.items()
        }
        if self.noise:
            promise = repr((self.clip, self.noise, self.delta))
            drawn = None if self.release else key.fold("private-updates", promise, tensors.sha256(update))
            deviation = self.noise * self.clip
            update = {n: value + deviation * normal(tuple(value.shape), drawn, n) for n, value in update.items()}
        counted = {name: sums.get(name, zero) for name in COUNTED}
        return {"weight": zero + expected, "scaled": zero + expected, **update, **counted}

    def epsilon(self, rounds: int, drawn: int, clients: int, *, replaced: bool = False) -> float | None:
        """ε at δ of so many rounds; None without noise, which promises nothing. See ``compute_epsilon``."""
        if not self.noise:
            return None
        return compute_epsilon(self.noise, self.delta, rounds, self.drawing(drawn, clients), replaced=replaced)

    def drawing(self, drawn: int, clients: int) -> Participation:
        """Who comes to a round."""
        return Participation(drawn, clients, self.poisson)

    def _shorter(self, update: Sums) -> float:
        """The length to cut to, so that rounding to the steps of a secure sum does not make it longer than ``clip``.

        Each of d parameters is off by half a step at most, together by √d half steps.
        """
        reserve = float(2.0 ** -(BITS + 1) * sum(value.numel() for value in update.values()) ** 0.5)
        if reserve > self.clip / 2:
            raise UserError(f"private-updates(clip={self.clip:g}): too short beside steps of 2^-{BITS}; give more")
        return (self.clip - reserve) * (1 - 1e-12)
