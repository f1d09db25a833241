"""Methods that protect what clients send: a calibration's statistics, a round's updates."""

from collections.abc import Mapping
from dataclasses import replace

from unskew.core.key import Key, system_key
from unskew.core.language import check_not_negative, check_positive
from unskew.core.types import THRESHOLD, PrivacyBudget, Roster, Sampler, SecureAggregation, Visit
from unskew.privacy.noise import PrivateUpdates
from unskew.privacy.secure_sum import RoundedUpdates, SecureUpdates
from unskew.round.algorithm import Method
from unskew.round.sampling import uniform


def withhold(min_count: int = 5) -> Method:
    """Does not send statistics of classes with few examples on a client.

    A rule of thumb against means of one or two images, without a quantitative guarantee.

    Parameters
    ----------
    min_count
        The fewest examples of a class that a client sends.

    Reference: Luo et al., "No Fear of Heterogeneity", NeurIPS 2021, appendix C.
    """
    check_positive("withhold", min_count=min_count)
    return lambda algorithm: replace(algorithm, withhold=min_count)


def secure(updates: bool = False, threshold: float = THRESHOLD) -> Method:
    """Masks what every client sends: the server sees only the sum.

    Pairwise masks from X25519 cancel in the sum, modulo 2^64. The sum is exact in steps of 2^-24 for a calibration's
    statistics, of 2^-32 for a round. If clients drop out, the shares of those that stay remove their masks. At least
    three clients. In a federation, nodes sign and verify each other's keys and the agreed settings, so that a dishonest
    server learns nothing more; it needs at least three nodes.

    Parameters
    ----------
    updates
        Also masks the sums of every round: updates, statistics of methods, metrics. Otherwise only a calibration's
        statistics.
    threshold
        The share of the clients that must stay to the end, or there is no sum.

    Reference: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017.
    """
    if not 0.5 < threshold <= 1:
        raise ValueError(f"secure(threshold={threshold:g}): give a fraction of the clients, above 0.5 and at most 1")
    masked = SecureAggregation(threshold)
    if not updates:
        return lambda algorithm: replace(algorithm, secure=masked)
    return lambda algorithm: replace(algorithm, secure=masked, exchange=SecureUpdates(threshold))


def rounded() -> Method:
    """Rounds what clients send in a round as secure does, without masks.

    It protects nothing. The result equals that of ``secure(updates=true)`` to the last bit, without the cost of masks:
    for studies, and to check that masks change nothing.
    """
    return lambda algorithm: replace(algorithm, exchange=RoundedUpdates())


def private(epsilon: float = 8.0, delta: float = 1e-5, clip: float = 10.0, release: bool = False) -> Method:
    """Adds noise to the statistics' sum, for differential privacy.

    (ε, δ) for every example. It covers the statistics, not the training before them.

    Parameters
    ----------
    epsilon, delta
        The guarantee (ε, δ).
    clip
        The length that features are clipped to.
    release
        Draws the noise from the operating system, so that it cannot be repeated, and keeps everything else about
        single examples out of the run directory. Otherwise it follows from the run's seed, for studies: anyone who
        knows the seed can remove it. The default is true in a federation.

    Reference: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018.
    """
    check_positive("private", epsilon=epsilon, clip=clip)
    _check_delta("private", delta)
    budget = PrivacyBudget(epsilon, delta, clip, release)
    return lambda algorithm: replace(algorithm, private=budget)


def private_updates(
    clip: float = 1.0, noise: float = 1.0, delta: float = 1e-5, sampling: str = "poisson", release: bool = False
) -> Method:
    """Clips updates and adds noise to their sum, for differential privacy.

    ḡ = (Σ Δ_k·min(1, S/‖Δ_k‖) + N(0, (z·S)²))/K, K the clients of a round. (ε, δ) for every client, all its examples
    together; an accountant reports ε after each round. All clients weigh the same. Training losses are not reported.
    With ``secure(updates=true)`` and ``release`` the clients add the noise, inside the masks.

    Parameters
    ----------
    clip
        The longest update S.
    noise
        The noise z, in multiples of S.
    delta
        δ, well below 1 / the number of clients.
    sampling
        ``poisson``: each client takes part with probability K/N, for the smallest ε. ``fixed``: always K clients.
    release
        Draws noise and participation from the operating system, so that they cannot be repeated, and keeps everything
        that (ε, δ) does not cover out of the run directory. Otherwise both follow from the run's seed, for studies:
        anyone who knows the seed can remove the noise. The default is true in a federation.

    Reference: McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, Algorithm 1.
    """
    check_positive("private-updates", clip=clip)
    check_not_negative("private-updates", noise=noise)
    _check_delta("private-updates", delta)
    if sampling not in SAMPLERS:
        raise ValueError(f"private-updates(sampling={sampling}): give {' or '.join(SAMPLERS)}")
    mechanism, draw = PrivateUpdates(clip, noise, delta, sampling == "poisson", release), SAMPLERS[sampling]

    def unpredictable(key: Key, roster: Roster, per_round: int) -> list[Visit]:  # ε assumes that nobody knows who comes
        return draw(system_key(), roster, per_round)

    return lambda algorithm: replace(
        algorithm,
        sampler=unpredictable if release else draw,
        mechanism=mechanism,
        claims=("available", "aggregate"),  # ε assumes a draw among all clients and the plain mean
    )


def _check_delta(name: str, delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"{name}(delta={delta:g}): give a number above 0, well below 1 / the number of examples")


def _fixed(key: Key, roster: Roster, per_round: int) -> list[Visit]:
    return [Visit(visit.client, 1.0) for visit in uniform(key, roster, per_round)]


def _poisson(key: Key, roster: Roster, per_round: int) -> list[Visit]:
    """Each client independently with probability K/N; there may be none."""
    chosen = key.numpy().random(len(roster.inhabited)) < per_round / max(1, len(roster.inhabited))
    return [Visit(client, 1.0) for client in roster.inhabited[chosen].tolist()]


SAMPLERS: Mapping[str, Sampler] = {"poisson": _poisson, "fixed": _fixed}
