"""Differential privacy of updates: clients clip them, noise is added to their sum, an accountant counts.

Every client's update, all parameters together, is cut to length S. One client more or less then moves the sum by S at
most, and Gaussian noise of standard deviation z·S on every parameter makes a round a Gaussian mechanism. Clients count
the same, whatever they hold, and the sum is divided by the number of visits that were to come, not by those that came.

Central: the server adds the noise, to a sum that it sees without. Distributed (``release`` under secure aggregation):
every client adds a share of discrete Gaussian noise to its words before they are masked, so that the server never sees
the sum without noise. Any t clients that can take the masks off have noise of z·S or more in their sum.

References: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
Algorithm 1 (flat clipping, the estimator with a fixed denominator). Canonne, Kamath, Steinke, "The Discrete Gaussian
for Differential Privacy", NeurIPS 2020, Algorithms 1 to 3 and Theorem 4. Kairouz, Liu, Steinke, "The Distributed
Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation", ICML 2021, Theorem 1.
"""

import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.plugins import require_extra
from unskew.core.types import Exchange, Sums, Tensors
from unskew.privacy.fixed_point import BITS
from unskew.privacy.ledger import CLIENT, REPLACED_CLIENT, epsilon_of_concentration


def normal(shape: tuple[int, ...], key: Key | None, *path: str | int) -> Tensor:
    """Standard Gaussian noise from 64 random bits a value: a sign, and the quantile of 63 bits, out to 9.1."""
    size = 8 * torch.Size(shape).numel()
    drawn = os.urandom(size) if key is None else key.fold("noise", *path).numpy().bytes(size)
    bits = torch.from_numpy(np.frombuffer(drawn, dtype="<i8").copy()).reshape(shape)
    share = ((bits & (2**63 - 1)).double() + 0.5) * 2.0**-64  # (0, ½]
    noise: Tensor = torch.special.ndtri(share) * torch.where(bits < 0, 1.0, -1.0)
    return noise


# Discrete Gaussian noise, exact: whole numbers and random bits alone decide

Words = npt.NDArray[np.int64]
MAX_DEVIATION = 2**24  # (|Y| − σ)² of Algorithm 3 stays below 2⁶³ for every |Y| up to 127·σ
AT_ONCE = 2**16  # proposals in one batch


