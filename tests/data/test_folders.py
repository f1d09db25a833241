import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from unskew.core.errors import UserError
from unskew.data import folders


def paint(path, size=(6, 4), mode="RGB", colour=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour or 0).save(path)
    return path


def refused(read, text):
    with pytest.raises(UserError) as caught:
        read(str(text))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def save(tmp_path, **arrays):
    path = tmp_path / "set.npz"
    np.savez(path, **arrays)
    return path


@pytest.fixture
def pictures(tmp_path):
    """Two classes with six and one pictures; the number of a picture is its colour."""
    for i in range(6):
        paint(tmp_path / "cat" / f"{i}.png", colour=(i, 10 + i, 20 + i))
    paint(tmp_path / "ant" / "0.png", colour=(100, 101, 102))
    return tmp_path


def test_a_folder_a_class_gives_every_fifth_picture_to_test(pictures):
    read = folders.load_folder(str(pictures))
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
    read = folders.load_folder(str(tmp_path))
    assert read.train.labels.tolist() == [0, 1]
    assert read.test.labels.tolist() == [1]
    assert read.notes == ()


def test_test_goes_before_val_and_what_is_not_read_is_said(tmp_path):
    paint(tmp_path / "train" / "a" / "1.png", colour=(1, 1, 1))
    paint(tmp_path / "test" / "a" / "1.png", colour=(2, 2, 2))
    paint(tmp_path / "val" / "a" / "1.png", colour=(3, 3, 3))
    (tmp_path / "train" / "README").touch()
    read = folders.load_folder(str(tmp_path))
    assert read.test.images.max() == 2
    assert read.notes == ("not read, beside train: val", "not read, beside the classes of train: README")


def test_hidden_files_and_those_of_file_managers_are_ignored(pictures):
    for name in (".DS_Store", "Thumbs.db", ".hidden"):
        (pictures / "cat" / name).touch()
    (pictures / ".git").mkdir()
    assert len(folders.load_folder(str(pictures)).train) == 6


def test_pictures_are_grey_only_if_all_are(tmp_path):
    for i, mode in enumerate(["L", "1", "LA", "L", "L"]):
        paint(tmp_path / "a" / f"{i}.png", mode=mode)
    assert folders.load_folder(str(tmp_path)).shape == (1, 4, 6)
    paint(tmp_path / "a" / "colour.png")
    assert folders.load_folder(str(tmp_path)).shape == (3, 4, 6)


def test_palettes_and_alpha_become_plain_colours(tmp_path):
    paint(tmp_path / "a" / "0.png", mode="RGBA", colour=(10, 20, 30, 40))
    palette = Image.new("P", (6, 4), 1)
    palette.putpalette([0, 0, 0, 50, 60, 70])
    palette.save(tmp_path / "a" / "1.png", transparency=bytes([0, 128]))
    paint(tmp_path / "a" / "2.gif", mode="P")
    paint(tmp_path / "a" / "3.png", mode="L", colour=9)
    paint(tmp_path / "a" / "4.png")
    read = folders.load_folder(str(tmp_path))
    assert read.train.images[[0, 1, 3], :, 0, 0].tolist() == [[10, 20, 30], [50, 60, 70], [9, 9, 9]]


def test_two_sizes_are_refused_with_both_files_and_the_way_out(pictures):
    odd = paint(pictures / "cat" / "odd.png", size=(8, 9))
    message = refused(folders.load_folder, pictures)
    assert f"{odd} is 8×9" in message
    assert "is 6×4" in message
    assert f"folder:{pictures}?size=64" in message


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_a_size_scales_the_shorter_side_and_crops_the_centre(pictures, size):
    paint(pictures / "cat" / "odd.png", size=(80, 9))
    read = folders.load_folder(f"{pictures}?size={size}")
    assert read.shape == (3, size, size)
    assert f"{size}×{size}" in read.notes[-1]


def test_the_centre_is_what_a_crop_keeps(tmp_path):
    stripes = np.repeat(np.array([[10, 20, 30]], np.uint8), 5, axis=0).repeat(5, axis=1)  # [5, 15]
    (tmp_path / "a").mkdir()
    for i in range(5):
        Image.fromarray(stripes).save(tmp_path / "a" / f"{i}.png")
    assert set(folders.load_folder(f"{tmp_path}?size=5").train.images.ravel()) == {20}


@pytest.mark.parametrize("size", ["0", "-1", "x", "", "1.5", "5000", "９"])
def test_a_size_that_is_none_is_refused(pictures, size):
    assert "give 1 to 4096" in refused(folders.load_folder, f"{pictures}?size={size}")


