"""Accuracy for each client: under its own label distribution, and on its own test images if it has any.

Shapes: K clients, C classes, N training examples, n test images, m classifiers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.types import ImageSet
from unskew.data.arrays import read_npz
from unskew.data.population import Clients, Ints, Partition
from unskew.round.evaluation import Evaluation
from unskew.runs.folder import reading, require_sealed

CLIENTS = "clients.npz"
OWN = ""  # the name of the run's own classifier

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClientSpread:
    """How accuracy is spread over the clients, each counted once; ``jain`` is Jain's index (Σa)² / (K·Σa²)."""

    clients: int  # those with an accuracy
    left_out: int  # those without: no examples, or no test image of any of their classes
    partly: int  # those with some classes that have no test images; their other classes count
    worst: float
    p10: float  # a tenth of the clients have at most this
    p50: float
    p90: float
    mean: float
    by_examples: float  # the mean weighted by each client's training examples or test images
    deviation: float
    jain: float
    p20: float | None = None  # the other deciles; None in some of recipes/results
    p30: float | None = None
    p40: float | None = None
    p60: float | None = None
    p70: float | None = None
    p80: float | None = None
    own_images: "ClientSpread | None" = None  # on the clients' own test images, if their owners are known

    def summary(self) -> str:
        """The spread in one line."""
        summary = f"{self._quantiles()}; fairness {self.jain:.3f} (Jain)"
        summary += f"; {self.left_out:,} left out" if self.left_out else ""
        own = self.own_images
        return summary + ("" if own is None else f"; on their own test images {own._quantiles()}")

    def _quantiles(self) -> str:
        return f"worst {self.worst:.2%}, tenth {self.p10:.2%}, median {self.p50:.2%}"


@dataclass(frozen=True, eq=False)
class ByClient:
    """[K] accuracies, NaN if unknown; [K] the examples that each is measured on, and whether these are all it has."""

    accuracy: Floats
    counted: Ints
    complete: npt.NDArray[np.bool_]
    own: "ByClient | None" = None  # on the clients' own test images, if their owners are known


def measure_clients(partition: Partition, labels: Ints, owners: Clients | None, score: Evaluation) -> ByClient:
    """Σ_c q_k(c)·acc_c for each client k, over the classes that have test images; and on its own test images."""
    right, total = np.asarray(score.right, np.float64), np.asarray(score.total, np.float64)
    known = total > 0
    share = np.divide(right, total, out=np.zeros_like(right), where=known)
    held = partition.client >= 0
    client, labels = partition.client[held], labels[held]
    counted = np.bincount(client, known[labels], partition.clients).astype(np.int64)
    accuracy = _divide(np.bincount(client, share[labels], partition.clients), counted)
    own = None if owners is None else on_own_images(owners, partition.clients, score)
    return ByClient(accuracy, counted, counted == np.bincount(client, minlength=partition.clients), own)


def on_own_images(owners: Clients, clients: int, score: Evaluation) -> ByClient:
    """Each client's accuracy on its own test images; ``owners`` [n] is −1 for images that no client owns."""
    assert score.marks is not None
    owned = owners >= 0
    counted = np.bincount(owners[owned], minlength=clients).astype(np.int64)
    accuracy = _divide(np.bincount(owners[owned], score.marks[owned], clients), counted)
    return ByClient(accuracy, counted, np.ones(clients, np.bool_))


def _divide(sums: npt.NDArray[Any], counted: Ints) -> Floats:
    shares: Floats = np.divide(sums, counted, out=np.full(len(sums), np.nan), where=counted > 0)
    return shares


def test_owners(partition: Partition, images: ImageSet) -> Clients | None:
    """[n], the client that owns each test image, −1 for none; None if the clients are not users or own none."""
    names, users = partition.names, images.test_users
    if names is None or users is None or len(users) != len(images.test):
        return None
    order = np.argsort(np.asarray(names, np.str_))
    ranked = np.asarray(names, np.str_)[order]
    rank = np.minimum(np.searchsorted(ranked, users), len(ranked) - 1)
    owned = ranked[rank] == users
    return np.where(owned, order[rank], -1).astype(np.int32) if owned.any() else None


def summarise_clients(measured: ByClient) -> ClientSpread | None:
    """The spread of these accuracies; None if no client has one."""
    known = ~np.isnan(measured.accuracy)
    values = measured.accuracy[known]
    if not len(values):
        return None
    deciles = np.quantile(values, np.arange(1, 10) / 10).tolist()
    squares = float(np.square(values).sum())
    return ClientSpread(
        clients=len(values),
        left_out=len(known) - len(values),
        partly=int((known & ~measured.complete).sum()),
        worst=float(values.min()),
        mean=float(values.mean()),
        by_examples=float(np.average(values, weights=measured.counted[known])),
        deviation=float(values.std()),
        jain=float(values.sum()) ** 2 / (len(values) * squares) if squares else 1.0,  # all equally wrong
        own_images=None if measured.own is None else summarise_clients(measured.own),
        **{f"p{decile}0": value for decile, value in enumerate(deciles, 1)},
    )


def read_clients(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a run's clients.npz; empty if it has none, as in a federation."""
    require_sealed(path, CLIENTS)
    if not (path / CLIENTS).exists():
        return {}
    with reading(path / CLIENTS):
        arrays = read_npz(path / CLIENTS)
        shape = len(arrays["classifiers"]), len(arrays["counted"])
        if any(arrays[name].shape != shape for name in arrays.keys() & {"accuracy", "own_images"}):
            raise ValueError("its arrays do not match")
        return arrays


def with_classifier(
    arrays: Mapping[str, npt.NDArray[Any]], name: str, measured: ByClient
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of clients.npz with one more classifier; one of the same name is replaced.

    They are names [m], accuracies [m, K], NaN if unknown, and the examples measured on [K].
    """
    new: dict[str, npt.NDArray[Any]] = {
        "classifiers": np.array([name], np.str_),
        "accuracy": measured.accuracy[None].astype(np.float32),
        "counted": measured.counted.astype(np.int32),
    }
    if (own := measured.own) is not None:
        new |= {"own_images": own.accuracy[None].astype(np.float32), "own_counts": own.counted.astype(np.int32)}
    if not arrays:
        return new
    keep = arrays["classifiers"] != name
    rows = [key for key in ("classifiers", "accuracy", "own_images") if key in arrays and key in new]
    counts = ("counted", *(("own_counts",) if "own_images" in rows else ()))
    joined = {key: np.concatenate([arrays[key][keep], new[key]]) for key in rows}
    return joined | {key: new[key] for key in counts}
