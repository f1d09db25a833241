"""Rows from annotation files as they are distributed: iNaturalist-2017, Google Landmarks v2, published splits."""

import csv
import json
import zipfile

import numpy as np
import pytest

from unskew.console.main import app
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data import federated_vision, sources
from unskew.data.federated_vision import core
from unskew.data.partition import partition_examples
from unskew.runs import config as configs
from unskew.runs.config import Config

# iNaturalist: 4 classes with 7, 5, 4 and 2 training examples, and 2 test examples each

FREQUENCY = {10: 7, 11: 5, 12: 4, 13: 2}


def inat_part(first, frequency):
    category = [c for c, count in frequency.items() for _ in range(count)]
    return {
        "info": {"year": 2017},
        "licenses": [],
        "images": [
            {"id": first + n, "width": 800, "file_name": f"train_val_images/{c}/{first + n}.jpg"}
            for n, c in enumerate(category)
        ],
        "categories": [{"id": c, "name": f"species {c}", "supercategory": "Aves"} for c in FREQUENCY],
        "annotations": [{"id": n, "image_id": first + n, "category_id": c} for n, c in enumerate(category)],
    }


def inat_files():
    train, val = inat_part(100, FREQUENCY), inat_part(500, dict.fromkeys(FREQUENCY, 2))
    files = {"train2017.json": train, "val2017.json": val}
    for name, part in (("train", train), ("val", val)):
        files[f"{name}2017_locations.json"] = [
            {"id": image["id"], "lat": image["id"] / 10, "lon": -image["id"] / 10, "user_id": image["id"] % 3}
            for image in part["images"]
        ]
    return files


@pytest.fixture
def inat(tmp_path):
    """Writes the files of iNaturalist into a data folder, perhaps changed."""

    def write(change=lambda files: None, folder="inaturalist"):
        files = inat_files()
        change(files)
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, content in files.items():
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            (tmp_path / folder / name).write_bytes(raw)
        return tmp_path

    return write


def test_classes_with_too_few_examples_are_left_out_and_the_others_are_drawn_down(inat):
    rows = sources.load_rows("inaturalist(balance=4)", inat())
    assert rows.classes == ("species 10", "species 11", "species 12")
    assert np.bincount(rows.labels[~rows.test]).tolist() == [4, 4, 4]
    assert np.bincount(rows.labels[rows.test]).tolist() == [2, 2, 2]
    for path, label in zip(rows.paths, rows.labels, strict=True):
        assert rows.classes[label] == f"species {path.split('/')[1]}"
    number = np.array([int(path.split("/")[2][:3]) for path in rows.paths])
    assert rows.users.tolist() == [str(n % 3) for n in number]
    assert np.allclose(rows.places[:, 0], number / 10)
    assert np.allclose(rows.places[:, 1], -number / 10)
    assert (number[~rows.test] < 500).all()
    assert rows.notes == (
        "3 of 4 classes have 4 training examples; 4 examples of each were drawn (seed 0)",
        "test: at most 30 validation images per class, 6 in total",
    )
    one = sources.load_rows("inaturalist(balance=4, test=1)", inat())
    assert np.bincount(one.labels[one.test]).tolist() == [1, 1, 1]
    assert set(np.array(one.paths)[~one.test]) == set(np.array(rows.paths)[~rows.test])


def test_without_a_knob_classes_need_100_examples_as_in_the_paper(inat):
    with pytest.raises(UserError, match=r"\(balance=100\): only 0 of 4 classes .*; give a smaller balance"):
        sources.load_rows("inaturalist", inat())

    def enough(files):
        files["train2017.json"] = inat_part(1000, {10: 130, 11: 100, 12: 99})

    rows = sources.load_rows("inaturalist", inat(enough))
    assert np.bincount(rows.labels[~rows.test]).tolist() == [100, 100]


