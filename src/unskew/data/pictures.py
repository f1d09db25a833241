"""Where a table's photographs are: in files of their own, or as bytes in a parquet file.

Both can go to another process as arrays of one entry for each photograph. Shapes: N photographs.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unskew.core.errors import StorageFailure, UserError
from unskew.core.limits import check_memory
from unskew.core.plugins import require_extra
from unskew.core.types import Arrays
from unskew.data.decode import NoBytes, Picture

BATCH, BATCH_BYTES = 64, 32 * 10**6  # photographs of a parquet file that are read at a time, and their bytes
PAGE = 1024  # rows of a parquet file that are unpacked together: as many as its usual writers put on a page
BUFFER = 1 << 20

Numbers = npt.NDArray[np.int64]


class Pictures(Protocol):
    """Where N photographs are."""

    def __len__(self) -> int: ...

    def name(self, row: int) -> str:
        """What a message calls it."""

    def stamps(self) -> list[bytes | None]:
        """For each 16 bytes that change when its file does; None where there is no file."""

    def contents(self, rows: Sequence[int]) -> list[Picture | None]:
        """These photographs as ``decode`` takes them."""

    def together(self) -> int:
        """How many ``contents`` may give at once: what it gives is in memory."""

    def part(self, rows: Numbers) -> "Pictures":
        """These rows alone."""

    def described(self) -> tuple[dict[str, Any], Arrays]:
        """How another process opens them: words and arrays."""


@dataclass(frozen=True, eq=False)
class Files:
    """Photographs in files below ``root``; their names are one text in UTF-8, ``ends`` says where each ends."""

    root: Path
    names: npt.NDArray[np.uint8]
    ends: Numbers  # [N]

    @staticmethod
    def of(root: Path, paths: Iterable[str]) -> "Files":
        """Files by their paths."""
        encoded = [os.fsencode(path) for path in paths]
        return Files(root, np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([len(each) for each in encoded]))

    def __len__(self) -> int:
        return len(self.ends)

    def path(self, row: int) -> Path:
        """Where that photograph is."""
        start = self.ends[row - 1] if row else 0
        return self.root / os.fsdecode(self.names[start : self.ends[row]].tobytes())

    def name(self, row: int) -> str:
        """Its path."""
        return str(self.path(row))

    def stamps(self) -> list[bytes | None]:
        """From path, size and time of the last change."""
        text, root, start, stamps = self.names.tobytes(), os.fsencode(self.root), 0, list[bytes | None]()
        for end in self.ends.tolist():
            path = os.path.join(root, text[start:end])
            start = end
            try:
                about = os.stat(path)
            except (OSError, ValueError):
                stamps.append(None)
                continue
            facts = b"%s\0%d\0%d" % (path, about.st_size, about.st_mtime_ns)
            stamps.append(hashlib.blake2b(facts, digest_size=16).digest())
        return stamps

    def contents(self, rows: Sequence[int]) -> list[Picture | None]:
        """Paths."""
        return [self.path(row) for row in rows]

    def together(self) -> int:
        """All: a path takes next to nothing."""
        return max(1, len(self))

    def part(self, rows: Numbers) -> "Files":
        """These rows alone."""
        starts = np.concatenate([[0], self.ends[:-1]])[rows]
        text = self.names.tobytes()
        pieces = [text[start:end] for start, end in zip(starts.tolist(), self.ends[rows].tolist(), strict=True)]
        return Files(self.root, np.frombuffer(b"".join(pieces), np.uint8), np.cumsum([len(each) for each in pieces]))

    def described(self) -> tuple[dict[str, Any], Arrays]:
        """The root as a word, the rest as arrays."""
        return {"kind": "files", "root": str(self.root)}, {"names": self.names, "ends": self.ends}


@dataclass(frozen=True, eq=False)
class Parquet:
    """Photographs as bytes in a column of a parquet file, plain or as Hugging Face's struct of bytes and path."""

    file: Path
    column: str
    rows: Numbers  # [N], in the file
    _reader: "list[_Reader]" = field(default_factory=list, repr=False)  # where the last reading ended

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> str:
        """The file and the row."""
        return f"{self.file} row {int(self.rows[row])}"

    def stamps(self) -> list[bytes | None]:
        """From the row, and the size of the file and the time of its last change."""
        about = os.stat(self.file)
        facts = f"{self.file}\0{self.column}\0{about.st_size}\0{about.st_mtime_ns}\0".encode()
        return [hashlib.blake2b(facts + str(row).encode(), digest_size=16).digest() for row in self.rows.tolist()]

    def contents(self, rows: Sequence[int]) -> list[Picture | None]:
        """Bytes, read from front to back."""
        wanted = self.rows[np.asarray(rows, np.int64)]
        found = dict[int, Picture | None]()
        for row in np.unique(wanted).tolist():
            if not self._reader or not self._reader[0].reaches(row):
                self._reader[:] = [_Reader(self.file, self.column, row)]
            found[row] = self._reader[0].take(row)
        return [found[row] for row in wanted.tolist()]

    def together(self) -> int:
        """As many as have a few megabytes."""
        return at_once(open_parquet(self.file), self.column)

    def part(self, rows: Numbers) -> "Parquet":
        """These rows alone."""
        return Parquet(self.file, self.column, self.rows[rows])

    def described(self) -> tuple[dict[str, Any], Arrays]:
        """The file as a word, the rows as an array."""
        return {"kind": "parquet", "file": str(self.file), "column": self.column}, {"rows": self.rows}


