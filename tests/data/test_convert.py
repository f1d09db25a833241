"""Whatever a program calls its data becomes one image set, or is refused with what is wrong with it."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from unskew.core.errors import UserError
from unskew.core.types import ImageSet, Split
from unskew.data.arrays import image_set_from

X = np.random.default_rng(0).integers(0, 256, (12, 4, 5, 3), dtype=np.uint8)
Y = np.arange(12) % 3
FIRST = X.transpose(0, 3, 1, 2)
COLOURED = ("x", ("a", "b", "c"), Split(FIRST, Y), Split(FIRST, Y), (0.5,) * 3, (0.5,) * 3)


class Examples(Dataset):
    """A map-style Dataset over a list."""

    def __init__(self, examples, **attributes):
        self.examples = examples
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, place):
        return self.examples[place]


def pairs(make, labels=Y, x=X):
    return Examples([(make(image), label) for image, label in zip(x, labels, strict=True)])


def same_train(found, images=FIRST, labels=Y):
    np.testing.assert_array_equal(found.train.images, images)
    assert found.train.labels.tolist() == list(labels)


def refused(value):
    with pytest.raises(UserError, match=r"\Amine") as caught:
        image_set_from(value, name="mine")
    return str(caught.value)


WHOLE = {"x_train": X, "y_train": Y, "x_test": X[:5], "y_test": Y[:5]}


@pytest.mark.parametrize(
    "value",
    [
        WHOLE,
        {name: torch.from_numpy(value) for name, value in WHOLE.items()},
        dict(zip(("train_images", "train_labels", "test_images", "test_labels"), WHOLE.values(), strict=True)),
        tuple(WHOLE.values()),
        ((X, Y), (X[:5], Y[:5])),
        [[X, Y.tolist()], [X[:5], Y[:5].tolist()]],
        tuple(torch.from_numpy(each) for each in (FIRST.copy(), Y, FIRST[:5].copy(), Y[:5])),
        {**WHOLE, "x_train": FIRST, "x_test": torch.from_numpy(FIRST[:5].copy()).float() / 255},
        (pairs(lambda image: image), pairs(lambda image: image, Y[:5], X[:5])),
        (pairs(Image.fromarray), pairs(Image.fromarray, Y[:5], X[:5])),
        (
            TensorDataset(torch.from_numpy(FIRST.copy()).float() / 255, torch.from_numpy(Y)),
            TensorDataset(torch.from_numpy(FIRST[:5].copy()).double() / 255, torch.from_numpy(Y[:5])),
        ),
    ],
)  # fmt: skip
def test_every_form_gives_the_same_bytes_and_labels(value):
    found = image_set_from(value, name="mine")
    same_train(found)
    np.testing.assert_array_equal(found.test.images, FIRST[:5])
    assert found.test.labels.tolist() == Y[:5].tolist()
    assert (found.name, found.classes, found.notes, found.users) == ("mine", ("0", "1", "2"), (), None)
    assert found.mean == pytest.approx(X.mean(axis=(0, 1, 2)) / 255)
    assert found.std == pytest.approx(X.std(axis=(0, 1, 2)) / 255)


def test_a_tensor_has_its_channels_first_and_an_array_last_where_both_fit():
    both = np.random.default_rng(0).integers(0, 256, (10, 3, 4, 3), dtype=np.uint8)
    labels = np.arange(10) % 2
    assert image_set_from((both, labels)).shape == (3, 3, 4)
    assert image_set_from((torch.from_numpy(both), labels)).shape == (3, 4, 3)
    assert image_set_from(pairs(torch.from_numpy, labels, both)).shape == (3, 4, 3)
    assert image_set_from(pairs(lambda image: image, labels, both)).shape == (3, 3, 4)


def test_texts_are_classes_in_sorted_order_or_in_the_order_of_classes():
    words = np.array(["dog", "ant", "cat"])[Y]
    assert image_set_from({**WHOLE, "y_train": words, "y_test": words[:5]}).classes == ("ant", "cat", "dog")
    given = {**WHOLE, "y_train": words, "y_test": words[:5], "classes": ["dog", "cat", "ant", "bee"]}
    found = image_set_from(given)
    assert found.classes == ("dog", "cat", "ant", "bee")
    assert [found.classes[n] for n in found.train.labels] == words.tolist()
    data = pairs(Image.fromarray, words.tolist())
    assert image_set_from((data, data)).classes == ("ant", "cat", "dog")
    assert "'dog' is not in classes" in refused({**given, "classes": ["cat", "ant"]})


def test_classes_and_users_come_from_the_dataset_and_through_a_subset():
    data = Examples(list(zip(X, Y.tolist(), strict=True)), classes=["a", "b", "c"], users=[f"u{n}" for n in range(12)])
    found = image_set_from((data, data))
    assert found.classes == ("a", "b", "c")
    assert found.users.tolist() == [f"u{n}" for n in range(12)]
    part = image_set_from((Subset(data, [3, 1, 5]), data))
    assert part.classes == ("a", "b", "c")
    assert part.users.tolist() == ["u3", "u1", "u5"]
    assert len(image_set_from(data).users) == 10


def test_transforms_that_draw_with_torch_draw_the_same_every_time_and_leave_the_generator_alone():
    data = pairs(lambda image: image)
    data.__class__ = type(
        "Drawing", (Examples,), {"__getitem__": lambda self, place: (torch.rand(1, 4, 5), int(Y[place]))}
    )
    before = torch.random.get_rng_state()
    first, again = image_set_from(data), image_set_from(data)
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_array_equal(first.train.images, again.train.images)
    assert len(np.unique(first.train.images)) > 50


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 0)])


class Endless(Dataset):
    def __getitem__(self, place):
        return X[0], 0


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, "is None; give an ImageSet"),
        ("digits", "is a str"),
        (X, "is a ndarray"),
        ((), "is a tuple; give"),
        ((X, Y, X), "is a tuple; give"),
        ({"x": X}, "has an unknown entry 'x'; give x_train"),
        ((X, Y * 0), "two or more classes"),
        (([X[0], X[1, :2]], [0, 1]), "give items of the same shape"),
        ({**WHOLE, "users": ["a"]}, "users is <U1 [1]"),
        (Stream(), "has no len()"),
        (iter([(X[0], 0)]), "has no len()"),
        (Endless(), "has no len()"),
        (Examples([]), "need at least one array"),
        (Examples([(X[0], 0, 1)]), "pairs (image, label)"),
        (Examples([(X[0], 0.5)]), "y_train is float64"),
        (Examples([(X[0], True)]), "y_train is bool"),
        (Examples([(X[0], 2**70)]), "y_train is object"),
        (Examples([(X[0], 0), (X[1, :2], 1)]), "all images of the same shape"),
        (Examples([("cat.png", 0)]), "pairs (image, label)"),
        (Examples([(torch.full((3, 4, 5), -1.0), 0)]), "image 0 is float32; give uint8, or floats from 0 to 1"),
        (Examples([(X[n], n % 2) for n in range(4)]), "five examples"),
        (Examples([(X[n], n) for n in range(9)], classes=["a"]), "range from 0 to 8"),
        (type("Broken", (Endless,), {"__len__": lambda self: 3, "__getitem__": lambda: None})(), "example 0: "),
        (ImageSet("x", ("a", "b"), Split(X, Y), Split(X, Y), (0.5,), (0.5,)), "class numbers from 0 to 1"),
        (ImageSet("x", ("a", "b", "c"), Split(X / 2, Y), Split(X, Y), (0.5,), (0.5,)), "must be a uint8 array"),
        (ImageSet("x", ("a", "b", "c"), Split(X, Y), Split(X, Y), (0.5,), (0.5,)), "need 4 numbers each"),
        (ImageSet("x", ("a",), Split(FIRST, Y * 0), Split(FIRST, Y * 0), (0.5,) * 3, (0.5,) * 3), "two or more"),
        (ImageSet(*COLOURED, users=np.array(["a"])), "users must have 12 entries"),
        (ImageSet(*COLOURED, places=np.zeros((1, 2))), "places must be an array [12, 2]"),
    ],
)  # fmt: skip
def test_what_is_not_an_image_set_is_refused(value, complaint):
    assert complaint in refused(value)
