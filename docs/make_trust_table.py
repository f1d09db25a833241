"""Writes the measured tables of docs/trust.md from recipes/results: `python docs/make_trust_table.py`."""

from collections.abc import Sequence
from pathlib import Path

from unskew.core.files import write_whole
from unskew.reproduce.cells import Asked
from unskew.reproduce.recipe_files import recipe
from unskew.reproduce.results import CellResult, Gain, TableResult, table_result

PAGE = Path(__file__).parent / "trust.md"
KEPT = Path(__file__).parent.parent / "recipes" / "results"
AT_PAPER = ("ours/calibrations", "ccvr/table3", "ccvr/table5")  # whose cells at the paper's scale are shown


def differences_table() -> str:
    """What each known difference is worth: accuracy, and the gain over the set-up of the recipes."""
    result = table_result(recipe("ours/differences"), Asked("small"), KEPT)
    lines = []
    for each in result.cells:
        gain = result.gain(each)
        lines.append([each.cell.row.name, each.words(), "" if gain is None else _points(gain), _interval(gain)])
    return _table(["set-up", "accuracy, %", "change, points", "95 % interval, paired over seeds"], lines)


def paper_table() -> str:
    """Every cell that was run at the paper's scale, beside the paper's value."""
    lines = []
    seen = set()
    for name in AT_PAPER:
        result = table_result(recipe(name), Asked("paper"), KEPT)
        for each in result.cells:
            key = (each.cell.training, each.cell.after)
            if each.ours is not None and key not in seen:
                seen.add(key)
                lines.append(_beside(result, each))
    return _table(["", "skew", "paper, %", "ours, %", "seeds", "gain in the paper", "our gain"], lines)


def _beside(result: TableResult, each: CellResult) -> list[str]:
    gain = result.gain(each)
    paper = "" if gain is None or gain.paper is None else f"{gain.paper:+.2f}"
    ours = "" if gain is None or gain.ours is None else f"{gain.ours:+.2f}"
    printed = "" if each.paper is None else str(each.paper)
    return [each.cell.row.name, each.cell.column.name, printed, each.words(), str(len(each.values)), paper, ours]


def _points(gain: Gain) -> str:
    return "" if gain.ours is None else f"{gain.ours:+.2f}"


def _interval(gain: Gain | None) -> str:
    if gain is None or gain.interval is None:
        return ""
    return f"{gain.interval.low:+.2f} to {gain.interval.high:+.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, marks, *rows]) + "\n"


TABLES = {"differences": differences_table, "paper": paper_table}


def page_with_tables(page: str) -> str:
    """The page with each table between its two marks."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, _, rest = page.partition(begin)
        page = before + begin + "\n" + make() + "\n" + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    write_whole(PAGE, page_with_tables(PAGE.read_text(encoding="utf-8")).encode())