def test_a_file_that_is_no_picture_is_named(pictures):
    (pictures / "cat" / "notes.txt").write_text("no picture")
    assert f"{pictures / 'cat' / 'notes.txt'} is no picture" in refused(folders.load_folder, pictures)


@pytest.mark.parametrize("kind", ["png", "jpg", "gif", "bmp"])
def test_a_truncated_picture_is_named_whatever_its_length(tmp_path, kind):
    for i in range(5):
        paint(tmp_path / "a" / f"{i}.{kind}", size=(40, 40))
    whole = (tmp_path / "a" / f"2.{kind}").read_bytes()
    for size in range(0, len(whole) // 2, 1 + len(whole) // 40):
        (tmp_path / "a" / f"2.{kind}").write_bytes(whole[:size])
        assert f"2.{kind}" in refused(folders.load_folder, tmp_path)


def test_sixteen_bits_a_pixel_are_refused(pictures):
    paint(pictures / "cat" / "deep.png", mode="I;16")
    assert "deep.png has more than 8 bits" in refused(folders.load_folder, pictures)


def test_an_empty_class_and_a_class_only_in_test_are_refused(tmp_path):
    paint(tmp_path / "train" / "a" / "1.png")
    paint(tmp_path / "test" / "b" / "1.png")
    assert f"{tmp_path / 'test' / 'b'}: train has no such class" in refused(folders.load_folder, tmp_path)
    (tmp_path / "train" / "b").mkdir()
    assert f"{tmp_path / 'train' / 'b'} is empty" in refused(folders.load_folder, tmp_path)


def test_folders_of_the_wrong_depth_are_refused(tmp_path):
    assert "holds no folders" in refused(folders.load_folder, tmp_path)
    paint(tmp_path / "test" / "b" / "1.png")
    assert "is a folder inside a class folder" in refused(folders.load_folder, tmp_path)
    assert "is not a folder" in refused(folders.load_folder, tmp_path / "absent")


def test_too_few_pictures_for_a_test_part_are_refused(tmp_path):
    paint(tmp_path / "a" / "1.png")
    assert "no class has five pictures" in refused(folders.load_folder, tmp_path)


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.sampled_from([1, 3]), st.just(2), st.just(3))))
def test_measuring_gives_numpys_mean_and_deviation(images):
    mean, std = folders.measure(images)
    pixels = images.astype(np.float64) / 255
    assert mean == pytest.approx(pixels.mean(axis=(0, 2, 3)), abs=1e-12)
    assert std == pytest.approx(np.maximum(pixels.std(axis=(0, 2, 3)), 1 / 255), abs=1e-12)


def test_measuring_goes_beyond_one_chunk():
    images = np.zeros((3000, 1, 1, 1), np.uint8)
    images[2999] = 255
    assert folders.measure(images)[0][0] == pytest.approx(1 / 3000)


X, Y = np.arange(10 * 4 * 5, dtype=np.uint8).reshape(10, 4, 5), np.arange(10) % 3


def test_arrays_with_a_test_part_are_taken_as_they_are(tmp_path):
    path = save(tmp_path, x_train=X, y_train=Y, x_test=X[:2], y_test=[5, 0])
    read = folders.load_arrays(str(path))
    np.testing.assert_array_equal(read.train.images[:, 0], X)
    assert read.test.labels.tolist() == [5, 0]
    assert read.classes == ("0", "1", "2", "3", "4", "5")
    assert read.notes == ()
    assert read.users is None


def test_arrays_without_a_test_part_give_every_fifth_example_to_test(tmp_path):
    users = np.array([f"u{i}" for i in range(10)])
    read = folders.load_arrays(str(save(tmp_path, train_images=X, train_labels=Y, users=users)))
    np.testing.assert_array_equal(read.test.images[:, 0], X[4::5])
    assert read.users.tolist() == [f"u{i}" for i in range(10) if i % 5 != 4]
    assert len(read.users) == len(read.train)
    assert any("every fifth" in note for note in read.notes)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((5, 4, 6), (1, 4, 6)), ((5, 4, 6, 3), (3, 4, 6)), ((5, 3, 4, 6), (3, 4, 6)), ((5, 3, 6, 1), (1, 3, 6)),
     ((5, 1, 4, 6), (1, 4, 6)), ((5, 3, 6, 3), (3, 3, 6))],
)  # fmt: skip
def test_channels_may_be_last_or_first_and_last_wins(tmp_path, shape, wanted):
    x = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    read = folders.load_arrays(str(save(tmp_path, x_train=x, y_train=np.zeros((5, 1), int))))
    assert read.shape == wanted
    if shape[-1] == 3:
        assert read.train.images[1, 2, 1, 0] == x[1, 1, 0, 2]


