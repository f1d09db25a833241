"""A finished run's records: result.json and how it is displayed, model.json for inference, clients.npz by client."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.charts.builders import accuracy_picture
from unskew.core.errors import UserError
from unskew.core.files import json_object, record_from
from unskew.core.types import ImageSet
from unskew.core.units import counted, format_bytes, format_duration, format_emd, format_rate
from unskew.data.arrays import read_npz
from unskew.data.population import Clients, Ints, Partition
from unskew.privacy.ledger import SEEDED, Spent
from unskew.round.evaluation import Evaluation
from unskew.runs.folder import json_bytes, read_sealed, reading, require_sealed
from unskew.runs.journal import read_metrics

RESULT = "result.json"
MODEL_INFO = "model.json"
TEST, VALIDATION, AT_NODES = "test", "validation", "nodes"


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


@dataclass(frozen=True)
class Calibration:
    """The scores and costs of a calibrated classifier."""

    name: str
    accuracy: float
    loss: float
    bytes_up: int
    seconds: float
    clients_accuracy: ClientSpread | None = None  # None in a federation
    ece: float | None = None  # expected calibration error; None if measured on the nodes' own test images
    ece_scaled: float | None = None  # with a temperature, cross-fitted
    temperature: float | None = None  # what logits are divided by before the softmax


@dataclass(frozen=True, repr=False, kw_only=True)
class Result:
    """The fields of result.json, and the run directory."""

    path: Path
    method: str
    data: str
    partition: str
    clients: int
    per_round: int
    rounds: int
    seed: int
    engine: str
    accuracy: float
    loss: float
    examples: int | None = None  # None here and below: a release leaves it out
    seconds: float
    examples_per_second: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    weights_sha256: str
    model: str
    partition_hash: str | None = None
    data_sha256: str | None = None
    emd: float | None = None  # None: the labels are at the nodes of a federation, or a release leaves it out
    failures: int | None = 0
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    baseline: str | None = None  # the run that this one's accuracy is compared with
    baseline_accuracy: float | None = None
    relative_accuracy: float | None = None  # accuracy / baseline_accuracy
    weights_seal: str | None = None  # a hash of the weights' types and shapes too, and of the classifier's names
    privacy: Spent | None = None  # the total privacy cost of everything released with noise
    start: Calibration | None = None  # the initial classifier (--start), evaluated before the first round
    settings: dict[str, Any] = field(default_factory=dict)  # every option that decides the result
    notes: list[str] = field(default_factory=list)  # where the weights come from, what is frozen
    best_round: int | None = None  # with --patience: the round whose model this is
    stopped_at: int | None = None  # the last trained round, if --patience ran out before --rounds
    evaluated_on: str = TEST  # what accuracy and loss are measured on: TEST, VALIDATION or AT_NODES
    clients_accuracy: ClientSpread | None = None  # how the accuracy is spread over the clients
    released: bool | None = None  # True: everything that (ε, δ) does not cover was left out (release=true)
    ece: float | None = None  # here and below: as in Calibration
    ece_scaled: float | None = None
    temperature: float | None = None

    @property
    def final_round(self) -> int:
        """The round after which the model is the result: the last, or with --patience the best."""
        return self.rounds if self.best_round is None else self.best_round

    @property
    def measured_on(self) -> str:
        """The images that accuracy and loss are measured on."""
        at_nodes = self.evaluated_on == AT_NODES
        return "the nodes' own test images" if at_nodes else measured_on(self.evaluated_on == VALIDATION)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per round: ``round``, ``train_loss``, ``accuracy`` if evaluated, …"""
        return read_metrics(self.path)

    def __repr__(self) -> str:
        after = "".join(f", {name} {calibration.accuracy:.2%}" for name, calibration in self.calibrations.items())
        return f"<Result of {self.method} on {self.data}: accuracy {self.accuracy:.2%}{after}; {self.path}>"

    def __str__(self) -> str:
        """A summary, one fact per line."""
        rows = summary_rows(self)
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {fact}" for label, fact in rows)

    def _repr_html_(self) -> str:
        """What a notebook shows: the summary as a table, and the accuracy by round."""
        left = 'style="text-align:left"'
        rows = [f"<th {left}>{escape(label)}</th><td {left}>{escape(fact)}</td>" for label, fact in summary_rows(self)]
        cells = "".join(f"<tr>{row}</tr>" for row in rows)
        try:
            after = {name: row.accuracy for name, row in self.calibrations.items()}
            picture = accuracy_picture(self.history, after, self.measured_on)
        except UserError as error:  # the folder was damaged or moved; the numbers are still right
            picture = f"<p>{escape(str(error))}</p>"
        return f"<div><table>{cells}</table>{picture}</div>"


def measured_on(validation: bool) -> str:
    """The images that accuracy is measured on."""
    return "the validation images" if validation else "the test set"


