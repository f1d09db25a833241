"""The drawn population without a file: users, places, the same for the same seed."""

import numpy as np
import pytest

from unskew.core.errors import UserError
from unskew.data.sources import load
from unskew.data.synthetic_set import population

SMALL = {"users": 12, "classes": 5, "examples": 60, "test": 20, "size": 8}


def test_it_has_users_places_and_the_sizes_that_were_asked_for():
    made = population(**SMALL)
    assert made.train.images.shape == (60, 3, 8, 8)
    assert len(made.test) == 20
    assert len(np.unique(made.users)) == 12
    assert made.places.shape == (60, 2)
    assert len(made.test_users) == 20
    assert np.bincount(made.train.labels).tolist() == [12] * 5


def test_it_is_a_data_set_by_name():
    knobs = ", ".join(f"{name}={value}" for name, value in SMALL.items())
    made = load(f"unskew.data.synthetic_set:population({knobs})", None)
    assert (made.train.images == population(**SMALL).train.images).all()
    with pytest.raises(UserError, match="4 to 512"):
        load("unskew.data.synthetic_set:population(size=2)", None)


def test_noise_makes_classes_hard_to_tell_apart():
    plain, clean, noisy = (population(**SMALL, **knobs) for knobs in ({}, {"noise": 0}, {"noise": 120.0}))
    assert (plain.train.labels == noisy.train.labels).all()

    def spread(made):  # how far pictures of one class are from their mean
        first = made.train.images[made.train.labels == 0].astype(float)
        return float(first.std(0).mean())

    assert spread(clean) < spread(plain) < spread(noisy)
    for wrong in (-1, 1001, float("nan")):
        with pytest.raises(UserError, match="0 to 1000"):
            population(**SMALL, noise=wrong)
