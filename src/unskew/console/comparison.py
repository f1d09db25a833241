"""Several runs side by side, as a table for people or for programs."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from unskew.analysis.ranking import headline
from unskew.core.errors import UserError
from unskew.runs.milestones import Rows, accuracy_at_batch, accuracy_at_round, batches, rounds_to
from unskew.runs.result import Result, to_json

FORMATS = ("table", "markdown", "csv", "latex", "json")

MINIMUM_WIDTH = 70  # columns of a terminal below which one row for each run cannot be read

SHARES = (10, 50, 90)  # per cent of the baseline's accuracy: Hsu et al. 2020, Table 5

_WORDS = ("run", "method", "data", "partition", "model")
_PLAIN = ("method", "data", "partition", "clients", "per_round", "rounds", "seed")


@dataclass(frozen=True)
class Compared:
    """A run: its result, compared with its baseline where one is known, and what it had reached by when."""

    result: Result
    round: int | None  # None: no run has metrics
    accuracy_at_round: float | None
    batch: int | None
    accuracy_at_batch: float | None
    rounds_to: Mapping[int, int | None]  # share in per cent → round, None for never; empty without baseline or metrics


def side_by_side(
    results: Sequence[Result], metrics: Sequence[Rows], *, baseline: Result | None = None, at_round: int | None = None,
    at_batch: int | None = None,
) -> list[Compared]:  # fmt: skip
    """Runs, each with its rounds, at one round and one batch count: by default the last that all of them reached."""
    results = [_with_baseline(baseline, result) for result in results]
    runs = list(zip(results, metrics, strict=True))
    if at_round is None:
        at_round = min((rows[-1]["round"] for _, rows in runs if rows), default=None)
    if at_batch is None:
        at_batch = min((_batches(result, rows) for result, rows in runs if rows), default=None)
    return [_compared(result, rows, at_round, at_batch) for result, rows in runs]


def rows(compared: Sequence[Compared], never: str = "-") -> list[dict[str, str]]:
    """One row a run: the settings that differ, what came out, then the settings that all runs share.

    There is a column for whatever any run has. Accuracies are in per cent. One run alone shows its settings first.
    """
    settings = [_settings(one.result) for one in compared]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    same = [key for key in keys if len(settings) > 1 and len({each.get(key, "") for each in settings}) == 1]
    return [
        {"run": str(one.result.path)}
        | {key: each.get(key, "") for key in keys if key not in same}
        | outcome
        | {key: each.get(key, "") for key in same}
        for one, each, outcome in zip(compared, settings, _outcomes(compared, never), strict=True)
    ]


def shared_settings(compared: Sequence[Compared]) -> list[str]:
    """The columns that say the same in every run; none where there is one run."""
    lines = rows(compared) if len(compared) > 1 else []
    known = dict.fromkeys(key for one in compared for key in _settings(one.result))
    return [key for key in known if lines and len({row[key] for row in lines}) == 1]


def _settings(result: Result) -> dict[str, str]:
    """What the run was: the fields of its result, then the options that these do not have."""
    plain = {key: getattr(result, key) for key in _PLAIN}
    others = {"model": result.model} | {key: value for key, value in result.settings.items() if key not in _PLAIN}
    return {key: str(value) for key, value in (plain | others).items()} | {"emd": f"{result.emd:.2f}"}


def _outcomes(compared: Sequence[Compared], never: str) -> list[dict[str, str]]:
    names = list(dict.fromkeys(name for one in compared for name in one.result.calibrations))
    relative = any(one.result.relative_accuracy is not None for one in compared)
    told = any(one.result.clients_accuracy is not None for one in compared)
    table = []
    for one in compared:
        result = one.result
        row = {"accuracy": _percent(result.accuracy)}
        for name in names:
            calibration = result.calibrations.get(name)
            row[f"after {name}"] = _percent(calibration.accuracy if calibration else None)
        if one.round is not None:
            row[f"acc@round {one.round:,}"] = _percent(one.accuracy_at_round)
        if one.batch is not None:
            row[f"acc@batch {one.batch:,}"] = _percent(one.accuracy_at_batch)
        if relative:
            row["relative"] = _percent(result.relative_accuracy)
            for share in SHARES:
                reached = one.rounds_to.get(share)
                row[f"to {share} %"] = "" if not one.rounds_to else never if reached is None else str(reached)
        row |= _clients(result, names, told)
        row["loss"] = f"{result.loss:.4f}"
        row["MB up"] = f"{result.bytes_up / 1e6:.1f}"
        for name in names:
            calibration = result.calibrations.get(name)
            row[f"MB up, {name}"] = f"{calibration.bytes_up / 1e6:.1f}" if calibration else ""
        row["MB down"] = f"{result.bytes_down / 1e6:.1f}"
        row["seconds"] = f"{result.seconds:.1f}"
        table.append(row)
    return table


def _clients(result: Result, names: Sequence[str], told: bool) -> dict[str, str]:
    """The accuracy of the worst client and of the tenth from below, before calibration and after each."""
    spreads = {"": result.clients_accuracy}
    for name in names:
        made = result.calibrations.get(name)
        spreads[f", {name}"] = made.clients_accuracy if made else None
    figures = {f"{word}{name}": None if each is None else getattr(each, word)
               for name, each in spreads.items() for word in ("worst", "p10")}  # fmt: skip
    return {name: _percent(figure) for name, figure in figures.items()} if told else {}


def as_table(compared: Sequence[Compared], width: int = 80) -> Group:
    """For the terminal; what is the same in every run, or repeats the accuracy, is written once, below.

    The last line says which setting is best, if the seeds support it.
    Columns that do not fit side by side go into a further table; on narrow terminals each figure has its own row.
    """
    lines = rows(compared)
    upright = len(lines) == 1 or width < MINIMUM_WIDTH
    same = shared_settings(compared)
    again = [key for key in lines[0] if key.startswith("acc@") and all(row[key] == row["accuracy"] for row in lines)]
    shown = [key for key in lines[0] if key not in same and key not in again]
    tables = [_upright(lines, shown)] if upright else _flat(lines, shown, width)
    notes = [f"{key} {lines[0][key]}" for key in same] + ([" = ".join((*again, "accuracy"))] if again else [])
    best = headline([one.result for one in compared])
    return Group(*tables, *([Text("; ".join(notes))] if notes else []), *map(Text, best))


def as_text(compared: Sequence[Compared], form: str) -> str:
    """The same as Markdown, CSV, LaTeX or JSON; JSON has the whole results."""
    if form == "json":
        return json.dumps([_values(one) for one in compared], indent=2)
    lines = rows(compared, never="" if form == "csv" else "-")
    keys = list(lines[0])
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return out.getvalue().rstrip("\n")
    same = shared_settings(compared)
    keys = [key for key in keys if key not in same]
    notes = [f"{key} {lines[0][key]}" for key in same]
    if form == "latex":
        return _latex(lines, keys, notes)
    rules = ["---" if key in _WORDS else "---:" for key in keys]
    table = [keys, rules, *([row[key].replace("|", "\\|") for key in keys] for row in lines)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    return text + (f"\n\nThe same in all runs: {'; '.join(notes)}." if notes else "")


def _latex(lines: Sequence[Mapping[str, str]], keys: Sequence[str], notes: Sequence[str]) -> str:
    """A table of the package booktabs; what all runs share is a comment below it."""
    body = [" & ".join(map(_escaped, line)) + r" \\" for line in (keys, *([row[key] for key in keys] for row in lines))]
    columns = "".join("l" if key in _WORDS else "r" for key in keys)
    head = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule"]
    below = [f"% the same in all runs: {'; '.join(notes)}"] if notes else []
    return "\n".join([*head, r"\end{tabular}", *below])


def _escaped(text: str) -> str:
    """A text as LaTeX writes it."""
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(signs.get(sign, f"\\{sign}" if sign in "&%$#_{}" else sign) for sign in text)


def _with_baseline(baseline: Result | None, result: Result) -> Result:
    """The result with the baseline given, or else with its own, and its accuracy relative to it."""
    if baseline is not None:
        if baseline.data_sha256 != result.data_sha256:
            raise UserError(
                f"{result.path} ({result.data}) and its baseline {baseline.path} ({baseline.data}) have different "
                "data; give with --baseline a run on the same data"
            )
        result = replace(result, baseline=str(baseline.path.absolute()), baseline_accuracy=baseline.accuracy)
    whole = result.baseline_accuracy
    if whole is None:
        return result
    if not isfinite(whole) or whole <= 0:
        raise UserError(
            f"the baseline {result.baseline} of {result.path} has the accuracy {whole:g}, which gives no "
            "relative accuracy; give with --baseline a run with an accuracy above 0"
        )
    return replace(result, relative_accuracy=result.accuracy / whole)


@contextmanager
def _metrics_of(result: Result) -> Iterator[None]:
    """Put the name of the file before what is wrong with its rounds."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{result.path / 'metrics.jsonl'}: {error}") from error


