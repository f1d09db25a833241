"""The results in the repository: of the recipes as they are, and the tables are what the records make."""

import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest

from analysis.finished import done
from unskew.reproduce.cells import Variant
from unskew.reproduce.plan import do_runs, plan_runs
from unskew.reproduce.recipe import SCALES, load_recipe, recipe_names
from unskew.reproduce.records import RunRecord, describe_machine, read_record
from unskew.reproduce.tables import INDEX

PROJECT = Path(__file__).parents[2]
KEPT = Path("recipes/results")
SAME_BITS = ("machine", "torch", "numpy")  # where these are the same, so are the weights


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The records alone, in a project of their own."""
    shutil.copytree(PROJECT / KEPT / "records", tmp_path / KEPT / "records")
    monkeypatch.chdir(tmp_path)
    return tmp_path / KEPT


def test_every_table_and_the_claim_are_made_anew_from_their_commands_and_the_records(kept, capsys):
    index = (PROJECT / KEPT / INDEX).read_text(encoding="utf-8")
    for line in [*re.findall("^unskew .*$", index, re.MULTILINE), f"unskew reproduce --claim --out {KEPT}"]:
        name, *words = shlex.split(line)
        assert name == "unskew"
        done(capsys, *words, "--show")
    there, here = (
        {file.relative_to(root): file.read_bytes() for file in (*root.glob("tables/**/*.*"), *root.glob("*.*"))}
        for root in (PROJECT / KEPT, kept)
    )
    expected = {file for file in there if file.name != "README.md"}
    assert expected == {file for file in here if file.suffix != ".html" or file.parent == Path()}
    assert [str(file) for file in expected if there[file] != here[file]] == []
    assert {Path(name) for name in (INDEX, "claim.md", "claim.html")} < expected


def test_no_record_is_of_a_recipe_that_has_changed_since():
    """A training is named by all that decides it: the record of a recipe that changed belongs to no table."""
    asked = [(one, Variant(scale, data)) for one in map(load_recipe, recipe_names()) for scale in SCALES
             for data in ("", *one.stand_ins)]  # fmt: skip
    wanted = {(job.path.parent.name, job.config.seed) for each in asked for job in plan_runs([each])}
    records = sorted((PROJECT / KEPT / "records").glob("*/seed*.json"))
    assert records
    assert [str(file) for file in records if (file.parent.name, int(file.stem[4:])) not in wanted] == []


def test_the_page_on_trust_has_the_kept_figures():
    made = runpy.run_path(str(PROJECT / "docs" / "generate" / "trust_table.py"))
    page = (PROJECT / "docs" / "explanation" / "trust.md").read_text(encoding="utf-8")
    assert made["page_with_tables"](page) == page, "run docs/generate/trust_table.py"


@pytest.mark.heavy
def test_a_kept_run_is_made_again_to_the_bit(tmp_path, real_data):
    """FedAvg of CCVR's Table 2 at the scale small, α = 0.1, seed 0, with all that other tables make of it left out."""
    asked = [(load_recipe("ccvr/table2"), Variant("small", seeds=(0,), rows=("FedAvg",), columns=("α = 0.1",)))]
    (job,) = plan_runs(asked, tmp_path)
    kept = read_record(plan_runs(asked, PROJECT / KEPT)[0].path)
    assert isinstance(kept, RunRecord)
    if differs := [name for name in SAME_BITS if kept.machine[name] != describe_machine()[name]]:
        pytest.skip(f"it was made with another {', '.join(differs)}")
    assert do_runs([job], data_dir=str(real_data)) == {}
    again = read_record(job.path)
    assert isinstance(again, RunRecord)
    assert again.result.weights_sha256 == kept.result.weights_sha256
    assert again.result.accuracy == kept.result.accuracy
