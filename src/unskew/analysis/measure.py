"""A measure as one record: how it is taken, stored and shown, and phrases that several measures share."""

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from unskew.charts import Axis, Chart
from unskew.charts.builders import axis_of, grouped
from unskew.charts.files import svg
from unskew.core.errors import Missing, UserError, a_kind, describe_error
from unskew.core.files import json_object
from unskew.core.types import Tensors
from unskew.runs.finished import UNCOVERED, FinishedRun
from unskew.runs.folder import json_bytes, read_sealed, write_sealed


@dataclass(frozen=True)
class Linked:
    """A cell's text with a link relative to the page, and its color: inside, near or outside."""

    text: str
    href: str = ""
    look: str = ""
    value: float | None = None  # to sort by; None: sorted by its text


CellValue = str | int | float | Linked | None  # None is an empty cell and sorts last


@dataclass(frozen=True)
class Column:
    """A table's column. ``kind``: "text", "number", "count", "percent" (0.5 is 50.00 %), "points" (0.5 is +50.00),
    "bytes", "seconds"."""

    name: str
    kind: str = "text"


@dataclass(frozen=True)
class Table:
    """Rows that a reader can sort by any column."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[CellValue]]
    note: str = ""


@dataclass(frozen=True)
class Choice:
    """Several charts shown one at a time: the reader chooses a layer, a client, a class."""

    label: str  # "layer"
    options: Mapping[str, Chart]  # by their name in the list
    start: str = ""  # the one shown initially; "": the first


Element = Chart | Choice | Table


Values = TypeVar("Values")


def _nothing(values: Any) -> list[Any]:
    return []


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[Values]):
    """A measure's section on the page that compares runs. Its functions take the values by run name."""

    draw: Callable[[Mapping[str, Values]], Sequence[Chart]] = _nothing
    title: str = ""  # "": that of the measure
    text: str = ""  # how to read the charts; "": that of the measure
    findings: Callable[[Mapping[str, Values]], Sequence[str]] = _nothing
    left_out: Callable[[Mapping[str, Values]], Sequence[str]] = _nothing  # runs missing from the charts, and why


@dataclass(frozen=True, kw_only=True)
class Measure(Generic[Values]):
    """One measure. ``take`` computes the values, the other functions present them.

    Your own measure is a function that returns a Measure; on the command line it is ``package.module:function``::

        @dataclass(frozen=True)
        class Sizes:
            largest: int

        def largest_client() -> Measure[Sizes]:
            return Measure(
                name="largest",
                values=Sizes,
                take=lambda run: Sizes(int(run.holdings.sizes.max())),
                findings=lambda values: [f"The largest client has {values.largest:,} examples."],
            )
    """

    name: str  # one word; files and charts are named after it
    values: type[Values]  # a dataclass of numbers, strings, lists and dicts, stored as JSON
    take: Callable[..., Values]  # (run: FinishedRun, *, knobs)
    draw: Callable[[Values], Sequence[Chart]] = _nothing  # charts, also written as files
    findings: Callable[[Values], Sequence[str]] = _nothing  # sentences, the most important first
    title: str = ""  # of its section; "": its name
    text: str = ""  # how to read the charts
    show: Callable[[FinishedRun, Values], Sequence[Element]] | None = None  # on the page; None: the charts of ``draw``
    compare: Comparison[Values] | None = None
    calibrations: bool = False  # True: a new calibration changes its values
    folder_only: str = ""  # its text if the data set is missing; "": it needs the data set
    headline: int | None = 100  # position of its first finding at the top of the page; None: not at the top


MeasureSource = str | Measure[Any]  # "cka(clients=20)", "package.module:function", or a Measure


