"""One description for one option: command line, unskew.run, fingerprint and documentation agree with the table."""

import inspect
import re
import runpy
import subprocess
import sys
import typing
from dataclasses import fields, replace
from pathlib import Path

import pytest

import unskew
from unskew.console.main import load_command
from unskew.core.errors import UserError
from unskew.runs import config as configs
from unskew.runs.config import OPTIONS, Config, checked, fingerprint

ROOT = Path(__file__).parents[2]
HANDLING = {"recipe", "out", "observe", "progress", "trust"}  # parameters of unskew.run that are not options


def test_every_field_is_an_option_with_help():
    assert [each.name for each in fields(Config)] == list(OPTIONS)
    assert [option.name for option in OPTIONS.values() if not (option.help and option.default_text)] == []


def test_the_signature_of_run_agrees_with_the_table():
    parameters = inspect.signature(unskew.run).parameters
    assert [name for name in parameters if name not in HANDLING] == list(OPTIONS)
    for name, option in OPTIONS.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None
        accepted = typing.get_args(parameters[name].annotation)
        assert option.kind in accepted, f"{name}: {option.kind} is not in {accepted}"
        assert type(None) in accepted


def test_resume_takes_options_of_run():
    parameters = inspect.signature(unskew.resume).parameters
    assert set(parameters) - {"path", "observe", "progress", "trust"} <= set(OPTIONS)


def test_the_command_line_has_a_flag_for_each_option():
    command = load_command("run")
    flags = {flag: each for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    for option in OPTIONS.values():
        assert f"(default: {option.default_text})" in flags[option.flag].help
    for name in ("data", "partition", "model", "method", "engine"):
        assert "package.module:function" in flags[OPTIONS[name].flag].help
    assert "package.module:function" in flags["--log"].help


def test_the_table_of_the_site_has_every_option():
    table = runpy.run_path(str(ROOT / "docs" / "generate" / "tables.py"))["options_table"]()
    assert re.findall(r"^\| `(--[a-z-]+)`", table, re.MULTILINE) == [option.flag for option in OPTIONS.values()]


OLD = Config(clients=10, per_round=10, model="tiny-cnn", augment=False)


def test_a_fingerprint_stays_the_same_from_version_to_version():
    # names the folders of the recipes' runs
    assert fingerprint(OLD) == "11c9cfd1dbd71eb12e8b92fdc1492b4c1a25d9efe68e6baf7a271a73dd7899ea"


OTHER = {str: "other", int: 7, float: 0.125, bool: True}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_fingerprint_follows_what_decides_the_result_and_nothing_else(name):
    option = OPTIONS[name]
    changed = fingerprint(replace(OLD, **{name: OTHER[option.kind]})) != fingerprint(OLD)
    assert changed == option.decides


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CPU", "", "cpu:0", "cuda:1234"])
def test_a_text_that_names_no_device_is_refused(device):
    with pytest.raises(UserError, match=r"--device .*give auto, cpu, cuda, cuda:N or mps"):
        checked(replace(Config(), device=device))


def test_a_configuration_with_values_from_python_says_that_it_does_not_repeat_the_run():
    text = configs.to_toml(replace(Config(), method="python:mine"))
    assert "Values given from Python are only described: method." in text.splitlines()[0]
    assert configs.to_toml(Config()).startswith(configs.HEADER)


@pytest.mark.heavy
def test_types_of_run_are_checked_by_mypy(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("import unskew\nunskew.run(rounds='3')\nunskew.run(round=3)\nunskew.run(data='digits', lr=1)\n")
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", str(file)],
        capture_output=True, text=True, check=False, cwd=ROOT, env={"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin"},
    )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if "wrong.py" in line and "error" in line]
    assert len(lines) == 2, ended.stdout + ended.stderr
    assert '"rounds"' in lines[0]
    assert '"round"' in lines[1]
