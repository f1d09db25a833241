import csv
import os
import shutil

import numpy as np
import pytest

import unskew
from photo_tables import HEADER, as_arrays, command, load_table, refused, write_table
from unskew.core.errors import UserError
from unskew.data import sources
from unskew.data.interface import BROKEN, DAMAGED
from unskew.data.store import cache_of
from unskew.data.tables import check_columns, read_csv


def test_a_table_is_an_image_set_with_users_and_places(tmp_path, cache):
    images = load_table(f"{write_table(tmp_path)}(size=16)", cache)
    assert images.classes == ("ant", "bee", "cat")
    assert images.shape == (3, 16, 16)
    assert (len(images.train), len(images.test)) == (32, 8)
    assert images.train.images.shape == (32, 3, 16, 16)
    assert len(images.users) == len(images.places) == 32
    assert len(images.test_users) == 8
    with open(tmp_path / "photos.csv") as file:
        rows = list(csv.DictReader(file))
    train = [row for row in rows if row["split"] == "train"]
    assert images.users.tolist() == [row["user"] for row in train]
    assert [images.classes[label] for label in images.train.labels] == [row["label"] for row in train]
    np.testing.assert_allclose(images.places[:, 0], [float(row["latitude"]) for row in train])


def test_mean_and_deviation_are_exactly_those_of_the_same_pixels_as_arrays(tmp_path, cache):
    images = load_table(f"{write_table(tmp_path)}(size=16)", cache)
    same = sources.load(as_arrays(images, tmp_path / "same.npz"), None)
    assert (images.mean, images.std) == (same.mean, same.std)
    again = load_table(f"{tmp_path / 'photos.csv'}(size=16)", cache)  # now from the kept counts
    assert (again.mean, again.std) == (same.mean, same.std)
    for counts in (tmp_path / "cache").rglob("counts-*"):
        counts.unlink()
    measured = load_table(f"{tmp_path / 'photos.csv'}(size=16)", cache)  # now from the stored pixels
    assert (measured.mean, measured.std) == (same.mean, same.std)


@pytest.mark.parametrize(
    ("method", "partition"),
    [("fedavg + ccvr", "users"), ("scaffold + fedvc(8)", "dirichlet(alpha=0.5, min_size=2)"), ("moon", "iid")],
)
def test_a_run_on_a_table_has_the_bits_of_a_run_on_the_same_pixels(tmp_path, cache, method, partition):
    table = f"table:{write_table(tmp_path)}(size=16)"
    arrays = as_arrays(sources.load(table, None, cache), tmp_path / "same.npz")
    clients = {} if partition == "users" else {"clients": 4}
    options = {
        "method": method, "partition": partition, "rounds": 2, "epochs": 1, "batch": 8, "engine": "loop",
        "augment": True, "model": "tiny-cnn", **clients,
    }  # fmt: skip
    in_memory = unskew.run(data=arrays, out=tmp_path / "a", **options)
    for name, budget in {
        "stored": {},
        "decoded": {"cache_disk": "0"},
        "bare": {"cache_disk": "0", "cache_memory": "0"},
    }.items():
        read = unskew.run(data=table, out=tmp_path / name, cache_dir=tmp_path / f"{name} cache", **budget, **options)
        assert read.weights_sha256 == in_memory.weights_sha256
        assert read.accuracy == in_memory.accuracy
        assert {n: c.accuracy for n, c in read.calibrations.items()} == {
            n: c.accuracy for n, c in in_memory.calibrations.items()
        }


def test_everything_after_a_run_works_on_a_table_that_may_move(tmp_path):
    table = f"table:{write_table(tmp_path)}(size=16)"
    options = {"data": table, "partition": "users", "rounds": 2, "epochs": 1, "model": "tiny-cnn", "engine": "loop"}
    whole = unskew.run(out=tmp_path / "whole", **options)
    unskew.calibrate_run(tmp_path / "whole", "ccvr(per_class=20)", "oracle")
    unskew.analyse(
        tmp_path / "whole", "cka(clients=2)", "inversion(examples=1, steps=5)", "projection", "confusion", "skew"
    )
    unskew.write_report(tmp_path / "whole")
    assert (tmp_path / "whole" / "report.html").stat().st_size > 10_000
    with pytest.raises(unskew.StopRun):
        unskew.run(
            out=tmp_path / "run", observe=lambda e: unskew.STOP if getattr(e, "round", 0) == 1 else None, **options
        )
    moved = tmp_path / "there"
    moved.mkdir()
    for entry in ("photos.csv", "pictures"):
        (tmp_path / entry).rename(moved / entry)
    with pytest.raises(UserError, match=r"photos.csv does not exist; if it has moved, give its new folder as --data-"):
        unskew.resume(tmp_path / "run")
    said = []
    assert unskew.resume(tmp_path / "run", data_dir=moved, observe=said.append).weights_sha256 == whole.weights_sha256
    (overview,) = (event for event in said if hasattr(event, "images"))
    assert any("no longer exists; reading it from" in note for note in overview.images.notes)
    unskew.calibrate_run(tmp_path / "run", "lda", data_dir=moved)  # the same pixels, wherever they are


