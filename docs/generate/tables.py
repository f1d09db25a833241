"""Tables of commands, options and methods that the site shows, made from the code."""

import re
from pathlib import Path

from unskew.console.main import COMMANDS
from unskew.methods import describe
from unskew.runs.config import OPTIONS, Option

PAGES = Path(__file__).parents[1] / "reference" / "methods"


def options_table() -> str:
    """The options as a Markdown table."""
    lines = ["| option | takes | default | what it is |", "| --- | --- | --- | --- |"]
    for option in OPTIONS.values():
        flag = f"`{option.flag}`, `--no-{option.flag[2:]}`" if option.kind is bool else f"`{option.flag}`"
        cells = [flag, _takes(option), _default(option), option.help]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _takes(option: Option) -> str:
    if option.choices:
        return " or ".join(f"`{choice}`" for choice in option.choices)
    kind = {int: "an integer", float: "a number", bool: "a switch", str: "text"}[option.kind]
    limits = option.limits.removeprefix("a number ")
    return f"{kind}, {limits}" if limits else kind


def _default(option: Option) -> str:
    return option.otherwise if option.default is None else f"`{option.default_text}`"


def methods_table() -> str:
    """The methods with their slots as a Markdown table, each linked to its page."""
    pages = {name: page.name for page in sorted(PAGES.glob("*.md")) for name in methods_of(page)}
    pages["secure"] = "protections.md"  # which links to the page on secure updates
    lines = ["| method | what it does | slots |", "| --- | --- | --- |"]
    for method in describe():
        lines.append(f"| [{method.name}]({pages[method.name]}) | {method.changes} | {method.slots} |")
    return "\n".join(lines) + "\n"


def commands_table() -> str:
    """The commands as a Markdown table."""
    lines = ["| command | what it does |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {words} |" for name, (_, words) in COMMANDS.items())]) + "\n"


def knobs_table(page: Path) -> str:
    """The knobs of a page's methods as a Markdown table."""
    described = [method for method in describe() if method.name in methods_of(page)]
    lines = ["| knob | default | meaning |", "| --- | --- | --- |"]
    for method in described:
        for knob in method.knobs:
            name, default, meaning = re.fullmatch(r"(\w+):.*? = (\S+)(?:  (.*))?", knob).groups()  # type: ignore[union-attr]
            shown = name if len(described) == 1 else f"{method.name}({name})"
            value = {"True": "true", "False": "false", "''": "none", "None": "none"}.get(default, default.strip("'"))
            cells = [f"`{shown}`", value, meaning or ""]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def methods_of(page: Path) -> list[str]:
    """The methods that a page describes: its title lists them."""
    title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return re.sub(r"\(.*?\)", "", title).split(", ")


def references_of(page: Path) -> str:
    """The papers of a page's methods, each once."""
    papers = [method.reference for method in describe() if method.name in methods_of(page) and method.reference]
    return " ".join(dict.fromkeys(paper[0].upper() + paper[1:] for paper in papers))
