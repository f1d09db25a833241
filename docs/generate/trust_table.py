"""Writes the measured tables of docs/explanation/trust.md from recipes/results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from unskew.core.files import write_whole
from unskew.reproduce.cells import Variant
from unskew.reproduce.recipe import load_recipe
from unskew.reproduce.results import CellResult, Gain, TableResult, read_table

PAGE = Path(__file__).parents[1] / "explanation" / "trust.md"
KEPT = Path(__file__).parents[2] / "recipes" / "results"
AT_PAPER = ("ours/calibrations",)  # whose cells at the paper's scale are shown

# what the papers say with a figure that has no numbers: the recipe, and for each cell what it is called here
FINDINGS: tuple[tuple[str, str, dict[tuple[str, str], str]], ...] = (
    ("Skew makes local models less similar, the classifier most (mean CKA)", "ccvr/figure2",
     {("first layer", "IID"): "iid: first layer", ("middle layer", "IID"): "middle", ("classifier", "IID"):
      "classifier", ("first layer", "α = 0.1"): "α = 0.1: first layer", ("middle layer", "α = 0.1"): "middle",
      ("classifier", "α = 0.1"): "classifier"}),
    ("FedProx and MOON keep local models more similar (mean CKA of the classifier)", "ccvr/figure11",
     {("FedAvg", "α = 0.1"): "FedAvg", ("FedProx", "α = 0.1"): "FedProx", ("MOON", "α = 0.1"): "MOON"}),
    ("A local classifier's row norms follow its label counts (correlation)",
     "ccvr/figure3", {("rows follow label counts, first round", "α = 0.1"): "first round",
                      ("rows follow label counts, at the end", "α = 0.1"): "at the end"}),
    ("Skew makes local row norms more uneven at the end (deviation over mean)",
     "ccvr/figure3", {("unevenness of local classifiers' rows, at the end", "IID"): "iid",
                      ("unevenness of local classifiers' rows, at the end", "α = 0.1"): "α = 0.1"}),
    ("With MOON, row norms do not follow label counts in the first round", "ccvr/figure12",
     {("MOON, round 1", "α = 0.1"): "first round", ("MOON, the last round", "α = 0.1"): "at the end"}),
    ("CCVR makes row norms more even (deviation over mean)", "ccvr/figure10",
     {("FedAvg", "α = 0.1"): "before", ("FedAvg + CCVR", "α = 0.1"): "after"}),
)  # fmt: skip


def differences_table() -> str:
    """What each known difference is worth: accuracy, and the gain over the set-up of the recipes."""
    result = read_table(load_recipe("ours/differences"), Variant("small"), KEPT)
    lines = []
    for each in result.cells:
        gain = result.gain(each)
        lines.append([each.cell.row.name, each.format(), "" if gain is None else _points(gain), _interval(gain)])
    return _table(["set-up", "accuracy, %", "change, points", "95 % interval, paired over seeds"], lines)


def paper_table() -> str:
    """Every method that was run at the paper's scale: ours for each skew, the paper's value in brackets."""
    rows: dict[str, dict[str, str]] = {}
    for name in AT_PAPER:
        for each in read_table(load_recipe(name), Variant("paper"), KEPT).cells:
            if each.ours is not None:
                rows.setdefault(each.cell.row.name, {}).setdefault(each.cell.column.name, _next_to_paper(each))
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    lines = [[row, *(cells.get(column, "") for column in columns)] for row, cells in rows.items()]
    return _table(["ours (paper), %", *columns], lines)


def findings_table() -> str:
    """What the papers' figures without numbers say, and what was measured at both scales."""
    lines = []
    for said, name, cells in FINDINGS:
        results = [read_table(load_recipe(name), Variant(scale), KEPT) for scale in ("small", "paper")]
        lines.append([said, name, *(_measured(result, cells) for result in results)])
    return _table(["the paper's finding", "recipe", "at `small`", "at the paper's scale"], lines, numbers=False)


def _measured(result: TableResult, cells: Mapping[tuple[str, str], str]) -> str:
    found = [(label, result.cell(*place)) for place, label in cells.items()]
    known = [f"{label} {each.format()}" for label, each in found if each.ours is not None]
    return ", ".join(known) or "not run"


def _next_to_paper(each: CellResult) -> str:
    return each.format() if each.paper is None else f"{each.format()} ({each.paper})"


def _points(gain: Gain) -> str:
    return "" if gain.ours is None else f"{gain.ours:+.2f}"


def _interval(gain: Gain | None) -> str:
    if gain is None or gain.interval is None:
        return ""
    return f"{gain.interval.low:+.2f} to {gain.interval.high:+.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    marks = ["---", *["---:" if numbers else "---"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, marks, *rows]) + "\n"


TABLES = {"differences": differences_table, "findings": findings_table, "paper": paper_table}


def page_with_tables(page: str) -> str:
    """The page with each table between its two marks."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        before, _, rest = page.partition(begin)
        page = before + begin + "\n" + make() + "\n" + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    write_whole(PAGE, page_with_tables(PAGE.read_text(encoding="utf-8")).encode())
