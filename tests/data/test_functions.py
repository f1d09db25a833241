"""``package.module:function`` as a data set and as a partition: what it gives is checked before anything is trained."""

import re

import numpy as np
import pytest
import torch

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.partition import partition_examples, partition_from
from unskew.data.sources import load

LABELS = np.arange(20) % 4


def split(text, clients=4, seed=0):
    return partition_examples(text, LABELS, clients=clients, key=Key(seed), classes=4)


def test_a_function_gives_a_data_set_with_knobs():
    images = load("outside_data:stripes", None)
    assert (images.name, images.classes, len(images.train)) == ("outside_data:stripes", ("row 0", "row 1", "row 2"), 60)
    assert len(load("outside_data:stripes(examples=30)", None).train) == 30
    assert len(load("outside_data:stripes(30)", None).train) == 30


def test_a_function_that_takes_data_dir_is_told_it(tmp_path):
    (tmp_path / "level.txt").write_text("0.5")
    bright, dark = load("outside_data:dataset", None), load("outside_data:dataset", tmp_path)
    assert dark.mean[0] == pytest.approx(bright.mean[0] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("outside_data:wrong", "is an int; give an ImageSet"),
        ("outside_data:fails", "raises OSError: disk on fire"),
        ("outside_data:complains", "mine: give another folder"),
        ("outside_data:missing", "cannot be imported"),
        ("nowhere:stripes", "cannot be imported"),
        ("outside_data:stripes(depth=3)", "has no knob 'depth'"),
        ("outside_data:stripes(examples=2.5)", "must be a whole number"),
        ("outside_data:stripes(classes=1)", "two or more classes"),
    ],
)
def test_a_function_that_gives_no_data_set_is_refused(name, complaint):
    with pytest.raises(UserError, match=re.escape(complaint)):
        load(name, None)


def test_a_function_gives_the_client_of_each_example():
    made = split("outside_data:by_class")
    assert made.client.tolist() == LABELS.tolist()
    assert (made.clients, made.scheme) == (4, "outside_data:by_class")
    assert split("outside_data:by_class(offset=1)").client.tolist() == ((LABELS + 1) % 4).tolist()
    assert split("outside_data:by_class( 1 )").scheme == "outside_data:by_class(1)"


def test_a_function_that_draws_from_the_key_gives_the_same_for_the_same_seed():
    first, again, other = (split("outside_data:drawn", seed=seed).client for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        *((what, "must be a list of 20 integers, one per training example") for what in (
            "float", "short", "negative", "none", "nobody", "table", "text", "ragged", "nan"
        )),
        ("large", "assigns an example to client 4, but clients are numbered from 0 to 3"),
        ("raises", "raises RuntimeError: no luck"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_refused_with_the_functions_name(what, complaint):
    with pytest.raises(UserError, match=f"outside_data:answer.*{re.escape(complaint)}"):
        split(f"outside_data:answer(what={what})")


@pytest.mark.parametrize("value", [LABELS, LABELS.tolist(), torch.from_numpy(LABELS), LABELS.astype(np.uint8)])
def test_an_array_is_a_partition(value):
    made = partition_from(value, LABELS, 9, 0, "mine")
    assert made.client.tolist() == LABELS.tolist()
    assert made.clients == 9
    assert not made.client.flags.writeable
