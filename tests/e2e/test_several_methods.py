"""Several methods in one command, and results for programs."""

import json
import shutil

import pytest

import unskew as package
from analysis.finished import command as unskew
from analysis.finished import done, refused
from unskew.console.schema import recipe_schema, result_schema
from unskew.runs.config import OPTIONS

pytestmark = pytest.mark.usefixtures("in_a_new_folder")
FAST = ["--rounds", "1", "--epochs", "1", "--engine", "loop", "--clients", "3", "--partition", "iid"]


def test_methods_and_seeds_are_trained_in_one_folder_compared_and_continued(capsys, tmp_path):
    words = ["run", *FAST, "--method", "fedavg", "--method", "fedprox(0.1) + lda", "--seeds", "0,1"]
    text = done(capsys, *words)
    folder = tmp_path / "runs" / "digits-fedavg-vs-fedprox-0.1-lda"
    runs = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("result.json"))
    assert runs == ["fedavg/seed0", "fedavg/seed1", "fedprox-0.1-lda/seed0", "fedprox-0.1-lda/seed1"]
    assert "2 methods, 4 runs" in text
    assert "after lda" in text
    assert "Too few seeds to name a winner" in " ".join(text.split())
    shutil.rmtree(folder / "fedavg/seed1")  # as if stopped before it
    code, text, error = unskew(capsys, *words, "--json")
    assert code == 0, error
    assert error.count("already finished") == 3
    found = json.loads(text)
    assert [(row["method"], row["seed"]) for row in found] == [
        ("fedavg", 0), ("fedavg", 1), ("fedprox(0.1) + lda", 0), ("fedprox(0.1) + lda", 1),
    ]  # fmt: skip
    table = package.compare(folder, columns="method,after")
    assert [row["method"] for row in table.rows()] == ["fedavg", "fedprox(0.1) + lda"]


def test_one_of_several_methods_that_is_wrong_is_refused_before_anything_is_trained(capsys, tmp_path):
    assert "did you mean 'fedprox'?" in refused(capsys, "run", *FAST, "--method", "fedavg", "--method", "fedprx")
    assert not (tmp_path / "runs").exists()


def test_a_run_prints_its_result_as_json_and_all_else_to_standard_error(capsys, tmp_path):
    code, text, error = unskew(capsys, "run", *FAST, "--out", "a", "--json")
    assert code == 0
    result = json.loads(text)
    assert result == {"run": "a"} | json.loads((tmp_path / "a/result.json").read_text())
    assert "round 1/1" in error
    known = result_schema()
    assert set(known["required"]) <= set(result) <= set(known["properties"])
    for words in (["compare", "a"], ["check", "a"], ["calibrate", "a", "lda"], ["methods"], ["analyse", "a", "skew"]):
        code, text, error = unskew(capsys, *words, "--json")
        assert (code, bool(json.loads(text))) == (0, True), error
    code, text, _ = unskew(capsys, "report", "a", "--only", "curves", "--json")
    assert json.loads(text)["report"] == "a/report.html"
    assert package.write_report("a", only=["curves"], out="b.html").name == "b.html"


def test_the_schema_of_a_recipe_has_every_option_with_its_limits(capsys):
    made = recipe_schema()
    assert set(made["properties"]) == {*OPTIONS, "seeds", "federation"}
    assert made["properties"]["lr"]["exclusiveMinimum"] == 0
    assert made["properties"]["decay"]["enum"] == ["all", "weights"]
    assert all(entry["description"] for entry in made["properties"].values())
    assert json.loads(unskew(capsys, "schema", "recipe")[1]) == json.loads(json.dumps(made))
    assert unskew(capsys, "schema", "recpie")[2] == "unskew: unskew schema recpie: did you mean 'recipe'?\n"


def test_completion_shows_the_public_names_alone():
    names = [name for name in dir(package) if not name.startswith("__")]
    assert sorted(names) == sorted(package.__all__)
    assert all(getattr(package, name) is not None for name in names)
