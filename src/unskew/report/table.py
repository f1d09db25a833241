"""Finished runs compared in a table: for a terminal, a notebook, a paper or a program."""

import csv
import importlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import chain
from math import inf, isfinite
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from unskew.analysis.ranking import list_result_settings, rank_settings
from unskew.core.errors import UserError, a_kind, accepts, nearest
from unskew.core.units import format_emd
from unskew.runs.config import OPTIONS
from unskew.runs.journal import Rows, accuracy_at_batch, accuracy_at_round, batches, read_metrics, rounds_to
from unskew.runs.result import Result, read_result, to_json
from unskew.runs.seeds import SeedRuns, SeedSpread, finished_runs, spread_over_seeds

FORMATS = ("table", "markdown", "csv", "latex", "json")
TEXTS = ("run", "method", "data", "partition", "model")  # columns of text, not of numbers
MIN_WIDTH = 70  # columns of a terminal; a narrower one shows a line per column instead of a row per run
SHARES = (10, 50, 90)  # percent of the baseline's accuracy: Hsu et al. 2020, Table 5
HIGHER = ("accuracy", "after ", "acc@", "relative", "worst", "p10", "fairness")  # columns where higher is better

_PLAIN = ("method", "data", "partition", "clients", "per_round", "rounds", "seed")


@dataclass(frozen=True)
class Compared:
    """A run's result, relative to its baseline if known, and its accuracy at a common round and batch."""

    result: Result
    round: int | None  # None: no run has metrics
    accuracy_at_round: float | None
    batch: int | None
    accuracy_at_batch: float | None
    rounds_to: Mapping[int, int | None]  # share in percent → round, None for never; empty without baseline or metrics


def side_by_side(
    results: Sequence[Result], metrics: Sequence[Rows], *, baseline: Result | None = None, at_round: int | None = None,
    at_batch: int | None = None,
) -> list[Compared]:  # fmt: skip
    """Compare runs at one round and one batch count, by default the last that all runs reached."""
    known = [rows for rows in metrics if rows]
    at_round = min((rows[-1]["round"] for rows in known), default=None) if at_round is None else at_round
    at_batch = min(map(batches, known), default=None) if at_batch is None else at_batch
    compared = []
    for result, rows in zip(results, metrics, strict=True):
        result = _with_baseline(baseline, result)
        goal = result.baseline_accuracy
        by_round = None if at_round is None else accuracy_at_round(rows, at_round)
        by_batch = None if at_batch is None else accuracy_at_batch(rows, at_batch)
        reached = {share: rounds_to(rows, share / 100 * goal) for share in SHARES} if rows and goal else {}
        compared.append(Compared(result, at_round, by_round, at_batch, by_batch, reached))
    return compared


@dataclass(frozen=True)
class Figure:
    """A number over the runs of a row; ``blank`` is the text if it is missing."""

    value: SeedSpread | None
    decimals: int
    blank: str = ""
    runs: int = 1

    def __str__(self) -> str:
        if self.value is None:
            return self.blank
        missing = f" ({self.value.count} of {self.runs})" if self.value.count < self.runs else ""
        return self.value.format(decimals=self.decimals) + missing