@dataclass(frozen=True)
class MeasureRequest:
    """A requested measure with its knobs filled in."""

    name: str  # "cka", or "package.module:function"
    text: str  # canonical spelling: "cka(clients=20)"
    measure: Measure[Any]
    take: Callable[[FinishedRun], Any] = field(compare=False)  # the knobs are in the text
    outside: bool = False  # True: its code is not part of this package

    def call(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call one of the measure's functions; an exception in code outside this package becomes a UserError."""
        try:
            return function(*args)
        except UserError:
            raise
        except Exception as error:
            if not self.outside:
                raise
            raise UserError(f"measure {self.text}: {part} failed: {describe_error(error)}") from error


@dataclass(frozen=True)
class Measured:
    """A measure of one run: its values, and notes for the reader."""

    request: MeasureRequest
    values: Any
    notes: tuple[str, ...] = ()

    @property
    def charts(self) -> list[Chart]:
        """Its charts, named after the request, so ``cka(round=0)`` and ``cka`` have different files."""
        return [self._rename(chart) for chart in self._list("draw", Chart, self.values)]

    @property
    def findings(self) -> list[str]:
        """Its findings, one or more sentences each."""
        return self._list("findings", str, self.values)

    def elements(self, run: FinishedRun) -> list[Element]:
        """The elements of its section on the page."""
        if self.request.measure.show is None:
            return list(self.charts)
        return [self._rename(element) for element in self._list("show", Element, run, self.values)]

    def _list(self, part: str, kind: Any, *args: Any) -> list[Any]:
        """The list that one of the measure's functions returns; its items must have the right type."""
        items = self.request.call(part, getattr(self.request.measure, part), *args)
        if not isinstance(items, list | tuple) or not all(isinstance(item, kind) for item in items):
            name = getattr(kind, "__name__", "Chart, Choice or Table")
            raise UserError(f"measure {self.request.text}: {part} must return a list of {name}, not {items!r:.100}")
        return list(items)

    def _rename(self, element: Any) -> Any:
        if isinstance(element, Choice):
            return replace(element, options={key: self._rename(chart) for key, chart in element.options.items()})
        if isinstance(element, Table):
            return element
        rest = element.name.removeprefix(self.request.measure.name).lstrip("-")
        return replace(element, name="-".join(filter(None, (slug(self.request.text), rest))))


def check_measure(measure: Any, text: str) -> None:
    """Reject an invalid measure; ``text`` is what the user typed."""
    if not isinstance(measure, Measure):
        raise UserError(f"measure {text}: it returns {a_kind(measure)}, not a Measure (unskew.extend.Measure)")
    functions = (measure.take, measure.draw, measure.findings, measure.show or measure.draw)
    named = re.fullmatch(r"[a-z][a-z0-9_-]*", str(measure.name))
    if not named or not is_dataclass(measure.values) or not all(map(callable, functions)):
        rules = "its name must be one lower-case word, values a dataclass, and take, draw, findings and show functions"
        raise UserError(f"measure {text}: {rules}: {measure}")


def slug(text: str) -> str:
    """A text as a file name: ``cka(round=0)`` becomes cka-round-0; −1 and 1 remain different."""
    plain = re.sub(r"([(=, ])-", r"\1minus", text.lower())
    plain = re.sub(r"(?<=\d)e-(?=\d)", "e_", plain)  # 1e-05 is not 1e05
    return re.sub(r"[^a-z0-9_.]+", "-", plain).strip("-")[:120]


SAMPLE_NOTED = 20  # clients; with more, a note reports that not all are shown
MAX_RUNS_NAMED = 8  # in a sentence


def retrain(run: FinishedRun, clients: int, round: int) -> tuple[dict[int, Tensors], dict[str, Any]]:
    """Local models trained from the model after ``round``, and the start of the row that describes them."""
    number, rounds = run.number(round), run.result.final_round
    models, everyone = run.local_models(number, clients), len(run.engine.roster.inhabited)
    if len(models) < everyone and everyone > SAMPLE_NOTED:
        run.notes.append(f"the local models of {len(models):,} of {everyone:,} clients are shown")
    when = "after the last round" if number == rounds > 0 else f"in round {number + 1}"
    return models, {"round": number + 1, "when": when, "asked": True, "clients": list(models)}


def order_rounds(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows by round; a round that was recorded and also retrained is listed once."""
    return sorted({row["round"]: row for row in rows}.values(), key=lambda row: int(row["round"]))


def name_layer(layer: str) -> str:
    """A layer in a sentence."""
    return "the classifier" if layer == "classifier" else layer


def pick_round(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The requested round, or the last one if all rounds were recorded during training."""
    return next((row for row in rows if row.get("asked")), rows[-1])


def name_clients(run: FinishedRun, clients: Iterable[int]) -> list[str]:
    """The clients' names if the data set has them, otherwise their numbers."""
    names = None
    with suppress(Missing):  # a release, or a federation
        names = run.holdings.names
    return [str(client) if names is None or client < 0 else names[client] for client in clients]


def list_by_run(what: str, runs: Mapping[str, float], digits: str) -> list[str]:
    """A sentence with a number for each run, the highest first; none for one run or too many."""
    if not 2 <= len(runs) <= MAX_RUNS_NAMED:
        return []
    ranked = sorted(runs.items(), key=lambda pair: -pair[1])
    return [f"{what} by run: {', '.join(f'{name} {value:{digits}}' for name, value in ranked)}."]


def draw_by_run(
    name: str, title: str, groups: Mapping[str, Sequence[float | None]], runs: Iterable[str], y: Axis, digits: str
) -> list[Chart]:
    """Bars or groups of named bars, by run; no chart without runs."""
    names = list(runs)

    def tip(label: str, at: int) -> str:
        value, bar = groups[label][at], f"{names[at]}, {label}" if label else names[at]
        return f"{bar}: none" if value is None else f"{bar}: {value:{digits}}"

    alt, width = f"{title}, by run: {', '.join(names)}.", 880 if len(names) * len(groups) > 8 else 440
    return [Chart(name, title, alt, grouped(groups, tip), axis_of("", names), y, width, 340)] if names else []


def pick_calibrations(run: FinishedRun, count: int) -> list[str]:
    """The run's own classifier, "", and its ``count`` best calibrations, in the order they were added."""
    if count < 0:
        raise UserError(f"calibrations={count}: give 0 or more")
    results = {name: result for name, result in run.result.calibrations.items() if name in run.calibrated}
    ranked = sorted(results, key=lambda name: -results[name].accuracy)
    if len(ranked) > count > 0:
        run.notes.append(f"showing the {count} most accurate of {len(ranked)} calibrations")
    return ["", *(name for name in results if name in ranked[:count])]


def tabulate(title: str, columns: Mapping[str, str], rows: Sequence[Sequence[CellValue]], note: str = "") -> Table:
    """A table; ``columns`` has the kind of each column."""
    return Table(title, [Column(name, kind) for name, kind in columns.items()], rows, note)


COVERED = ("curves", "confusion", "projection")  # these use only noisy models and public test images
VERSION = 1  # of the values in figures/*.json


def take_measure(run: FinishedRun, request: MeasureRequest) -> Measured:
    """Take the measure of this run and store its values."""
    if run.result.released and request.name not in COVERED:
        raise Missing(UNCOVERED)
    before = len(run.notes)
    values = request.call("take", request.take, run)
    if not isinstance(values, request.measure.values):
        declared = request.measure.values.__name__
        raise UserError(f"measure {request.text}: take returns {a_kind(values)}, but values is declared as {declared}")
    fields = asdict(values)
    try:
        json.dumps(fields, allow_nan=False)
    except ValueError as error:
        raise Missing("a value is NaN or infinite; the model has probably diverged") from error
    except TypeError as error:
        problem = f"values may contain only numbers, strings, lists and dicts: {error}"
        raise UserError(f"measure {request.text}: {problem}") from error
    notes = tuple(dict.fromkeys(run.notes[before:]))
    measured = Measured(request, values, notes)
    if request.outside:
        request.call("findings or draw", _check_shown, measured)
    content = {"unskew": VERSION, **_stamp(run, request), "without_data": run.no_data is not None, "notes": notes}
    try:
        write_sealed(run.path, {_value_file(request): json_bytes({**content, "values": fields})})
    except UserError as error:  # a read-only run directory can still be analyzed
        return replace(measured, notes=(*notes, f"the values were not stored: {error}"))
    return measured


def load_measure(run: FinishedRun, request: MeasureRequest) -> Measured | None:
    """The stored measure; None if it is missing or outdated. A tampered file is rejected."""
    stored = read_sealed(run.path, _value_file(request))
    if stored is None:
        return None
    with suppress(UserError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        content = json_object(stored, run.path / _value_file(request))
        stamp = _stamp(run, request)
        if content["unskew"] != VERSION or {key: content.get(key) for key in stamp} != stamp:
            return None
        measured = Measured(request, request.measure.values(**content["values"]), tuple(content["notes"]))
        _check_shown(measured)
        return None if content["without_data"] and run.has_data else measured
    return None


def load_or_take(run: FinishedRun, request: MeasureRequest, *, again: bool = False) -> Measured:
    """The stored measure if it is up to date; otherwise, or with ``again``, a new one."""
    stored = None if again else load_measure(run, request)
    return take_measure(run, request) if stored is None else stored


def _value_file(request: MeasureRequest) -> str:
    return f"figures/{slug(request.text)}.json"


def _stamp(run: FinishedRun, request: MeasureRequest) -> dict[str, Any]:
    """What the values depend on; if it changes, they are outdated."""
    sha256 = run.result.weights_sha256
    stamp: dict[str, Any] = {"measure": request.text, "weights_sha256": sha256, "recorded": len(run.during)}
    if request.measure.calibrations:
        stamp["calibrations"] = {name: row.accuracy for name, row in run.result.calibrations.items()}
    if request.outside:  # with other code the measure is taken again
        stamp["code_sha256"] = ""
        with suppress(TypeError, OSError):
            code = Path(inspect.getsourcefile(request.measure.values) or "").read_bytes()
            stamp["code_sha256"] = hashlib.sha256(code).hexdigest()
    return stamp


def _check_shown(measured: Measured) -> None:
    """Draw every chart and write every sentence once, so that failures surface early."""
    names = [chart.name for chart in measured.charts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"measure {measured.request.text}: two charts are named {twice[0]!r}; give each a unique name")
    _ = [svg(chart) for chart in measured.charts], measured.findings
