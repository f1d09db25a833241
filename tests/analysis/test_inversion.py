"""Images made again from features: exactly where the encoder can be undone, and likeness by its laws."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import unskew
from analysis.finished import NAMES, content, drawn, finished_run, undisturbed
from federation import federation
from unskew.analysis import inversion
from unskew.analysis.inversion import Inversion, feature_loss, invert, psnr, search_deep, ssim
from unskew.core.errors import Missing, UserError
from unskew.core.key import Key
from unskew.engines.blueprint import build
from unskew.models.networks import Network


def square(shape, classes):
    """As many features as pixels: a linear encoder that a key's random weights leave invertible."""
    pixels = shape[0] * shape[1] * shape[2]
    return Network(nn.Sequential(nn.Flatten(), nn.Linear(pixels, pixels)), nn.Linear(pixels, classes))


def bench_of(model="test_inversion:square"):
    small = federation(model=model, dtype="float64")
    side = build(small.blueprint, small.data)
    weight = dict(side.network.named_parameters()).get("encoder.1.weight")
    if weight is not None:
        with torch.no_grad():
            weight.copy_(torch.linalg.qr(torch.randn(64, 64, generator=Key(3).torch(), dtype=torch.float64))[0])
    return side


QUIET = SimpleNamespace(key=Key(0), say=lambda *_: None)


def test_a_linear_encoder_that_can_be_undone_gives_its_images_away():
    side = bench_of()
    with torch.no_grad():
        images = side.train.batch(torch.arange(3))[0]
        targets = side.network.encoder(images)
    found = invert(side, targets, 400, 0.1, 0.0, QUIET)
    for made, image in zip(found, images, strict=True):
        assert psnr(side, made, image) > 35
        assert ssim(side, made, image) > 0.99


def test_a_deep_prior_finds_an_image_whose_feature_is_the_given_one_and_the_same_image_for_the_same_key():
    side = bench_of()
    image = side.train.batch(torch.arange(1))[0]
    low, high = inversion._ends(side)
    loss = feature_loss([side.network.encoder], [side.network.encoder(image)[0].detach()])

    def search(steps):
        return search_deep(loss, side.train.shape, low, high, steps=steps, lr=0.01, key=Key(1))

    found = search(150)
    assert loss(found).item() < 0.1 * loss(search(1)).item()
    assert psnr(side, found[0], image[0]) > 20
    assert torch.equal(found, search(150))
    assert (found >= low).all()
    assert (found <= high).all()


def test_several_images_are_searched_so_that_their_mean_feature_fits_every_encoder():
    side = bench_of()
    images = side.train.batch(torch.arange(2))[0]
    encoders = [side.network.encoder, lambda x: side.network.encoder(x).square()]
    means = [encoder(images).mean(0).detach() for encoder in encoders]
    loss = feature_loss(encoders, means)
    assert loss(images).item() < 1e-20
    low, high = inversion._ends(side)
    found = search_deep(loss, side.train.shape, low, high, steps=60, lr=0.01, key=Key(1), count=2)
    assert found.shape == images.shape
    assert loss(found).item() < 0.5 * loss(torch.zeros_like(images)).item()


def test_mean_and_covariance_of_two_examples_give_both_features_away():
    features = torch.randn(2, 30, generator=Key(5).torch(), dtype=torch.float64)
    statistics = unskew.ClassStatistics.of_features(features, torch.zeros(2, dtype=torch.long), classes=1)
    values, vectors = torch.linalg.eigh(statistics.covariance(0))
    step = vectors[:, -1] * (values[-1] / 2).sqrt()
    found = torch.stack([statistics.mean(0) + step, statistics.mean(0) - step])
    if (found[0] - features[0]).norm() > (found[1] - features[0]).norm():
        found = found.flip(0)
    assert torch.allclose(found, features, atol=1e-12)


def test_no_target_changes_another_s_image():
    side = bench_of("tiny-cnn")
    with torch.no_grad():
        targets = side.network.encoder(side.train.batch(torch.arange(2))[0])
    both, alone = invert(side, targets, 20, 0.05, 0.1, QUIET), invert(side, targets[:1], 20, 0.05, 0.1, QUIET)
    torch.testing.assert_close(both[:1], alone, rtol=1e-9, atol=1e-9)


# Likeness


def image(side, place):
    return side.train.batch(torch.tensor([place]))[0][0]


def test_psnr_by_hand():
    """Black against grey 51: an error of 0.2 everywhere, −10·log₁₀ 0.04; black against white: 0 dB."""
    side = bench_of("tiny-cnn")
    low, high = inversion._ends(side)
    black, white, grey = (torch.zeros(1, 8, 8) + end for end in (low, high, low + 0.2 * (high - low)))
    assert psnr(side, black, grey) == pytest.approx(-10 * np.log10(0.04))
    assert psnr(side, black, white) == pytest.approx(0, abs=1e-9)


