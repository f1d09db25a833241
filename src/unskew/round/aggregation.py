"""4. How results become one: from sums over the visits to the pseudo-gradient old − new."""

from unskew import tensors
from unskew.types import Sums, Tensors


def weighted_mean(sums: Sums) -> Tensors:
    """ḡ = Σ wₖ·(old − newₖ) / Σ wₖ, parameters and buffers alike, in float64."""
    weight = sums["weight"]
    return {name: value / weight for name, value in tensors.under(sums, "delta/").items()}
