"""A finished run's records: result.json and how it is displayed, and model.json, which inference needs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from unskew.charts import Axis, Chart, Line
from unskew.charts.files import svg
from unskew.core.errors import UserError
from unskew.core.files import json_object, record_from
from unskew.core.units import counted, format_bytes, format_duration, format_emd, format_rate
from unskew.privacy.ledger import SEEDED, Spent
from unskew.round.evaluation import Evaluation
from unskew.runs.client_accuracy import ClientSpread
from unskew.runs.folder import json_bytes, read_sealed, reading
from unskew.runs.journal import read_metrics

RESULT = "result.json"
MODEL_INFO = "model.json"
TEST, VALIDATION, AT_NODES = "test", "validation", "nodes"
MAX_POINTS_MARKED = 40  # of a line in a chart; with more the dots would hide it


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


def accuracy_picture(
    rows: Sequence[Mapping[str, Any]], calibrated: Mapping[str, float] | None = None, on: str = "the test set"
) -> str:
    """Accuracy by round as inline SVG, with a dashed line for each calibration; empty if no round was evaluated."""
    evaluated = [(row["round"], row["accuracy"]) for row in rows if row.get("accuracy") is not None]
    if not evaluated:
        return ""
    rounds, scores = zip(*evaluated, strict=True)
    marks = [Line(rounds, scores, "trained", 0, points=len(scores) <= MAX_POINTS_MARKED)]
    for colour, (name, accuracy) in enumerate((calibrated or {}).items(), 1):
        ends = [rounds[0], rounds[-1]] if rounds[-1] > rounds[0] else [rounds[0], rounds[0] + 1]
        marks.append(Line(ends, [accuracy, accuracy], f"after {name}", colour % 10, dashed=True))
    alt = f"Accuracy by round; the last is {scores[-1]:.2%}."
    x, y = Axis("round", kind="count"), Axis("accuracy", kind="percent")
    return svg(Chart("accuracy", f"Accuracy on {on}", alt, marks, x=x, y=y))


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
