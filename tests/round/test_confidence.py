"""The calibration error and its temperature, as sums over any split of the images."""

import math

import pytest
import torch

import unskew
from unskew.core.key import Key
from unskew.round.evaluation import BINS, TEMPERATURES, confidence_sums, read_confidence


def drawn(count=4000, classes=5, sharpness=3.0):
    """Logits whose softmax are the true probabilities, times ``sharpness``; labels drawn from them."""
    logits = torch.randn(count, classes, generator=Key(0).torch()) * 1.5
    labels = torch.multinomial(logits.softmax(1), 1, generator=Key(1).torch())[:, 0]
    return logits * sharpness, labels, torch.arange(count)


def naive_error(logits, labels):
    confidence, answers = logits.double().softmax(1).max(1)
    total = 0.0
    for number in range(BINS):
        inside = (confidence > number / BINS) & (confidence <= (number + 1) / BINS)
        if inside.any():
            gap = (answers[inside] == labels[inside]).double().mean() - confidence[inside].mean()
            total += float(gap.abs() * inside.double().mean())
    return total


def test_the_error_is_its_definition_and_the_temperature_undoes_the_sharpening():
    logits, labels, numbers = drawn()
    found = read_confidence(confidence_sums(logits, labels, numbers))
    assert found.ece == pytest.approx(naive_error(logits, labels), abs=1e-9)
    assert found.temperature == pytest.approx(3.0, rel=0.1)
    assert found.ece > 0.15
    assert found.ece_scaled < 0.03
    assert read_confidence(confidence_sums(*drawn(sharpness=1.0))).temperature == pytest.approx(1.0, rel=0.1)


def test_parts_add_up_to_the_whole():
    logits, labels, numbers = drawn(301)
    whole = confidence_sums(logits, labels, numbers)
    parts = sum(confidence_sums(*(value[some] for value in (logits, labels, numbers))) for some in numbers.split(64))
    torch.testing.assert_close(parts, whole)


def test_a_temperature_that_does_not_lower_the_error_is_not_used():
    """Few labels are right, and the confidence is as low; a lower loss would need a higher error."""
    logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]]).repeat(50, 1)
    labels = torch.tensor([0, 0]).repeat(50)
    found = read_confidence(confidence_sums(logits, labels, torch.arange(100) // 2))
    assert found.ece_scaled <= found.ece
    hopeless = read_confidence(confidence_sums(torch.zeros(100, 2), labels, torch.arange(100)))
    assert (hopeless.temperature, hopeless.ece_scaled) == (1.0, hopeless.ece)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_images_have_no_error(count):
    assert read_confidence(confidence_sums(*drawn(count or 1)) * count) is None


def test_logits_without_end_have_no_error():
    logits, labels, numbers = drawn(10)
    logits[3, 0] = math.nan
    assert read_confidence(confidence_sums(logits, labels, numbers)) is None


def test_a_run_reports_the_error_of_every_classifier_in_any_engine(tmp_path):
    options = {"method": "fedavg + lda", "rounds": 1, "steps": 4, "clients": 3}
    loop, pool = (unskew.run(engine=each, out=tmp_path / each, **options) for each in ("loop", "pool"))
    for one in (loop, loop.calibrations["lda"]):
        assert 0 <= one.ece_scaled <= 1
        assert one.temperature in TEMPERATURES
    assert (loop.ece, loop.calibrations["lda"].ece) == (pool.ece, pool.calibrations["lda"].ece)
    assert f"ECE {loop.ece:.3f}" in str(loop)
