"""Nodes and server that are killed, and a network that is cut, while a run is on: between real processes."""

import json
import time
from contextlib import closing

import pytest

import unskew
from faults.live import LOCAL, Command, Live, Run, recipe, rounds_done, until
from faults.wires import HELD, OPEN, Wire
from unskew.federation.folder import read_node, toml

pytestmark = pytest.mark.heavy


@pytest.fixture
def live(tmp_path):
    with closing(Live(tmp_path / "f", ["a", "b", "c"])) as made:
        made.start("server", "a", "b", "c")
        yield made


def test_a_node_killed_in_round_3_of_6_does_not_stop_the_run_and_comes_back(live, tmp_path):
    out = tmp_path / "run"
    run = Run(live, out, recipe(3, 6, "scaffold"), deadline=120.0, min_replies=2)
    run.reaches(2)
    live.kill("c")
    live.start("c")
    run.wait()
    assert run.trouble is None, run.said
    rounds = rounds_done(out)
    assert [row["round"] for row in rounds] == [1, 2, 3, 4, 5, 6]
    answered = [row["clients"] for row in rounds]
    assert 2 in answered[2:]
    assert answered[-1] == 3, (answered, run.said)
    missed = [row for row in rounds if row["clients"] == 2]
    assert all("c: " in json.dumps(row) for row in missed), missed  # by name, with the reason


def test_a_killed_server_is_resumed_to_the_bits_of_a_run_that_never_stopped(live, tmp_path):
    out = tmp_path / "run"
    run = Run(live, out, recipe(3, 5, "scaffold"), min_replies=3)
    run.reaches(2)
    live.kill("server")
    run.wait()
    assert run.trouble is not None
    assert not (out / "result.json").exists()
    live.start("server")
    live.run(out, recipe(3, 5, "scaffold"), resume=True, min_replies=3)
    result = json.loads((out / "result.json").read_text())
    alone = unskew.run(
        data="digits", partition=f"file:{live.partition}", clients=3, method="scaffold", rounds=5, evaluate_every=5,
        engine="loop", out=tmp_path / "alone", **LOCAL,
    )  # fmt: skip
    assert result["weights_sha256"] == alone.weights_sha256


def test_a_network_that_is_cut_for_ten_seconds_costs_time_and_no_round(tmp_path):
    live = Live(tmp_path / "f", ["a", "b"])
    relay = Wire(live.federation.settings.port)
    node = read_node(live.federation.node("b"))
    (node.path / "node.toml").write_text(toml({"name": "b", "server": f"127.0.0.1:{relay.port}"}, "for a test"))
    out = tmp_path / "run"
    with closing(live), closing(relay):
        live.start("server", "a", "b")
        run = Run(live, out, recipe(2, 4), deadline=120.0)
        run.reaches(1)
        relay.mode = HELD
        time.sleep(10)
        relay.mode = OPEN
        run.wait()
        assert run.trouble is None, run.said
        assert [row["clients"] for row in rounds_done(out)] == [2, 2, 2, 2]


def test_a_program_of_the_server_that_dies_is_started_again(tmp_path):
    with closing(Live(tmp_path / "f", ["a"])) as live:
        live.start("server")
        live.kill_program("server", "unskew.federation.gateway")
        live.commands["server"].wait_for("gateway ended with signal 9")
        live.start("a")
        second = Command("node", str(live.federation.node("a")))
        assert second.ends() == 2
        assert second.says("node a of")
        assert second.says("is already running")
        live.kill_program("a", "node_service")
        live.commands["a"].wait_for("service ended with signal 9")
        until(lambda: sum("ready: node a" in line for line in live.commands["a"].lines) == 2)
