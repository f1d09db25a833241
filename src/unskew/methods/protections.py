"""What keeps the statistics of a calibration private; training is not touched. docs/privacy.md says who learns what."""

from dataclasses import replace

from unskew.core.types import PrivacyBudget
from unskew.round.algorithm import Method


def withhold(min_count: int = 5) -> Method:
    """Keeps the statistics of a class at home on every client that has fewer than so many examples of it.

    A rule of thumb against means of one or two images; no promise in numbers.

    Reference: Luo et al., "No Fear of Heterogeneity", NeurIPS 2021, appendix C.
    """
    if min_count < 1:
        raise ValueError(f"withhold(min_count={min_count}): it counts examples, give at least 1")
    return lambda algorithm: replace(algorithm, withhold=min_count)


def secure() -> Method:
    """Masks every client's statistics, so that the server sees their sum alone, exact to 2^-24.

    Pairwise masks from X25519 cancel in the sum, modulo 2^64. At least three clients.

    Reference: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017.
    """
    return lambda algorithm: replace(algorithm, secure=True)


def private(epsilon: float = 8.0, delta: float = 1e-5, clip: float = 10.0) -> Method:
    """Adds noise to the statistics' sum: (ε, δ)-differential privacy of every example, features cut to ``clip``.

    The noise follows from the run's seed, for studies; it covers the statistics and not the training before them.

    Reference: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018.
    """
    for knob, value, most in (("epsilon", epsilon, float("inf")), ("delta", delta, 1.0), ("clip", clip, float("inf"))):
        if not 0 < value < most:
            limit = "" if most == float("inf") else " and below 1"
            raise ValueError(f"private({knob}={value:g}): give a number above 0{limit}")
    promise = PrivacyBudget(epsilon, delta, clip)
    return lambda algorithm: replace(algorithm, private=promise)
