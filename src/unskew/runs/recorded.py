"""during.jsonl: what was recorded while a run trained, one line for each round."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from unskew.core.errors import UserError
from unskew.core.files import json_lines, read_content
from unskew.runs.lines import Mark
from unskew.runs.manifest import read_sealed

DURING = "during.jsonl"


def mark_after(path: Path, number: int) -> Mark:
    """The part of during.jsonl up to that round, for checkpoints of earlier versions, which do not tell."""
    content = read_content(path / DURING) or b""
    kept = sum(row["round"] <= number for row in _checked(json_lines(content, path / DURING), path))
    return Mark(sum(len(line) + 1 for line in content.split(b"\n")[:kept]))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that were recorded while training, without a last line that a crash cut short."""
    return _checked(json_lines(read_sealed(path, DURING) or b"", path / DURING), path)


def _checked(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    try:
        for row in rows:
            _check_recorded(row)
        return rows
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{path / DURING} is damaged: {type(error).__name__} {error}") from error


def _check_recorded(row: dict[str, Any]) -> None:
    """Refuse a line of during.jsonl that the recorder did not write."""
    if isinstance(row["round"], bool) or not isinstance(row["round"], int) or row["round"] < 1:
        raise ValueError(f"{row['round']!r} is not a round")
    if not math.isfinite(row.get("silhouette") or 0.0):
        raise ValueError(f"round {row['round']} has the silhouette {row['silhouette']!r}")
    for name in ("norms", "drift"):
        if name in row:
            seen = row[name]
            table = np.array([seen["server"], *seen["local"]], float)  # unequal rows are refused here
            widths = {len(seen["server"]), *([len(seen["layers"])] if name == "drift" else [])}
            clients = [int(client) for client in seen["clients"]]
            if len(widths) > 1 or len(clients) + 1 != len(table) or not np.isfinite(table).all():
                raise ValueError(f"round {row['round']} has {name} of other lengths")
