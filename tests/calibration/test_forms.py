"""A form is a text, a set of shapes, a weight in bytes, and sums over examples that its plain definition gives too."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.calibration.covariances import FORMS as TABLE
from unskew.calibration.covariances import (
    Diagonal,
    Full,
    LowRank,
    Shared,
    draw_directions,
    parse_form,
    statistics_bytes,
)
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key

FORMS = ("full", "diagonal", "shared", "low-rank(1)", "low-rank(3)")


def features_of(count, width, seed=0):
    return torch.randn(count, width, generator=Key(seed).torch(), dtype=torch.float64)


def measured(form, features):
    """The second moments of one class, without its place among others."""
    shapes = form.shapes(1, features.shape[1])
    sums = {name: torch.full(shape, torch.nan).double() for name, shape in shapes.items() if name != "sums"}
    form.measure(features, [features], sums)
    return {name: value if name in form.common else value[0] for name, value in sums.items()}


def test_every_name_is_a_form_and_its_text_is_read_back():
    assert [parse_form(name) for name in TABLE] == [Full(), Diagonal(), Shared(), LowRank(32)]
    for name in TABLE:
        assert parse_form(str(parse_form(name))) == parse_form(name)
    assert parse_form("low-rank") == parse_form("low-rank(32)") == parse_form(" low-rank( rank = 32 ) ")
    assert str(parse_form("low-rank(rank=7)")) == "low-rank(7)"
    assert str(parse_form("diagonal()")) == "diagonal"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("ful", "no covariance form is called 'ful'; give full, diagonal, shared or low-rank"),
        ("full + diagonal", "no covariance form is called 'full [+] diagonal'"),
        ("full(3)", "takes no values, but 1 were given"),
        ("shared(rank=3)", "has no knob 'rank'"),
        ("low-rank(0)", "rank=0: give a whole number from 1"),
        ("low-rank(2.0)", "rank must be a whole number, not 2.0"),
        ("low-rank(", "expected a value"),
        ("", "covariance form is empty"),
    ],
)
def test_a_text_that_is_no_form_is_refused_in_words(source, words):
    with pytest.raises(UserError, match=words):
        parse_form(source)


@settings(max_examples=25)
@given(form=st.sampled_from(FORMS), held=st.integers(0, 6), width=st.integers(3, 9))
def test_bytes_is_the_real_size_of_the_tensors_and_shapes_are_their_shapes(form, held, width):
    labels = torch.arange(2 * held) // 2 * 3  # every third class
    found = ClassStatistics.of_features(features_of(2 * held, width), labels, 20, form)
    assert (
        statistics_bytes(parse_form(form), held, width)
        == sum(value.nbytes for value in found.tensors().values())
        == found.size
    )
    assert {name: tuple(value.shape) for name, value in found.sums.items()} == parse_form(form).shapes(held, width)


@pytest.mark.parametrize("form", FORMS)
def test_second_moments_are_sums_over_examples_of_their_definition(form):
    """The plain twin: one example at a time, in numpy."""
    features = features_of(11, 5)
    found = measured(parse_form(form), features)
    omega = draw_directions(5, parse_form(form).rank).numpy() if "low" in form else None
    plain = {
        "second": lambda z: np.outer(z, z)[np.triu_indices(5)],
        "squares": lambda z: z**2,
        "sketch": lambda z: np.outer(z, z @ omega),
    }
    assert found
    for name, value in found.items():
        wanted = sum(plain[name](z) for z in features.numpy())
        np.testing.assert_allclose(value.numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("width", "rank"), [(1, 1), (5, 2), (6, 6), (64, 16)])
def test_directions_are_orthonormal(width, rank):
    omega = draw_directions(width, rank)
    assert (omega.shape, omega.dtype) == ((width, rank), torch.float64)
    torch.testing.assert_close(omega.t() @ omega, torch.eye(rank, dtype=torch.float64), atol=1e-13, rtol=0)


def test_directions_are_the_same_for_everybody():
    """Clients of another version must agree on Ω, or their sketches add up to nothing.

    >>> key = Key(0).fold("directions", 3)
    >>> torch.linalg.qr(torch.randn(3, 2, generator=key.torch(), dtype=torch.float64)).Q
    """
    golden = [
        [-0.6234793815396, 0.7506313022954],
        [0.0686660770466, -0.2260613669796],
        [0.7788186121672, 0.6208453159795],
    ]
    draw_directions.cache_clear()
    first = draw_directions(3, 2).clone()
    torch.testing.assert_close(first, torch.tensor(golden, dtype=torch.float64), atol=1e-12, rtol=0)
    ClassStatistics.of_features(features_of(9, 3), torch.zeros(9, dtype=torch.int64), 1, "low-rank(2)").covariance(0)
    assert torch.equal(draw_directions(3, 2), first)
    draw_directions.cache_clear()
    assert torch.equal(draw_directions(3, 2), first)


def test_more_directions_than_features_are_refused_whoever_asks_even_with_no_example():
    form = parse_form("low-rank(4)")
    asking = (
        lambda: form.shapes(0, 3),
        lambda: statistics_bytes(form, 10, 3),
        lambda: measured(form, features_of(5, 3)),
        lambda: ClassStatistics.empty(2, 3, form),
        lambda: ClassStatistics.of_features(features_of(0, 3), torch.zeros(0, dtype=torch.int64), 2, form),
    )
    for ask in asking:
        with pytest.raises(UserError, match=r"low-rank\(4\): there are only 3 features"):
            ask()