def test_every_fifth_row_is_test_without_a_split_and_a_note_says_so(tmp_path, cache):
    images = load_table(f"{write_table(tmp_path, 10, columns=('path', 'label'))}(size=8)", cache)
    assert (len(images.train), len(images.test)) == (8, 2)
    assert images.users is images.places is None
    assert any("every fifth row is used for testing" in note for note in images.notes)


def test_a_validation_part_is_left_out_with_a_note(tmp_path, cache):
    path = write_table(tmp_path, 20)
    text = path.read_text().splitlines()
    path.write_text("\n".join([text[0], *(line.replace("train", "val") for line in text[1:4]), *text[4:]]))
    images = load_table(f"{path}(size=8)", cache)
    assert len(images.train) == 13
    assert any("3 rows with split validation" in note for note in images.notes)


def test_whole_numbers_keep_their_order_and_texts_are_sorted(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("path,label\n" + "".join(f"x,{label}\n" for label in (10, 9, 2, 10, 9)))
    assert check_columns(read_csv(path)).classes == ("2", "9", "10")
    path.write_text("path,label\n" + "".join(f"x,{label}\n" for label in ("b", "a", "10", "9", "a")))
    assert check_columns(read_csv(path)).classes == ("10", "9", "a", "b")


GOOD = f"{','.join(HEADER)}\na.png,bee,u,,,test\n"
TABLES = {
    "": "has no column label; other columns: none",
    "path,category": "has no column label; other columns: category (rename it to label?)",
    "filename,label": "has no column path; other columns: filename (rename it to path?)",
    "path,label,latitude": "has no column longitude",
    "image,label": "has no column path",
    GOOD + "x.png,ant,u,1,2,nowhere": "line 3: split is 'nowhere'; give train, test or validation",
    GOOD + "x.png,,u,1,2,train": "line 3: the label is empty",
    GOOD + "x.png,ant,u,91,2,train": "line 3: the latitude is '91'; give degrees from -90 to 90",
    GOOD + "x.png,ant,u,north,2,train": "line 3: the latitude is 'north'",
    GOOD + "x.png,ant,u,1,181,train": "line 3: the longitude is '181'",
    GOOD + "x.png,ant": "line 3 has 2 values for 6 columns",
    GOOD + 'x.png,"ant': "is not a CSV file in UTF-8: unexpected end of data",
}


@pytest.mark.parametrize("content", TABLES)
def test_a_header_is_checked_by_name_and_a_line_is_named_where_it_is_wrong(tmp_path, cache, content):
    (tmp_path / "t.csv").write_text(content + "\n")
    assert TABLES[content] in refused(load_table, tmp_path / "t.csv", cache)


def test_equal_photographs_and_those_with_two_labels_are_noted(tmp_path, cache):
    write_table(tmp_path, 4)
    shutil.copy(tmp_path / "pictures" / "0.png", tmp_path / "copy.png")
    lines = [
        "pictures/0.png,x,train", "pictures/1.png,y,train", "copy.png,x,test", "pictures/1.png,x,train",
        "pictures/2.png,y,test", "pictures/2.png,y,validation",
    ]  # fmt: skip
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split", *lines]) + "\n")
    notes = load_table(f"{tmp_path / 't.csv'}(size=8)", cache).notes
    assert "2 repeated photographs, 1 of them in both train and test" in notes
    assert f"1 photograph with several labels: {tmp_path / 'pictures' / '1.png'} (x, y)" in notes


def test_what_is_not_a_table_is_refused(tmp_path, cache):
    path = tmp_path / "t.csv"
    assert "No such file" in refused(load_table, path, cache)
    path.write_bytes("path,label\n\xe9,1\n".encode("latin-1"))
    assert "is not a CSV file in UTF-8" in refused(load_table, path, cache)
    path.write_text("path,label\n")
    assert "has a header but no rows" in refused(load_table, path, cache)
    assert "is not a table; give FILE.csv or FILE.parquet" in refused(load_table, tmp_path / "t.xlsx", cache)
    path.unlink()
    os.mkfifo(path)
    assert "it is not a regular file" in refused(load_table, path, cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("(size=0)", "size must be 1 to 4096"),
        ("(size=big)", "data set table: size must be a whole number, not big"),
        ("(broken=mend)", "broken must be stop or skip"),
        ("(colour=grey)", "data set table has no knob 'colour'; choose from: size, broken"),
        ("(size=8, size=9)", "size is given twice"),
        ("(size=)", "expected a value"),
    ],
)
def test_the_options_are_checked(tmp_path, cache, options, message):
    with pytest.raises(UserError, match=message):
        load_table(f"{write_table(tmp_path, 5)}{options}", cache)


