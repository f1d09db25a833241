"""Partitions to files and back; what is foreign, changed or damaged is named."""

import csv
import hashlib

import numpy as np
import pytest

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.partition_files import from_arrays, from_csv, read_partition, to_arrays, to_csv_rows
from unskew.data.population import Partition, emd, number_users

LABELS = np.arange(600) * 7 % 10
MADE = partition_examples("dirichlet(0.5, min_size=3)", LABELS, clients=8, key=Key(3), classes=10)
ARRAYS = to_arrays(MADE, LABELS, 10)


def saved(path, arrays=ARRAYS):
    np.savez_compressed(path, **arrays)
    return path


def read(path, labels=LABELS, clients=None, seed=0):
    return partition_examples(f"file:{path}", labels, clients=clients, key=Key(seed), classes=10)


# The artefact


def test_the_artefact_holds_sizes_label_counts_and_emd():
    assert ARRAYS["sizes"].tolist() == np.bincount(MADE.client, minlength=8).tolist()
    assert ARRAYS["emd"] == emd(MADE.client, LABELS, 10)
    client, label, count = ARRAYS["counts"][0]
    assert count == ((MADE.client == client) & (label == LABELS)).sum()
    assert ARRAYS["counts"][:, 2].sum() == 600


def test_the_artefact_gives_the_partition_again_with_names_and_a_long_seed(tmp_path):
    users = np.array(["zoë", "a,b", "日本"])[np.arange(600) % 3]
    made = partition_examples("users", LABELS, clients=None, key=Key(2**80), users=users, classes=10)
    for partition in (made, MADE):
        again = from_arrays(dict(np.load(saved(tmp_path / "p.npz", to_arrays(partition, LABELS, 10)))), LABELS, 10)
        assert again.client.tolist() == partition.client.tolist()
        for field in ("clients", "scheme", "seed", "hash", "names", "redraws", "notes"):
            assert getattr(again, field) == getattr(partition, field)
    assert (made.names, made.seed) == (("a,b", "zoë", "日本"), 2**80)


def test_the_hash_covers_the_clients_and_their_number():
    written = bytes.fromhex("00000000 01000000 ffffffff 0200000000000000")
    client = np.array([0, 1, -1], np.int32)
    assert Partition(client, 2, "by hand", 0).hash == hashlib.sha256(written).hexdigest()
    assert Partition(client, 3, "by hand", 0).hash != Partition(client, 2, "by hand", 0).hash


def test_a_file_keeps_its_text_as_scheme_and_notes_how_it_was_made(tmp_path):
    path = saved(tmp_path / "p.npz")
    found = read(path, clients=8)
    assert found.hash == MADE.hash
    assert (found.scheme, found.seed) == (f"file:{path}", 3)
    assert found.notes == ("made as dirichlet(alpha=0.5, min_size=3) with seed 3",)


@pytest.mark.parametrize(
    "change",
    [
        {"client": ARRAYS["client"].astype(float)},
        {"client": ARRAYS["client"][None]},
        {"client": ARRAYS["client"] - 2},
        {"clients": np.array(7)},
        {"clients": np.array(-1)},
        {"clients": np.array([1, 2])},
        {"hash": np.array("abc")},
        {"names": np.array(["a", "b"])},
        {"seed": np.array("first")},
    ],
)
def test_an_artefact_with_a_wrong_field_is_refused(tmp_path, change):
    with pytest.raises(UserError, match=r"p\.npz is damaged, or not an Unskew partition"):
        read(saved(tmp_path / "p.npz", {**ARRAYS, **change}))


def test_an_artefact_for_other_data_is_refused(tmp_path):
    path = saved(tmp_path / "p.npz")
    for labels in (LABELS[:500], (LABELS + 1) % 10):
        with pytest.raises(UserError, match="was made for 600 examples, or other labels than the training set's"):
            read(path, labels)


