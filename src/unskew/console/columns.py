"""Tables in a terminal: figures side by side as far as they fit, in further tables below where they do not."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

WORDS = ("run", "method", "data", "partition", "model")  # columns of text, not of numbers


def upright(lines: Sequence[Mapping[str, str]], shown: Sequence[str]) -> Table:
    """One row for each figure, one column for each run."""
    table = Table(show_header=False)
    for key in shown:
        table.add_row(Text(key), *(Text(row[key], overflow="fold") for row in lines))
    return table


def flat(lines: Sequence[Mapping[str, str]], shown: Sequence[str], width: int) -> list[Table]:
    """One row for each run, in as many tables as it takes."""
    tables = []
    for keys in _blocks(lines, shown, width):
        table = Table()
        for key in keys:
            words = key in WORDS
            table.add_column(key, justify="left" if words else "right", max_width=width // 4 if words else None)
        for row in lines:
            table.add_row(*(Text(row[key], overflow="fold") for key in keys))
        tables.append(table)
    return tables


def _blocks(lines: Sequence[Mapping[str, str]], shown: Sequence[str], width: int) -> list[list[str]]:
    """The columns of each table: as many as fit unbroken, after the first, which every table begins with."""
    needs = {key: 3 + max(cell_len(text) for text in (key, *(row[key] for row in lines))) for key in shown}
    needs |= {key: min(needs[key], 3 + width // 4) for key in shown if key in WORDS}
    blocks = [[shown[0]]]
    for key in shown[1:]:
        if len(blocks[-1]) > 1 and 1 + sum(needs[other] for other in (*blocks[-1], key)) > width:
            blocks.append([shown[0]])
        blocks[-1].append(key)
    return blocks