@dataclass(frozen=True, repr=False)
class ComparisonTable:
    """Finished runs in a table: a row for each setting, with mean and deviation over its seeds.

    It displays itself in a terminal and in a notebook. ``text("latex")`` and ``frame()`` are for papers and programs.
    """

    runs: Sequence[Compared]
    groups: Sequence[Sequence[int]]  # the runs of each row
    chosen: Sequence[str] = ()  # columns; empty: those that fit

    @cached_property
    def settings(self) -> list[dict[str, str]]:
        """The settings of each row, with the same keys in every row."""
        several, rows = any(len(group) > 1 for group in self.groups), []
        for group in self.groups:
            runs = [_list_shown_settings(self.runs[at].result) for at in group]
            row = {key: " / ".join(dict.fromkeys(run.get(key, "") for run in runs)) for key in chain(*runs)}
            if several:
                row["seeds"] = row["seed"].replace(" / ", " ")
                del row["seed"], row["emd"]
            rows.append(row)
        keys = dict.fromkeys(chain(*rows))
        return [{key: row.get(key, _find_default(key, row)) for key in keys} for row in rows]

    @cached_property
    def figures(self) -> list[dict[str, Figure]]:
        """The results of each row, with the same keys in every row."""
        runs, several = _list_figures(self.runs), any(len(group) > 1 for group in self.groups)
        if several:
            runs = [figures | {"emd": (run.result.emd, 2)} for figures, run in zip(runs, self.runs, strict=True)]
        rows = []
        for group in self.groups:
            row = {"n": Figure(spread_over_seeds([len(group)]), 0)} if several else {}
            for key, (_, decimals) in runs[group[0]].items():
                values = [runs[at][key][0] for at in group]
                spread = spread_over_seeds(values)
                if spread and key.startswith("MB") and spread.deviation == 0:  # the same for every seed
                    spread = replace(spread, deviation=None)
                known = [value for value in values if value is not None]
                blank = "-" if NEVER in known else str(known[0]) if known else ""  # infinite, or not a number
                row[key] = Figure(spread, decimals or int(len(group) > 1), blank, len(group))  # a mean has decimals
            rows.append(row)
        return rows

    @property
    def same(self) -> list[str]:
        """The settings that all rows share; empty for a single row."""
        rows = self.settings
        return [key for key in (rows[0] if len(rows) > 1 else ()) if len({row[key] for row in rows}) == 1]

    @property
    def columns(self) -> list[str]:
        """Every column: the settings that differ, the results, the run directory, the shared settings."""
        if not self.groups:
            return []
        differing = [key for key in self.settings[0] if key not in self.same]
        if len(self.groups) == 1 or not differing:
            return ["run", *differing, *self.figures[0], *self.same]
        return [*differing, *self.figures[0], "run", *self.same]

    @property
    def shown(self) -> list[str]:
        """The chosen columns, or all in which rows can differ."""
        shown: list[str] = []
        for name in self.chosen:
            matching = [name] if name in self.columns else [key for key in self.columns if key.startswith(name)]
            if not matching:
                raise UserError(f"--columns {name}: there is no such column; {nearest(name, self.columns)}")
            shown += [key for key in matching if key not in shown]
        equal = len(self.groups) > 1 and len({len(group) for group in self.groups}) == 1
        return shown or [key for key in self.columns if key not in self.same and not (key == "n" and equal)]

    def cell(self, row: int, key: str) -> str:
        """One cell as text: the common folder of seeds, or the first run and how many more; a setting; a figure."""
        if key == "run":
            paths = [self.runs[at].result.path for at in self.groups[row]]
            if len({path.parent for path in paths}) == 1 < len(paths) and all(p.name.startswith("seed") for p in paths):
                return str(paths[0].parent)
            return f"{paths[0]} +{len(paths) - 1}" if len(paths) > 1 else str(paths[0])
        return str(self.figures[row].get(key) or self.settings[row][key])

    def rows(self, columns: Sequence[str] | None = None) -> list[dict[str, str]]:
        """Every row as texts by column."""
        keys = self.columns if columns is None else columns
        return [{key: self.cell(row, key) for key in keys} for row, _ in enumerate(self.groups)]

    def best(self, key: str) -> set[int]:
        """The rows with the best value of a column; empty if it has no best, or all are equal."""
        figures = {row: figures[key] for row, figures in enumerate(self.figures) if key in figures}
        known = {row: round(figure.value.mean, figure.decimals) for row, figure in figures.items() if figure.value}
        if len(known) < 2 or len(set(known.values())) < 2 or not (key == "loss" or key.startswith(HIGHER)):
            return set()
        top = min(known.values()) if key == "loss" else max(known.values())
        return {row for row, value in known.items() if value == top}

    def text(self, form: str = "table") -> str:
        """The table as text: table, markdown, csv, latex or json. JSON contains the full results."""
        writers = {"table": self.__repr__, "markdown": self._markdown, "csv": self._csv, "latex": self._latex}
        writers["json"] = lambda: _json(self.runs)
        if form not in writers:
            raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
        return writers[form]()

    def frame(self) -> Any:
        """A pandas DataFrame with numbers as numbers and deviations in separate columns."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise UserError("pandas is not installed; install it with: pip install pandas") from error
        return pandas.DataFrame(self._split_deviations(lambda value, decimals, blank: value))

    def _csv(self) -> str:
        def write(value: float | None, decimals: int, blank: str) -> str:
            return blank.strip("-") if value is None else f"{value:.{decimals}f}"

        rows, out = self._split_deviations(write), io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue().rstrip("\n")

    def _split_deviations(self, write: Callable[[float | None, int, str], Any]) -> list[dict[str, Any]]:
        """Every row by column, with deviations in columns of their own; ``write`` converts a number."""
        rows = self.rows(self.shown if self.chosen else self.columns)
        spread = {key for figures in self.figures for key, figure in figures.items() if figure.runs > 1}
        for row, figures in enumerate(self.figures):
            cells: dict[str, Any] = {}
            for key, text in rows[row].items():
                cells[key] = text
                if figure := figures.get(key):
                    mean, deviation = (figure.value.mean, figure.value.deviation) if figure.value else (None, None)
                    cells[key] = write(mean, figure.decimals, figure.blank)
                    cells |= {f"{key} ±": write(deviation, figure.decimals, "")} if key in spread else {}
            rows[row] = cells
        return rows

    def render(self, width: int = 100) -> Group:
        """A table at most this wide, then the shared settings and the verdict.

        A single row, or a narrow terminal, has a line for each column.
        """
        rows, keys, hidden = range(len(self.groups)), self.shown, list[str]()
        if not self.chosen:  # hide columns that repeat the accuracy
            accuracies = [self.cell(row, "accuracy") for row in rows]
            repeat = [key.startswith("acc@") and [self.cell(row, key) for row in rows] == accuracies for key in keys]
            keys = [key for key, repeated in zip(keys, repeat, strict=True) if not repeated]
        if len(self.groups) == 1 or width < MIN_WIDTH:
            table = Table(show_header=False)
            for key in keys:
                table.add_row(Text(key), *(self._styled(row, key) for row in rows))
        else:
            fitting = keys if self.chosen else self._fitting(keys, width)
            hidden = [key for key in keys if key not in fitting]
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for key in fitting:
                look: dict[str, Any] = {"max_width": width // 3} if key in TEXTS else {"justify": "right"}
                table.add_column(key, **look)
            for row in rows:
                table.add_row(*(self._styled(row, key) for key in fitting))
        more = f"Not shown: {', '.join(hidden)}; choose with --columns, or write all with --format csv."
        return Group(table, *map(Text, [*self._notes(), *([more] if hidden else []), *self._rank()]))

    def _rank(self) -> list[str]:
        return rank_settings([run.result for run in self.runs])

    def _styled(self, row: int, key: str) -> Text:
        return Text(self.cell(row, key), "bold" if row in self.best(key) else "", overflow="fold")

    def _fitting(self, keys: Sequence[str], width: int) -> list[str]:
        """The columns that fit next to each other, in their order; the first is always included."""
        left, fitting, rows = width - 1, list[str](), self.rows(keys)
        for key in keys:
            need = 3 + max(cell_len(text) for text in (key, *(row[key] for row in rows)))
            need = min(need, 3 + width // 3) if key in TEXTS else need
            if not fitting or need <= left:
                left -= need
                fitting.append(key)
        return fitting

    def __repr__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100, color_system=None, force_jupyter=False).print(self.render())
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        head = "".join(f"<th>{escape(key)}</th>" for key in self.shown)
        rows = self._list_marked(self.shown, escape, "<b>{}</b>")
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        notes = "".join(f"<p>{escape(line)}</p>" for line in (*self._notes(), *self._rank()))
        return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}</div>"

    def _list_marked(self, keys: Sequence[str], escape: Callable[[str], str], mark: str) -> list[list[str]]:
        """The cells of each row, escaped, with ``mark`` around the best of each column."""
        best = {key: self.best(key) for key in keys}
        return [
            [mark.format(escape(cell)) if at in best[key] else escape(cell) for key, cell in row.items()]
            for at, row in enumerate(self.rows(keys))
        ]

    def _notes(self) -> list[str]:
        """The settings that all rows share and do not show."""
        shared = [f"{key} {self.cell(0, key)}" for key in self.same if key not in self.shown]
        return [f"The same in all rows: {'; '.join(shared)}."] if shared else []

    def _markdown(self) -> str:
        keys = self.shown
        lines = [keys, ["---" if key in TEXTS else "---:" for key in keys]]
        lines += self._list_marked(keys, lambda text: text.replace("|", "\\|"), "**{}**")
        return "\n\n".join(["\n".join("| " + " | ".join(line) + " |" for line in lines), *self._notes()])

    def _latex(self) -> str:
        """A table for booktabs with a caption, the best of each column in bold."""
        keys = self.shown
        if not self.chosen:  # for a paper: no folders and no costs
            settings = [key for key in keys if key in self.settings[0] and key != "seeds"]
            keys = [*(settings or ["run"]), *(key for key in keys if key == "accuracy" or key.startswith("after "))]
        rows = [list(map(_escape, keys)), *self._list_marked(keys, _escape, r"\textbf{{{}}}")]
        head, *lines = [" & ".join(row) + r" \\" for row in rows]
        columns = "".join("l" if key in TEXTS else "r" for key in keys)
        start = [r"% needs \usepackage{booktabs}", r"\begin{table}", r"\centering"]
        start += [rf"\caption{{{_escape(self._caption(keys))}}}", r"\label{tab:comparison}"]
        rules = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *lines, r"\bottomrule"]
        return "\n".join([*start, *rules, r"\end{tabular}", r"\end{table}"])

    def _caption(self, keys: Sequence[str]) -> str:
        seeds = sorted({len(group) for group in self.groups})
        over = f", mean ± standard deviation over {' to '.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds"
        on = dict.fromkeys(run.result.measured_on for run in self.runs)
        settings = [f"{key.replace('_', ' ')} {self.cell(0, key)}" for key in self.same if key in _PLAIN]
        best = " Best in bold." if any(self.best(key) for key in keys) else ""
        shared = f" In all rows: {', '.join(settings)}." if settings else ""
        return f"Accuracy in % on {' or '.join(on)}{over if seeds[-1] > 1 else ''}.{best}{shared}"


@accepts
def compare(
    *runs: Any,
    baseline: Any = None,
    at_round: int | None = None,
    at_batch: int | None = None,
    columns: str | Sequence[str] = (),
    each: bool = False,
) -> ComparisonTable:
    """Compare finished runs; runs that differ only in the seed share a row with mean and deviation.

    Parameters
    ----------
    runs
        Results, what ``unskew.run_seeds`` returned, run directories or folders of them; also lists of these.
    baseline
        The run that relative accuracy refers to, such as one with ``method="centralised"``.
    at_round
        Also show the accuracy at this round (default: the last that all runs reached).
    at_batch
        Also show the accuracy at this batch count (default: the largest that all runs reached).
    columns
        Columns to show, such as ``"method,accuracy"``; the beginning of a name is enough (default: all that differ).
    each
        Whether every run has its own row, even if runs differ only in the seed.

    Returns
    -------
    ComparisonTable
        The table. It displays itself; ``.text("latex")`` and ``.frame()`` (pandas) are for papers and programs.
    """
    for name, number in (("round", at_round), ("batch", at_batch)):
        if number is not None and number < 1:
            raise UserError(f"--at-{name} {number}: give a whole number of at least 1")
    results = _results(runs)
    reference = [None] if baseline is None else _results([baseline])
    if not results or len(reference) != 1:
        raise UserError("nothing to compare: give results or run directories, and at most one baseline")
    metrics = [read_metrics(result.path) for result in results]
    compared = side_by_side(results, metrics, baseline=reference[0], at_round=at_round, at_batch=at_batch)
    names = columns.split(",") if isinstance(columns, str) else columns
    if not all(isinstance(name, str) for name in names):
        raise UserError("columns must be names such as 'method,accuracy'")
    return make_table(compared, each=each, columns=[name.strip() for name in names if name.strip()])


def make_table(compared: Sequence[Compared], *, each: bool = False, columns: Sequence[str] = ()) -> ComparisonTable:
    """The table of these runs, with its columns checked."""
    groups = [[at] for at in range(len(compared))] if each else group_by_setting(compared)
    table = ComparisonTable(compared, groups, columns)
    _ = table.shown
    return table


def _results(runs: Iterable[Any]) -> list[Result]:
    results: list[Result] = []
    for run in runs:
        if isinstance(run, Result):
            results.append(run)
        elif isinstance(run, SeedRuns):
            results += run.results
        elif isinstance(run, str | Path):
            results += [read_result(path) for path in finished_runs([Path(run)])[0]]
        elif isinstance(run, list | tuple):
            results += _results(run)
        else:
            raise UserError(f"{a_kind(run)} cannot be compared; give a result, or the path of a run directory")
    return results


def _escape(text: str) -> str:
    signs = {"±": r"$\pm$", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(signs.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)


def _find_default(key: str, settings: Mapping[str, str]) -> str:
    """The default of a setting that a run lacks; "" if it depends on the data, or the run recorded no settings."""
    recorded = any(name in OPTIONS and name not in (*_PLAIN, "model") for name in settings)
    return OPTIONS[key].default_text if recorded and key in OPTIONS and OPTIONS[key].default is not None else ""


def _list_shown_settings(result: Result) -> dict[str, str]:
    """The settings among the result's fields, then the other options."""
    others = {key: value for key, value in result.settings.items() if key not in _PLAIN}
    shown = {key: getattr(result, key) for key in (*_PLAIN, "model")} | others
    return {key: str(value) for key, value in shown.items()} | {"emd": format_emd(result.emd)}