def summary_rows(result: Result) -> list[tuple[str, str]]:
    """The result as labels and facts."""
    data = f"{result.data}, {result.partition}, {counted(result.clients, 'client')}"
    data += "" if result.released else f", EMD {format_emd(result.emd)}"
    rows = [
        ("method", result.method),
        ("data", data),
        ("accuracy", f"{result.accuracy:.2%} on {result.measured_on}, loss {result.loss:.4f}{format_ece(result)}"),
    ]
    if result.relative_accuracy is not None:
        baseline = f"{result.baseline_accuracy:.2%}, {result.baseline}"
        rows.append(("relative", f"{result.relative_accuracy:.2%} of {baseline}"))
    calibrations = [(f"after {name}", calibration) for name, calibration in result.calibrations.items()]
    calibrations += [(f"start {result.start.name}", result.start)] if result.start else []
    for name, calibration in calibrations:
        scores = f"{calibration.accuracy:.2%}, loss {calibration.loss:.4f}{format_ece(calibration)}"
        costs = f"{format_bytes(calibration.bytes_up)} up, {format_duration(calibration.seconds)}"
        rows.append((name, f"{scores}; {costs}"))
    spreads = {"": result.clients_accuracy}
    spreads |= {f"{name}: ": calibration.clients_accuracy for name, calibration in result.calibrations.items()}
    summaries = [name + spread.summary() for name, spread in spreads.items() if spread and spread.clients > 1]
    rows += [("" if number else "clients", summary) for number, summary in enumerate(summaries)]
    if result.privacy is not None:
        rows += [("privacy", result.privacy.describe()), *([("", SEEDED)] if result.privacy.seeded else [])]
    rounds, duration = counted(result.rounds, "round"), format_duration(result.seconds)
    if result.examples is None or result.bytes_up is None or result.bytes_down is None:  # a release
        rows.append(("trained", f"{rounds}, {duration}"))
    else:
        rate = f"{format_rate(result.examples_per_second or 0)} examples per second"
        rows.append(("trained", f"{rounds}, {result.examples:,} examples, {duration}, {rate}"))
        rows.append(("sent", f"{format_bytes(result.bytes_up)} up, {format_bytes(result.bytes_down)} down"))
    rows += [("note", note) for note in result.notes]
    if result.best_round is not None:
        when = "ran to its last round" if result.stopped_at is None else f"stopped after round {result.stopped_at}"
        rows.append(("stopping", f"{when}; the model is from the best round, {result.best_round}"))
    if result.failures:
        rows.append(("failed", f"{counted(result.failures, 'visit')}; see metrics.jsonl"))
    return [*rows, ("weights", f"sha256 {result.weights_sha256}"), ("run", str(result.path))]


def format_ece(scores: Result | Calibration) -> str:
    """The calibration error before and after temperature scaling; empty if unknown."""
    if scores.ece is None:
        return ""
    return f", ECE {scores.ece:.3f} ({scores.ece_scaled:.3f} at temperature {scores.temperature:.3g})"


def to_json(result: Result) -> dict[str, Any]:
    """The content of result.json: without the path and anything that is None, calibrations as a list."""
    values = asdict(result) | {"path": None, "notes": result.notes or None}
    values["calibrations"] = [_drop_none(row) for row in values["calibrations"].values()]
    return _drop_none(values)


def _drop_none(values: dict[str, Any]) -> dict[str, Any]:
    nested = ("clients_accuracy", "own_images", "privacy")
    return {key: _drop_none(value) if key in nested else value for key, value in values.items() if value is not None}


def read_result(path: Path) -> Result:
    """The result of a finished run."""
    content = read_sealed(path, RESULT)
    if content is None:
        begun = (path / "config.toml").is_file()
        hint = f"finish it with: unskew resume {path}" if begun else "it is not a run directory"
        raise UserError(f"{path} has no {RESULT}; {hint}" if path.exists() else f"{path} does not exist")
    return result_from(json_object(content, path / RESULT), path / RESULT, path)


def result_from(values: Mapping[str, Any], file: Path, path: Path) -> Result:
    """The result that ``to_json`` encoded; ``file`` is where it was read, ``path`` the run directory."""
    with reading(file):
        calibrations = {str(row["name"]): row for row in values["calibrations"]}
        return record_from(Result, {**values, "calibrations": calibrations, "path": path})


# model.json

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class ModelInfo:
    """The model's classes and inputs; pixels are normalized as (x/255 − mean) / std."""

    classes: tuple[str, ...]
    image: Shape  # [ch, H, W] of the data set's pictures
    shape: Shape  # [ch, H, W] of the network's input
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_accuracy: dict[str, list[float | None]] = field(default_factory=dict)  # by calibration ("": none) and class

    def with_score(self, name: str, score: Evaluation) -> "ModelInfo":
        """Add the accuracy of each class."""
        by_class = [right / total if total else None for right, total in zip(score.right, score.total, strict=True)]
        return replace(self, class_accuracy={**self.class_accuracy, name: by_class})

    def to_bytes(self) -> bytes:
        """The content of model.json."""
        return json_bytes(asdict(self))


def read_model_info(path: Path) -> ModelInfo:
    """Read a run directory's model.json."""
    with reading(path / MODEL_INFO):
        info = record_from(ModelInfo, json_object(read_sealed(path, MODEL_INFO) or b"", path / MODEL_INFO))
        if {len(info.mean), len(info.std)} != {info.shape[0]} or min(*info.image, *info.shape, len(info.classes)) < 1:
            raise ValueError("its sizes do not agree")
        return info


# clients.npz: accuracy for each client, under its own label distribution, and on its own test images if it has any.
# Shapes: K clients, C classes, N training examples, n test images, m classifiers.

CLIENTS = "clients.npz"
OWN = ""  # the name of the run's own classifier

Floats = npt.NDArray[np.float64]


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
