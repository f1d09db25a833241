"""A table with its results as Markdown, fit for an appendix."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from unskew.charts import Chart
from unskew.reproduce.links import run_link
from unskew.reproduce.results import AGREEMENT, MARKS, CellResult, TableResult, columns_of, rows_of
from unskew.reproduce.wording import Told, difference_words, ours_of


def to_markdown(result: TableResult, said: Told, command: str, charts: Sequence[Chart], folder: Path) -> str:
    """The whole page; ``folder`` is where it is written, and what links are relative to."""
    recipe = result.recipe
    lines = [f"# {recipe.name}: {recipe.title}", "", f"{recipe.paper.reference}; {recipe.source}.", ""]
    lines += [recipe.about, ""] if recipe.about else []
    lines += [f"Made by `{command}`.", ""]
    lines += [f"- {each}" for each in said.findings]
    lines += ["", *_table(result, folder), ""]
    judged = [each for each in result.cells if each.agreement]
    if judged:
        legend = ", ".join(f"{MARKS[name]} {words}" for name, words in AGREEMENT.items())
        lines += [
            f"In brackets ours minus the paper's. {legend}: the paper's ± where it gives one, otherwise ours.",
            "",
        ]
    lines += [f"![{chart.alt}]({quote(chart.name)}.svg)\n" for chart in charts]
    lines += ["## Gains", "", *gains, ""] if (gains := _gains(result)) else []
    lines += ["## Known differences", "", *(f"- {each}" for each in said.differences), ""]
    if recipe.notes:
        lines += ["## On the paper's values", "", *(f"- {each}" for each in recipe.notes), ""]
    lines += ["## How it was made", "", *(f"- {name}: {fact}" for name, fact in said.facts), ""]
    lines += _runs(result, folder)
    return "\n".join(lines).rstrip() + "\n"


def _table(result: TableResult, folder: Path) -> list[str]:
    names = columns_of(result)
    printed, ours = any(each.paper for each in result.cells), ours_of(result)
    head = [""]
    for name in names:
        head += [_headed(name, "paper"), _headed(name, ours)] if printed else [name or "value"]
    rows = []
    for name, cells in rows_of(result).items():
        parts = [
            part
            for each in cells
            for part in ([_paper(each), _ours(each, folder)] if printed else [_ours(each, folder)])
        ]
        rows.append([name, *parts])
    rules = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(_plain(cell) for cell in line) + " |" for line in (head, rules, *rows)]


def _headed(column: str, whose: str) -> str:
    return f"{column}, {whose}" if column else whose


def _paper(each: CellResult | None) -> str:
    return str(each.paper) if each is not None and each.paper is not None else ""


def _ours(each: CellResult | None, folder: Path) -> str:
    if each is None:
        return ""
    if each.ours is None:
        return f"*{each.reason}*"
    gap = f" ({difference_words(each)})" if each.difference is not None else ""
    mark = f" {MARKS[each.agreement]}" if each.agreement else ""
    return f"[{each.words()}]({quote(run_link(next(iter(each.records.values())), folder))}){gap}{mark}"


def _gains(result: TableResult) -> list[str]:
    """What each row gains over the one that it is compared with, paired over the seeds."""
    rows = []
    for each in result.cells:
        gain = result.gain(each)
        if gain is None or not each.cell.done or (gain.paper is None and gain.ours is None):
            continue
        paper = "" if gain.paper is None else f"{gain.paper:+.2f}"
        ours = "" if gain.ours is None else f"{gain.ours:+.2f}"
        interval = f"{gain.interval.low:+.2f} to {gain.interval.high:+.2f}" if gain.interval else ""
        rows.append([each.cell.row.name, each.cell.column.name, gain.over, paper, ours, interval])
    if not rows:
        return []
    head = ["row", "column", "over", "paper", "ours", "95 % interval, paired over seeds"]
    rules = ["---"] * 3 + ["---:"] * 3
    return ["| " + " | ".join(_plain(cell) for cell in line) + " |" for line in (head, rules, *rows)]


def _runs(result: TableResult, folder: Path) -> list[str]:
    if not result.records:
        return []
    head = ["run", "seed", "accuracy, %", "seconds", "weights"]
    rows = [
        [f"[{each.training}]({quote(run_link(each, folder))})", str(each.result.seed),
         f"{100 * each.result.accuracy:.2f}", f"{each.result.seconds:.0f}", each.result.weights_sha256[:12]]
        for each in result.records
    ]  # fmt: skip
    table = (head, ["---", "---:", "---:", "---:", "---"], *rows)
    return ["| " + " | ".join(_plain(cell) for cell in line) + " |" for line in table]


def _plain(cell: str) -> str:
    return cell.replace("|", "\\|")