def test_annotations_are_read_from_their_archives(inat, tmp_path):
    plain = sources.load_rows("inaturalist(balance=4)", inat())
    folder = tmp_path / "inaturalist"
    for archive, names in {
        "train_val2017.zip": ["train2017.json", "val2017.json"],
        "inat2017_locations.zip": ["train2017_locations.json", "val2017_locations.json"],
    }.items():
        with zipfile.ZipFile(folder / archive, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in names:
                packed.write(folder / name, f"inside/{name}")
                (folder / name).unlink()
    packed = sources.load_rows("inaturalist(balance=4)", tmp_path)
    assert packed.paths == plain.paths
    assert np.array_equal(packed.places, plain.places)


def test_a_photograph_without_user_or_place_has_none(inat):
    def lose(files):
        files["train2017_locations.json"][0] |= {"lat": None, "lon": None, "user_id": None}
        del files["train2017_locations.json"][1]

    rows = sources.load_rows("inaturalist(balance=0)", inat(lose))
    assert rows.users[:3].tolist() == ["", "", "0"]
    assert np.isnan(rows.places[:2]).all()
    assert not np.isnan(rows.places[2:]).any()
    train = ~rows.test
    found = partition_examples(
        "users", rows.labels[train], clients=None, key=Key(0), users=rows.users[train], classes=4
    )
    assert found.names == ("0", "1", "2")
    assert found.client[:3].tolist() == [-1, -1, 0]
    assert found.notes == ("not assigned to any client: 2 training examples without a user",)


def remove(name):
    return lambda files: files.pop(name)


def put(name, **entry):
    return lambda files: files[name]["images"][0].update(entry)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove("val2017.json"), "val2017.json cannot be read: No such file or directory; get it from"),
        (remove("train2017_locations.json"), "train2017_locations.json cannot be read: No such file"),
        (lambda files: files.update({"train2017.json": b'{"images": [{"id": 1,'}), "train2017.json is damaged"),
        (lambda files: files["train2017.json"].pop("annotations"), "missing required field `annotations`"),
        (lambda files: files["train2017.json"]["annotations"].pop(), "has an image without an annotation"),
        (lambda files: files["train2017.json"]["categories"].pop(0), "an annotation has an unknown category"),
        (lambda files: files["train2017.json"].update(images=[]), "only 0 of 0 classes"),
        (put("train2017.json", id=101), "lists an image twice"),
        (put("train2017.json", id=[1]), "Expected `int`, got `array`"),
        (put("train2017.json", id=2**62), "Expected `int` <="),
        (lambda files: files.update({"train2017.json": b"[" * 100_000}), "train2017.json is damaged|cannot be read"),
        (lambda files: files.update({"train2017.json": b'{"images": "\xff"}'}), "train2017.json is damaged"),
        (lambda files: files["val2017_locations.json"][0].update(lat="north"), r"got `str` - at `\$\[0\].lat`"),
    ],
)
def test_missing_and_malformed_annotations_are_one_sentence(inat, change, says):
    with pytest.raises(UserError, match=says.replace("(", r"\(")) as caught:
        sources.load_rows("inaturalist(balance=4)", inat(change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("inaturalist(balanced=4)", "has no knob 'balanced'; did you mean 'balance'"),
        ("inaturalist(balance=4) + digits", "give one data set; several cannot be added"),
        ("digits(size=4)", "data set digits has no knob 'size'; it takes none"),
        ("inaturalist(balance=few)", "whole number"),
        ("inaturalist(split=absent.csv)", "the split absent.csv does not exist, nor does"),
    ],
)
def test_wrong_knobs_are_refused(inat, name, says):
    with pytest.raises(UserError, match=says):
        sources.load_rows(name, inat())


# Published splits


