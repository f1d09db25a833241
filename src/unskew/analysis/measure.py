"""A measure as one record: how it is taken of a finished run, and what a reader sees of it."""

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Generic, TypeVar

from unskew.charts import Chart
from unskew.core.errors import UserError, a_kind
from unskew.runs.finished import FinishedRun

LOOKS = ("inside", "near", "outside")  # how a value agrees with another that it is compared with


@dataclass(frozen=True)
class Linked:
    """A cell's text that leads somewhere, to a file below or beside the page; ``look`` colours it: one of LOOKS."""

    text: str
    href: str = ""
    look: str = ""
    value: float | None = None  # what it is sorted by; None: its text


Cell = str | int | float | Linked | None  # a number is sorted as a number; None is an empty cell and sorts last


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
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Choice:
    """One of several charts at a time: a reader chooses a layer, a client, a class."""

    label: str  # "layer"
    options: Mapping[str, Chart]  # by what the reader sees in the list
    start: str = ""  # which is shown first; "": the first


Element = Chart | Choice | Table


Values = TypeVar("Values")
LAST = 100  # the headline of a measure that does not say where it goes


def _nothing(values: Any) -> list[Any]:
    return []


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[Values]):
    """A measure's section on the page that compares runs. Each function takes the values by the run's name."""

    title: str
    text: str
    draw: Callable[[Mapping[str, Values]], Sequence[Chart]]
    findings: Callable[[Mapping[str, Values]], Sequence[str]] = _nothing
    left_out: Callable[[Mapping[str, Values]], Sequence[str]] = _nothing  # which runs are not in the charts, and why


@dataclass(frozen=True, kw_only=True)
class Measure(Generic[Values]):
    """One measure. ``take`` gives the values, the other functions say what a reader sees of them.

    A measure of your own is a function that gives a Measure; the command line calls it ``package.module:function``::

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

    name: str  # a word: files and charts are named after it
    values: type[Values]  # a dataclass of numbers, texts, lists and dicts: it is stored as JSON
    take: Callable[..., Values]  # (run: FinishedRun, *, knobs)
    draw: Callable[[Values], Sequence[Chart]] = _nothing  # the charts, each also written as a file
    findings: Callable[[Values], Sequence[str]] = _nothing  # sentences, the most telling first
    title: str = ""  # of its section on the page; "": its name
    text: str = ""  # how to read the charts, in a few sentences
    show: Callable[[FinishedRun, Values], Sequence[Element]] | None = None  # on the page; None: the charts of ``draw``
    compare: Comparison[Values] | None = None  # None: it cannot compare runs
    calibrations: bool = False  # whether a new calibration changes its values
    folder_only: str = ""  # the text that takes it without the data set; "": it needs the data set
    headline: int | None = LAST  # order of its first sentence at the top of the page; None: not shown there


Source = str | Measure[Any]  # what names a measure: "cka(clients=20)", "package.module:function", or a value


@dataclass(frozen=True)
class Request:
    """A measure that was asked for, its knobs filled in."""

    name: str  # "cka", or "package.module:function"
    text: str  # in its plainest spelling: "cka(clients=20)"
    measure: Measure[Any]
    take: Callable[[FinishedRun], Any] = field(compare=False)  # the knobs are in the text
    outside: bool = False  # whether its code is outside this package

    @property
    def title(self) -> str:
        """The title of its section."""
        return self.measure.title or self.measure.name

    def call(self, part: str, function: Callable[..., Any], *given: Any) -> Any:
        """Call one of the measure's functions; an exception of code outside this package becomes one message."""
        try:
            return function(*given)
        except UserError:
            raise
        except Exception as error:
            if not self.outside:
                raise
            raise UserError(f"measure {self.text}: {part} failed: {_described(error, function)}") from error


@dataclass(frozen=True)
class Measured:
    """A measure taken of one run: its values, and notes that a reader needs."""

    request: Request
    values: Any
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The measure's name."""
        return self.request.name

    @property
    def source(self) -> str:
        """The measure as it was asked for, in its plainest spelling."""
        return self.request.text

    @property
    def charts(self) -> list[Chart]:
        """Its charts. Their names begin with the request: those of ``cka(round=0)`` are not those of ``cka``."""
        charts = self.request.call("draw", self.request.measure.draw, self.values)
        return [self._named(chart) for chart in _each(self.request, "draw", charts, Chart)]

    @property
    def findings(self) -> list[str]:
        """What it shows, in a sentence each."""
        sentences = self.request.call("findings", self.request.measure.findings, self.values)
        return _each(self.request, "findings", sentences, str)

    def elements(self, run: FinishedRun) -> list[Element]:
        """What the page shows of it."""
        show = self.request.measure.show
        if show is None:
            return list(self.charts)
        elements = _each(self.request, "show", self.request.call("show", show, run, self.values), Element)
        return [self._renamed(element) for element in elements]

    def _renamed(self, element: Element) -> Element:
        if isinstance(element, Choice):
            return replace(element, options={key: self._named(chart) for key, chart in element.options.items()})
        return self._named(element) if isinstance(element, Chart) else element

    def _named(self, chart: Chart) -> Chart:
        rest = chart.name.removeprefix(self.request.measure.name).lstrip("-")
        return replace(chart, name="-".join(filter(None, (slug(self.request.text), rest))))


def check_measure(measure: Any, given: str) -> None:
    """Refuse what is not a measure, or is one that cannot work; ``given`` is what the user typed."""
    if not isinstance(measure, Measure):
        raise UserError(f"measure {given}: it gives {a_kind(measure)}; return a Measure (unskew.extend.Measure)")
    if not isinstance(measure.name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", measure.name):
        raise UserError(f"measure {given}: the name {measure.name!r} is not a word in lower case")
    if not isinstance(measure.values, type) or not is_dataclass(measure.values):
        raise UserError(f"measure {given}: values={measure.values!r} is not a dataclass")
    parts = {"take": measure.take, "draw": measure.draw, "findings": measure.findings, "show": measure.show}
    for part, function in parts.items():
        if not callable(function) and not (part == "show" and function is None):
            raise UserError(f"measure {given}: {part}={function!r} is not a function")


def slug(text: str) -> str:
    """A text as a file's name: ``cka(round=0)`` is cka-round-0, and −1 is not 1."""
    plain = re.sub(r"([(=, ])-", r"\1minus", text.lower())
    plain = re.sub(r"(?<=\d)e-(?=\d)", "e_", plain)  # 1e-05 is not 1e05
    return re.sub(r"[^a-z0-9_.]+", "-", plain).strip("-")[:120]


def _each(request: Request, part: str, given: Any, kind: Any) -> list[Any]:
    """The list that a function of the measure gave, if everything in it is of the right kind."""
    name = getattr(kind, "__name__", "Chart, Choice or Table")
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(f"measure {request.text}: {part} gives {a_kind(given)}; give a list of {name}")
    for each in given:
        if not isinstance(each, kind):
            raise UserError(f"measure {request.text}: {part} gives a list with {a_kind(each)}; wanted: {name}")
    return list(given)


def _described(error: Exception, function: Callable[..., Any]) -> str:
    """An error in one line, with the line of the function's file where it happened, or else the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    last = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
