"""Several runs side by side, as a table for people or for programs."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from unskew.results import Result, to_json

FORMATS = ("table", "markdown", "csv", "json")

MINIMUM_WIDTH = 70  # columns of a terminal below which a row a run is no longer legible

_PLAIN = ("method", "data", "partition", "clients", "per_round", "rounds", "seed")


def rows(results: Sequence[Result]) -> list[dict[str, str]]:
    """One row a run: what it was, what came out; a column for each calibration that any run has."""
    names = list(dict.fromkeys(name for result in results for name in result.calibrations))
    table = []
    for result in results:
        row = {"run": str(result.path)} | {key: str(getattr(result, key)) for key in _PLAIN}
        row["emd"] = f"{result.emd:.2f}"
        row["accuracy"] = f"{100 * result.accuracy:.2f}"
        for name in names:
            found = result.calibrations.get(name)
            row[f"after {name}"] = f"{100 * found.accuracy:.2f}" if found else ""
        row["loss"] = f"{result.loss:.4f}"
        row["MB up"] = f"{result.bytes_up / 1e6:.1f}"
        row["MB down"] = f"{result.bytes_down / 1e6:.1f}"
        row["seconds"] = f"{result.seconds:.1f}"
        table.append(row)
    return table


def as_table(results: Sequence[Result], width: int = 80) -> Table:
    """For the terminal; what is the same in every run stands once, in the caption. Narrow ones get a row a figure."""
    found = rows(results)
    if len(found) == 1 or width < MINIMUM_WIDTH:
        upright = Table(show_header=False)
        for key in found[0]:
            upright.add_row(Text(key), *(Text(row[key], overflow="fold") for row in found))
        return upright
    same = [key for key in found[0] if key in _PLAIN and len({row[key] for row in found}) == 1]
    table = Table(caption=Text("; ".join(f"{key} {found[0][key]}" for key in same)) if same else None)
    shown = [key for key in found[0] if key not in same]
    for key in shown:
        right = key not in ("run", "method", "data", "partition")
        table.add_column(key, justify="right" if right else "left", overflow="fold")
    for row in found:
        table.add_row(*(Text(row[key]) for key in shown))
    return table


def as_text(results: Sequence[Result], form: str) -> str:
    """The same as Markdown, CSV or JSON; JSON holds the whole results."""
    if form == "json":
        values: list[dict[str, Any]] = [{"run": str(result.path)} | to_json(result) for result in results]
        return json.dumps(values, indent=2)
    found = rows(results)
    keys = list(found[0])
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
        return out.getvalue().rstrip("\n")
    lines = [keys, ["---"] * len(keys), *([row[key].replace("|", "\\|") for key in keys] for row in found)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