def opened(words: dict[str, Any], arrays: Arrays) -> Pictures:
    """What ``described`` gave, in another process."""
    if words["kind"] == "files":
        return Files(Path(words["root"]), arrays["names"], arrays["ends"])
    return Parquet(Path(words["file"]), words["column"], arrays["rows"])


class _Reader:
    """One pass through a parquet file from the row group of a row on: rows are taken in ascending order."""

    def __init__(self, file: Path, column: str, row: int) -> None:
        self._file, parquet = file, open_parquet(file)
        sizes = [parquet.metadata.row_group(place).num_rows for place in range(parquet.num_row_groups)]
        ends = np.cumsum(sizes)
        group = int(np.searchsorted(ends, row, side="right"))
        if group == len(sizes):
            raise StorageFailure(f"{file} has changed since it was read: it has no row {row}; start again")
        self._end = int(ends[group])  # of the first group: a later row is better begun at its own group
        self._next = self._end - sizes[group]
        groups = list(range(group, len(sizes)))
        self._batches: Iterator[Any] = parquet.iter_batches(
            batch_size=at_once(parquet, column), row_groups=groups, columns=[column], use_threads=False
        )
        self._batch: list[Any] = []

    def reaches(self, row: int) -> bool:
        """Whether a row comes soon: later in this pass, and not far."""
        return bool(self._next - len(self._batch) <= row < max(self._end, self._next + 4 * BATCH))

    def take(self, row: int) -> bytes | NoBytes | None:
        """The bytes of that row."""
        while row >= self._next:
            self._batch = self._following()
            self._next += len(self._batch)
        value = self._batch[row - self._next]  # counted from the batch's end
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if isinstance(content, bytes):
            return content
        return NoBytes(str(path)) if path else None

    def _following(self) -> list[Any]:
        """The next batch."""
        arrow = require_extra("pyarrow", "tables")
        try:
            rows: list[Any] = next(self._batches).column(0).to_pylist()
        except (arrow.ArrowException, OSError, StopIteration) as error:
            raise StorageFailure(f"{self._file} is damaged inside ({reason(error)}); write it again") from error
        return rows


def at_once(parquet: Any, column: str) -> int:
    """How many photographs of a column are read together: a few megabytes of them, by the file's own words."""
    return max(1, min(BATCH, BATCH_BYTES // max(1, _average(parquet, column))))


def check_pages(parquet: Any, column: str, file: Path) -> None:
    """Refuse a file that was written in pieces which do not fit into memory."""
    most = max((parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)), default=0)
    needed = 2 * _average(parquet, column) * min(PAGE, most)
    check_memory(
        needed, f"{file}, read {min(PAGE, most):,} rows at a time,", "write it again with row groups of 100 rows"
    )


def _average(parquet: Any, column: str) -> int:
    """Bytes of a photograph."""
    about, total = parquet.metadata, 0
    for group in range(about.num_row_groups):
        chunks = (about.row_group(group).column(place) for place in range(about.num_columns))
        total += sum(each.total_uncompressed_size for each in chunks if each.path_in_schema.split(".")[0] == column)
    return int(total // max(1, about.num_rows))


def reason(error: BaseException) -> str:
    """An error of Arrow in one line."""
    return " ".join(str(error).split())[:100] or type(error).__name__


def open_parquet(file: Path) -> Any:
    """The parquet file, by its header; what is read of it is read piece by piece."""
    arrow, parquet = require_extra("pyarrow", "tables"), require_extra("pyarrow.parquet", "tables")
    try:
        return parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
    except FileNotFoundError as error:
        raise UserError(f"{file} is not there; give the path of a table") from error
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{file} is not a parquet file ({reason(error)}); write it again") from error
