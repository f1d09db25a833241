"""Tables: ``table:FILE.csv`` and ``table:FILE.parquet`` with a user's photographs, labels, users and places.

Also Hugging Face's data sets, which become such a table, and columns of other CSV files. Shapes: N rows.
"""

import csv
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, brief
from unskew.core.files import in_pieces, user_path
from unskew.core.language import cut
from unskew.core.limits import MAX_CLASSES, check_memory, check_plain, check_unpacked, size_on_disk
from unskew.core.plugins import require_extra
from unskew.data import photographs
from unskew.data.arrays import every_fifth
from unskew.data.interface import OWN, DataRequest, Rows, Source
from unskew.data.store import cache_of

COLUMNS = ("path", "image", "label", "user", "latitude", "longitude", "split")
LEFT_OUT = ("validation", "valid", "val", "dev")  # values of split that are neither train nor test
ROW_BYTES = 20  # in memory per byte of a CSV file, approximately
OTHER_NAMES = {
    "label": ("class", "category", "target", "species", "label_id", "class_id", "category_id"),
    "path": ("file", "filename", "file_name", "image_path", "file_path", "img", "picture", "photo"),
    "user": (
        "user_id", "author", "client", "client_id", "owner", "site", "site_id", "hospital", "clinic", "camera",
        "station", "patient", "photographer", "observer",
    ),
    "latitude": ("lat",),
    "longitude": ("lon", "lng", "long"),
}  # fmt: skip
MAX_FIELD = 1 << 24  # characters: in train_clean.csv of Landmarks, one field lists all images of a landmark
EXCEL = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}  # the start of its "Unicode text"


@dataclass(frozen=True)
class Columns:
    """A table's columns as strings, by their names in ``COLUMNS``."""

    file: Path
    texts: dict[str, list[str]]
    notes: tuple[str, ...] = ()
    lines: list[int] | None = None  # of a CSV file, for messages
    names: tuple[str, ...] | None = None  # of the classes, if the labels are their numbers
    image: str | None = None  # the parquet column with the photographs as bytes

    def refuse(self, row: int, why: str) -> NoReturn:
        """Raise a UserError about a row."""
        where = f"row {row}" if self.lines is None else f"line {self.lines[row]}"
        raise UserError(f"{self.file} {where}: {why}")


def read_csv(path: Path, wanted: Sequence[str] = (), only: set[str] | None = None) -> Columns:
    """Read a CSV file in UTF-8 with a header, or as Excel writes it; separated by commas, semicolons or tabs.

    ``wanted`` are the columns to read instead of a table's; ``only`` selects the rows whose first one is in it.
    """
    check_plain(path)
    before = csv.field_size_limit(MAX_FIELD)
    try:
        with path.open("rb") as start:
            encoding = EXCEL.get(start.read(2), "utf-8-sig")
        with path.open(encoding=encoding, newline="") as file:
            if wanted:
                check_unpacked(path.stat().st_size, size_on_disk([path]), str(path))
            else:
                check_memory(ROW_BYTES * path.stat().st_size, str(path), "split the table")
            while (first := file.readline(100_000)).isspace():
                pass
            named = re.fullmatch(r"sep=(.)\s*", first)  # Excel's first line
            file.seek(0)
            delimiter = named[1] if named else max(",;\t", key=first.count)
            strict = not wanted  # published files have quotes inside fields
            lines = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=strict)
            rows = filter(None, lines)
            if named:
                next(rows)
            header = [name.strip() for name in next(rows, [])]
            if missing := next((column for column in wanted if column not in header), None):
                raise csv.Error(f"its first line has no column {missing!r}; expected {', '.join(wanted)}")
            if wanted:
                positions, notes = {name: header.index(name) for name in wanted}, tuple[str, ...]()
            else:
                positions, notes = choose_columns([name.lower() for name in header], path, without="image")
            texts: dict[str, list[str]] = {name: [] for name in positions}
            cells = [(texts[name], column) for name, column in positions.items()]
            numbers: list[int] = []
            for row in rows:
                if len(row) != len(header):
                    raise csv.Error(f"line {lines.line_num} has {len(row)} values for {len(header)} columns")
                if only is None or row[cells[0][1]].strip() in only:
                    numbers.append(lines.line_num)
                    for column, at in cells:
                        column.append(row[at])
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; give the path to a table") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file in UTF-8: {error}; write it again") from error
    finally:
        csv.field_size_limit(before)
    return Columns(path, texts, notes, numbers)


