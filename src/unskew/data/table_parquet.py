"""A parquet file's columns as those of a table of photographs; also Hugging Face's image and label columns."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.limits import check_plain, check_unpacked, size_on_disk
from unskew.core.plugins import require_extra
from unskew.data.pictures import check_pages, open_parquet, reason
from unskew.data.table_columns import Columns, chosen

TEXTS = ("is_string", "is_large_string", "is_string_view")
NUMBERS = ("is_floating", "is_integer", "is_decimal", "is_null")
NAMES = (*TEXTS, "is_integer", "is_floating")  # floating: pandas makes them of whole numbers where some are missing
KINDS = {"label": NAMES, "user": NAMES, "path": TEXTS, "split": TEXTS, "latitude": NUMBERS, "longitude": NUMBERS}
WORDS = {TEXTS: "texts", NUMBERS: "numbers", NAMES: "texts or whole numbers"}


def read_parquet(path: Path) -> tuple[Columns, str | None]:
    """The columns, and the name of the one that has the photographs as bytes, if there is one."""
    check_plain(path)
    parquet = open_parquet(path)
    arrow = require_extra("pyarrow", "tables")
    schema = parquet.schema_arrow
    places, notes = chosen([name.lower() for name in schema.names], str(path), "a row for each photograph")
    names = {known: schema.names[place] for known, place in places.items()}
    image = names.pop("image", None)
    if image is not None:
        _check_image(arrow, schema.field(image).type, f"{path}: the column {image}")
        check_pages(parquet, image, path)
        names.pop("path", None)
    _check_size(parquet, list(names.values()), path)
    try:
        table = parquet.read(columns=list(names.values()))
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({reason(error)}); write it again") from error
    columns = {known: _texts(arrow, table.column(name), known, f"{path}: {name}") for known, name in names.items()}
    classes = (
        _class_names(schema, names["label"]) if arrow.types.is_integer(schema.field(names["label"]).type) else None
    )
    return Columns(str(path), lambda row: f"row {row}", notes=notes, names=classes, **columns), image


def _texts(arrow: Any, column: Any, known: str, where: str) -> list[str]:
    if arrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    wanted = WORDS[KINDS[known]]
    if not any(getattr(arrow.types, kind)(column.type) for kind in KINDS[known]):
        raise UserError(f"{where} is of type {column.type}; give {wanted}")
    values = column.to_pylist()
    if KINDS[known] is NAMES and arrow.types.is_floating(column.type):
        for row, value in enumerate(values):
            if value is not None and not math.isnan(value) and value % 1:
                raise UserError(f"{where} is {value} in row {row}; give {wanted}")
        values = [None if value is None or math.isnan(value) else int(value) for value in values]
    return ["" if value is None else repr(value) if isinstance(value, float) else str(value) for value in values]


def _check_image(arrow: Any, kind: Any, where: str) -> None:
    types = arrow.types
    inner = kind.field("bytes").type if types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    if not (types.is_binary(inner) or types.is_large_binary(inner) or types.is_binary_view(inner)):
        raise UserError(f"{where} is of type {kind}; give the bytes of image files, or a struct with bytes")


def _check_size(parquet: Any, names: list[str], path: Path) -> None:
    """What the columns unpack to, by the file's own words, before they are read."""
    about, claimed = parquet.metadata, 0
    for group in range(about.num_row_groups):
        for place in range(about.num_columns):
            column = about.row_group(group).column(place)
            claimed += column.total_uncompressed_size if column.path_in_schema in names else 0
    check_unpacked(claimed, size_on_disk([path]), str(path))


def _class_names(schema: Any, label: str) -> tuple[str, ...] | None:
    """The names of the classes in Hugging Face's description of the file."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        about = json.loads((schema.metadata or {})[b"huggingface"])
        names = about["info"]["features"][label]["names"]
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
    return None
