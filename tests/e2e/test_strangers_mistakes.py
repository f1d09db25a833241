"""What a stranger may do wrong at each door: one clear message, exit code 2, and no folder left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import unskew
from analysis import finished

pytestmark = pytest.mark.usefixtures("in_a_new_folder")
TESTS = Path(__file__).parent.parent
DOORS = {
    "--data": "outside_data:wrong",
    "--partition": "outside_data:by_class",
    "--model": "outside_models:linear",
    "--method": "outside_methods:raises",
    "--engine": "outside_engines:knobs",
    "--log": "outside_loggers:lines",
}


def refused(capsys, *words):
    """The one message of a command that ends with code 2 and leaves nothing behind."""
    said = finished.refused(capsys, "run", "--rounds", "1", "--epochs", "1", *words)
    assert list(Path().iterdir()) == []
    return said


@pytest.mark.parametrize("flag", DOORS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name: "no_such_module:thing", "'no_such_module:thing' cannot be imported: ModuleNotFoundError"),
        (lambda name: f"{name.partition(':')[0]}:no_such_thing", "cannot be imported: AttributeError"),
        (lambda name: "outside_broken:thing", "cannot be imported: ZeroDivisionError"),
        (lambda name: "outside_engines:number_not_function", "'outside_engines:number_not_function' is not a function"),
        (lambda name: f"{name}(no_such_knob=1)", "has no knob 'no_such_knob'"),
        (lambda name: f"{name}(", ""),
    ],
    ids=["no module", "no function", "raises on import", "not callable", "wrong knob", "half a text"],
)
def test_a_name_that_leads_nowhere(capsys, flag, change, message):
    name = change(DOORS[flag])
    said = refused(capsys, flag, name)
    assert message in said
    assert name.partition("(")[0] in said


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--data", "outside_data:fails", "raises OSError: disk on fire"),
        ("--data", "outside_data:wrong", "is an int; give an ImageSet"),
        ("--partition", "outside_data:answer(what=raises)", "raises RuntimeError: no luck"),
        ("--partition", "outside_data:answer(what=text)", "must be a list of 1,438 integers, one per training exam"),
        ("--model", "outside_methods:nothing", "returns None; it must return a torch.nn.Module"),
        ("--method", "outside_methods:empty", "must return a function from Algorithm to Algorithm"),
        ("--method", "outside_engines:no_setup", "is not a method"),
        ("--engine", "outside_engines:raises", "engine outside_engines:raises raises ConnectionError: no server"),
        ("--engine", "outside_engines:nothing", "returns None without roster, visit, close"),
        (
            "--engine",
            "outside_engines:no_setup",
            "cannot be called from a text: it must take 1 argument before its kno",
        ),
        ("--engine", "outside_engines:knobs(seed=high)", "seed must be a whole number, not high"),
        ("--log", "outside_loggers:broken", "--log outside_loggers:broken raises ConnectionError: no server"),
        ("--log", "outside_loggers:lines + outside_loggers:lines", "give one --log per logger"),
    ],
)
def test_a_function_that_raises_or_gives_something_else(capsys, flag, name, message):
    assert message in refused(capsys, flag, name)


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("--method", "uscc(9223372036854775808)", "per_class=9223372036854775808 is too large; the limit is 1,000,"),
        ("--method", "ccvr(per_class=1e30)", "per_class must be a whole number"),
        ("--method", "fedvc(1000000000)", "of memory before training"),
        ("--method", "fedavg + " * 20_000, "characters; the limit is 10,000"),
        ("--epochs", "1000000000", "of memory before training"),
        ("--partition", "dirichlet(1e-400)", "give a number above 0"),
        ("--partition", "shards(1000000000)", "give fewer clients or a smaller per_client"),
        ("--data", f"arrays:{'n' * 5000}", "File name too long"),
        ("--out", "n" * 5000, "File name too long"),
    ],
)
def test_a_value_beyond_all_bounds_is_refused_before_any_training(capsys, flag, text, message):
    said = refused(capsys, flag, text)
    assert message in " ".join(said.split())
    assert len(said) < 1000


def test_an_engine_from_python_is_a_function_of_a_module():
    import outside_engines

    with pytest.raises(
        unskew.UserError, match="engine must be a name, or an importable function that takes an EngineSetup"
    ):
        unskew.run(engine=lambda setup: None, rounds=1)
    with pytest.raises(unskew.UserError, match="not 3"):
        unskew.run(engine=3, rounds=1)
    assert list(Path().iterdir()) == []
    assert unskew.run(engine=outside_engines.knobs, rounds=1, epochs=1).engine == "outside_engines:knobs"


def test_a_calibration_without_a_name_cannot_be_in_a_list_of_methods():
    from outside_calibrations import nameless

    with pytest.raises(unskew.UserError, match="a calibration has no name"):
        unskew.run(method=["fedavg", nameless()], rounds=1)
    assert list(Path().iterdir()) == []


def test_a_real_shell_has_every_door_open_in_one_command(tmp_path):
    """A process of its own, in the stranger's folder, with nothing but its files beside it."""
    for name in ("outside_data", "outside_models", "outside_methods", "outside_calibrations", "outside_loggers",
                 "outside_engines"):  # fmt: skip
        (tmp_path / f"{name.replace('outside', 'my')}.py").write_text((TESTS / f"{name}.py").read_text())
    words = ["--data", "my_data:stripes", "--partition", "my_data:by_class", "--clients", "3",
             "--model", "my_models:vit", "--method", "my_methods:as_it_is + my_calibrations:shrink",
             "--engine", "my_engines:knobs(seed=1)",
             "--log", "my_loggers:lines", "--rounds", "1", "--epochs", "1", "--out", "run"]  # fmt: skip
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(TESTS)]
    ended = subprocess.run(
        [sys.executable, "-m", "unskew", "run", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "logs").is_dir()
    assert "my_calibrations:shrink" in (tmp_path / "run" / "result.json").read_text()