def read_columns(path: Path, wanted: Sequence[str], *, only: set[str] | None = None) -> list[list[str]]:
    """Read columns of a CSV file with a header; ``only`` selects the rows whose first wanted column is in it."""
    return [[text.strip() for text in column] for column in read_csv(path, wanted, only).texts.values()]


def choose_columns(header: Sequence[str], where: Path, without: str = "") -> tuple[dict[str, int], tuple[str, ...]]:
    """The positions of the known columns, and a note on the others; rejects a header without the required ones."""
    positions = {name: list(header).index(name) for name in COLUMNS if name in header and name != without}
    known_as = {other: name for name, others in OTHER_NAMES.items() for other in others}
    unused = ", ".join(
        f"{name} (rename it to {known_as[name]}?)" if name in known_as else name
        for name in header
        if name not in positions
    )
    needed = ["label", *([] if "image" in positions else ["path"])]
    needed += ["latitude", "longitude"] if {"latitude", "longitude"} & set(positions) else []
    if missing := next((name for name in needed if name not in positions), None):
        raise UserError(f"{where} has no column {missing}; other columns: {cut(unused, 400) or 'none'}")
    return positions, (f"unused columns: {cut(unused, 400)}",) if unused else ()


def check_columns(columns: Columns) -> Rows:
    """Check the columns, number the labels and choose the test part; rows of a validation part are left out."""
    texts, count = columns.texts, len(columns.texts["label"])
    if not count:
        raise UserError(f"{columns.file} has a header but no rows; add one row per photograph")
    used, notes = np.arange(count), list(columns.notes)
    if "split" in texts:
        splits = [word.strip().lower() for word in texts["split"]]
        wrong = (row for row, word in enumerate(splits) if word not in ("train", "test", *LEFT_OUT))
        if (row := next(wrong, None)) is not None:
            columns.refuse(row, f"split is {brief(texts['split'][row])}; give train, test or validation")
        test, out = np.equal(splits, "test"), np.isin(splits, LEFT_OUT)
        used = np.flatnonzero(~out)
        notes += [f"{int(out.sum()):,} rows with split validation are left out"] if out.any() else []
    else:
        test = every_fifth(count)
        notes.append("every fifth row is used for testing, since the table has no column split")
        if not test.any():
            raise UserError(f"{columns.file} has fewer than five rows and no column split; add the column, or rows")
    labels, classes = _number_labels(columns)
    owners = [user.strip() for user in texts.get("user", ())]  # empty: the example belongs to no client
    users = np.array(owners, np.str_) if any(owners) else None
    file, facts = columns.file.absolute(), (labels, classes, test, users, _places(columns), tuple(notes))
    if columns.image is not None:
        return Rows(file, [], *facts, numbers=np.arange(count), column=columns.image).part(used)
    return Rows(file.parent, texts["path"], *facts).part(used)