def _batches(result: Result, rows: Rows) -> int:
    with _metrics_of(result):
        return batches(rows)


def _compared(result: Result, rows: Rows, at_round: int | None, at_batch: int | None) -> Compared:
    whole = result.baseline_accuracy
    with _metrics_of(result):
        return Compared(
            result=result,
            round=at_round,
            accuracy_at_round=None if at_round is None else accuracy_at_round(rows, at_round),
            batch=at_batch,
            accuracy_at_batch=None if at_batch is None else accuracy_at_batch(rows, at_batch),
            rounds_to={share: rounds_to(rows, share / 100 * whole) for share in SHARES} if rows and whole else {},
        )


def _percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{100 * accuracy:.2f}"


def _values(one: Compared) -> dict[str, Any]:
    values = {
        "run": str(one.result.path),
        **to_json(one.result),
        "accuracy_at_round": {"round": one.round, "accuracy": one.accuracy_at_round},
        "accuracy_at_batch": {"batch": one.batch, "accuracy": one.accuracy_at_batch},
    }
    return values | ({"rounds_to": {str(key): value for key, value in one.rounds_to.items()}} if one.rounds_to else {})


def _upright(lines: Sequence[Mapping[str, str]], shown: Sequence[str]) -> Table:
    table = Table(show_header=False)
    for key in shown:
        table.add_row(Text(key), *(Text(row[key], overflow="fold") for row in lines))
    return table


def _flat(lines: Sequence[Mapping[str, str]], shown: Sequence[str], width: int) -> list[Table]:
    tables = []
    for keys in _blocks(lines, shown, width):
        table = Table()
        for key in keys:
            words = key in _WORDS
            table.add_column(key, justify="left" if words else "right", max_width=width // 4 if words else None)
        for row in lines:
            table.add_row(*(Text(row[key], overflow="fold") for key in keys))
        tables.append(table)
    return tables


def _blocks(lines: Sequence[Mapping[str, str]], shown: Sequence[str], width: int) -> list[list[str]]:
    """The columns of each table: as many as fit unbroken, after the run, which every table begins with."""
    needs = {key: 3 + max(cell_len(text) for text in (key, *(row[key] for row in lines))) for key in shown}
    needs |= {key: min(needs[key], 3 + width // 4) for key in shown if key in _WORDS}
    blocks = [["run"]]
    for key in shown[1:]:
        if len(blocks[-1]) > 1 and 1 + sum(needs[other] for other in (*blocks[-1], key)) > width:
            blocks.append(["run"])
        blocks[-1].append(key)
    return blocks
