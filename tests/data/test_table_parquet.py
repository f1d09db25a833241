import json
import re

import numpy as np
import pytest

from photo_tables import load_table, write_table
from unskew.core.errors import UserError
from unskew.data import photographs
from unskew.data.photographs import Parquet
from unskew.data.store import Cache
from unskew.data.tables import read_csv

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def table(tmp_path):
    """A CSV, its columns, and the photographs and labels as columns of a parquet file."""
    path = write_table(tmp_path, 30)
    texts = read_csv(path).texts
    return path, texts, {"image": [(tmp_path / n).read_bytes() for n in texts["path"]], "label": texts["label"]}


def write(path, columns, groups=7, metadata=None):
    made = arrow.table(columns)
    if metadata is not None:
        made = made.replace_schema_metadata({"huggingface": json.dumps(metadata)})
    parquet.write_table(made, path, row_group_size=groups)
    return path


def same(one, other):
    return one.train.images.sha256 == other.train.images.sha256 and one.test.images.sha256 == other.test.images.sha256


@pytest.mark.parametrize("form", ["bytes", "struct", "path"])
def test_bytes_structs_and_paths_give_the_images_of_the_csv(tmp_path, cache, table, form):
    path, texts, plain = table
    image = {
        "bytes": {"image": plain["image"]},
        "struct": {"image": [{"bytes": each, "path": None} for each in plain["image"]]},
        "path": {"path": texts["path"]},
    }[form]
    facts = {name: texts[name] for name in ("label", "user", "split")}
    made = write(tmp_path / "t.parquet", {**image, **facts})
    images = load_table(f"{made}(size=16)", cache)
    wanted = load_table(f"{path}(size=16)", cache)
    assert same(images, wanted)
    assert images.classes == wanted.classes
    assert images.users.tolist() == wanted.users.tolist()


def test_hugging_faces_class_names_are_used(tmp_path, cache, table):
    *_, plain = table
    numbers = [{"ant": 2, "bee": 0, "cat": 1}[label] for label in plain["label"]]
    about = {"info": {"features": {"label": {"names": ["bee", "cat", "ant", "dog"], "_type": "ClassLabel"}}}}
    made = write(tmp_path / "t.parquet", plain | {"label": numbers}, metadata=about)
    images = load_table(f"{made}(size=16)", cache)
    assert images.classes == ("bee", "cat", "ant", "dog")
    train = [number for row, number in enumerate(numbers) if row % 5 != 4]
    assert images.train.labels.tolist() == train
    broken = write(tmp_path / "u.parquet", plain | {"label": [9] * 30}, metadata=about)
    with pytest.raises(UserError, match="row 0: the label is 9, but there are 4 classes"):
        load_table(f"{broken}(size=16)", cache)


def test_a_reader_finds_every_row_whatever_the_groups(tmp_path):
    contents = [bytes([n % 256]) * (n % 7 + 1) for n in range(500)]
    path = write(tmp_path / "t.parquet", {"image": contents}, groups=170)
    pictures = Parquet(path, "image", np.arange(500))
    for rows in ([499, 0, 3], [170, 171, 169], [400, 100], list(range(160, 350))):
        assert pictures.contents(rows) == [contents[row] for row in rows]


def test_a_photograph_without_bytes_is_broken(tmp_path, cache, table):
    *_, plain = table
    plain["image"][3] = None
    made = write(tmp_path / "t.parquet", plain)
    with pytest.raises(UserError, match=r"1 of 30 photographs cannot be read.*t\.parquet row 3 has no bytes"):
        load_table(f"{made}(size=16)", cache)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"x"], "name": ["a"]}, "has no column label"),
        ({"path": ["x"], "label": [True]}, "strings or numbers, not True"),
        ({"path": ["x"], "label": [[1]]}, "strings or numbers, not [1]"),
        ({"path": ["x"] * 5, "label": [None] * 5}, "the label is empty"),
        ({"path": [], "label": []}, "no rows"),
    ],
)
def test_columns_of_other_types_are_refused(tmp_path, cache, columns, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_table(str(write(tmp_path / "t.parquet", columns)), cache)


def test_whole_numbers_among_which_some_are_missing_are_read(tmp_path, cache, table):
    users = [None if row == 3 else float("nan") if row == 4 else float(row % 7) for row in range(30)]
    made = write(tmp_path / "t.parquet", table[2] | {"user": users})
    images = load_table(f"{made}(size=16)", cache)
    assert images.users.tolist() == ["" if r == 3 else str(r % 7) for r in range(30) if r % 5 != 4]


def test_large_photographs_are_read_a_few_at_a_time(tmp_path, cache, table, monkeypatch):
    path, texts, plain = table
    made = write(tmp_path / "t.parquet", plain | {"split": texts["split"]}, 100)
    average = sum(map(len, plain["image"])) / 30
    monkeypatch.setattr(photographs, "BATCH_BYTES", int(3.5 * average))
    asked, contents_of = [], Parquet.contents
    monkeypatch.setattr(Parquet, "contents", lambda self, rows: asked.append(len(rows)) or contents_of(self, rows))
    images = load_table(f"{made}(size=16)", Cache(cache.folder, 0, 0)).train.images
    assert np.array_equal(images[:], load_table(f"{path}(size=16)", cache).train.images[:])
    assert max(asked) == 3


def test_a_column_of_images_that_is_damaged_inside_is_refused(tmp_path, cache, table):
    path = write(tmp_path / "t.parquet", table[2])
    raw = bytearray(path.read_bytes())
    start = parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    raw[start : start + 12] = b"\xff" * 12
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"t\.parquet is damaged \(.*\); write it again") as caught:
        load_table(f"{path}(size=16)", cache)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_refused(tmp_path, cache, table):
    path = write(tmp_path / "t.parquet", table[2])
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[:-20], whole[:1000], b"PAR1" + bytes(3000) + whole[-200:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"is not a parquet file|is damaged|has no column"):
            load_table(f"{path}(size=16)", cache)
    with pytest.raises(UserError, match="does not exist"):
        load_table(str(tmp_path / "none.parquet"), cache)
