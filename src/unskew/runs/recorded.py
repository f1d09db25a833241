"""during.jsonl: what was recorded while a run trained, a line a round."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unskew.core.errors import UserError
from unskew.core.files import append, write_whole


def start(path: Path, after: int) -> None:
    """What was recorded of rounds up to ``after`` stays; what a crash left beyond them goes, and is made again."""
    file = path / "during.jsonl"
    if file.exists():
        lines = [json.dumps(row) for row in read(path) if row["round"] <= after]
        write_whole(file, "".join(f"{line}\n" for line in lines).encode())


def write(path: Path, row: Mapping[str, Any]) -> None:
    """One line more of what was recorded while training."""
    append(path / "during.jsonl", json.dumps(row, allow_nan=False).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """What was recorded while training, without a last line that a crash cut short."""
    try:
        lines = (path / "during.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    try:
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines[:-1]]
        for row in rows:
            _check_recorded(row)
        return rows
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / 'during.jsonl'} is damaged: {type(error).__name__} {error}") from error


def _check_recorded(row: dict[str, Any]) -> None:
    """Refuse a line of during.jsonl that the recorder did not write."""
    if isinstance(row["round"], bool) or not isinstance(row["round"], int) or row["round"] < 1:
        raise ValueError(f"{row['round']!r} is no round")
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
