"""Partitions to files and back; what is foreign, changed or damaged is named."""

import csv

import numpy as np
import pytest

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.partition_files import from_arrays, from_csv, read_partition, to_arrays, to_csv_rows
from unskew.data.population import emd, number_users

LABELS = np.arange(600) * 7 % 10
MADE = partition_examples("dirichlet(0.5, min_size=3)", LABELS, clients=8, key=Key(3), classes=10)
ARRAYS = to_arrays(MADE, LABELS, 10)


def saved(path, arrays=ARRAYS):
    np.savez_compressed(path, **arrays)
    return path


def read(path, labels=LABELS, clients=None, seed=0):
    return partition_examples(f"file:{path}", labels, clients=clients, key=Key(seed), classes=10)


# The artefact


def test_the_artefact_gives_the_partition_again():
    again = from_arrays(ARRAYS, LABELS, 10)
    for field in ("clients", "scheme", "seed", "hash", "names", "redraws", "notes"):
        assert getattr(again, field) == getattr(MADE, field)
    assert again.client.tolist() == MADE.client.tolist()


def test_the_artefact_holds_sizes_label_counts_and_emd():
    assert ARRAYS["sizes"].tolist() == np.bincount(MADE.client, minlength=8).tolist()
    assert ARRAYS["emd"] == emd(MADE.client, LABELS, 10)
    client, label, count = ARRAYS["counts"][0]
    assert count == ((MADE.client == client) & (label == LABELS)).sum()
    assert ARRAYS["counts"][:, 2].sum() == 600


def test_the_artefact_of_100_000_clients_and_1203_classes_is_small():
    labels = np.arange(300_000) % 1203
    made = partition_examples("iid", labels, clients=100_000, key=Key(0), classes=1203)
    assert sum(array.nbytes for array in to_arrays(made, labels, 1203).values()) < 8_000_000


def test_names_notes_and_a_long_seed_survive(tmp_path):
    users = np.array(["zoë", "a,b", "日本"])[np.arange(600) % 3]
    made = partition_examples("users", LABELS, clients=None, key=Key(2**80), users=users, classes=10)
    again = from_arrays(dict(np.load(saved(tmp_path / "p.npz", to_arrays(made, LABELS, 10)))), LABELS, 10)
    assert (again.names, again.seed) == (("a,b", "zoë", "日本"), 2**80)


def test_a_file_keeps_its_text_as_scheme_and_notes_how_it_was_made(tmp_path):
    path = saved(tmp_path / "p.npz")
    found = read(path, clients=8)
    assert found.hash == MADE.hash
    assert (found.scheme, found.seed) == (f"file:{path}", 3)
    assert found.notes == ("made as dirichlet(alpha=0.5, min_size=3) with seed 3",)


def test_another_number_of_clients_than_the_files_is_refused(tmp_path):
    with pytest.raises(UserError, match="has 8 clients, but --clients asks for 9"):
        read(saved(tmp_path / "p.npz"), clients=9)


def test_a_changed_artefact_is_detected(tmp_path):
    changed = ARRAYS["client"].copy()
    changed[5] = (changed[5] + 1) % 8
    with pytest.raises(UserError, match=r"p\.npz was modified after it was written") as error:
        read(saved(tmp_path / "p.npz", {**ARRAYS, "client": changed}))
    assert "dirichlet(alpha=0.5, min_size=3), seed 3" in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"client": ARRAYS["client"].astype(float)}, "whole numbers"),
        ({"client": ARRAYS["client"][None]}, "whole numbers"),
        ({"client": ARRAYS["client"] - 2}, "clients must be between"),
        ({"clients": np.array(7)}, "clients must be between"),
        ({"clients": np.array(-1)}, "clients must be between"),
        ({"clients": np.array([1, 2])}, "not an Unskew partition"),
        ({"clients": np.array(9)}, "was modified"),
        ({"hash": np.array("abc")}, "was modified"),
        ({"names": np.array(["a", "b"])}, "2 names for 8 clients"),
        ({"seed": np.array("first")}, "not an Unskew partition"),
    ],
)
def test_an_artefact_with_a_wrong_field_is_refused_by_name(tmp_path, change, says):
    with pytest.raises(UserError, match=says) as error:
        read(saved(tmp_path / "p.npz", {**ARRAYS, **change}))
    assert "p.npz" in str(error.value)