NEVER = -inf  # rounds to an accuracy that was not reached
Value = tuple[float | None, int]  # a number, and its decimals


def _list_figures(compared: Sequence[Compared]) -> list[dict[str, Value]]:
    """The results of each run, with an entry for everything that any run has."""
    names = list(dict.fromkeys(name for run in compared for name in run.result.calibrations))
    relative = any(run.result.relative_accuracy is not None for run in compared)
    spreads = [spread for run in compared if (spread := run.result.clients_accuracy)]
    table = []
    for run in compared:
        result = run.result
        calibrations = {name: result.calibrations.get(name) for name in names}
        row = {"accuracy": _percent(result.accuracy)}
        row |= {f"after {name}": _percent(new.accuracy if new else None) for name, new in calibrations.items()}
        if relative:
            row["relative"] = _percent(result.relative_accuracy)
            for share in SHARES:
                reached = run.rounds_to.get(share)
                row[f"to {share} %"] = (NEVER if run.rounds_to and reached is None else reached, 0)
        classifiers = {"": result, **{f" ({name})": new for name, new in calibrations.items()}} if spreads else {}
        for name, source in classifiers.items():
            spread = source.clients_accuracy if source else None
            row |= {f"{key}{name}": _percent(getattr(spread, key, None)) for key in ("worst", "p10")}
            row[f"fairness{name}"] = (getattr(spread, "jain", None), 3)
            if any(spread.own_images for spread in spreads):
                row[f"worst on own images{name}"] = _percent(getattr(spread and spread.own_images, "worst", None))
        row["loss"] = (result.loss, 4)
        if run.round is not None:
            row[f"acc@round {run.round:,}"] = _percent(run.accuracy_at_round)
        if run.batch is not None:
            row[f"acc@batch {run.batch:,}"] = _percent(run.accuracy_at_batch)
        row["MB up"] = _megabytes(result.bytes_up)
        row |= {f"MB up ({name})": _megabytes(new.bytes_up if new else None) for name, new in calibrations.items()}
        row |= {"MB down": _megabytes(result.bytes_down), "seconds": (result.seconds, 1)}
        table.append(row)
    return table