def write_csv(path, *lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def test_a_published_split_decides_examples_classes_and_users(inat, tmp_path):
    header = ("user_id", "image_id", "class", "label")
    split = write_csv(tmp_path / "train.csv", header, ("80a", 111, 0, 11), ("80a", 100, 1, 10), ("7c", 101, 1, 10))
    write_csv(tmp_path / "test.csv", ("image_id", "class", "label"), (502, 0, 11), (500, 1, 10))
    rows = sources.load_rows(f'inaturalist(split="{split}")', inat())
    assert rows.classes == ("species 11", "species 10")
    assert [path.split("/")[2] for path in rows.paths] == ["111.jpg", "100.jpg", "101.jpg", "502.jpg", "500.jpg"]
    assert rows.labels.tolist() == [0, 1, 1, 0, 1]
    assert rows.users.tolist() == ["80a", "80a", "7c", "", ""]
    assert rows.test.tolist() == [False] * 3 + [True] * 2
    assert rows.places[0].tolist() == [11.1, -11.1]


def test_a_split_is_found_from_any_folder_and_in_the_set_itself(inat, tmp_path, monkeypatch):
    folder = inat()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_csv(tmp_path / "here" / "a.csv", ("user_id", "image_id", "class"), ("u", 111, 0), ("u", 100, 1))
    write_csv(tmp_path / "here" / "test.csv", ("image_id", "class"), (500, 1))
    config = configs.checked(Config(data="inaturalist(split=a.csv, size=32)", data_dir=str(folder)))
    assert config.data == f'inaturalist(split="{tmp_path / "here" / "a.csv"}", size=32)'
    monkeypatch.chdir(tmp_path)
    assert len(sources.load_rows(config.data, folder)) == 3
    for name in ("a.csv", "test.csv"):
        (tmp_path / "here" / name).rename(folder / "inaturalist" / name)
    assert len(sources.load_rows(config.data, folder)) == 3
    (folder / "inaturalist" / "a.csv").unlink()
    with pytest.raises(UserError, match=r"a.csv does not exist, nor does .*a\.csv; fetch it"):
        sources.load_rows(config.data, folder)
    assert sources.make_absolute("cinic10") == "cinic10"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (("u", 999, 0), "its images or classes are not the annotated ones"),
        (("u", 107, 1), "its images or classes are not the annotated ones"),
        (("u", 112, 5), "not numbered from 0"),
        (("u", 100, 1), "an image_id appears twice"),
        (("u", 112, "x"), "is damaged .*'x'"),
    ],
)
def test_a_split_of_other_data_is_refused(inat, tmp_path, line, says):
    split = write_csv(tmp_path / "train.csv", ("user_id", "image_id", "class"), ("u", 111, 0), ("u", 100, 1), line)
    write_csv(tmp_path / "test.csv", ("image_id", "class"), (502, 0))
    with pytest.raises(UserError, match=says):
        sources.load_rows(f'inaturalist(split="{split}")', inat())


# Landmarks


def name_of(number):
    return f"{number:016x}"


def write_landmarks(folder, images):
    """``images`` are (landmark, author) pairs; ids count from 0."""
    folder.mkdir(exist_ok=True)
    by_landmark = {}
    for number, (landmark, _) in enumerate(images):
        by_landmark.setdefault(landmark, []).append(name_of(number))
    write_csv(
        folder / "train_clean.csv", ("landmark_id", "images"), *((k, " ".join(v)) for k, v in by_landmark.items())
    )
    lines = [(name_of(n), "http://x", author, "CC", 'a, "title"') for n, (_, author) in enumerate(images)]
    lines.insert(0, ("f" * 16, "http://x", "not cleaned", "CC", "other"))
    write_csv(folder / "train_attribution.csv", ("id", "url", "author", "license", "title"), *lines)


def plain_core(images, least_images, least_users, least_landmarks):
    """The rule in plain words: take out one landmark or user that has too few, and look again."""
    kept = set(range(len(images)))
    while True:
        for column, least_others in ((0, least_users), (1, least_landmarks)):
            for owner in {images[n][column] for n in kept}:
                own = {n for n in kept if images[n][column] == owner}
                if len(own) < least_images or len({images[n][1 - column] for n in own}) < least_others:
                    kept -= own
                    break
            else:
                continue
            break
        else:
            return kept


@pytest.mark.parametrize("seed", range(12))
def test_the_fixed_point_is_what_taking_out_one_after_another_leaves(seed, monkeypatch):
    for name, value in (("MIN_IMAGES", 6), ("MIN_USERS", 3), ("MIN_LANDMARKS", 2)):
        monkeypatch.setattr(federated_vision, name, value)
    draw = np.random.default_rng(seed)
    pairs = np.stack([draw.zipf(1.3, 300) % 25, draw.zipf(1.4, 300) % 20], axis=1)
    kept = core(pairs[:, 0], pairs[:, 1], np.ones(300, bool))
    assert set(np.flatnonzero(kept).tolist()) == plain_core(pairs.tolist(), 6, 3, 2)


def crowd():
    """10 users with 5 landmarks of 6 images each; then a user and landmarks that the rules take out."""
    images = [(landmark, f"user {u}") for landmark in range(5) for u in range(10) for _ in range(6)]
    images += [(9, f"user {u}") for u in range(10) for _ in range(2)]  # 20 images: too few
    images += [(landmark, "short stay") for landmark in range(3) for _ in range(20)]  # 60 images of 3 landmarks
    images += [(landmark, f"other {n}") for landmark in range(5) for n in range(12)]  # test: 12 of each landmark
    return [*images, (0, ""), (0, "")]  # no author: neither train nor test


