"""The index of a folder of results: every table in it, what it found, its command, seeds and time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import json_object, write_whole
from unskew.reproduce.files import TABLES
from unskew.reproduce.recipe_files import names

INDEX = "tables.md"


def write_index(out: Path) -> Path:
    """Write tables.md from the JSON files of the tables; one that cannot be read is named."""
    groups: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    order = [*map(Path, names())]
    for file in sorted((out / TABLES).glob("*/*/*.json"), key=lambda each: (each.parents[1], _place(each, order))):
        try:
            values = json_object(file.read_bytes(), file)
        except (OSError, UserError):
            values = {"findings": [f"{file.name} cannot be read; give its command again."]}
        groups.setdefault(file.parent.parent.name, []).append((file, values))
    lines = ["# Tables in this folder", ""]
    for name, tables in groups.items():
        lines += [
            f"## {name}",
            "",
            "| table | what was found | seeds | runs | trained |",
            "| --- | --- | --- | ---: | ---: |",
        ]
        lines += [_line(out, file, values) for file, values in tables]
        lines += ["", "Made by:", "", "```", *_commands([values for _, values in tables]), "```", ""]
    write_whole(out / INDEX, ("\n".join(lines).rstrip() + "\n").encode())
    return out / INDEX


def _place(file: Path, order: Sequence[Path]) -> tuple[int, Path]:
    """Where a table stands among those of its scale: as in the list of all recipes, what is none of them last."""
    name = Path(file.parent.name, file.stem)
    return (order.index(name) if name in order else len(order)), name


def _commands(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tables' commands; those that differ in the table's name alone are one."""
    found: dict[tuple[str, str], list[str]] = {}
    for values in tables:
        before, name, after = str(values.get("command", "")).partition(str(values.get("recipe", " ")))
        if before:
            found.setdefault((before, after), []).append(name)
    return [f"{before}{' '.join(filter(None, those))}{after}" for (before, after), those in found.items()]


def _line(out: Path, file: Path, values: Mapping[str, Any]) -> str:
    facts = values.get("facts") or {}
    link = f"[{values.get('recipe', file.stem)}]({file.with_suffix('.md').relative_to(out).as_posix()})"
    found = " ".join(values.get("findings") or ())
    cells = [f"{link}: {values.get('title', '')}", found, *(str(facts.get(name, "")) for name in ("seeds", "runs"))]
    cells.append(str(facts.get("training, of all runs together", "")))
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"
