"""4. How results become one: from sums over the visits to the pseudo-gradient old − new."""

from unskew.core import tensors
from unskew.core.types import Sums, Tensors


def weighted_mean(sums: Sums) -> Tensors:
    """ḡ = Σ wₖ·(old − newₖ) / Σ wₖ, parameters and buffers alike, in float64."""
    weight = sums["weight"]
    return {name: value / weight for name, value in tensors.under(sums, "delta/").items()}


def normalised_mean(sums: Sums) -> Tensors:
    """ḡ = (Σ wₖ·aₖ / Σ wₖ) · Σ wₖ·(old − newₖ)/aₖ / Σ wₖ for parameters, where each visit scaled its own by 1/aₖ."""
    common = sums["scaled"] / sums["weight"]
    mean = weighted_mean(sums)
    return {name: common * value if name.startswith("params/") else value for name, value in mean.items()}
