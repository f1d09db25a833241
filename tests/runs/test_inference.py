"""Predictions and exports from a run directory alone, after its data are gone."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import unskew
from analysis.finished import command, done, refused
from unskew.core.errors import UserError
from unskew.runs import folder as folders
from unskew.runs.prediction import load_predictor
from unskew.runs.result import MODEL_INFO, read_model_info

SIDE, NAMES = 20, ("bright", "dark", "striped")


def picture(kind, number):
    """One of three kinds that any network can tell apart."""
    noise = np.random.Generator(np.random.PCG64(number)).integers(0, 40, (SIDE, SIDE, 3))
    base = {"bright": 200, "dark": 20}.get(kind, 0) + (200 * (np.arange(SIDE) % 2)[:, None, None] * (kind == "striped"))
    return Image.fromarray((base + noise).astype(np.uint8))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a folder of pictures, moved to where its data are not; new pictures; the model's answers with data."""
    top = tmp_path_factory.mktemp("inference")
    for part, numbers in (("train", range(30)), ("test", range(100, 110))):
        for kind in NAMES:
            (top / "data" / part / kind).mkdir(parents=True)
            for number in numbers:
                picture(kind, number).save(top / "data" / part / kind / f"{number}.png")
    run = unskew.run(
        data=f"folder:{top / 'data'}", method="fedavg + lda", rounds=2, steps=6, batch=16, clients=3, lr=0.02,
        partition="iid", engine="loop", resize=24, out=top / "run",
    )  # fmt: skip
    shutil.move(top / "data", top / "elsewhere")
    shutil.move(run.path, top / "moved")
    return top / "moved", top / "elsewhere" / "test", run


def test_a_moved_run_predicts_without_its_data_as_accurately_as_it_was_evaluated(trained):
    path, pictures, run = trained
    assert read_model_info(path).classes == NAMES
    for name, accuracy in (None, run.accuracy), ("lda", run.calibrations["lda"].accuracy):
        found = unskew.predict(path, pictures, calibration=name)
        truth = [file.split("/")[-2] for file in found.names]
        assert np.mean([a == b for a, b in zip(found.answers, truth, strict=True)]) == pytest.approx(accuracy)
        np.testing.assert_allclose(found.probabilities.sum(1), 1, rtol=1e-5)


def test_loading_needs_no_data_and_gives_the_logits_behind_the_probabilities(trained):
    path, pictures, _ = trained
    network, predictor = unskew.load(path, "lda"), load_predictor(path, "lda")
    image = torch.from_numpy(np.array(Image.open(pictures / "dark" / "100.png")).transpose(2, 0, 1).copy())[None]
    inside = torch.nn.functional.interpolate(image.float(), (24, 24), mode="bilinear", align_corners=False)
    logits = network(inside * predictor.scale + predictor.offset)
    expected = (logits / predictor.temperature).softmax(1)
    assert torch.allclose(predictor(image), expected, atol=1e-6)


def test_a_table_with_labels_gives_the_accuracy_a_csv_and_json(trained, tmp_path, capsys):
    path, pictures, _ = trained
    table = tmp_path / "new.csv"
    table.write_text(f"path,label\n{pictures}/dark/100.png,dark\n{pictures}/bright/100.png,dark\n")
    words = ["predict", path, table, "--calibration", "lda"]
    assert "accuracy 50.00% on 2 labeled pictures" in done(capsys, *words, "--out", tmp_path / "p.csv")
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [row["class"] for row in rows] == ["dark", "bright"]
    assert float(rows[0]["probability"]) == max(float(rows[0][name]) for name in NAMES)
    for row, record in zip(rows, json.loads(command(capsys, *words, "--json")[1]), strict=True):
        assert record["probabilities"] == {name: float(row[name]) for name in NAMES}
        assert (record["class"], record["label"]) == (row["class"], row["label"])


def test_grey_and_odd_sized_pictures_are_brought_to_the_training_size(trained, tmp_path):
    path, _, _ = trained
    grey = picture("striped", 5).convert("L").resize((90, 41))
    grey.save(tmp_path / "1.png")
    grey.convert("RGB").save(tmp_path / "2.png")
    first, second = unskew.predict(path, tmp_path).probabilities
    assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda top: top / "missing.png", "missing.png does not exist"),
        (lambda top: top, "contains no pictures"),
        (lambda top: (top / "t.csv", (top / "t.csv").write_text("file\nx\n"))[0], "has no column 'path'"),
        (lambda top: (top / "x.png", (top / "x.png").write_bytes(b"no"))[0], "x.png is not a picture; replace it"),
        (lambda top: np.zeros((1, 3, 5, 5), np.uint8), r"give uint8 \[N, 3, 20, 20\]"),
    ],
    ids=["missing", "empty folder", "column", "damaged", "array"],
)
def test_what_cannot_be_classified_is_one_message(trained, tmp_path, make, message):
    with pytest.raises(UserError, match=message):
        unskew.predict(trained[0], make(tmp_path))


def test_a_damaged_model_json_is_refused(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained[0], copy)
    values = json.loads((copy / MODEL_INFO).read_text())
    folders.write_sealed(copy, {MODEL_INFO: json.dumps(values | {"mean": [0.5]}).encode()})
    with pytest.raises(UserError, match=r"model\.json is damaged or missing \(its sizes do not agree"):
        unskew.load(copy)


@pytest.mark.parametrize("form", ["onnx", "torchscript", "torch-export"])
@pytest.mark.parametrize("calibration", [None, "lda"])
def test_an_exported_model_gives_the_same_probabilities(trained, tmp_path, form, calibration):
    file = unskew.export(trained[0], form, calibration=calibration, out=tmp_path / "made")
    images = torch.randint(0, 256, (5, 3, SIDE, SIDE), dtype=torch.uint8, generator=unskew.Key(0).torch())
    expected = load_predictor(trained[0], calibration)(images).detach()
    if form == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(file))
        found = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
        about = session.get_modelmeta().custom_metadata_map
    elif form == "torchscript":
        about = {"classes": ""}
        with pytest.warns(DeprecationWarning, match="torch.jit"):
            found = torch.jit.load(str(file), _extra_files=about)(images)
    else:
        about = {"classes": ""}
        found = torch.export.load(file, extra_files=about).module()(images)
    assert torch.allclose(found, expected, atol=1e-5)
    assert json.loads(about["classes"]) == list(NAMES)
    card = (tmp_path / "made" / "README.md").read_text()
    assert "| striped |" in card
    assert ("calibrated with lda" in card) == (calibration == "lda")


def test_safetensors_carry_the_names(trained, tmp_path):
    file = unskew.export(trained[0], "safetensors", out=tmp_path / "made")
    with safe_open(file, "pt") as content:
        assert json.loads(content.metadata()["classes"]) == list(NAMES)
        assert set(content.keys()) == set(unskew.load(trained[0]).state_dict())


def test_exports_overwrite_nothing_and_what_is_unknown_is_named(trained, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("x")
    said = refused(capsys, "export", trained[0], "--format", "onnx", "--out", tmp_path)
    assert "is not an empty folder; choose another --out" in said
    said = refused(capsys, "export", trained[0], "--format", "tflite", "--out", tmp_path / "new")
    assert "onnx, torchscript, torch-export, safetensors" in said
    said = refused(capsys, "predict", *trained[:2], "--calibration", "ccvr")
    assert "has no calibration 'ccvr'; available: lda" in said
    assert not (tmp_path / "new").exists()