def test_an_artefact_for_other_data_is_refused(tmp_path):
    path = saved(tmp_path / "p.npz")
    with pytest.raises(UserError, match="assigns 600 examples, but the training set has 500"):
        read(path, LABELS[:500])
    with pytest.raises(UserError, match="other labels"):
        read(path, (LABELS + 1) % 10)


def test_a_foreign_npz_is_refused_and_nothing_is_unpickled(tmp_path):
    with pytest.raises(UserError, match=r"p\.npz is not an Unskew partition: it has no client"):
        read(saved(tmp_path / "p.npz", {"images": np.zeros(3)}))
    np.savez(tmp_path / "o.npz", client=np.array([{}], dtype=object))
    with pytest.raises(UserError, match=r"o\.npz is damaged"):
        read(tmp_path / "o.npz")


def test_an_artefact_damaged_anywhere_is_refused_or_unharmed(tmp_path):
    whole = saved(tmp_path / "p.npz").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        harmed = bytearray(whole)
        harmed[rng.integers(2, len(whole))] ^= int(rng.integers(1, 256))
        (tmp_path / "h.npz").write_bytes(harmed[: rng.integers(len(whole) // 2, 2 * len(whole))])
        try:
            outcome = read(tmp_path / "h.npz").hash
        except UserError as error:
            outcome = str(error)
        assert outcome == MADE.hash or "h.npz" in outcome


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.npz cannot be read: No such file"):
        read(tmp_path / "none.npz")
    with pytest.raises(UserError, match="cannot be read: it is a folder"):
        read(tmp_path)


# The published CSV


def from_text(text, labels=(6, 9, 9, 4)):
    content = text if isinstance(text, bytes) else text.encode()
    return from_csv(content, np.array(labels), name="s.csv", seed=0)


ROWS = "user_id,image_id,class\n12,0,6\n3,1,9\n12,2,9\n3,3,4\n"


@pytest.mark.parametrize(
    "text",
    [
        ROWS,
        ROWS.rstrip(),
        ROWS.replace("\n", "\r\n"),
        b"\xef\xbb\xbf" + ROWS.encode(),
        ROWS.replace("\n3,1,9", "\n\n3 , 1 ,9 "),
        "class,note,user_id,image_id\n4,x,3,3\n6,x,12,0\n9,x,3,1\n9,x,12,2\n",
        '"user_id","image_id","class"\n"12",0,6\n3,"1",9\n12,2,9\n3,3,4\n',
    ],
)
def test_a_published_csv_is_read_whatever_its_line_ends_marks_and_order(text):
    found = from_text(text)
    assert found.names == ("3", "12")  # as numbers, not as text
    assert found.client.tolist() == [1, 0, 1, 0]
    assert (found.clients, found.notes, found.scheme) == (2, (), "file:s.csv")


def test_user_ids_may_be_any_text():
    found = from_text('user_id,image_id,class\n"Doe, J.",0,6\n日本,1,9\n007,2,9\n,3,4\n')
    assert found.names == ("", "007", "Doe, J.", "日本")


def test_a_csv_of_some_examples_leaves_the_rest_to_nobody_and_notes_it():
    found = from_text("user_id,image_id,class\na,3,4\nb,0,6\n")
    assert found.client.tolist() == [1, -1, -1, 0]
    assert found.notes == ("2 of 4 training examples are not in the file and belong to no client",)


HEADER = "user_id,image_id,class\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no column 'user_id'; its first line must contain user_id, image_id, class"),
        ("user_id,image\n1,2\n", "has no column 'image_id'"),
        (HEADER, "has a header but no rows"),
        (HEADER + "a,0\n", "line 2: 2 fields, but the header has 3"),
        (HEADER + "a,0,6\nb,x.jpg,9\n", "line 3: image_id must be a whole number, not 'x.jpg'"),
        (HEADER + "a,0,frog\n", "line 2: class must be a whole number, not 'frog'"),
        (HEADER + "a,0,6\nb,4,9\n", "line 3: image_id 4 is outside the training set, whose rows are 0 to 3"),
        (HEADER + "a,-1,6\n", "line 2: image_id -1 is outside"),
        (HEADER + "a,99999999999999999999,6\n", "line 2: image_id 99999999999999999999 is outside"),
        (HEADER + "a,0,6\nb,1,9\nc,0,6\nd,1,9\n", "line 4: image_id 0 appears a second time"),
        (HEADER + "a,0,6\nb,1,8\nc,3,0\n", "line 3: image_id 1 has class 8 in the file and 9 in the training set"),
        (HEADER.encode() + b"\xff,0,6\n", "not a CSV file in UTF-8"),
        (b"\x89PNG\r\n\x1a\n\x00", "not a CSV file in UTF-8"),
    ],
)
def test_a_wrong_csv_is_refused_at_its_first_wrong_line(text, says):
    with pytest.raises(UserError, match=says) as error:
        from_text(text)
    assert "s.csv" in str(error.value)


