"""The steps of docs/tutorials/federation.md on one machine, and the demo: commands that people type."""

import configparser
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from faults.live import until
from unskew.federation.folder import read_federation
from unskew.federation.network import free_port
from unskew.federation.processes import marked
from unskew.federation.server import last_seen, server_mark

COMMANDS = """
unskew federation init fed --node ward --node clinic --node lab
unskew federation server fed &
unskew partition --data digits --clients 3 --partition "dirichlet(alpha=0.5)" --out part.npz
unskew federation node fed/nodes/ward --data digits --partition file:part.npz --client 0 &
unskew federation node fed/nodes/clinic --data digits --partition file:part.npz --client 1 &
unskew federation node fed/nodes/lab --data digits --partition file:part.npz --client 2 &
unskew federation status fed
unskew federation run recipe.toml --federation fed --out runs/first --report
unskew compare runs/first
unskew federation stop fed
"""
RECIPE = """
data = "nodes"
clients = 3
method = "fedavgm(0.9) + ccvr + secure"
rounds = 3
evaluate_every = 3
batch = 32
lr = 0.02
"""
RECIPES = Path(__file__).parents[2] / "recipes" / "federation"


def commands():
    return COMMANDS.strip().splitlines()


def unskew(words, folder):
    command = [sys.executable, "-m", "unskew", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_walk_through_has_every_command_that_there_is():
    named = {tuple(shlex.split(line)[:3]) for line in commands()}
    typed = {words[2] for words in named if words[1] == "federation"}
    assert typed == {"init", "server", "node", "run", "status", "stop"}


@pytest.mark.heavy
def test_the_walk_through_does_what_it_says(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    background, said = [], {}
    try:
        for line in commands():
            words = shlex.split(line)
            behind = words[-1] == "&"
            words = words[1 : -1 if behind else None]
            if words[:2] == ["federation", "init"]:
                words += ["--port", str(free_port(3))]  # 8000 may be in use here
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


def volumes_of(service):
    """What a service mounts: source, place, whether it may write."""
    return [(each.split(":")[0], each.split(":")[1], not each.endswith(":ro")) for each in service["volumes"]]


def test_the_parts_of_a_node_share_a_socket_in_the_compose_file_and_nothing_that_both_may_write():
    services = yaml.safe_load((RECIPES / "compose.yaml").read_text())["services"]
    service, supernode = services["service"], services["supernode"]
    assert service["network_mode"] == "none"
    assert "ports" not in service | supernode
    assert service["user"] != supernode["user"]
    shared = {source for source, _, _ in volumes_of(service)} & {source for source, _, _ in volumes_of(supernode)}
    assert shared == {"meeting"}
    assert ("meeting", "/meeting", False) in volumes_of(supernode)
    assert not any("data" in source for source, _, _ in volumes_of(supernode))
    for each in services.values():
        assert each["read_only"] is True
        assert each["cap_drop"] == ["ALL"]
        assert each["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in each
    entry = (RECIPES / "Dockerfile").read_text().splitlines()[-1]
    assert entry == 'ENTRYPOINT ["unskew", "federation"]'


@pytest.mark.heavy
def test_the_units_start_commands_that_exist_each_as_a_user_of_its_own():
    users, written = set(), {}
    for file in sorted((RECIPES / "systemd").glob("*.service")):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str
        unit.read(file)
        options = unit["Service"]
        users.add(options["User"])
        written[file.stem] = {options["StateDirectory"], options.get("RuntimeDirectory", "")} - {""}
        assert (options["UMask"], options["NoNewPrivileges"], options["ProtectSystem"]) == ("0077", "yes", "strict")
        words = shlex.split(options["ExecStart"])[2:]
        flags = [word for word in words if word.startswith("--")]
        printed, _ = unskew(["federation", words[0], "--help"], RECIPES).communicate(timeout=120)
        assert all(flag in printed for flag in flags), file
    assert len(users) == 3
    assert not written["unskew-service"] & written["unskew-supernode"]
