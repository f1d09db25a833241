"""during.jsonl: what was recorded while a run trained, one line for each round."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unskew.core.errors import UserError
from unskew.core.files import append, read_json_lines, write_whole


def start(path: Path, after: int) -> None:
    """Keep the rows of rounds up to ``after``; those that a crash left beyond them go, and are recorded again."""
    file = path / "during.jsonl"
    if file.exists():
        lines = [json.dumps(row) for row in read(path) if row["round"] <= after]
        write_whole(file, "".join(f"{line}\n" for line in lines).encode())


def write(path: Path, row: Mapping[str, Any]) -> None:
    """Add the row of one round."""
    append(path / "during.jsonl", json.dumps(row, allow_nan=False).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that were recorded while training, without a last line that a crash cut short."""
    rows = read_json_lines(path / "during.jsonl")
    try:
        for row in rows:
            _check_recorded(row)
        return rows
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / 'during.jsonl'} is damaged: {type(error).__name__} {error}") from error


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
