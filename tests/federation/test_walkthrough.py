"""The walk-through of docs/federation.md as it stands there, and the demo: commands that people type."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from live import until

from unskew.federation.folder import read_federation
from unskew.federation.network import free_ports
from unskew.federation.processes import marked
from unskew.federation.server import last_seen, server_mark

PAGE = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
WALK = PAGE.partition("## Walk-through")[2].partition("\n## ")[0]
RECIPES = Path(__file__).parents[2] / "recipes" / "federation"


def commands():
    return [line.removeprefix("$ ") for line in WALK.splitlines() if line.startswith("$ ")]


def unskew(words, folder):
    command = [sys.executable, "-m", "unskew", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_walk_through_has_every_command_that_there_is():
    named = {tuple(shlex.split(line)[:3]) for line in commands()}
    assert {words[2] for words in named if words[1] == "federation"} == {
        "init",
        "server",
        "node",
        "run",
        "status",
        "stop",
    }


@pytest.mark.heavy
def test_the_walk_through_does_what_it_says(tmp_path):
    recipe = re.search(r"```toml\n(.*?)```", WALK, re.DOTALL)[1]
    (tmp_path / "recipe.toml").write_text(recipe)
    background, said = [], {}
    try:
        for line in commands():
            words = shlex.split(line)
            behind = words[-1] == "&"
            words = words[1 : -1 if behind else None]
            if words[:2] == ["federation", "init"]:
                words += ["--port", str(free_ports())]  # 8000 may be in use here
            if words[:2] == ["federation", "status"]:
                until(lambda: len(last_seen(read_federation(tmp_path / "fed"))) == 3)
            command = unskew(words, tmp_path)
            if behind:
                background.append(command)
                continue
            printed, _ = command.communicate(timeout=600)
            assert command.returncode == 0, (line, printed)
            said[" ".join(words[:2])] = printed
        codes = [command.wait(60) for command in background]
    finally:
        for command in background:
            command.terminate()
        for command in background:
            command.communicate(timeout=60)
    for name in ("ward", "clinic", "lab"):
        assert f"node {name}: online" in said["federation status"]
    assert "after ccvr + secure" in said["federation run"]
    assert "server: ended" in said["federation stop"]
    assert codes == [0, 0, 0, 0]
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    assert json.loads((tmp_path / "runs" / "first" / "result.json").read_text())["engine"] == "flower"
    assert marked(server_mark(read_federation(tmp_path / "fed"))) == []


@pytest.mark.heavy
def test_the_demo_trains_calibrates_reports_and_leaves_nothing_running(tmp_path):
    began = time.monotonic()
    demo = unskew(["federation", "demo", "--out", "d"], tmp_path)
    printed, _ = demo.communicate(timeout=900)
    print(f"{time.monotonic() - began:.0f} s, {os.getloadavg()}")
    assert demo.returncode == 0, printed
    run = tmp_path / "d" / "runs" / "demo"
    result = json.loads((run / "result.json").read_text())
    assert result["calibrations"][0]["name"] == "ccvr + secure"
    assert result["calibrations"][0]["accuracy"] > result["accuracy"]
    assert (run / "report.html").exists()
    assert marked(server_mark(read_federation(tmp_path / "d"))) == []


@pytest.mark.heavy
def test_an_interrupted_demo_leaves_nothing_running(tmp_path):
    demo = unskew(["federation", "demo", "--out", "d"], tmp_path)
    until(lambda: (tmp_path / "d" / "federation.toml").exists())
    mark = server_mark(read_federation(tmp_path / "d"))
    until(lambda: len(marked(mark)) >= 2)
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert marked(mark) == []


def test_the_compose_file_keeps_data_and_network_apart():
    services = yaml.safe_load((RECIPES / "compose.yaml").read_text())["services"]
    assert services["service"]["network_mode"] == "none"
    assert not any("data" in volume or "memories" in volume for volume in services["supernode"]["volumes"])
    assert "ports" not in services["service"] | services["supernode"]
    entry = (RECIPES / "Dockerfile").read_text().splitlines()[-1]
    assert entry == 'ENTRYPOINT ["unskew", "federation"]'
