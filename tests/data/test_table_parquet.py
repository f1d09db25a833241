import json
import re

import numpy as np
import pytest

from photo_tables import load_table, write_table
from unskew.core import limits
from unskew.core.errors import UserError
from unskew.data import photographs
from unskew.data.photographs import Parquet
from unskew.data.store import Cache
from unskew.data.tables import read_csv

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache", 10**9, 10**8)


@pytest.fixture
def table(tmp_path):
    """A CSV and the columns of a parquet file with the same photographs as bytes."""
    path = write_table(tmp_path, 30)
    columns = read_csv(path)
    contents = [(tmp_path / name).read_bytes() for name in columns.path]
    return path, columns, contents


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
    path, columns, contents = table
    image = {
        "bytes": {"image": contents},
        "struct": {"image": [{"bytes": each, "path": None} for each in contents]},
        "path": {"path": columns.path},
    }[form]
    facts = {"label": columns.label, "user": columns.user, "split": columns.split}
    made = write(tmp_path / "t.parquet", {**image, **facts})
    images = load_table(f"{made}(size=16)", cache)
    wanted = load_table(f"{path}(size=16)", cache)
    assert same(images, wanted)
    assert images.classes == wanted.classes
    assert images.users.tolist() == wanted.users.tolist()


def test_hugging_faces_class_names_are_used(tmp_path, cache, table):
    _, columns, contents = table
    numbers = [{"ant": 2, "bee": 0, "cat": 1}[label] for label in columns.label]
    about = {"info": {"features": {"label": {"names": ["bee", "cat", "ant", "dog"], "_type": "ClassLabel"}}}}
    made = write(tmp_path / "t.parquet", {"image": contents, "label": numbers}, metadata=about)
    images = load_table(f"{made}(size=16)", cache)
    assert images.classes == ("bee", "cat", "ant", "dog")
    train = [number for row, number in enumerate(numbers) if row % 5 != 4]
    assert images.train.labels.tolist() == train
    broken = write(tmp_path / "u.parquet", {"image": contents, "label": [9] * 30}, metadata=about)
    with pytest.raises(UserError, match="row 0: the label is 9, but there are 4 classes"):
        load_table(f"{broken}(size=16)", cache)


def test_rows_beyond_the_budget_are_read_from_the_file_in_any_order(tmp_path, cache, table):
    path, columns, contents = table
    made = write(tmp_path / "t.parquet", {"image": contents, "label": columns.label, "split": columns.split})
    images = load_table(f"{made}(size=16)", Cache(cache.folder, 3000, 0)).train.images
    wanted = load_table(f"{path}(size=16)", cache).train.images
    order = np.random.default_rng(0).integers(0, len(images), 60)
    assert np.array_equal(images.take(order), wanted.take(order))


def test_a_reader_finds_every_row_whatever_the_groups(tmp_path):
    contents = [bytes([n % 256]) * (n % 7 + 1) for n in range(500)]
    path = write(tmp_path / "t.parquet", {"image": contents}, groups=170)
    pictures = Parquet(path, "image", np.arange(500))
    for rows in ([499, 0, 3], [170, 171, 169], [400, 100], list(range(160, 350))):
        assert pictures.contents(rows) == [contents[row] for row in rows]