def test_the_rules_of_landmarks_and_a_test_set_of_other_authors(tmp_path):
    images = crowd()
    write_landmarks(tmp_path / "landmarks", images)
    rows = sources.load_rows("landmarks", tmp_path)
    train = ~rows.test
    assert rows.classes == ("0", "1", "2", "3", "4")
    assert np.bincount(rows.labels[train]).tolist() == [60] * 5
    assert set(rows.users[train].tolist()) == {f"user {u}" for u in range(10)}
    assert np.bincount(rows.labels[rows.test]).tolist() == [10] * 5
    assert not set(rows.users[train].tolist()) & set(rows.users[rows.test].tolist())
    assert "" not in rows.users
    for path, label, user in zip(rows.paths, rows.labels, rows.users, strict=True):
        number = int(path.rpartition("/")[2].removesuffix(".jpg"), 16)
        assert images[number] == (label, user)
        assert path == f"0/0/0/{number:016x}.jpg"
    assert rows.notes[0] == "300 training images of 10 users follow the rules of Landmarks-User-160k"
    assert np.bincount(sources.load_rows("landmarks(test=3)", tmp_path).labels).tolist() == [63] * 5
    with pytest.raises(UserError, match="test, the test images per landmark, must be at least 1, not 0"):
        sources.load_rows("landmarks(test=0)", tmp_path)


def test_landmarks_published_split_needs_no_annotations_but_the_folder(tmp_path):
    write_landmarks(tmp_path / "landmarks", crowd())
    (tmp_path / "landmarks" / "train").mkdir()
    split = write_csv(tmp_path / "s.csv", ("user_id", "image_id", "class"), ("Ann, A.", "abc1", 1), ("Ben", "abd2", 0))
    write_csv(tmp_path / "test.csv", ("image_id", "class"), ("bbb3", 1))
    rows = sources.load_rows(f'landmarks(split="{split}")', tmp_path)
    assert rows.paths == ["train/a/b/c/abc1.jpg", "train/a/b/d/abd2.jpg", "train/b/b/b/bbb3.jpg"]
    assert rows.users.tolist() == ["Ann, A.", "Ben", ""]


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / "train_attribution.csv").unlink(), "train_attribution.csv cannot be read"),
        (lambda f: (f / "train_clean.csv").write_text("landmark,images\n"), "has no column 'landmark_id'"),
        (lambda f: (f / "train_clean.csv").write_text("landmark_id,images\nx,a1b2\n"), "is damaged .*'x'"),
        (lambda f: (f / "train_clean.csv").write_text("landmark_id,images\n1,a1b2,3\n"), "line 2 has 3 values"),
        (
            lambda f: (f / "train_clean.csv").write_text("landmark_id,images\n1,a1b2\n"),
            "has no images that follow the rules",
        ),
        (lambda f: (f / "train_clean.csv").write_bytes(b"landmark_id,images\n\xff"), "not a CSV file in UTF-8"),
    ],
)
def test_missing_and_malformed_csvs_are_one_sentence(tmp_path, break_it, says):
    write_landmarks(tmp_path / "landmarks", crowd())
    break_it(tmp_path / "landmarks")
    with pytest.raises(UserError, match=says) as caught:
        sources.load_rows("landmarks", tmp_path)
    assert "\n" not in str(caught.value)


# The table, and what the commands say


def test_the_command_writes_a_table_that_reads_back(inat, tmp_path, capsys):
    folder = inat()
    out = str(tmp_path / "t" / "a.csv")
    app(
        args=["data", "table", "inaturalist(balance=4)", "--data-dir", str(folder), "--out", out], standalone_mode=False
    )
    told = capsys.readouterr().out
    assert "12 training examples and 6 test examples of 3 classes" in told
    with (tmp_path / "t" / "a.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = sources.load_rows("inaturalist(balance=4)", folder)
    assert list(lines[0]) == ["path", "label", "user", "latitude", "longitude", "split"]
    assert [(tmp_path / "t" / line["path"]).resolve() for line in lines] == [rows.root / p for p in rows.paths]
    assert [line["label"] for line in lines] == [rows.classes[k] for k in rows.labels]
    assert [float(line["latitude"]) for line in lines] == rows.places[:, 0].tolist()
    assert [line["split"] for line in lines] == ["test" if t else "train" for t in rows.test]
