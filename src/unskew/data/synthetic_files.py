"""A drawn population as a file: a CSV with pictures beside it, or one Parquet file with the pictures inside."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import in_pieces, write_again, write_whole
from unskew.core.plugins import require_extra
from unskew.data.rows import Rows
from unskew.data.synthetic import Shape, draw_rows, pictures
from unskew.data.table_csv import table_csv

Report = Callable[[int, int], None]  # pictures so far, and in all

GROUP = 500  # rows that a reader of Parquet unpacks together


def write_population(
    file: Path, shape: Shape, *, size: int | None = 32, seed: int = 0, report: Report = lambda done, total: None
) -> Rows:
    """Write the table and its pictures of ``size``×``size``; without a size no pictures, only their paths."""
    if file.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {file}: a table is written as .csv or .parquet")
    if size is not None and not 4 <= size <= 512:
        raise UserError(f"--size {size}: a side of a picture has 4 to 512 pixels")
    if file.suffix == ".parquet":
        require_extra("pyarrow", "tables")
    rows = draw_rows(shape, file.parent / f"{file.stem}-pictures", seed=seed)
    drawn = _reported(pictures(rows, size=size, seed=seed), len(rows), report) if size is not None else None
    if file.suffix == ".parquet":
        _write_parquet(file, rows, drawn)
        return rows
    for path, content in zip(rows.paths, drawn, strict=True) if drawn is not None else ():
        write_again(rows.root / str(path), content)
    write_whole(file, table_csv(rows, file))
    return rows


def _write_parquet(file: Path, rows: Rows, drawn: Iterator[bytes] | None) -> None:
    """Group by group, so that the pictures are never all in memory."""
    pyarrow, parquet = require_extra("pyarrow", "tables"), require_extra("pyarrow.parquet", "tables")
    writer = None
    with in_pieces(file) as beside, ExitStack() as stack:
        for start in range(0, len(rows), GROUP):
            table = pyarrow.table(_columns(pyarrow, rows, slice(start, start + GROUP), drawn))
            writer = writer or stack.enter_context(parquet.ParquetWriter(beside, table.schema))
            writer.write_table(table)


def _columns(pyarrow: Any, rows: Rows, part: slice, drawn: Iterator[bytes] | None) -> dict[str, Any]:
    labels = rows.labels[part].tolist()
    columns: dict[str, Any] = {"path": rows.paths[part].tolist()}
    if drawn is not None:
        columns = {"image": pyarrow.array(list(islice(drawn, len(labels))), pyarrow.binary())}
    columns["label"] = [rows.classes[label] for label in labels]
    if rows.users is not None:
        columns["user"] = rows.users[part].tolist()
    if rows.places is not None:
        columns["latitude"], columns["longitude"] = rows.places[part, 0], rows.places[part, 1]
    columns["split"] = ["test" if test else "train" for test in rows.test[part].tolist()]
    return columns


def _reported(drawn: Iterator[bytes], total: int, report: Report) -> Iterator[bytes]:
    for done, content in enumerate(drawn, 1):
        yield content
        if done % GROUP == 0:
            report(done, total)