def _number_labels(columns: Columns) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    texts = [text.strip() for text in columns.texts["label"]]
    if "" in texts:
        columns.refuse(texts.index(""), "the label is empty; give one, or remove the row")
    if (names := columns.names) is not None:
        wrong = (row for row, text in enumerate(texts) if not text.isdigit() or int(text) >= len(names))
        if (first := next(wrong, None)) is not None:
            columns.refuse(first, f"the label is {texts[first]}, but there are {len(names)} classes; correct the label")
        return np.array(texts, np.int64), names
    distinct = set(texts)
    if len(distinct) > MAX_CLASSES:
        raise UserError(f"{columns.file} has {len(distinct):,} different labels; the limit is {MAX_CLASSES:,}")
    integers = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", text) for text in distinct)
    classes = sorted(distinct, key=int) if integers else sorted(distinct)
    number_of = {text: number for number, text in enumerate(classes)}
    return np.array([number_of[text] for text in texts], np.int64), tuple(classes)


def _places(columns: Columns) -> npt.NDArray[np.float64] | None:
    if "latitude" not in columns.texts:
        return None
    places = np.empty((len(columns.texts["label"]), 2))
    for column, (name, most) in enumerate((("latitude", 90), ("longitude", 180))):
        for row, text in enumerate(columns.texts[name]):
            try:
                places[row, column] = float(text.replace(",", ".").strip() or "nan")  # Excel's decimal comma
            except ValueError:
                places[row, column] = math.inf
            if abs(places[row, column]) > most:
                columns.refuse(row, f"the {name} is {brief(text)}; give degrees from -{most} to {most}, or nothing")
    return places


def read_parquet(path: Path) -> Columns:
    """Read all columns except the photographs themselves."""
    check_plain(path)
    parquet = photographs.open_parquet(path)
    arrow = require_extra("pyarrow", "tables")
    schema = parquet.schema_arrow
    positions, notes = choose_columns([name.lower() for name in schema.names], path)
    names = {known: schema.names[column] for known, column in positions.items()}
    image = names.pop("image", None)
    if image is not None:
        photographs.check_pages(parquet, image, path)
        names.pop("path", None)
    check_unpacked(photographs.column_bytes(parquet, list(names.values())), size_on_disk([path]), str(path))
    try:
        table = parquet.read(columns=list(names.values()))
        texts = {known: list(map(_text, table.column(name).to_pylist())) for known, name in names.items()}
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({photographs.reason(error)}); write it again") from error
    classes = None
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        if arrow.types.is_integer(schema.field(names["label"]).type):
            classes = tuple(map(str, features[names["label"]]["names"])) or None
    return Columns(path, texts, notes, names=classes, image=image)


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bytes | bool | list | dict):
        raise ValueError(f"columns must have strings or numbers, not {brief(value)}")
    whole = isinstance(value, float) and value.is_integer()  # pandas makes whole numbers floats if some are missing
    return str(int(value)) if whole else str(value)


def read_table(request: DataRequest) -> Rows:
    """List the photographs of a table."""
    path = user_path(request.path)
    kind = path.suffix.lower()
    if kind not in (".csv", ".tsv", ".parquet"):
        raise UserError(f"{cut(request.name)}: {brief(request.path)} is not a table; give FILE.csv or FILE.parquet")
    request.say("reading the table", 0, 0)
    return check_columns(read_parquet(path) if kind == ".parquet" else read_csv(path))


_WHAT = "your own photographs: path or image, label, user, latitude, longitude, split"
TABLE = Source("table", _WHAT, OWN, rows=read_table, path="FILE.csv")


def table_columns(rows: Rows) -> dict[str, list[Any]]:
    """The columns of a table of these photographs."""
    columns: dict[str, list[Any]] = {"path": rows.paths, "label": [rows.classes[n] for n in rows.labels.tolist()]}
    if rows.users is not None:
        columns["user"] = rows.users.tolist()
    if rows.places is not None:
        columns["latitude"], columns["longitude"] = rows.places.T.tolist()
    return columns | {"split": ["test" if test else "train" for test in rows.test.tolist()]}


def table_csv(rows: Rows, out: Path) -> bytes:
    """Write a table; paths in it are relative to the folder of ``out``, so that both can be moved together."""
    root = os.path.relpath(rows.root.resolve(), out.resolve().parent)
    columns = table_columns(rows)
    if root != os.curdir:
        columns["path"] = [f"{root}/{path}" for path in rows.paths]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(columns)
    lines.writerows(["" if value != value else value for value in row] for row in zip(*columns.values(), strict=True))
    return text.getvalue().encode()


