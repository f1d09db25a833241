"""Small finished runs that the tests of measures look at: made once, and never written to."""

import hashlib
import json
import shutil
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from unskew.analysis import measure, parse_measure
from unskew.charts.files import svg
from unskew.console.main import main
from unskew.data import sources
from unskew.runs import train
from unskew.runs.finished import FinishedRun, calibrate_run
from unskew.runs.seals import seal_folder

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
EVERYTHING = "norms + drift + silhouette + model(every=1)"
CALIBRATIONS = ("ccvr(per_class=30, epochs=2)", "lda", "lda(layers=2)")
SMALL = {
    "partition": "dirichlet(alpha=0.5)",
    "clients": 5,
    "rounds": 3,
    "epochs": 1,
    "batch": 8,
    "lr": 0.05,
    "engine": "loop",
}


@cache
def images(folder: Path) -> Path:
    """Some of the digits as a user's own arrays, so that a test can move them away."""
    digits = sources.load("digits", None)
    file = folder / "digits.npz"
    np.savez(
        file, x_train=digits.train.images[:240, 0], y_train=digits.train.labels[:240],
        x_test=digits.test.images[:120, 0], y_test=digits.test.labels[:120], classes=np.array(NAMES),
    )  # fmt: skip
    return file


@cache
def made(folder: Path, **options) -> Path:
    """A finished run with these options, in a folder of its own."""
    words = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:12]
    run = folder / f"run-{words}"
    calibrations = options.pop("calibrations", ())
    train.run(out=run, **{"data": f"arrays:{images(folder)}", **SMALL, **options})
    if calibrations:
        calibrate_run(run, *calibrations)
    return run


@pytest.fixture(scope="session")
def runs_of(tmp_path_factory):
    """Finished runs by their options; each is made when it is first asked for. Nobody writes to them."""
    folder = tmp_path_factory.getbasetemp() / "finished"
    folder.mkdir(exist_ok=True)  # test modules of other folders have this fixture too, and share what was made
    return lambda **options: made(folder, **options)


@pytest.fixture(scope="session")
def finished(runs_of):
    """A run of three rounds, recorded and calibrated in three ways, four of five clients a round."""
    return runs_of(calibrations=CALIBRATIONS, during=EVERYTHING, per_round=4)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it that a test may spoil, with a copy of its images beside."""
    return copied(finished, tmp_path)


def copied(finished: Path, folder: Path, name: str = "run") -> Path:
    """The run with its images in ``folder``, as if it had been made there."""
    place = folder / name
    shutil.copytree(finished, place)
    mine = folder / "digits.npz"
    if not mine.exists():
        shutil.copy(finished.parent / "digits.npz", mine)
    text = (place / "config.toml").read_text()
    (place / "config.toml").write_text(text.replace(str(finished.parent / "digits.npz"), str(mine)))
    seal_folder(place)
    return place


def unsealed(run: Path) -> Path:
    """The run as an earlier version would have left it: what is changed in it is not noticed by its hash."""
    (run / "manifest.json").unlink(missing_ok=True)
    return run


@contextmanager
def finished_run(run: Path, **options):
    with FinishedRun(run, **options) as opened:
        yield opened


def measured(opened: FinishedRun, source: str, *, again: bool = True):
    """The measure of this text: taken, or with ``again=False`` as it is stored where that still fits."""
    return measure.load_or_take(opened, parse_measure(source), again=again)


def known(opened: FinishedRun, source: str):
    """The measure of this text as it is stored."""
    return measure.load_measure(opened, parse_measure(source))


def content(
    run: Path, *, but: tuple[str, ...] = ("figures", ".lock", "report.html", "manifest.json", ".manifest.lock")
) -> dict[str, str]:
    """Every file of a run with a hash of what it holds, without what measures themselves write."""
    files = (path for path in run.rglob("*") if path.is_file())
    inside = {path.relative_to(run): path for path in files}
    return {
        str(name): hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in sorted(inside.items())
        if name.parts[0] not in but
    }


def drawn(charts) -> list[str]:
    """The names of the charts; each of them can be drawn."""
    assert all(svg(chart).startswith("<svg") for chart in charts)
    return [chart.name for chart in charts]


def recorded(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "during.jsonl").read_text().splitlines()]


def metrics(run: Path) -> list[dict]:
    """Every round but for its seconds."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def section(page, name: str):
    """The section of a page."""
    return next(section for section in page.sections if section.name == name)


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def changed(file: Path, change) -> None:
    """A JSON file with ``change`` done to what it holds, in a run that is then no longer sealed."""
    for folder in file.parents[:2]:
        unsealed(folder)
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def command(capsys, *words) -> tuple[int, str, str]:
    """Run a command in this process: exit code, standard output, standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def without_note(error: str) -> str:
    """What a command says on standard error, but for the note that a run is not sealed."""
    return "".join(line for line in error.splitlines(keepends=True) if "is not sealed: it has no" not in line)


def done(capsys, *words) -> str:
    code, said, error = command(capsys, *words)
    assert (code, without_note(error)) == (0, "")
    return said


def refused(capsys, *words) -> str:
    """The one message of a command that ends with exit code 2."""
    code, _, error = command(capsys, *words)
    assert code == 2, error
    error = without_note(error)
    assert error.startswith("unskew: ")
    assert error.count("unskew: ") == 1
    assert "Traceback" not in error
    return error.removeprefix("unskew: ")


@contextmanager
def undisturbed():
    """Whoever draws and counts threads elsewhere notices nothing."""
    drawn, threads, grad = torch.random.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
    numpy = np.random.get_state()[1].copy()  # noqa: NPY002  what must not move
    yield
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert (np.random.get_state()[1] == numpy).all()  # noqa: NPY002
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)