def test_photographs_of_different_sizes_get_the_networks_input_size(tmp_path, cache):
    path = write_table(tmp_path, 10)
    images = sources.load(f"table:{path}", None, cache, side=48)
    assert images.shape == (3, 48, 48)
    note = next(note for note in images.notes if "different sizes" in note)
    assert "0.png is" in note
    assert "all are scaled and cropped to 48×48" in note
    assert note.endswith("(size=48) fixes it for every network")
    write_table(tmp_path, 10, low=24, high=25)
    assert load_table(str(path), cache).shape == (3, 24, 24), "of one size: as they are"
    write_table(tmp_path, 10, low=600, high=601)
    assert any("large (600×600)" in note for note in load_table(str(path), cache).notes)


def test_semicolons_tabs_and_a_byte_order_mark_are_read(tmp_path, cache):
    path = write_table(tmp_path, 5)
    for separator in ";\t":
        path.write_text("\ufeff" + path.read_text().replace("\ufeff", "").replace(",", separator))
        assert len(load_table(f"{path}(size=8)", cache).train) == 4
        path.write_text(path.read_text().replace(separator, ","))
    plain = path.read_text().replace("\ufeff", "").replace(",", "\t")
    path.write_text(plain, encoding="utf-16")  # Excel's "Unicode text"
    assert len(load_table(f"{path}(size=8)", cache).train) == 4
    numbers = plain.replace("\t", ";").replace(".", ",").replace(",png", ".png")  # and its decimal commas
    path.write_text(f"sep=;\n{numbers}")
    assert load_table(f"{path}(size=8)", cache).places is not None


def test_columns_that_are_not_used_are_noted(tmp_path, cache):
    path = write_table(tmp_path, 5, columns=("path", "label"))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0] + ",user_id,weather", *(line + ",u,x" for line in lines[1:])]))
    notes = load_table(f"{path}(size=8)", cache).notes
    assert any("unused columns: user_id (rename it to user?), weather" in note for note in notes)


def test_broken_photographs_are_named_counted_and_refused_or_left_out(tmp_path, cache):
    path = write_table(tmp_path, 20)
    (tmp_path / "pictures" / "3.png").write_text("not a picture")
    (tmp_path / "pictures" / "7.png").unlink()
    (tmp_path / "pictures" / "9.png").write_bytes(b"")
    message = refused(load_table, f"{path}(size=8)", cache)
    assert "3 of 20 photographs cannot be read" in message
    assert "pictures/3.png is not a picture" in message
    assert "pictures/7.png cannot be read (No such file" in message
    assert "pictures/9.png is empty" in message
    assert "leave them out: table:" in message
    images = load_table(f"{path}(size=8, broken=skip)", cache)
    assert (len(images.train), len(images.test)) == (14, 3)
    assert any("3 of 20 photographs cannot be read and are skipped" in note for note in images.notes)
    assert len(images.users) == len(images.train.images) == 14


def test_the_check_of_a_table_counts_its_photographs(tmp_path, cache):
    path = write_table(tmp_path, 10)
    (found,) = sources.check(f"table:{path}(size=8)", None, cache)
    assert found.whole
    assert "8 training and 2 test images" in found.detail
    for number in range(7):
        (tmp_path / "pictures" / f"{number}.png").write_text("no")
    *broken, whole = sources.check(f"table:{path}(size=8)", None, cache)
    assert [each.path for each in broken] == [str(tmp_path / "pictures" / f"{number}.png") for number in range(7)]
    assert {(each.status, each.detail) for each in broken} == {(BROKEN, "is not a picture")}
    assert whole.status == DAMAGED
    assert whole.detail.startswith("7 of 10 photographs cannot be read; replace them, or leave them out: table:")
    with pytest.raises(UserError, match=r"no.csv cannot be read: No such file .*; give the path to a table"):
        sources.check(f"table:{tmp_path / 'no.csv'}", None, cache)


def test_a_partition_is_made_without_reading_the_photographs(tmp_path, capsys):
    path = write_table(tmp_path, 30)
    named, whole = str(tmp_path / "a.npz"), str(tmp_path / "b.npz")
    for picture in (tmp_path / "pictures").iterdir():
        if picture.stem == "3":
            picture.write_text("no")
    for name, said in ((f"table:{path}", "24 examples"), (f"table:{path}(size=8, broken=skip)", "23 examples")):
        where = ["--cache-dir", str(tmp_path / "cache"), "--partition", "iid", "--clients", "1"]
        code, words, _ = command(capsys, "partition", "--data", name, *where, "--out", named)
        assert (code, said in words) == (0, True)
    for picture in (tmp_path / "pictures").iterdir():
        picture.unlink()
    assert command(capsys, "partition", "--data", f"table:{path}", "--partition", "users", "--out", whole)[0] == 0
    with np.load(whole) as found:
        assert len(found["client"]) == 24


def test_the_budgets_are_read_and_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("UNSKEW_CACHE", str(tmp_path))
    made = cache_of(None, "1.5GB", "2MB")
    assert (made.folder, made.disk, made.memory) == (tmp_path, 1_500_000_000, 2_000_000)
    for name in ("cache_disk", "cache_memory"):
        with pytest.raises(UserError, match="give a size such as 8GB"):
            unskew.run(**{name: "much"})