# Ids of the original data set, as in the published splits of iNaturalist and Landmarks

IDS = "image_id,row\n9ad8,2\n17,0\nff00,1\nunused,3\n"
SPLIT = "user_id,image_id,class\nann,17,0\nbob,9ad8,7\nann,ff00,7\n"


def with_ids(tmp_path, split=SPLIT, ids=IDS, labels=(6, 9, 9, 4)):
    (tmp_path / "split.csv").write_text(split)
    (tmp_path / "rows.csv").write_text(ids)
    return read(f'{tmp_path}/split.csv(ids="{tmp_path}/rows.csv")', np.array(labels))


def test_ids_of_the_original_data_set_are_read_with_the_table_of_their_rows(tmp_path):
    found = with_ids(tmp_path)
    assert found.names == ("ann", "bob")
    assert found.client.tolist() == [0, 0, 1, -1]
    assert found.notes == ("1 of 4 training examples are not in the file and belong to no client",)
    assert found.scheme == f'file:{tmp_path}/split.csv(ids="{tmp_path}/rows.csv")'


def test_without_the_table_the_message_says_how_to_give_one(tmp_path):
    (tmp_path / "split.csv").write_text(SPLIT)
    with pytest.raises(UserError, match=r"image_id 17 is outside.*file:SPLIT\.csv\(ids=TABLE\.csv\).*image_id,row"):
        read(tmp_path / "split.csv", np.array([6, 9, 9, 4]))
    (tmp_path / "split.csv").write_text(SPLIT.replace("17", "0f"))
    with pytest.raises(UserError, match=r"must be a whole number, not '0f'; ids of the original data set"):
        read(tmp_path / "split.csv", np.array([6, 9, 9, 4]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ids": IDS.replace("17,0", "18,0")}, r"split\.csv, line 2: .*rows\.csv has no image_id 17"),
        ({"ids": IDS.replace("17,0", "17,4")}, r"rows\.csv, line 3: row 4 is outside the training set"),
        ({"ids": IDS.replace("17,0", "17,-1")}, "row -1 is outside"),
        ({"ids": IDS.replace("17,0", "17,1.5")}, "row must be a whole number, not '1.5'"),
        ({"ids": IDS.replace("17,0", "17,2")}, r"rows\.csv, line 3: row 2 appears twice"),
        ({"ids": IDS.replace("17,0", "9ad8,0")}, r"rows\.csv, line 3: image_id 9ad8 appears twice"),
        ({"ids": "id,row\n17,0\n"}, r"rows\.csv has no column 'image_id'; its first line must contain image_id, row"),
        ({"split": SPLIT.replace("ff00", "17")}, r"split\.csv, line 4: image_id 17 appears a second time"),
        (
            {"labels": (6, 9, 6, 4)},
            "line 3: image_id 9ad8 has class 7 .* and 6 .* but label 6 belongs to class 0 above",
        ),
        ({"labels": (6, 8, 9, 4)}, "line 4: image_id ff00 has class 7 .* and 8 .* but class 7 has the label 9 above"),
    ],
)
def test_a_table_or_a_split_that_does_not_fit_is_refused_at_its_line(tmp_path, change, says):
    with pytest.raises(UserError, match=says):
        with_ids(tmp_path, **change)


def test_a_table_of_ids_is_for_a_csv(tmp_path):
    with pytest.raises(UserError, match=r"is an \.npz file, which has rows instead of ids"):
        read(f"{saved(tmp_path / 'p.npz')}(ids=rows.csv)")
    with pytest.raises(UserError, match="has no file name"):
        read("split.csv(ids='')")


def test_a_drawn_partition_survives_the_csv(tmp_path):
    path = tmp_path / "split.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(to_csv_rows(MADE, LABELS))
    found = read(path, clients=8)
    assert found.hash == MADE.hash
    assert read_partition(path, LABELS, 10, seed=5).seed == 5


def test_users_are_numbered_as_numbers_only_if_all_are():
    assert number_users(np.array(["10", "9", "100"]))[1] == ("9", "10", "100")
    assert number_users(np.array(["10", "9", "x"]))[1] == ("10", "9", "x")
    assert number_users(np.array(["10", "9", "09"]))[1] == ("09", "10", "9")
