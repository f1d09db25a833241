"""The files of a table with its results: Markdown, HTML, JSON, and its figures as SVG."""

from pathlib import Path
from typing import Any

from unskew.charts.svg import svg
from unskew.core.files import write_whole
from unskew.report.html import to_html
from unskew.reproduce.figures import draw_figures
from unskew.reproduce.links import run_link
from unskew.reproduce.markdown import to_markdown
from unskew.reproduce.page import to_page
from unskew.reproduce.results import TableResult
from unskew.reproduce.wording import Told
from unskew.runs.config import deciding
from unskew.runs.folder import json_bytes

TABLES = "tables"


def table_folder(result: TableResult) -> Path:
    """Where the files of a table are."""
    return result.out / TABLES / result.asked.folder / result.recipe.paper.name


def write_table(result: TableResult, said: Told, command: str) -> list[Path]:
    """Write them; what was there before is replaced."""
    folder, name = table_folder(result), result.recipe.name.partition("/")[2]
    charts = draw_figures(result)
    contents = {
        f"{name}.md": to_markdown(result, said, command, charts, folder).encode(),
        f"{name}.html": to_html(to_page(result, said, command, charts, folder)).encode(),
        f"{name}.json": json_bytes(as_json(result, said, command, folder)),
        **{f"{chart.name}.svg": svg(chart).encode() for chart in charts},
    }
    for file, content in contents.items():
        write_whole(folder / file, content)
    for old in folder.glob(f"{name}-*.svg"):
        if old.name not in contents:
            old.unlink(missing_ok=True)
    return [folder / file for file in contents]


def as_json(result: TableResult, said: Told, command: str, folder: Path) -> dict[str, Any]:
    """The table for programs."""
    cells = []
    for each in result.cells:
        paper, ours = each.paper, each.ours
        cells.append(
            {
                "row": each.cell.row.name,
                "column": each.cell.column.name,
                "reads": each.cell.reads,
                "after": each.cell.after,
                "unit": each.reading.unit,
                "paper": None if paper is None else {"mean": paper.mean, "deviation": paper.deviation},
                "ours": None if ours is None else {"mean": ours.mean, "deviation": ours.deviation},
                "by_seed": {str(seed): value for seed, value in each.values.items()},
                "missing": {str(seed): reason for seed, reason in each.missing.items()} or each.reason,
                "difference": each.difference,
                "agreement": each.agreement,
                "settings": deciding(each.cell.config),
                "runs": [run_link(record, folder) for record in each.records.values()],
            }
        )
    about = {"recipe": result.recipe.name, "title": result.recipe.title, "command": command}
    return {
        **about,
        "findings": said.findings,
        "differences": said.differences,
        "facts": dict(said.facts),
        "cells": cells,
    }
