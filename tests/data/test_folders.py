import shutil
import zipfile

import numpy as np
import pytest
from PIL import Image

from photo_tables import load_folder, refused
from unskew.data.photographs import open_photographs


def paint(path, size=(6, 4), mode="RGB", colour=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour or 0).save(path)
    return path


@pytest.fixture
def pictures(tmp_path):
    """Two classes with six and one pictures; the number of a picture is its colour."""
    for i in range(6):
        paint(tmp_path / "cat" / f"{i}.png", colour=(i, 10 + i, 20 + i))
    paint(tmp_path / "ant" / "0.png", colour=(100, 101, 102))
    return tmp_path


def test_a_folder_a_class_gives_every_fifth_picture_to_test(pictures):
    read = load_folder(str(pictures))
    assert read.name == f"folder:{pictures}"
    assert read.classes == ("ant", "cat")
    assert read.shape == (3, 4, 6)
    assert read.train.images[:][:, 0, 0, 0].tolist() == [100, 0, 1, 2, 3, 5]
    assert read.train.labels.tolist() == [0, 1, 1, 1, 1, 1]
    assert read.test.images[0][:, 3, 5].tolist() == [4, 14, 24]
    assert read.test.labels.tolist() == [1]
    assert any("every fifth" in note for note in read.notes)
    assert not read.augment


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation"])
def test_train_and_test_folders_are_taken_as_they_are(tmp_path, test):
    for name in ("a", "b"):
        paint(tmp_path / "train" / name / "1.png")
    paint(tmp_path / test / "b" / "1.png")
    read = load_folder(str(tmp_path))
    assert read.train.labels.tolist() == [0, 1]
    assert read.test.labels.tolist() == [1]
    assert not any("ignored" in note for note in read.notes)


def test_test_goes_before_val_and_what_is_not_read_is_said(tmp_path):
    paint(tmp_path / "train" / "a" / "1.png", colour=(1, 1, 1))
    paint(tmp_path / "test" / "a" / "1.png", colour=(2, 2, 2))
    paint(tmp_path / "val" / "a" / "1.png", colour=(3, 3, 3))
    (tmp_path / "train" / "README").touch()
    read = load_folder(str(tmp_path))
    assert read.test.images[:].max() == 2
    assert read.notes[0] == "ignored: 2 files that are not pictures of a class: train/README, val/a/1.png"


def test_pictures_are_grey_only_if_all_are(tmp_path):
    for i, mode in enumerate(["L", "1", "LA", "L", "L"]):
        paint(tmp_path / "a" / f"{i}.png", mode=mode)
    assert load_folder(str(tmp_path)).shape == (1, 4, 6)
    paint(tmp_path / "a" / "colour.png")
    assert load_folder(str(tmp_path)).shape == (3, 4, 6)


def test_a_file_that_is_no_picture_is_ignored_by_its_name_or_refused(pictures):
    (pictures / "cat" / "notes.txt").write_text("no picture")
    assert any("not pictures of a class: cat/notes.txt" in note for note in load_folder(str(pictures)).notes)
    (pictures / "cat" / "notes.jpg").write_text("no picture")
    assert f"{pictures / 'cat' / 'notes.jpg'} is not a picture" in refused(load_folder, pictures)
    assert len(load_folder(f"{pictures}(broken=skip)").train) == 6


def test_pictures_deeper_inside_a_class_and_one_folder_around_all_are_read(tmp_path):
    for number in range(5):
        paint(tmp_path / "photos" / "cat" / "2024" / f"{number}.png")
        paint(tmp_path / "photos" / "dog" / f"{number}.png")
    read = load_folder(str(tmp_path))
    assert read.classes == ("cat", "dog")
    assert (len(read.train), len(read.test)) == (8, 2)


def test_what_is_no_folder_of_pictures_is_refused(tmp_path):
    assert "has no class folders with pictures" in refused(load_folder, tmp_path)
    assert "is not a folder" in refused(load_folder, tmp_path / "absent")
    (tmp_path / "bad.zip").write_bytes(b"PK")
    assert "bad.zip cannot be read as a zip archive" in refused(load_folder, tmp_path / "bad.zip")


def test_a_zip_archive_has_the_pixels_of_its_folder(pictures, tmp_path_factory):
    archive = shutil.make_archive(str(tmp_path_factory.mktemp("zip") / "pictures"), "zip", pictures)
    packed, plain = load_folder(archive), load_folder(str(pictures))
    assert packed.train.images.sha256 == plain.train.images.sha256
    assert packed.train.labels.tolist() == plain.train.labels.tolist()
    same = open_photographs(*packed.train.images.described())
    assert np.array_equal(same[:], plain.train.images[:])
    with zipfile.ZipFile(archive, "a") as more:
        more.writestr("cat/9.png", "no picture")
    assert "1 of 8 photographs cannot be read" in refused(load_folder, archive)