def read_hugging_face(
    request: DataRequest, *, image: str = "", label: str = "", user: str = "", config: str = "", train: str = "train",
    test: str = "",
) -> Rows:  # fmt: skip
    """List ``hf:NAME``, a data set from the Hugging Face Hub or a folder, copied once to a parquet file in the cache.

    ``image``, ``label`` and ``user`` are columns, ``train`` and ``test`` splits.
    """
    datasets = require_extra("datasets", "hf")
    request.say(f"loading {request.path} with Hugging Face's datasets", 0, 0)
    folder = user_path(request.path)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(str(folder) if folder.exists() else request.path, config or None)
    except Exception as error:  # from the network, the hub or the data set
        raise UserError(f"{request.name}: {type(error).__name__}: {brief(str(error), 300)[1:-1]}") from error
    parts = dict(loaded) if isinstance(loaded, dict) else {train: loaded}
    held = test or next((name for name in ("test", *LEFT_OUT) if name in parts), "")
    if missing := [name for name in (train, held) if name and name not in parts]:
        choice = f"choose from {', '.join(parts)} with (train=…) or (test=…)"
        raise UserError(f"{request.name} has no split {missing[0]}; {choice}")
    chosen = {"train": parts[train], **({"test": parts[held]} if held else {})}
    features = parts[train].features
    kinds = {"image": datasets.Image, "label": datasets.ClassLabel}
    columns = {"image": image, "label": label or ("label" if "label" in features else ""), "user": user}
    for name, kind in kinds.items():
        columns[name] = columns[name] or next((c for c, held in features.items() if isinstance(held, kind)), "")
    if wrong := next((name for name, c in columns.items() if c not in features and (c or name != "user")), None):
        raise UserError(f"{request.name} has no {wrong} column; choose one with ({wrong}=…): {', '.join(features)}")
    version = [*(part._fingerprint for part in chosen.values()), *columns.values()]
    name = hashlib.sha256(json.dumps(version).encode()).hexdigest()[:32]
    file = (request.cache or cache_of()).folder / "hf" / f"{name}.parquet"
    if not file.is_file():
        _copy_photographs(datasets, chosen, columns, file, request)
    return check_columns(read_parquet(file))


def _copy_photographs(
    datasets: Any, parts: dict[str, Any], columns: dict[str, str], file: Path, request: DataRequest
) -> None:
    arrow, parquet = require_extra("pyarrow", "tables"), require_extra("pyarrow.parquet", "tables")
    label = parts["train"].features[columns["label"]]
    names = {"info": {"features": {"label": {"names": getattr(label, "names", None)}}}}
    writer, done, total = None, 0, sum(map(len, parts.values()))
    with in_pieces(file) as temporary, ExitStack() as stack:
        for part, rows in parts.items():
            for batch in rows.with_format("arrow").iter(100):  # rows in a row group, which readers unpack together
                embedded = datasets.table.embed_table_storage(batch)
                held = {known: embedded.column(column) for known, column in columns.items() if column}
                held["image"] = held["image"].cast(arrow.struct({"bytes": arrow.binary(), "path": arrow.string()}))
                if len(parts) > 1:
                    held["split"] = arrow.array([part] * len(batch))
                table = arrow.table(held).replace_schema_metadata({"huggingface": json.dumps(names)})
                writer = writer or stack.enter_context(parquet.ParquetWriter(temporary, table.schema))
                writer.write_table(table)
                done += len(batch)
                request.say("copying the photographs", done, total)


_HUB = "a data set from the Hugging Face Hub, or a saved one (needs an extra)"
HUGGING_FACE = Source("hf", _HUB, OWN, rows=read_hugging_face, path="NAME", remote=True)