def discrete_gaussian(count: int, deviation: int) -> Words:
    """Whole numbers x with probability exp(−x²/2σ²) / Σ exp(−y²/2σ²), σ the deviation, from the system's randomness.

    Proposals are discrete Laplace with scale σ; one is accepted with probability exp(−(|Y| − σ)²/2σ²).
    """
    if not 1 <= deviation <= MAX_DEVIATION:
        raise ValueError(f"a deviation from 1 to {MAX_DEVIATION:,} whole steps, {deviation} given")
    found, missing = list[Words](), count
    while missing > 0:
        proposed = _discrete_laplace(min(AT_ONCE, missing + missing // 2 + 16), deviation)
        exponent = (np.abs(proposed) - deviation) ** 2
        accepted = proposed[_flip_exp(exponent, 2 * deviation**2)][:missing]
        found.append(accepted)
        missing -= len(accepted)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _discrete_laplace(proposals: int, scale: int) -> Words:
    """Some whole numbers with probability proportional to exp(−|y|/scale): Algorithm 2."""
    below = _uniform_below(scale, 2 * proposals)
    below = below[_flip_exp(below, scale)]
    whole, running = np.zeros(len(below), np.int64), np.arange(len(below))
    while len(running):
        running = running[_flip_exp(np.ones(len(running), np.int64), 1)]
        whole[running] += 1
    size = below + scale * whole
    negative = _uniform_below(2, len(size)) == 1
    drawn: Words = np.where(negative, -size, size)[~(negative & (size == 0))]  # zero must not count twice
    return drawn


def _flip_exp(numerator: Words, denominator: int) -> npt.NDArray[np.bool_]:
    """True with probability exp(−numerator/denominator), for each: Algorithm 1, its whole part first."""
    whole, rest = np.divmod(numerator, denominator)
    heads = _flip_exp_fraction(rest, denominator)
    running = np.flatnonzero(heads & (whole > 0))
    while len(running):
        again = _flip_exp_fraction(np.ones(len(running), np.int64), 1)
        heads[running[~again]] = False
        whole[running] -= 1
        running = running[again & (whole[running] > 0)]
    return heads


def _flip_exp_fraction(numerator: Words, denominator: int) -> npt.NDArray[np.bool_]:
    """The same for fractions from 0 to 1: flips with chances γ/1, γ/2, γ/3, … succeed an even number of times."""
    heads, running, turn = np.zeros(len(numerator), np.bool_), np.arange(len(numerator)), 1
    while len(running):
        success = _uniform_below(denominator, len(running)) < numerator[running]
        success &= _uniform_below(turn, len(running)) == 0
        heads[running[~success]] = turn % 2 == 1
        running, turn = running[success], turn + 1
    return heads


def _uniform_below(bound: int, count: int) -> Words:
    """Whole numbers from 0 to bound − 1, all equally likely: of 64 random bits, those beyond the last multiple go."""
    if bound == 1:
        return np.zeros(count, np.int64)
    last, drawn = 2**64 - 2**64 % bound - 1, np.zeros(0, np.uint64)
    while len(drawn) < count:
        bits = np.frombuffer(os.urandom(8 * (count - len(drawn))), np.uint64)
        drawn = np.concatenate([drawn, bits[bits <= np.uint64(last)]])
    return (drawn % np.uint64(bound)).astype(np.int64)


GRID_BITS = 23  # of a deviation in steps of the grid that a release's noise is on


def add_gaussian(value: Tensor, deviation: float, key: Key | None, *path: str | int) -> Tensor:
    """The value with noise. With a key it can be repeated, in float64; without one it is a release.

    The noise of a release is exact: the value is rounded to a grid of 2^-23 deviations or finer, and discrete Gaussian
    noise is added in whole steps, so the lowest bits reveal nothing. Rounding moves a sum by up to a step more than
    one example or client does: ``raise_deviation`` makes up for that.
    """
    if key is not None:
        return value + deviation * normal(tuple(value.shape), key, *path)
    step = 2.0 ** (math.frexp(deviation)[1] - 1 - GRID_BITS)
    noise = torch.from_numpy(discrete_gaussian(value.numel(), math.ceil(deviation / step))).reshape(value.shape)
    noisy: Tensor = ((value / step).round() + noise) * step
    return noisy


def raise_deviation(deviation: float, sensitivity: float, count: int) -> float:
    """The deviation that a release of so many numbers needs, where rounding adds to what one contribution moves.

    Each number moves by one step more at most where it is rounded, and less than one where it was summed up in float64.
    """
    return deviation * (1 + 2.0 ** (1 - GRID_BITS) * math.sqrt(count) * deviation / sensitivity)


SHARE_BITS = 20  # of a share's deviation in steps: fine enough for updates of 10^8 parameters
LEAST_SHARE = 2**10  # steps
TAIL = 40  # deviations that noise never reaches


def share_of(deviation: float, needed: int) -> tuple[int, int]:
    """A client's share of noise with this deviation, of ``needed`` clients: σ in multiples of 2^shift, and the shift.

    σ is rounded up: the shares of ``needed`` clients together never have less than the deviation.
    """
    own = deviation / needed**0.5
    shift = max(0, math.frexp(own)[1] - 1 - SHARE_BITS)
    sigma = math.ceil(own * (1 + 1e-12) / 2**shift)
    if sigma < LEAST_SHARE:
        raise UserError(f"noise of {own:.3g} steps is too little for a share of it; give a larger clip")
    return sigma, shift


def add_share(words: Tensor, deviation: float, needed: int) -> Tensor:
    """int64 words, rounded to multiples of 2^shift, with a client's share of the noise."""
    sigma, shift = share_of(deviation, needed)
    noise = torch.from_numpy(discrete_gaussian(words.numel(), sigma)).reshape(words.shape)
    noisy: Tensor = (((words + 2**shift // 2) >> shift) + noise) << shift
    return noisy


STEP = 0.005  # of a discretised privacy loss
ORDERS = (*range(2, 33), 48, 64)  # of the Rényi divergences


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round: so many of all clients, on average (``poisson``) or always."""

    drawn: int
    clients: int
    poisson: bool

    @property
    def everyone(self) -> bool:
        """Whether every client takes part in every round."""
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


def compute_epsilon_in_masks(noise: float, delta: float, rounds: int, *, replaced: bool = False) -> float:
    """ε of so many rounds of distributed discrete Gaussian noise, for a client that may come to every one of them.

    The sum of the shares is as good as a discrete Gaussian: they differ by τ = 10·Σ exp(−2π²σ²·k/(k+1)), which is 0 in
    float64 for any share of ``LEAST_SHARE`` steps or more. A round is ½/z²-concentrated, and concentrations add up.
    Sampling is not counted on: the server, from whom the noise protects too, knows who comes.
    """
    return epsilon_of_concentration(rounds * ((2 if replaced else 1) / noise) ** 2 / 2, delta)


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
    release: bool = False  # noise and participation from the operating system, not from the run's seed
    in_masks: bool = False  # clients add the noise, before they mask their words

    @property
    def repeatable(self) -> bool:
        """Whether noise and participation follow from the key."""
        return not self.release

    def through(self, exchange: Exchange) -> "PrivateUpdates":
        """The same where updates reach the server through this exchange: a release adds its noise inside masks."""
        return replace(self, in_masks=bool(self.release and self.noise and getattr(exchange, "masks", False)))

    def clip_update(self, sums: Sums) -> Sums:
        """The client's update cut to length, its weight and how much it visited; its loss stays with it."""
        others = [name for name in sums if name.startswith(("delta/buffers/", "stat/"))]
        if others:
            raise UserError(
                f"private-updates: {others[0]} would be sent with the update, and no noise covers it; use a network "
                "without running statistics (GroupNorm), or leave private-updates out"
            )
        if float(sums["weight"]) != 1:
            raise UserError(f"private-updates: clients count 1 each, this visit {float(sums['weight']):g}")
        update = {name: value for name, value in sums.items() if name.startswith(UPDATE)}
        length = tensors.flat(update).norm()
        factor = torch.clamp(self._shorter(update) / length, max=1.0) if length > 0 else torch.ones_like(length)
        kept = {name: sums[name] for name in ("weight", "scaled", *(COUNTED[1:] if self.release else COUNTED))}
        return kept | {name: value * factor for name, value in update.items()}

    def add_noise(self, sums: Sums, params: Tensors, expected: int, key: Key) -> Sums:
        """The sum of the updates with noise; of nobody it is noise alone, as it must be. Its weight is ``expected``."""
        zero = torch.zeros((), dtype=torch.float64)
        update = {
            f"delta/{name}": sums.get(f"delta/{name}", torch.zeros_like(value, dtype=torch.float64))
            for name, value in params.items()
        }
        if self.noise and not self.in_masks:
            promise = repr((self.clip, self.noise, self.delta))
            drawn = None if self.release else key.fold("private-updates", promise, tensors.sha256(update))
            deviation = self.noise * self.clip
            if self.release:
                deviation = raise_deviation(deviation, self.clip, sum(value.numel() for value in update.values()))
            update = {name: add_gaussian(value, deviation, drawn, name) for name, value in update.items()}
        counted = {name: sums.get(name, zero) for name in COUNTED}
        return {"weight": zero + expected, "scaled": zero + expected, **update, **counted}

    def with_share(self, words: Tensors, needed: int, members: int) -> Tensors:
        """A client's words with its share of the noise; ``needed`` of the members can take the masks off.

        A share has variance (z·S)²/needed or more. Words and noise are whole multiples of 2^shift steps.
        """
        if not self.in_masks:
            return words
        deviation = self.noise * self.clip * 2.0**BITS
        sigma, shift = share_of(deviation, needed)
        if members * (self.clip * 2.0**BITS + TAIL * sigma * 2.0**shift) >= 2.0**63:
            raise UserError(f"private-updates(clip={self.clip:g}): too long for a secure sum of {members} clients")
        return {
            name: add_share(value, deviation, needed) if name.startswith(UPDATE) else value
            for name, value in words.items()
        }

    def epsilon(self, rounds: int, drawn: int, clients: int, *, replaced: bool = False) -> float | None:
        """ε at δ of so many rounds; None without noise, which promises nothing. See ``compute_epsilon``."""
        if not self.noise:
            return None
        if self.in_masks:
            return compute_epsilon_in_masks(self.noise, self.delta, rounds, replaced=replaced)
        return compute_epsilon(self.noise, self.delta, rounds, self.drawing(drawn, clients), replaced=replaced)

    def drawing(self, drawn: int, clients: int) -> Participation:
        """Who takes part in a round."""
        return Participation(drawn, clients, self.poisson)

    def unit(self, drawn: int, clients: int) -> str:
        """Whom ε protects."""
        replaces = self.drawing(drawn, clients).replaces and not self.in_masks
        return REPLACED_CLIENT if replaces else CLIENT

    def _shorter(self, update: Sums) -> float:
        """The length to cut to, so that rounding to the steps of a secure sum does not make it longer than ``clip``.

        Each of d parameters is off by half a step at most, together by √d half steps. Noise inside masks has coarser
        steps, of 2^-SHARE_BITS deviations at most.
        """
        step = 2.0**-BITS + (self.noise * self.clip * 2.0**-SHARE_BITS if self.in_masks else 0.0)
        reserve = float(step / 2 * sum(value.numel() for value in update.values()) ** 0.5)
        if reserve > self.clip / 2:
            raise UserError(
                f"private-updates(clip={self.clip:g}): too short for steps of 2^-{BITS}; give a larger clip"
            )
        return (self.clip - reserve) * (1 - 1e-12)
