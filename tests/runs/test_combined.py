"""Photographs, frozen parts, validation parts, seeds: together they do what each does alone."""

import csv
import json

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import unskew
from unskew.runs.config import read_run
from unskew.runs.prepare import prepare

SIZE, COUNT, CLASSES, USERS = 64, 40, 4, 5
OPTIONS = {"rounds": 2, "epochs": 1, "batch": 16, "lr": 0.05, "model": "simple-cnn", "engine": "loop"}


def pixels():
    """[N, H, W, 3] and labels: a class is a colour and a direction."""
    generator = np.random.default_rng(0)
    labels = np.arange(COUNT) % CLASSES
    images = generator.integers(0, 120, (COUNT, SIZE, SIZE, 3), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[..., label % 3] += 100
        image[:: 2 + label] //= 2
    return images, labels


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of photographs with users, places and a test part."""
    folder = tmp_path_factory.mktemp("photographs")
    with open(folder / "photographs.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "user", "latitude", "longitude", "split"])
        for number, (image, label) in enumerate(zip(*pixels(), strict=True)):
            Image.fromarray(image).save(folder / f"{number:02d}.png")
            part = "test" if number % 5 == 0 else "train"
            rows.writerow([f"{number:02d}.png", f"class {label}", f"user {number // 8}", 40 + number, number, part])
    return folder / "photographs.csv"


@pytest.fixture(scope="module")
def pretrained(table, tmp_path_factory):
    """Weights that others start from."""
    out = tmp_path_factory.mktemp("pretrained") / "run"
    return unskew.run(**OPTIONS | {"data": f"table:{table}", "partition": "iid", "clients": 2}, out=out).path


def run(table, out, **options):
    return unskew.run(**OPTIONS | {"data": f"table:{table}", "partition": "users"} | options, out=out)


def test_a_table_behind_a_frozen_part_is_what_its_pixels_are_there(table, pretrained, tmp_path):
    images, labels = pixels()
    out = np.arange(COUNT) % 5 == 0
    arrays = tmp_path / "same.npz"
    np.savez(arrays, x_train=images[~out], y_train=labels[~out], x_test=images[out], y_test=labels[out])
    options = {
        "pretrained": pretrained / "model.safetensors", "train": "last(2)", "partition": "iid", "clients": 3,
        "normalise": "imagenet",
    }  # fmt: skip
    one = run(table, tmp_path / "table", method="fedavg + lda", **options)
    other = run(table, tmp_path / "arrays", method="fedavg + lda", **options, data=f"arrays:{arrays}")
    assert one.weights_sha256 == other.weights_sha256
    assert one.calibrations["lda"].accuracy == other.calibrations["lda"].accuracy


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.heavy), {"train": "last(2)", "views": 2}])
def test_a_validation_part_of_photographs_is_the_same_in_loop_and_pool(table, pretrained, tmp_path, options):
    options = {"pretrained": pretrained / "model.safetensors", "validation": 0.25, **options}
    one = run(table, tmp_path / "loop", **options)
    other = run(table, tmp_path / "pool", **options | {"engine": "pool", "workers": 1})
    assert one.weights_sha256 == other.weights_sha256
    assert (one.accuracy, one.evaluated_on) == (other.accuracy, "validation")


def test_large_photographs_get_views_of_resized_crops(table, pretrained, tmp_path):
    options = {"pretrained": pretrained / "model.safetensors", "train": "classifier", "views": 3}
    crops = run(table, tmp_path / "crops", **options)
    shifts = run(table, tmp_path / "shifts", **options, augmentation="shift")
    assert (read_run(crops.path).augmentation, read_run(shifts.path).augmentation) == ("resized-crop", "shift")
    assert crops.weights_sha256 != shifts.weights_sha256
    data = prepare(read_run(crops.path)).data
    assert len(data["train/images"]) == 4 * len(data["train/labels"])
    views = data["train/images"].reshape(len(data["train/labels"]), 4, -1)
    assert all(float((views[:, 0] - views[:, view]).abs().max()) > 1e-3 for view in (1, 2, 3))


def test_everything_at_once_runs_resumes_and_is_compared(table, pretrained, tmp_path):
    several = unskew.run_seeds(
        **OPTIONS, data=f"table:{table}", partition="users", seeds=[0, 1], out=tmp_path / "all",
        pretrained=pretrained / "model.safetensors", train="last(2)",
        method="fedavgm(0.9) + fedvc(8) + absent(0.2) + ridge",
        schedule="cosine", optimizer="adamw", clip=1.0, decay="weights", validation=0.2, start="lda", per_round=3,
    )  # fmt: skip
    assert len(several.results) == 2
    for result in several.results:
        told = json.loads((result.path / "result.json").read_text())
        assert told["evaluated_on"] == "validation"
        assert told["start"]["name"] == "lda"
        assert told["clients_accuracy"]["clients"] == USERS
        assert load_file(result.path / "model.safetensors").keys() == load_file(pretrained / "model.safetensors").keys()
        unskew.calibrate_run(result.path, "ccvr(per_class=20)")
