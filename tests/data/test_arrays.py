"""Arrays become an image set exactly, or are refused with what is wrong with them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from photo_tables import load_arrays, refused
from unskew.data import arrays


def save(tmp_path, **given):
    path = tmp_path / "set.npz"
    np.savez(path, **given)
    return path


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.sampled_from([1, 3]), st.just(2), st.just(3))))
def test_measuring_gives_numpys_mean_and_deviation(images):
    mean, std = arrays.measure(images)
    pixels = images.astype(np.float64) / 255
    assert mean == pytest.approx(pixels.mean(axis=(0, 2, 3)), abs=1e-12)
    assert std == pytest.approx(np.maximum(pixels.std(axis=(0, 2, 3)), 1 / 255), abs=1e-12)


X, Y = np.arange(10 * 4 * 5, dtype=np.uint8).reshape(10, 4, 5), np.arange(10) % 3


def test_arrays_with_a_test_part_are_taken_as_they_are(tmp_path):
    path = save(tmp_path, x_train=X, y_train=Y, x_test=X[:2], y_test=[5, 0])
    read = load_arrays(str(path))
    np.testing.assert_array_equal(read.train.images[:, 0], X)
    assert read.test.labels.tolist() == [5, 0]
    assert read.classes == ("0", "1", "2", "3", "4", "5")
    assert read.notes[0] == "2 of 6 classes have no example in train or test: 3, 4"
    assert read.notes[1].startswith("no training examples of 1 class of 4: 5")
    assert read.users is None


def test_arrays_without_a_test_part_give_every_fifth_example_to_test(tmp_path):
    users = np.array([f"u{i}" for i in range(10)])
    read = load_arrays(str(save(tmp_path, train_images=X, train_labels=Y, users=users)))
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
    read = load_arrays(str(save(tmp_path, x_train=x, y_train=np.arange(5)[:, None] % 2)))
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
    images = arrays.to_bytes(x, "x")
    assert np.abs(images[:, 0] / 255 - x.astype(np.float64)).max() <= 0.5 / 255 + 1e-12


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"y_train": Y}, "has no 'x_train'; name the arrays x_train, y_train, x_test, y_test or"),
        ({"x_train": X}, "has no 'y_train'"),
        ({"x_train": X, "y_train": Y, "x_test": X}, "has no 'y_test'"),
        ({"x_train": X, "y_train": Y[:9]}, "10 images in x_train, but 9 labels"),
        ({"x_train": X, "y_train": Y * 1.0}, "y_train is float64"),
        ({"x_train": X, "y_train": np.eye(10, dtype=int)}, "[10, 10]; give whole numbers"),
        ({"x_train": X, "y_train": Y - 1}, "range from -1 to 1"),
        ({"x_train": X, "y_train": Y + 10**9}, "number the classes from 0"),
        ({"x_train": X.astype(int), "y_train": Y}, "is int64; give uint8, or floats from 0 to 1"),
        ({"x_train": np.where(X > 5, np.nan, 0.5), "y_train": Y}, "floats from 0 to 1"),
        ({"x_train": X / -255, "y_train": Y}, "floats from 0 to 1"),
        ({"x_train": X[0], "y_train": Y[:4]}, "has shape [4, 5]"),
        ({"x_train": X[:0], "y_train": Y[:0]}, "y_train is int64 [0]"),
        ({"x_train": np.zeros((5, 4, 4, 4), np.uint8), "y_train": Y[:5]}, "has shape [5, 4, 4, 4]"),
        ({"x_train": X[:4], "y_train": Y[:4]}, "nor five examples"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :2], "y_test": Y}, "must have the same shape"),
        ({"x_train": X, "y_train": Y, "users": np.arange(9)}, "users is int64 [9]"),
        ({"x_train": X, "y_train": Y, "users": np.arange(10.0)}, "users is float64"),
        ({"x_train": X, "y_train": Y, "classes": np.array(["a", "b"])}, "range from 0 to 2"),
    ],
)
def test_arrays_that_are_no_image_set_are_refused(tmp_path, given, complaint):
    path = save(tmp_path, **given)
    message = refused(load_arrays, path)
    assert str(path) in message
    assert complaint in message


def test_objects_in_an_npz_are_never_unpickled(tmp_path):
    path = save(tmp_path, x_train=np.array([{}, []], dtype=object), y_train=Y)
    assert "not an .npz file of plain arrays" in refused(load_arrays, path)


def test_a_damaged_npz_is_named_whatever_its_length(tmp_path):
    path = save(tmp_path, x_train=X, y_train=Y)
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        assert str(path) in refused(load_arrays, path)
    np.save(tmp_path / "one.npy", X)
    assert "not an .npz" in refused(load_arrays, tmp_path / "one.npy")
    assert "No such file" in refused(load_arrays, tmp_path / "absent.npz")
    assert "it is a folder" in refused(load_arrays, tmp_path)
