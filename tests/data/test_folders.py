import numpy as np
import pytest
from PIL import Image

from photo_tables import load_folder
from unskew.core.errors import UserError


def paint(path, size=(6, 4), mode="RGB", colour=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour or 0).save(path)
    return path


def refused(read, text):
    with pytest.raises(UserError, match=r"\A[^\n]+\Z") as caught:
        read(str(text))
    return str(caught.value)


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
    assert read.train.images[:, 0, 0, 0].tolist() == [100, 0, 1, 2, 3, 5]
    assert read.train.labels.tolist() == [0, 1, 1, 1, 1, 1]
    assert read.test.images[0, :, 3, 5].tolist() == [4, 14, 24]
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
    assert read.notes == ()


def test_test_goes_before_val_and_what_is_not_read_is_said(tmp_path):
    paint(tmp_path / "train" / "a" / "1.png", colour=(1, 1, 1))
    paint(tmp_path / "test" / "a" / "1.png", colour=(2, 2, 2))
    paint(tmp_path / "val" / "a" / "1.png", colour=(3, 3, 3))
    (tmp_path / "train" / "README").touch()
    read = load_folder(str(tmp_path))
    assert read.test.images.max() == 2
    assert read.notes == ("ignored, next to train: val", "ignored, next to the classes of train: README")


def test_hidden_files_and_those_of_file_managers_are_ignored(pictures):
    for name in (".DS_Store", "Thumbs.db", ".hidden"):
        (pictures / "cat" / name).touch()
    (pictures / ".git").mkdir()
    assert len(load_folder(str(pictures)).train) == 6


def test_pictures_are_grey_only_if_all_are(tmp_path):
    for i, mode in enumerate(["L", "1", "LA", "L", "L"]):
        paint(tmp_path / "a" / f"{i}.png", mode=mode)
    assert load_folder(str(tmp_path)).shape == (1, 4, 6)
    paint(tmp_path / "a" / "colour.png")
    assert load_folder(str(tmp_path)).shape == (3, 4, 6)


def test_palettes_and_alpha_become_plain_colours(tmp_path):
    paint(tmp_path / "a" / "0.png", mode="RGBA", colour=(10, 20, 30, 40))
    palette = Image.new("P", (6, 4), 1)
    palette.putpalette([0, 0, 0, 50, 60, 70])
    palette.save(tmp_path / "a" / "1.png", transparency=bytes([0, 128]))
    paint(tmp_path / "a" / "2.gif", mode="P")
    paint(tmp_path / "a" / "3.png", mode="L", colour=9)
    paint(tmp_path / "a" / "4.png")
    read = load_folder(str(tmp_path))
    assert read.train.images[[0, 1, 3], :, 0, 0].tolist() == [[10, 20, 30], [50, 60, 70], [9, 9, 9]]


def test_two_sizes_are_refused_with_both_files_and_the_way_out(pictures):
    odd = paint(pictures / "cat" / "odd.png", size=(8, 9))
    message = refused(load_folder, pictures)
    assert f"{odd} is 8×9" in message
    assert "is 6×4" in message
    assert f"folder:{pictures}(size=64)" in message


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_a_size_scales_the_shorter_side_and_crops_the_centre(pictures, size):
    paint(pictures / "cat" / "odd.png", size=(80, 9))
    read = load_folder(f"{pictures}(size={size})")
    assert read.shape == (3, size, size)
    assert f"{size}×{size}" in read.notes[-1]


def test_the_centre_is_what_a_crop_keeps(tmp_path):
    stripes = np.repeat(np.array([[10, 20, 30]], np.uint8), 5, axis=0).repeat(5, axis=1)  # [5, 15]
    (tmp_path / "a").mkdir()
    for i in range(5):
        Image.fromarray(stripes).save(tmp_path / "a" / f"{i}.png")
    assert set(load_folder(f"{tmp_path}(size=5)").train.images.ravel()) == {20}


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("0", "must be from 1 to 4096"),
        ("-1", "must be from 1 to 4096"),
        ("5000", "must be from 1 to 4096"),
        ("x", "a whole number"),
        ("1.5", "a whole number"),
        ("", "expected a value"),
    ],
)
def test_a_size_that_is_none_is_refused(pictures, size, message):
    with pytest.raises(UserError, match=message):
        load_folder(f"{pictures}(size={size})")


def test_a_file_that_is_no_picture_is_named(pictures):
    (pictures / "cat" / "notes.txt").write_text("no picture")
    assert f"{pictures / 'cat' / 'notes.txt'} is not a picture" in refused(load_folder, pictures)


@pytest.mark.parametrize("kind", ["png", "jpg", "gif", "bmp"])
def test_a_truncated_picture_is_named_whatever_its_length(tmp_path, kind):
    for i in range(5):
        paint(tmp_path / "a" / f"{i}.{kind}", size=(40, 40))
    whole = (tmp_path / "a" / f"2.{kind}").read_bytes()
    for size in range(0, len(whole) // 2, 1 + len(whole) // 40):
        (tmp_path / "a" / f"2.{kind}").write_bytes(whole[:size])
        assert f"2.{kind}" in refused(load_folder, tmp_path)


def test_sixteen_bits_a_pixel_are_refused(pictures):
    paint(pictures / "cat" / "deep.png", mode="I;16")
    assert "deep.png has more than 8 bits" in refused(load_folder, pictures)


def test_an_empty_class_and_a_class_only_in_test_are_refused(tmp_path):
    paint(tmp_path / "train" / "a" / "1.png")
    paint(tmp_path / "test" / "b" / "1.png")
    assert f"{tmp_path / 'test' / 'b'}: this class is not in train" in refused(load_folder, tmp_path)
    (tmp_path / "train" / "b").mkdir()
    assert f"{tmp_path / 'train' / 'b'} is empty" in refused(load_folder, tmp_path)


def test_folders_of_the_wrong_depth_are_refused(tmp_path):
    assert "contains no folders" in refused(load_folder, tmp_path)
    paint(tmp_path / "test" / "b" / "1.png")
    assert "is a folder inside a class folder" in refused(load_folder, tmp_path)
    assert "is not a folder" in refused(load_folder, tmp_path / "absent")


def test_too_few_pictures_for_a_test_part_are_refused(tmp_path):
    paint(tmp_path / "a" / "1.png")
    assert "no class has five pictures" in refused(load_folder, tmp_path)
