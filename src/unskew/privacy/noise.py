"""Differential privacy of updates: clients clip them to length S, their sum gets noise, an accountant computes ε.

Gaussian noise of standard deviation z·S on every parameter makes a round a Gaussian mechanism (McMahan, Ramage, Talwar,
Zhang, ICLR 2018, Algorithm 1: flat clipping, a fixed denominator). The server adds it or, for a release under secure
aggregation, every client adds a share of discrete Gaussian noise before masking (Canonne, Kamath, Steinke, NeurIPS
2020, Algorithms 1 to 3; Kairouz, Liu, Steinke, ICML 2021, Theorem 1): the sum over any t clients has z·S or more.
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
from unskew.privacy.ledger import CLIENT, REPLACED_CLIENT, epsilon_of_concentration


def normal(shape: tuple[int, ...], key: Key, *path: str | int) -> Tensor:
    """Standard Gaussian noise from 64 random bits per value: a sign, and the quantile of 63 bits, up to 9.1."""
    drawn = key.fold("noise", *path).numpy().bytes(8 * torch.Size(shape).numel())
    bits = torch.from_numpy(np.frombuffer(drawn, dtype="<i8").copy()).reshape(shape)
    share = ((bits & (2**63 - 1)).double() + 0.5) * 2.0**-64  # (0, ½]
    noise: Tensor = torch.special.ndtri(share) * torch.where(bits < 0, 1.0, -1.0)
    return noise


# Exact discrete Gaussian noise, from whole numbers and random bits only

Words = npt.NDArray[np.int64]
MAX_DEVIATION = 2**24  # (|Y| − σ)² of Algorithm 3 stays below 2⁶³ for every |Y| up to 127·σ
AT_ONCE = 2**16  # proposals in one batch


def discrete_gaussian(count: int, deviation: int) -> Words:
    """Integers x with probability exp(−x²/2σ²) / Σ exp(−y²/2σ²), σ the deviation, from the system's randomness.

    Proposals are discrete Laplace with scale σ; one is accepted with probability exp(−(|Y| − σ)²/2σ²).
    """
    if not 1 <= deviation <= MAX_DEVIATION:
        raise ValueError(f"the deviation must be from 1 to {MAX_DEVIATION:,} steps, not {deviation}")
    parts, missing = list[Words](), count
    while missing > 0:
        proposed = _discrete_laplace(min(AT_ONCE, missing + missing // 2 + 16), deviation)
        exponent = (np.abs(proposed) - deviation) ** 2
        accepted = proposed[_flip_exp(exponent, 2 * deviation**2)][:missing]
        parts.append(accepted)
        missing -= len(accepted)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _discrete_laplace(proposals: int, scale: int) -> Words:
    """About ``proposals`` integers with probability proportional to exp(−|y|/scale): Algorithm 2."""
    below = _uniform_below(scale, 2 * proposals)
    below = below[_flip_exp(below, scale)]
    multiple, running = np.zeros(len(below), np.int64), np.arange(len(below))
    while len(running):
        running = running[_flip_exp(np.ones(len(running), np.int64), 1)]
        multiple[running] += 1
    size = below + scale * multiple
    negative = _uniform_below(2, len(size)) == 1
    drawn: Words = np.where(negative, -size, size)[~(negative & (size == 0))]  # zero must not count twice
    return drawn


def _flip_exp(numerator: Words, denominator: int) -> npt.NDArray[np.bool_]:
    """True with probability exp(−numerator/denominator), for each numerator: Algorithm 1."""
    quotient, rest = np.divmod(numerator, denominator)
    heads = _flip_exp_fraction(rest, denominator)
    running = np.flatnonzero(heads & (quotient > 0))
    while len(running):
        again = _flip_exp_fraction(np.ones(len(running), np.int64), 1)
        heads[running[~again]] = False
        quotient[running] -= 1
        running = running[again & (quotient[running] > 0)]
    return heads


def _flip_exp_fraction(numerator: Words, denominator: int) -> npt.NDArray[np.bool_]:
    """``_flip_exp`` for fractions γ from 0 to 1: flips with probability γ/1, γ/2, … succeed an even number of times."""
    heads, running, turn = np.zeros(len(numerator), np.bool_), np.arange(len(numerator)), 1
    while len(running):
        success = _uniform_below(denominator, len(running)) < numerator[running]
        success &= _uniform_below(turn, len(running)) == 0
        heads[running[~success]] = turn % 2 == 1
        running, turn = running[success], turn + 1
    return heads


def _uniform_below(bound: int, count: int) -> Words:
    """Uniform integers from 0 to bound − 1: 64 random bits, rejected above the last multiple of the bound."""
    if bound == 1:
        return np.zeros(count, np.int64)
    last, drawn = 2**64 - 2**64 % bound - 1, np.zeros(0, np.uint64)
    while len(drawn) < count:
        bits = np.frombuffer(os.urandom(8 * (count - len(drawn))), np.uint64)
        drawn = np.concatenate([drawn, bits[bits <= np.uint64(last)]])
    return (drawn % np.uint64(bound)).astype(np.int64)


GRID_BITS = 23  # a release's noise is on a grid of at least 2^23 steps per deviation


def add_gaussian(value: Tensor, deviation: float, key: Key | None, *path: str | int) -> Tensor:
    """Add noise: repeatable with a key, in float64; for a release without one.

    The noise of a release is exact: the value is rounded to a grid of 2^-23 deviations or finer, and discrete Gaussian
    noise is added in whole steps, so the lowest bits reveal nothing. Rounding changes a sum by up to a step more than
    one example or client does; ``raise_deviation`` compensates for that.
    """
    if key is not None:
        return value + deviation * normal(tuple(value.shape), key, *path)
    step = 2.0 ** (math.frexp(deviation)[1] - 1 - GRID_BITS)
    noise = torch.from_numpy(discrete_gaussian(value.numel(), math.ceil(deviation / step))).reshape(value.shape)
    noisy: Tensor = ((value / step).round() + noise) * step
    return noisy


def raise_deviation(deviation: float, sensitivity: float, count: int) -> float:
    """The deviation for a release of ``count`` numbers, increased because rounding adds to one contribution's effect.

    Each number changes by at most one step more when rounded, and by less than one when summed in float64.
    """
    return deviation * (1 + 2.0 ** (1 - GRID_BITS) * math.sqrt(count) * deviation / sensitivity)


SHARE_BITS = 20  # a share's deviation is about 2^20 steps: fine enough for updates of 10^8 parameters
LEAST_SHARE = 2**10  # steps
TAIL = 40  # deviations, more than noise ever reaches


def share_of(deviation: float, needed: int) -> tuple[int, int]:
    """One of ``needed`` clients' shares of noise with this deviation: σ in multiples of 2^shift, and the shift.

    σ is rounded up, so the shares of ``needed`` clients together have at least the deviation.
    """
    share = deviation / needed**0.5
    shift = max(0, math.frexp(share)[1] - 1 - SHARE_BITS)
    sigma = math.ceil(share * (1 + 1e-12) / 2**shift)
    if sigma < LEAST_SHARE:
        raise UserError(f"a client's share of the noise, {share:.3g} steps, is too small; give a larger clip")
    return sigma, shift


def add_share(words: Tensor, deviation: float, needed: int) -> Tensor:
    """Round int64 words to multiples of 2^shift and add a client's share of the noise."""
    sigma, shift = share_of(deviation, needed)
    noise = torch.from_numpy(discrete_gaussian(words.numel(), sigma)).reshape(words.shape)
    noisy: Tensor = (((words + 2**shift // 2) >> shift) + noise) << shift
    return noisy


STEP = 0.005  # of a discretized privacy loss
ORDERS = (*range(2, 33), 48, 64)  # of the Rényi divergences


@lru_cache(maxsize=4)
def _losses(noise: float, share: float, replaced: bool) -> Any:
    """The distribution of one round's privacy loss."""
    relations = require_extra("dp_accounting").NeighboringRelation
    relation = relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE
    return require_extra("dp_accounting.pld.privacy_loss_distribution").from_gaussian_mechanism(
        noise, sampling_prob=share, value_discretization_interval=STEP, neighboring_relation=relation
    )


BITS = 32  # a round's secure sums are in steps of 2^-32


def to_steps(value: Tensor, bits: int, visits: int, what: str, hint: str) -> Tensor:
    """Round to int64 steps of 2^-``bits``; refused, naming ``what``, if a sum over ``visits`` could overflow."""
    steps, limit = (value * 2.0**bits).round(), (2**63 - 1) // visits
    if bool((steps.abs() >= 2.0**63).any()) or bool((steps.long().abs() > limit).any()):
        raise UserError(
            f"{what} reaches {float(value.abs().max()):.3g}, but a secure sum over {visits} visits has room for "
            f"{limit * 2.0**-bits:.3g} each; {hint}"
        )
    return steps.long()


UPDATE = "delta/params/"
COUNTED = ("metric/examples", "metric/visits")  # the server knows them from the roster, so they get no noise


@dataclass(frozen=True)
class PrivateUpdates:
    """Clips to length ``clip``, adds noise of ``noise`` times that to the sum, and computes ε at ``delta``."""

    clip: float
    noise: float
    delta: float
    poisson: bool
    release: bool = False  # noise and participation from the operating system, not from the run's seed
    in_masks: bool = False  # clients add the noise, before they mask their words

    def through(self, exchange: Exchange) -> "PrivateUpdates":
        """This mechanism with the exchange: a release through masks adds its noise inside them."""
        return replace(self, in_masks=bool(self.release and self.noise and getattr(exchange, "masks", False)))

    def clip_update(self, sums: Sums) -> Sums:
        """The client's clipped update, its weight and counts; its loss is not sent."""
        others = [name for name in sums if name.startswith(("delta/buffers/", "stat/"))]
        if others:
            raise UserError(
                f"private-updates: {others[0]} would be sent with the update without noise; use a network without "
                "running statistics (GroupNorm), or leave out private-updates"
            )
        if float(sums["weight"]) != 1:
            raise UserError(f"private-updates: every visit must have weight 1, not {float(sums['weight']):g}")
        update = {name: value for name, value in sums.items() if name.startswith(UPDATE)}
        length = tensors.flat(update).norm()
        factor = torch.clamp(self._shorter(update) / length, max=1.0) if length > 0 else torch.ones_like(length)
        plain = {name: sums[name] for name in ("weight", "scaled", *(COUNTED[1:] if self.release else COUNTED))}
        return plain | {name: value * factor for name, value in update.items()}

    def add_noise(self, sums: Sums, params: Tensors, expected: int, key: Key) -> Sums:
        """The sum of the updates with noise, only noise without updates; its weight is ``expected``."""
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
        """Add a client's share of the noise to its words; ``needed`` of the members can remove the masks.

        A share has variance (z·S)²/needed or more. Words and noise are multiples of 2^shift steps.
        """
        if not self.in_masks:
            return words
        deviation = self.noise * self.clip * 2.0**BITS
        sigma, shift = share_of(deviation, needed)
        if members * (self.clip * 2.0**BITS + TAIL * sigma * 2.0**shift) >= 2.0**63:
            raise UserError(
                f"private-updates(clip={self.clip:g}): too large for a secure sum over {members} clients; give a "
                "smaller clip"
            )
        return {
            name: add_share(value, deviation, needed) if name.startswith(UPDATE) else value
            for name, value in words.items()
        }

    def epsilon(self, rounds: int, drawn: int, clients: int, *, replaced: bool = False) -> float | None:
        """ε at δ of ``rounds`` rounds; None without noise.

        It is for adding or removing a client; with ``replaced``, or if a fixed number is sampled, for replacing a
        client's data, which covers adding or removing one of its examples.

        In masks, the sum of the shares is practically a discrete Gaussian: they differ by τ = 10·Σ exp(−2π²σ²·k/(k+1)),
        which is 0 in float64 for any share of at least ``LEAST_SHARE`` steps. A round is ½/z²-concentrated, and
        concentrations add up. Sampling does not help: the noise also protects against the server, which knows who takes
        part.
        """
        if not self.noise:
            return None
        if self.in_masks:
            return epsilon_of_concentration(rounds * ((2 if replaced else 1) / self.noise) ** 2 / 2, self.delta)
        accounting, sampling = require_extra("dp_accounting"), self.sampling(drawn, clients)
        if sampling == "everyone":
            combined = self.noise / rounds**0.5
            return float(accounting.get_epsilon_gaussian(combined / 2 if replaced else combined, self.delta))
        if sampling == "poisson":
            losses = _losses(self.noise, drawn / clients, replaced)
            return float(losses.self_compose(rounds).get_epsilon_for_delta(self.delta))
        relation = accounting.NeighboringRelation.REPLACE_ONE
        accountant = require_extra("dp_accounting.rdp").RdpAccountant(ORDERS, relation)
        gaussian = accounting.GaussianDpEvent(self.noise / 2)  # a replaced client may change the sum by 2·S
        event = accounting.SampledWithoutReplacementDpEvent(clients, drawn, gaussian)
        return float(accountant.compose(event, rounds).get_epsilon(self.delta))

    def sampling(self, drawn: int, clients: int) -> str:
        """How a round's clients are drawn: everyone takes part, so many on average (poisson), or always so many."""
        return "everyone" if drawn >= clients else "poisson" if self.poisson else "fixed"

    def unit(self, drawn: int, clients: int) -> str:
        """Whom ε protects."""
        return REPLACED_CLIENT if self.sampling(drawn, clients) == "fixed" and not self.in_masks else CLIENT

    def _shorter(self, update: Sums) -> float:
        """The length to clip to, so that rounding to the steps of a secure sum does not exceed ``clip``.

        Each of d parameters is off by at most half a step, the update by √d half steps. Noise inside masks has coarser
        steps, at most 2^-SHARE_BITS deviations.
        """
        step = 2.0**-BITS + (self.noise * self.clip * 2.0**-SHARE_BITS if self.in_masks else 0.0)
        reserve = float(step / 2 * sum(value.numel() for value in update.values()) ** 0.5)
        if reserve > self.clip / 2:
            raise UserError(
                f"private-updates(clip={self.clip:g}): too small for steps of 2^-{BITS}; give a larger clip"
            )
        return (self.clip - reserve) * (1 - 1e-12)
