"""A drawn population as a file: a CSV with pictures beside it, or one Parquet file with the pictures inside."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import write_again, write_whole
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
        write_whole(file, _parquet(rows, drawn))
        return rows
    for path, content in zip(rows.paths, drawn, strict=True) if drawn is not None else ():
        write_again(rows.root / str(path), content)
    write_whole(file, table_csv(rows, file))
    return rows


def _parquet(rows: Rows, drawn: Iterator[bytes] | None) -> bytes:
    pyarrow, parquet = require_extra("pyarrow", "tables"), require_extra("pyarrow.parquet", "tables")
    columns: dict[str, Any] = {"path": rows.paths.tolist()}
    if drawn is not None:
        columns = {"image": pyarrow.array(drawn, pyarrow.binary())}
    columns["label"] = [rows.classes[label] for label in rows.labels.tolist()]
    if rows.users is not None:
        columns["user"] = rows.users.tolist()
    if rows.places is not None:
        columns["latitude"], columns["longitude"] = rows.places[:, 0], rows.places[:, 1]
    columns["split"] = ["test" if test else "train" for test in rows.test.tolist()]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink, row_group_size=GROUP)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _reported(drawn: Iterator[bytes], total: int, report: Report) -> Iterator[bytes]:
    for done, content in enumerate(drawn, 1):
        yield content
        if done % GROUP == 0:
            report(done, total)