@given(
    st.one_of(
        hnp.arrays(np.float32, (5, 2, 2), elements=st.floats(0, 1, width=32)),
        hnp.arrays(np.float64, (5, 2, 2), elements=st.floats(0, 1)),
    )
)
def test_floats_are_rounded_to_the_nearest_byte(x):
    images = folders._images(x, "x")
    assert np.abs(images[:, 0] / 255 - x.astype(np.float64)).max() <= 0.5 / 255 + 1e-12


def test_bytes_saved_as_floats_come_back_exactly(tmp_path):
    x = np.arange(256, dtype=np.uint8).reshape(4, 8, 8).repeat(2, axis=0)
    for dtype in (np.float32, np.float64):
        path = save(tmp_path, x_train=(x / 255).astype(dtype), y_train=np.zeros(8, int))
        np.testing.assert_array_equal(folders.load_arrays(str(path)).train.images[:4, 0], x[:4])


def test_numbers_serve_as_users_and_texts_as_classes(tmp_path):
    path = save(tmp_path, x_train=X, y_train=Y, users=np.arange(10) // 2, classes=np.array(["a", "b", "c", "d"]))
    read = folders.load_arrays(str(path))
    assert read.users.tolist() == ["0", "0", "1", "1", "2", "3", "3", "4"]
    assert read.classes == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"y_train": Y}, "has no 'x_train', it holds y_train"),
        ({}, "has no 'x_train', it holds nothing"),
        ({"x_train": X}, "has no 'y_train'"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "has no 'y_test'"),
        ({"x_train": X, "y_train": Y[:9]}, "10 images in x_train, 9 labels in y_train"),
        ({"x_train": X, "y_train": Y * 1.0}, "y_train is float64"),
        ({"x_train": X, "y_train": np.eye(10, dtype=int)}, "[10, 10]; give whole numbers"),
        ({"x_train": X, "y_train": Y - 1}, "goes from -1 to 1"),
        ({"x_train": X, "y_train": Y + 10**9}, "number the classes from 0"),
        ({"x_train": X.astype(int), "y_train": Y}, "is int64; give uint8, or floats"),
        ({"x_train": X * 1.0, "y_train": Y}, "outside 0..1 or NaN"),
        ({"x_train": np.where(X > 5, np.nan, 0.5), "y_train": Y}, "outside 0..1 or NaN"),
        ({"x_train": X / -255, "y_train": Y}, "outside 0..1 or NaN"),
        ({"x_train": X[0], "y_train": Y[:4]}, "has shape [4, 5]"),
        ({"x_train": X[:0], "y_train": Y[:0]}, "N > 0"),
        ({"x_train": np.zeros((5, 4, 4, 4), np.uint8), "y_train": Y[:5]}, "has shape [5, 4, 4, 4]"),
        ({"x_train": X[:4], "y_train": Y[:4]}, "nor five examples"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y}, "[1, 4, 5] in train, [1, 2, 5] in test"),
        ({"x_train": X, "y_train": Y, "users": np.arange(9)}, "10 texts or numbers"),
        ({"x_train": X, "y_train": Y, "users": np.arange(10.0)}, "users is float64"),
        ({"x_train": X, "y_train": Y, "classes": np.array(["a", "b"])}, "classes names 2, but a label is 2"),
    ],
)
def test_arrays_that_are_no_image_set_are_refused(tmp_path, arrays, complaint):
    path = save(tmp_path, **arrays)
    message = refused(folders.load_arrays, path)
    assert str(path) in message
    assert complaint in message


def test_objects_in_an_npz_are_never_unpickled(tmp_path):
    path = save(tmp_path, x_train=np.array([{}, []], dtype=object), y_train=Y)
    assert "no .npz of plain arrays" in refused(folders.load_arrays, path)


def test_a_damaged_npz_is_named_whatever_its_length(tmp_path):
    path = save(tmp_path, x_train=X, y_train=Y)
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        assert str(path) in refused(folders.load_arrays, path)
    np.save(tmp_path / "one.npy", X)
    assert "no .npz" in refused(folders.load_arrays, tmp_path / "one.npy")
    assert "is not there" in refused(folders.load_arrays, tmp_path / "absent.npz")
    assert "no .npz" in refused(folders.load_arrays, tmp_path)
