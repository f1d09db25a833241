"""The table of options that the site shows on docs/reference/options.md."""

from unskew.runs.config import OPTIONS, Option


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
