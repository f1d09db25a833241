"""The index of a folder of results: every table in it, what it found, its command, seeds and time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import json_object, write_whole
from unskew.reproduce.files import TABLES

INDEX = "tables.md"


def write_index(out: Path) -> Path:
    """Write tables.md from the JSON files of the tables; one that cannot be read is named."""
    groups: dict[str, list[tuple[Path, Mapping[str, Any]]]] = {}
    for file in sorted((out / TABLES).glob("*/*/*.json")):
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
        commands = dict.fromkeys(str(values.get("command", "")) for _, values in tables)
        lines += ["", "Made by:", "", "```", *filter(None, commands), "```", ""]
    write_whole(out / INDEX, ("\n".join(lines).rstrip() + "\n").encode())
    return out / INDEX


def _line(out: Path, file: Path, values: Mapping[str, Any]) -> str:
    facts = values.get("facts") or {}
    link = f"[{values.get('recipe', file.stem)}]({file.with_suffix('.md').relative_to(out).as_posix()})"
    found = " ".join(values.get("findings") or ())
    cells = [f"{link}: {values.get('title', '')}", found, *(str(facts.get(name, "")) for name in ("seeds", "runs"))]
    cells.append(str(facts.get("training, of all runs together", "")))
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"
