"""Writes the table in docs/reference/options.md from the options' descriptions."""

from pathlib import Path

from unskew.core.files import write_whole
from unskew.runs.config import OPTIONS, Option

PAGE = Path(__file__).parents[1] / "reference" / "options.md"
BEGIN, END = "<!-- options -->\n", "<!-- /options -->\n"


def options_table() -> str:
    """The options as a Markdown table."""
    lines = ["| option | takes | default | what it is |", "| --- | --- | --- | --- |"]
    for option in OPTIONS.values():
        flag = f"`{option.flag}`, `--no-{option.flag[2:]}`" if option.kind is bool else f"`{option.flag}`"
        cells = [flag, _takes(option), _default(option), option.help]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page_with(table: str, page: str) -> str:
    """The page with this table between the two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + table + "\n" + END + rest.partition(END)[2]


def _takes(option: Option) -> str:
    if option.choices:
        return " or ".join(f"`{choice}`" for choice in option.choices)
    kind = {int: "a whole number", float: "a number", bool: "a switch", str: "a text"}[option.kind]
    limits = option.limits.removeprefix("a number ")
    return f"{kind}, {limits}" if limits else kind


def _default(option: Option) -> str:
    return option.otherwise if option.default is None else f"`{option.default_text}`"


if __name__ == "__main__":
    write_whole(PAGE, page_with(options_table(), PAGE.read_text(encoding="utf-8")).encode())