def _with_baseline(baseline: Result | None, result: Result) -> Result:
    """The result with this baseline, or its own, and the accuracy relative to it."""
    if baseline is not None:
        data, other = ((run.data_sha256, run.settings.get("validation")) for run in (baseline, result))
        if data != other:
            raise UserError(
                f"{result.path} ({result.data}) and its baseline {baseline.path} ({baseline.data}) use different data "
                "or another --validation; give a run on the same images as --baseline"
            )
        result = replace(result, baseline=str(baseline.path.absolute()), baseline_accuracy=baseline.accuracy)
    reference = result.baseline_accuracy
    if reference is None:
        return result
    if not isfinite(reference) or reference <= 0:
        raise UserError(f"the baseline of {result.path}, {result.baseline}, must have an accuracy above 0")
    return replace(result, relative_accuracy=result.accuracy / reference)


def _percent(accuracy: float | None) -> Value:
    return (None if accuracy is None else 100 * accuracy, 2)


def _megabytes(count: int | None) -> Value:
    return (None if count is None else count / 1e6, 1)


def _json(compared: Sequence[Compared]) -> str:
    """Every run's full result, and the mean and deviation over the runs of its setting: ``over_seeds``."""
    values: list[dict[str, Any]] = []
    for run in compared:
        own = {"run": str(run.result.path), **to_json(run.result)}
        own["accuracy_at_round"] = {"round": run.round, "accuracy": run.accuracy_at_round}
        own["accuracy_at_batch"] = {"batch": run.batch, "accuracy": run.accuracy_at_batch}
        reached = {str(key): value for key, value in run.rounds_to.items()}
        values.append(own | ({"rounds_to": reached} if reached else {}))

    def record(numbers: Iterable[float]) -> dict[str, Any] | None:
        spread = spread_over_seeds(numbers)
        return None if spread is None else {"mean": spread.mean, "deviation": spread.deviation, "n": spread.count}

    for group in group_by_setting(compared):
        results = [compared[at].result for at in group]
        names = dict.fromkeys(name for result in results for name in result.calibrations)
        calibrations = {name: [run.calibrations[name] for run in results if name in run.calibrations] for name in names}
        over_seeds = {
            "seeds": [result.seed for result in results],
            "accuracy": record(result.accuracy for result in results),
            "loss": record(result.loss for result in results),
            "calibrations": {name: record(row.accuracy for row in rows) for name, rows in calibrations.items()},
        }
        for at in group:
            values[at]["over_seeds"] = over_seeds
    return json.dumps(values, indent=2)


def group_by_setting(compared: Sequence[Compared]) -> list[list[int]]:
    """The indices of the runs of each setting; a repeated seed starts a new group."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    copies = Counter[tuple[Any, ...]]()
    for at, run in enumerate(compared):
        setting = (*sorted(list_result_settings(run.result).items()), run.result.data_sha256)
        copies[*setting, run.result.seed] += 1
        groups.setdefault((*setting, copies[*setting, run.result.seed]), []).append(at)
    return list(groups.values())