def test_a_foreign_npz_is_refused_and_nothing_is_unpickled(tmp_path):
    with pytest.raises(UserError, match=r"p\.npz is damaged, or not an Unskew partition: 'client'"):
        read(saved(tmp_path / "p.npz", {"images": np.zeros(3)}))
    np.savez(tmp_path / "o.npz", client=np.array([{}], dtype=object))
    with pytest.raises(UserError, match=r"o\.npz cannot be read as a partition"):
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


# The published CSV


def from_text(tmp_path, text, labels=(6, 9, 9, 4)):
    (tmp_path / "s.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return from_csv(tmp_path / "s.csv", np.array(labels), seed=0)


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
def test_a_published_csv_is_read_whatever_its_line_ends_marks_and_order(tmp_path, text):
    found = from_text(tmp_path, text)
    assert found.names == ("3", "12")  # as numbers, not as text
    assert found.client.tolist() == [1, 0, 1, 0]
    assert (found.clients, found.notes, found.scheme) == (2, (), f"file:{tmp_path}/s.csv")


def test_a_csv_of_some_examples_leaves_the_rest_to_nobody_and_notes_it(tmp_path):
    found = from_text(tmp_path, "user_id,image_id,class\na,3,4\nb,0,6\n")
    assert found.client.tolist() == [1, -1, -1, 0]
    assert found.notes == ("2 of 4 training examples are not in the file and belong to no client",)


HEADER = "user_id,image_id,class\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no column 'user_id'"),
        (HEADER, "has no rows"),
        (HEADER + "a,0\n", "line 2 has 2 values for 3 columns"),
        (HEADER + "a,0,6\nb,x.jpg,9\n", "must be whole numbers .*'x.jpg'"),
        (HEADER + "a,0,frog\n", "must be whole numbers .*'frog'"),
        (HEADER + "a,0,6\nb,4,9\n", "one of the rows 0 to 3 of the training set"),
        (HEADER + "a,-1,6\n", "one of the rows 0 to 3"),
        (HEADER + "a,99999999999999999999,6\n", "must be whole numbers"),
        (HEADER + "a,0,6\nc,0,6\n", "and appear once"),
        (HEADER + "a,0,6\nb,1,8\nc,3,0\n", "its classes are not the training set's"),
        (b"\x89PNG\r\n\x1a\n\x00", "not a CSV file in UTF-8"),
    ],
)
def test_a_wrong_csv_is_refused(tmp_path, text, complaint):
    with pytest.raises(UserError, match=rf"s\.csv.*{complaint}"):
        from_text(tmp_path, text)


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


def test_without_the_table_the_message_explains_how_to_give_one(tmp_path):
    for split in (SPLIT, SPLIT.replace("17", "0f")):
        (tmp_path / "split.csv").write_text(split)
        with pytest.raises(UserError, match=r"file:SPLIT\.csv\(ids=TABLE\.csv\), with the columns image_id,row"):
            read(tmp_path / "split.csv", np.array([6, 9, 9, 4]))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ids": IDS.replace("17,0", "18,0")}, r"rows\.csv has no image_id '17'"),
        ({"ids": IDS.replace("17,0", "17,4")}, "one of the rows 0 to 3"),
        ({"ids": IDS.replace("17,0", "17,1.5")}, "must be whole numbers"),
        ({"ids": IDS.replace("17,0", "17,2")}, "appear once"),
        ({"ids": "id,row\n17,0\n"}, r"rows\.csv .* no column 'image_id'"),
        ({"split": SPLIT.replace("ff00", "17")}, "appear once"),
        ({"labels": (6, 9, 6, 4)}, "its classes are not the training set's"),
        ({"labels": (6, 8, 9, 4)}, "its classes are not the training set's"),
    ],
)
def test_a_table_or_a_split_that_does_not_fit_is_refused(tmp_path, change, complaint):
    with pytest.raises(UserError, match=complaint):
        with_ids(tmp_path, **change)


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