def test_ssim_is_its_plain_twin():
    """Wang et al. 2004, equation 13, window by window of 7 × 7, with plain means and variances (divisor 49)."""
    side = bench_of("tiny-cnn")
    a, b = image(side, 2), image(side, 3)
    x, y = (inversion._unit(side, each)[0].numpy() for each in (a, b))
    found = []
    for i in range(2):
        for j in range(2):
            p, q = x[i : i + 7, j : j + 7], y[i : i + 7, j : j + 7]
            covariance = ((p - p.mean()) * (q - q.mean())).mean()
            top = (2 * p.mean() * q.mean() + 0.0001) * (2 * covariance + 0.0009)
            found.append(top / ((p.mean() ** 2 + q.mean() ** 2 + 0.0001) * (p.var() + q.var() + 0.0009)))
    assert ssim(side, a, b) == pytest.approx(np.mean(found), abs=1e-9)


# Of a run


def test_a_run_s_images_are_those_of_its_largest_clients(finished):
    with finished_run(finished) as opened, undisturbed():
        found = inversion.take_inversion(opened, steps=15, examples=3)
        sizes = opened.prepared.population.sizes
        side = opened.side
        labels = side.train.labels.numpy()
        for row in found.rows:
            held = side.population.examples(int(row["client"]))
            label = NAMES.index(row["class"])
            own = [index for index in held.tolist() if labels[index] == label]
            assert len(own) > found.of
            assert row["original"] == opened.images.train.images[own[0], 0].tolist()
    assert found.of == 3
    assert len({row["class"] for row in found.rows}) == len(found.rows) == 3
    order = [int(sizes[int(row["client"])]) for row in found.rows]
    assert order == sorted(order, reverse=True)
    for row in found.rows:
        for name in ("one", "mean", "other"):
            assert -1 <= row[f"{name}_ssim"] <= 1
            assert -1 <= row[f"{name}_cosine"] <= 1 + 1e-6
            assert np.array(row[name]).shape == (8, 8)
            assert 0 <= np.min(row[name]) <= np.max(row[name]) <= 255


def test_the_same_twice_and_nothing_is_written(finished):
    before = content(finished)
    with finished_run(finished) as one, finished_run(finished) as other:
        assert inversion.take_inversion(one, steps=3) == inversion.take_inversion(other, steps=3)
    assert content(finished) == before


@pytest.mark.parametrize("knobs", [{"examples": 0}, {"of": 1}, {"steps": 0}, {"lr": -1.0}, {"smooth": -1.0}])
def test_impossible_knobs_are_refused(finished, knobs):
    with finished_run(finished) as opened, pytest.raises(UserError, match="inversion needs"):
        inversion.take_inversion(opened, **({"steps": 2} | knobs))


def test_an_unknown_prior_is_refused_and_the_deep_one_runs(finished):
    with finished_run(finished) as opened:
        with pytest.raises(UserError, match="prior=dip"):
            inversion.take_inversion(opened, prior="dip")
        assert len(inversion.take_inversion(opened, prior="deep", examples=1, steps=2).rows) == 1


def test_nobody_with_so_many_images_of_a_class_is_said(finished):
    with finished_run(finished) as opened, pytest.raises(Missing, match="no client has 201 images of one class"):
        inversion.take_inversion(opened, of=200)


def made(*grey):
    pixels, names, rows = [[0, 255], [128, 7]], ("one", "mean", "other", "grey"), []
    for client, scores in enumerate([(0.5, 0.25, 0.125), (0.7, 0.35, 0.375)]):
        row = {"client": client, "class": NAMES[client], "original": pixels, **dict.fromkeys(names, pixels)}
        row |= {f"{name}_ssim": score for name, score in zip(names, (*scores, grey[client]), strict=True)}
        rows.append(row | {f"{name}_{kind}": 9.0 for name in names for kind in ("psnr", "cosine")})
    return Inversion(3, rows)


def test_the_finding_compares_with_both_yardsticks():
    (finding,) = inversion.INVERSION.findings(made(0.1, 0.2))
    assert finding.endswith("0.150 ± 0.071 for a gray picture (2 images).")
    (finding,) = inversion.INVERSION.findings(made(0.8, 0.7))
    assert finding.endswith("beat only one of these two, so nothing is clearly recovered.")
    worse = made(0.8, 0.7)
    for row in worse.rows:
        row["other_ssim"] = 0.9
    (finding,) = inversion.INVERSION.findings(worse)
    assert finding.endswith("By this measure the search recovers nothing; look at the pictures, too.")


def test_pictures_of_the_images():
    charts = inversion.INVERSION.draw(made(0.1, 0.2))
    assert drawn(charts) == ["inversion-pictures", "inversion-likeness"]
