"""A result in Python: its history, its words, and how a notebook shows it."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

import unskew
from unskew.core.errors import UserError
from unskew.runs.result import Calibration, Result, read_result, to_json

RESULT = Result(
    path=Path("runs/a<b>"), method="fedavg + lda", data="digits", partition="iid", clients=2, per_round=2, rounds=3,
    seed=0, engine="loop", accuracy=0.5, loss=1.25, emd=0.0, examples=1234, seconds=75.0, examples_per_second=16.0,
    bytes_up=1_500, bytes_down=2_500_000, weights_sha256="0123456789abcdef" * 4, model="tiny-cnn",
    partition_hash="", data_sha256="", calibrations={"lda": Calibration("lda", 0.75, 0.5, 300, 1.0)},
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return unskew.run(
        out=tmp_path_factory.mktemp("runs") / "a", rounds=3, epochs=1, evaluate_every=2, method="fedavg + lda"
    )


def test_the_history_is_the_rows_of_the_rounds(finished):
    assert [row["round"] for row in finished.history] == [1, 2, 3]
    assert "accuracy" not in finished.history[0]
    assert finished.history[-1]["accuracy"] == finished.accuracy
    assert read_result(finished.path).history == finished.history


def test_a_result_has_every_option_that_decides_it(finished):
    assert finished.settings.items() >= {"lr": 0.01, "method": "fedavg + lda", "seed": 0}.items()
    assert not {"engine", "workers", "data_dir", "during"} & set(finished.settings)
    assert read_result(finished.path).settings == finished.settings


def test_a_result_in_one_line_and_in_a_summary():
    assert repr(RESULT) == "<Result of fedavg + lda on digits: accuracy 50.00%, lda 75.00%; runs/a<b>>"
    lines = str(RESULT).splitlines()
    assert lines[0] == "method     fedavg + lda"
    assert "after lda  75.00%, loss 0.5000; 300 B up, 1.0 s" in lines
    assert "failed" not in str(RESULT)
    assert "failed     2 visits" in str(replace(RESULT, failures=2))
    compared = replace(RESULT, baseline="runs/central", baseline_accuracy=0.8, relative_accuracy=0.625)
    assert "62.50% of 80.00%, runs/central" in str(compared)


def test_a_notebook_gets_a_table_and_a_picture(finished):
    page = finished._repr_html_()
    assert f"{finished.accuracy:.2%}" in page
    assert "after lda" in page
    picture = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    assert picture.tag.endswith("svg")
    assert "after lda" in "".join(picture.itertext())


def test_names_cannot_break_the_page_and_a_moved_folder_shows_its_numbers(tmp_path):
    page = replace(RESULT, path=tmp_path / "gone", method="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in page
    assert "50.00%" in page
    assert "<svg" not in page
    (tmp_path / "metrics.jsonl").write_text("not JSON\n")
    assert "is damaged" in replace(RESULT, path=tmp_path)._repr_html_()


# result.json as version 0.1 wrote it, in November 2026
WRITTEN = """{
  "method": "fedavg + lda + private(epsilon=2)", "data": "digits", "partition": "iid", "clients": 2, "per_round": 2,
  "rounds": 3, "seed": 0, "engine": "loop", "accuracy": 0.5, "loss": 1.25, "examples": 1234, "seconds": 75.0,
  "examples_per_second": 16.0, "bytes_up": 1500, "bytes_down": 2500000, "weights_sha256": "0123", "model": "tiny-cnn",
  "partition_hash": "4567", "data_sha256": "89ab", "emd": 0.0, "failures": 0,
  "calibrations": [
    {"name": "lda", "accuracy": 0.75, "loss": 0.5, "bytes_up": 300, "seconds": 1,
     "clients_accuracy": {"clients": 2, "left_out": 0, "partly": 0, "worst": 0.4, "p10": 0.4, "p50": 0.5, "p90": 0.6,
                          "mean": 0.5, "by_examples": 0.5, "deviation": 0.1, "jain": 0.96,
                          "own_images": {"clients": 2, "left_out": 0, "partly": 0, "worst": 0.3, "p10": 0.4,
                                         "p50": 0.5, "p90": 0.6, "mean": 0.5, "by_examples": 0.5, "deviation": 0.1,
                                         "jain": 0.96}}}
  ],
  "weights_seal": "cdef",
  "privacy": {"epsilon": 2.0, "delta": 1e-05, "unit": "example",
              "releases": [{"id": "a1", "epsilon": 2.0, "delta": 1e-05, "clip": 1.0, "calibrations": ["lda"],
                            "unit": "example", "released": false, "in_masks": false}]},
  "settings": {"data": "digits", "lr": 0.01}, "notes": ["a note"], "evaluated_on": "test"
}"""


def test_a_result_json_of_today_stays_readable(tmp_path):
    (tmp_path / "result.json").write_text(WRITTEN)
    result = read_result(tmp_path)
    assert (result.path, result.rounds, result.accuracy, result.notes) == (tmp_path, 3, 0.5, ["a note"])
    assert result.calibrations["lda"].clients_accuracy.own_images.worst == 0.3
    assert result.privacy.releases[0].calibrations == ("lda",)
    assert result.settings == {"data": "digits", "lr": 0.01}
    assert json.loads(json.dumps(to_json(result))) == json.loads(WRITTEN)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rounds": 3', '"rounds": "3"', "rounds: expected int, got str"),
        ('"rounds": 3', '"rounds": 3, "extra": 1', "unknown key 'extra'"),
        ('"calibrations": [\n', '"calibrations": [1,', "not subscriptable"),
    ],
)
def test_a_damaged_result_json_is_refused_by_file_and_field(tmp_path, old, new, message):
    assert old in WRITTEN
    (tmp_path / "result.json").write_text(WRITTEN.replace(old, new, 1))
    with pytest.raises(UserError, match=rf"result\.json is damaged or missing .*{message}"):
        read_result(tmp_path)