def test_a_photograph_without_bytes_is_broken(tmp_path, cache, table):
    _, columns, contents = table
    contents[3] = None
    made = write(tmp_path / "t.parquet", {"image": contents, "label": columns.label})
    with pytest.raises(UserError, match=r"1 of 30 photographs cannot be read: .*t\.parquet row 3 has no bytes"):
        load_table(f"{made}(size=16)", cache)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"x"], "name": ["a"]}, "has no column label"),
        ({"image": [1], "label": [1]}, "give the bytes of image files"),
        ({"path": ["x"], "label": [1.5]}, "label is 1.5 in row 0; give strings or whole numbers"),
        ({"path": ["x"], "label": [True]}, "has type bool; give strings or whole numbers"),
        ({"path": [1], "label": ["a"]}, "has type int64; give strings"),
        ({"img": [b"x"], "label": ["a"]}, "rename img to path if it contains file names, or to image if"),
        ({"path": ["x"], "label": [[1]]}, "has type list"),
        ({"path": ["x"], "label": [None]}, "has type null"),
        ({"path": [], "label": []}, "has type null"),
    ],
)
def test_columns_of_other_types_are_refused(tmp_path, cache, columns, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_table(str(write(tmp_path / "t.parquet", columns)), cache)


def test_whole_numbers_among_which_some_are_missing_are_read(tmp_path, cache, table):
    _, columns, contents = table
    users = [None if row == 3 else float("nan") if row == 4 else float(row % 7) for row in range(30)]
    made = write(tmp_path / "t.parquet", {"image": contents, "label": columns.label, "user": users})
    images = load_table(f"{made}(size=16)", cache)
    assert images.users.tolist() == ["" if r == 3 else str(r % 7) for r in range(30) if r % 5 != 4]


def test_views_of_texts_and_bytes_are_read(tmp_path, cache, table):
    path, columns, contents = table
    views = {
        "image": arrow.array(contents, arrow.binary_view()),
        "label": arrow.array(columns.label, arrow.string_view()),
        "split": columns.split,
    }
    made = write(tmp_path / "t.parquet", views)
    assert same(load_table(f"{made}(size=16)", cache), load_table(f"{path}(size=16)", cache))


def test_a_path_in_the_place_of_bytes_is_said(tmp_path, cache, table):
    _, columns, contents = table
    rows = [{"bytes": None, "path": "a.jpg"}, *({"bytes": each, "path": None} for each in contents[1:])]
    made = write(tmp_path / "t.parquet", {"image": rows, "label": columns.label})
    with pytest.raises(
        UserError, match=r"row 0 has no bytes, only the path 'a.jpg'; put paths into a column called path"
    ):
        load_table(f"{made}(size=16)", cache)


def test_large_photographs_are_read_a_few_at_a_time(tmp_path, cache, table, monkeypatch):
    path, columns, contents = table
    made = write(tmp_path / "t.parquet", {"image": contents, "label": columns.label, "split": columns.split}, 100)
    average = sum(map(len, contents)) / 30
    monkeypatch.setattr(photographs, "BATCH_BYTES", int(3.5 * average))
    asked, contents_of = [], Parquet.contents
    monkeypatch.setattr(Parquet, "contents", lambda self, rows: asked.append(len(rows)) or contents_of(self, rows))
    images = load_table(f"{made}(size=16)", Cache(cache.folder, 0, 0)).train.images
    assert np.array_equal(images[:], load_table(f"{path}(size=16)", cache).train.images[:])
    assert max(asked) == 3


def test_pieces_that_do_not_fit_into_memory_are_refused(tmp_path, cache, table, monkeypatch):
    _, columns, contents = table
    made = write(tmp_path / "t.parquet", {"image": contents, "label": columns.label}, 100)
    monkeypatch.setattr(limits, "physical_memory", lambda: 2 * sum(map(len, contents)))
    with pytest.raises(UserError, match=r"read 30 rows at a time, needs .* write it again with row groups of 100 rows"):
        load_table(f"{made}(size=16)", cache)


def test_a_column_of_images_that_is_damaged_inside_is_refused(tmp_path, cache, table):
    _, columns, contents = table
    path = write(tmp_path / "t.parquet", {"image": contents, "label": columns.label})
    raw = bytearray(path.read_bytes())
    start = parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    raw[start : start + 12] = b"\xff" * 12
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"t\.parquet is damaged \(.*\); write it again") as caught:
        load_table(f"{path}(size=16)", cache)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_refused(tmp_path, cache, table):
    _, columns, contents = table
    path = write(tmp_path / "t.parquet", {"image": contents, "label": columns.label})
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[:-20], whole[:1000], b"PAR1" + bytes(3000) + whole[-200:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"is not a parquet file|is damaged|has no column"):
            load_table(f"{path}(size=16)", cache)
    with pytest.raises(UserError, match="does not exist"):
        load_table(str(tmp_path / "none.parquet"), cache)
