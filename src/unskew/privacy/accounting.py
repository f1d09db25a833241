"""What rounds of private updates cost: (ε, δ) by dp_accounting's accountants.

A round is a Gaussian mechanism on the sum of clipped updates, σ = z·S for updates of length S at most, on some of the
clients. With everyone in every round T rounds are one Gaussian mechanism with z/√T, exactly. Where each client comes
with a chance of its own (Poisson), privacy losses are composed numerically (PLD), an upper bound in steps of 0.005.
Where a fixed number is drawn, only "one client's data replaced by other data" can be promised: the sum then moves by
2·S, and the bound is that of Rényi divergences.

Reference: Mironov, Talwar, Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", 2019; Koskela et al.,
"Computing Tight Differential Privacy Guarantees Using FFT", AISTATS 2020; Wang, Balle, Kasiviswanathan, "Subsampled
Rényi Differential Privacy and Analytical Moments Accountant", AISTATS 2019, theorem 27.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from unskew.core.plugins import require_extra

STEP = 0.005  # of a discretised privacy loss
ORDERS = (*range(2, 33), 48, 64)  # of the Rényi divergences


@dataclass(frozen=True)
class Drawing:
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


def epsilon_of(noise: float, delta: float, rounds: int, drawing: Drawing, *, replaced: bool = False) -> float:
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
        noise, sampling_prob=share, value_discretization_interval=STEP,
        neighboring_relation=relation or accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )  # fmt: skip
