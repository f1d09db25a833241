"""``hf:NAME``: a data set from the Hugging Face Hub, or one saved to a folder; needs the extra ``hf``.

Photographs, labels and users are copied once into a parquet file in the cache, which is then read like ``table:``.
"""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError, brief
from unskew.core.files import in_pieces
from unskew.core.limits import user_path
from unskew.core.plugins import require_extra
from unskew.data.interface import OWN, DataRequest, Rows, Source
from unskew.data.store import cache_of
from unskew.data.tables import LEFT_OUT, check_columns, read_parquet


def read_hugging_face(
    request: DataRequest, *, image: str = "", label: str = "", user: str = "", config: str = "", train: str = "train",
    test: str = "",
) -> Rows:  # fmt: skip
    """Copy a data set into the cache and list it; ``image``, ``label`` and ``user`` are columns, the others splits."""
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
        raise UserError(f"{request.name} has no split {missing[0]}; choose from {', '.join(parts)} with (train=…)")
    chosen = {"train": parts[train], **({"test": parts[held]} if held else {})}
    features = parts[train].features
    kinds = {"image": datasets.Image, "label": datasets.ClassLabel}
    columns = {"image": image, "label": label or ("label" if "label" in features else ""), "user": user}
    for name, kind in kinds.items():
        columns[name] = columns[name] or next((c for c, held in features.items() if isinstance(held, kind)), "")
    if wrong := next((name for name, c in columns.items() if c not in features and (c or name != "user")), None):
        raise UserError(f"{request.name}: choose the column with ({wrong}=…) from {', '.join(features)}")
    version = [*(part._fingerprint for part in chosen.values()), *columns.values()]
    name = hashlib.sha256(json.dumps(version).encode()).hexdigest()[:32]
    file = (request.cache or cache_of()).folder / "hf" / f"{name}.parquet"
    if not file.is_file():
        _write(datasets, chosen, columns, file, request)
    return check_columns(read_parquet(file))


HUGGING_FACE = Source(
    "hf",
    "a data set from the Hugging Face Hub, or a saved one (needs an extra)",
    OWN,
    rows=read_hugging_face,
    path="NAME",
    remote=True,
)


def _write(datasets: Any, parts: dict[str, Any], columns: dict[str, str], file: Path, request: DataRequest) -> None:
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
