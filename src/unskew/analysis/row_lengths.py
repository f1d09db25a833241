"""The lengths of a classifier's rows, one row for each of C classes, and how uneven they are."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch


def calibrated_lengths(classifier: dict[str, torch.Tensor]) -> list[float]:
    """[C], of the layer whose rows belong to the classes."""
    return own_lengths(classifier["head.weight" if "head.weight" in classifier else "head.classifier.weight"])


def own_lengths(weight: torch.Tensor) -> list[float]:
    """[C], the lengths of rows without what all rows share: adding one vector to every row changes no prediction.

    Departs from the paper, whose rows are taken as they are: those of a discriminant share a part thousands of times
    as long as the differences between classes.
    """
    rows = weight.cpu().double()
    lengths: list[float] = (rows - rows.mean(0)).norm(dim=1).tolist()
    return lengths


def correlation(counts: Any, norms: Sequence[float]) -> float | None:
    """Pearson's correlation; None where one of them does not vary."""
    counts, lengths = np.asarray(counts, float), np.asarray(norms, float)
    if len(counts) < 3 or counts.std() == 0 or lengths.std() == 0:
        return None
    return float(np.corrcoef(counts, lengths)[0, 1])


def mean_known(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def unevenness(norms: Sequence[float]) -> float:
    """The rows' standard deviation as a share of their mean: 0 where all are alike."""
    mean = fmean(norms)
    return float(np.std(norms)) / mean if mean else 0.0


def some_rows(counts: Sequence[float], most: int) -> list[int]:
    """At most about ``most`` of the rows, by number: half of them of classes that a client has, evenly chosen."""
    has, lacks = ([at for at, count in enumerate(counts) if bool(count) is held] for held in (True, False))
    first = min(len(has), max(most // 2, most - len(lacks)))
    return sorted([*_evenly(has, first), *_evenly(lacks, most - first)])


def _evenly(places: Sequence[int], most: int) -> Sequence[int]:
    return places[:: max(1, -(-len(places) // max(most, 1)))]
