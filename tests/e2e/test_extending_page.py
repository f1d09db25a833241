"""docs/how-to/extending.md as a stranger uses it: its code is one file, its commands run in order, its claims hold."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import unskew
from observers import stop_after
from unskew.console.main import main
from unskew.report.write import make_report

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "extending.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MINE = "\n".join(code for kind, code in BLOCKS if kind == "python")
COMMANDS = [line[2:] for kind, code in BLOCKS if kind == "console" for line in code.splitlines()]
SCRIPT = "\n".join(code for kind, code in BLOCKS if kind == "py")
DOORS = ["method", "calibration", "measure", "network", "data set", "partition", "engine", "logger"]


def at_once(folder, *commands):
    """Run the commands in that folder; mine.py there is the page's code."""
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command)[1:])
        assert ended.value.code == 0, command


def result(run):
    return json.loads(Path(run, "result.json").read_text())


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A folder in which the page was followed from top to bottom."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "mine.py").write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        sys.modules.pop("mine", None)
        at_once(folder, *COMMANDS)
        exec(compile(SCRIPT, "use.py", "exec"), {"__name__": "__main__"})
        yield folder
        sys.modules.pop("mine", None)


def test_there_is_a_section_for_each_door():
    headings = " ".join(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    for door in DOORS:
        assert re.search(rf"\bAn? {door}\b", headings), door
        assert re.search(rf"^\| {door} \|", PAGE, re.MULTILINE), door


def test_the_commands_do_what_the_page_says(page):
    assert all(command.startswith("unskew ") for command in COMMANDS)
    assert result("runs/rare")["method"] == "fedavgm(0.5) + mine:rare(strength=1)"
    assert [row["name"] for row in result("runs/rare")["calibrations"]] == [
        "mine:adjusted", "mine:adjusted(strength=0.5) + secure",
    ]  # fmt: skip
    assert (page / "runs" / "rare" / "figures" / "mine-brightness-most-3-clients.svg").exists()
    assert "of full brightness" in (page / "runs" / "rare" / "report.html").read_text()
    assert result("runs/mostly")["partition"] == "mine:mostly"


def test_an_engine_of_threads_gives_the_bits_of_the_loop(page):
    ours, theirs = result("runs/loop"), result("runs/threads")
    assert theirs["engine"] == "mine:threads"
    assert theirs["weights_sha256"] == ours["weights_sha256"]
    assert (theirs["accuracy"], theirs["loss"]) == (ours["accuracy"], ours["loss"])


@pytest.mark.parametrize("method", ["scaffold + moon + prototypes", "fedvc(16) + fedir + lda + secure"])
def test_it_does_so_with_memories_statistics_and_after_a_stop(page, method):
    options = {"method": method, "rounds": 3, "epochs": 1, "clients": 4, "per_round": 3, "checkpoint_seconds": 0}
    name = re.sub(r"\W+", "-", method)
    loop = unskew.run(engine="loop", out=f"runs/loop-{name}", **options)
    with pytest.raises(unskew.StopRun):
        unskew.run(engine="mine:threads", out=f"runs/threads-{name}", observe=stop_after(2), **options)
    resumed = unskew.resume(f"runs/threads-{name}")
    assert resumed.weights_sha256 == loop.weights_sha256
    assert resumed.engine == "mine:threads"
    ours, theirs = ([row.accuracy for row in run.calibrations.values()] for run in (resumed, loop))
    assert ours == theirs


def test_the_logger_has_each_round_once_and_only_what_was_asked_for(page):
    (file,) = (page / "runs" / "logged" / "logs").rglob("figures.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    assert all("accuracy" in name for row in rows for name in row if name != "round")


def test_values_from_python_have_texts_where_another_process_could_find_them(page):
    found = result("runs/python")
    assert found["method"] == "fedavg + mine:rare + mine:adjusted(strength=0.5)"
    assert (found["engine"], found["model"]) == ("mine:threads", "mine:layers")
    assert [row["name"] for row in found["calibrations"]] == [
        "mine:adjusted(strength=0.5)", "mine:adjusted(strength=0.2)",
    ]  # fmt: skip
    assert result("runs/value")["engine"] == "loop"


def test_a_run_of_values_goes_the_whole_way_with_the_same_values(page):
    import mine

    images = mine.bars(100)
    with pytest.raises(unskew.UserError, match=r"data was passed from Python .*; pass it again as data=…"):
        unskew.calibrate_run("runs/python", "lda")
    with pytest.raises(unskew.UserError, match=r"data is .*60 train.*but the run was started with .*100 train"):
        unskew.analyse("runs/python", "confusion", data=mine.bars(60))
    assert unskew.load("runs/python", "mine:adjusted(0.2)") is not None
    assert unskew.analyse("runs/python", "confusion", data=images)["confusion"].findings
    _, made = make_report("runs/python", only=["norms", mine.brightness()], data=images)
    assert not [words for section in made.sections for words in section.missing]


@pytest.mark.heavy
def test_workers_find_every_part_of_it(page):
    words = "--data mine:bars --partition mine:mostly --clients 4 --model mine:layers --rounds 1"
    method = '--method "fedavg + mine:rare + mine:adjusted"'
    at_once(
        page,
        f"unskew run {words} {method} --engine loop --out runs/all-loop",
        f"unskew run {words} {method} --engine pool --workers 2 --out runs/all-pool",
        "unskew analyse runs/all-pool mine:brightness --engine pool",
        "unskew calibrate runs/all-pool mine:adjusted --engine mine:threads",
    )
    assert result("runs/all-loop")["weights_sha256"] == result("runs/all-pool")["weights_sha256"]


def test_the_method_keeps_the_laws(page):
    from unskew.extend import check_method

    assert check_method("mine:rare", beside=["fedprox"])
