"""Methods that keep a calibration's statistics private. Training does not change. See docs/privacy.md."""

from dataclasses import replace

from unskew.core.types import PrivacyBudget
from unskew.round.algorithm import Method


def withhold(min_count: int = 5) -> Method:
    """Does not send statistics of classes with few examples on a client.

    Fewer than ``min_count`` examples. A rule of thumb against means of one or two images; it guarantees nothing in
    numbers.

    Reference: Luo et al., "No Fear of Heterogeneity", NeurIPS 2021, appendix C.
    """
    if min_count < 1:
        raise ValueError(f"withhold(min_count={min_count}): it counts examples, give at least 1")
    return lambda algorithm: replace(algorithm, withhold=min_count)


def secure() -> Method:
    """Masks every client's statistics: the server sees only their sum.

    Pairwise masks from X25519 cancel in the sum, modulo 2^64; the sum is exact to 2^-24. Needs at least three clients.

    Reference: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017.
    """
    return lambda algorithm: replace(algorithm, secure=True)


def private(epsilon: float = 8.0, delta: float = 1e-5, clip: float = 10.0, release: bool = False) -> Method:
    """Adds noise to the statistics' sum, for differential privacy.

    (ε, δ) for every example, features cut to length ``clip``. It covers the statistics and not the training before
    them. The noise follows from the run's seed, for studies: anyone who knows the seed can remove it. With ``release``
    it comes from the operating system and cannot be repeated.

    Reference: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018.
    """
    for knob, value, limit in (("epsilon", epsilon, float("inf")), ("delta", delta, 1.0), ("clip", clip, float("inf"))):
        if not 0 < value < limit:
            below = "" if limit == float("inf") else " and below 1"
            raise ValueError(f"private({knob}={value:g}): give a number above 0{below}")
    budget = PrivacyBudget(epsilon, delta, clip, release)
    return lambda algorithm: replace(algorithm, private=budget)
