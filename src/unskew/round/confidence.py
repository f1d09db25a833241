"""How far a model's probabilities can be trusted: the calibration error, and the temperature that corrects it.

Everything is a sum over images, so that parts of the test images may be scored in different processes.
Shapes: n images, C classes, T temperatures, B bins.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TEMPERATURES = [2.0 ** (number / 8) for number in range(-48, 57)]  # 1/64 to 128
ONE = TEMPERATURES.index(1.0)
BINS = 15  # of equal width, as in Guo et al. 2017


@dataclass(frozen=True)
class Confidence:
    """The expected calibration error of a model's probabilities, as they are and with the best temperature.

    ``ece_scaled`` is cross-fitted: each half of the images is scored with the temperature of the other half.
    """

    ece: float
    temperature: float
    ece_scaled: float


def confidence_sums(logits: Tensor, labels: Tensor, numbers: Tensor) -> Tensor:
    """[2, T, B, 4], by half of the images, temperature and bin: images, their confidence, right answers, loss.

    Images with even ``numbers`` are one half, those with odd ones the other.
    """
    logits = logits.double()
    highest, answers = logits.max(1)
    right, own = (answers == labels).double(), logits.gather(1, labels[:, None])[:, 0]
    sums = torch.zeros(len(TEMPERATURES), 2 * BINS, 4, dtype=torch.float64)
    for row, temperature in zip(sums, TEMPERATURES, strict=True):
        total = (logits / temperature).logsumexp(1)
        confidence = (highest / temperature - total).exp()
        bins = (confidence * BINS).ceil().nan_to_num(1).clamp(1, BINS).long() - 1
        values = torch.stack([torch.ones_like(right), confidence, right, total - own / temperature], 1)
        row.index_add_(0, numbers % 2 * BINS + bins, values)
    return sums.view(len(TEMPERATURES), 2, BINS, 4).transpose(0, 1).contiguous()


def read_confidence(sums: Tensor) -> Confidence | None:
    """The errors and the temperature that minimizes the loss; None with fewer than two images, or without finite loss.

    A temperature that does not lower the cross-fitted error is not used: then it is 1.

    Reference: Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", ICML 2017, section 4.2.
    """
    loss = sums[..., 3].sum(2)  # [2, T]
    if not bool(sums[:, ONE, :, 0].sum(1).all()) or not bool(loss.isfinite().all()):
        return None
    first, second = loss.argmin(1).tolist()
    ece, scaled = _error(sums[:, ONE].sum(0)), _error(sums[0, second] + sums[1, first])
    if scaled >= ece:
        return Confidence(ece, 1.0, ece)
    return Confidence(ece, TEMPERATURES[int(loss.sum(0).argmin())], scaled)


def _error(bins: Tensor) -> float:
    """The mean over images of |confidence − accuracy| in their bin; ``bins`` is [B, 4]."""
    error = float((bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum())
    return error if math.isfinite(error) else 1.0
