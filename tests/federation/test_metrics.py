"""What operators see: the run that is on, health, and counters that Prometheus reads."""

import asyncio
import json
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from unskew.console.federation import federation_app
from unskew.core.errors import UserError
from unskew.federation.folder import initialise, toml
from unskew.federation.metrics import Counts, describe_folder, last_run, served
from unskew.federation.network import free_port


def submitted(tmp_path, rounds=(1, 2)):
    """A federation whose last run has finished these rounds."""
    federation = initialise(tmp_path / "fed", nodes=["ward"])
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.toml").write_text('method = "fedavg + ccvr"\nrounds = 5\n')
    (run / "metrics.jsonl").write_text("".join(json.dumps({"round": number}) + "\n" for number in rounds) + '{"rou')
    federation.run_config.write_text(toml({"recipe": "r.toml", "out": str(run)}, "test"))
    return federation, run


def test_status_names_round_method_and_run_directory_as_json(tmp_path):
    federation, run = submitted(tmp_path)
    printed = CliRunner().invoke(federation_app, ["status", str(federation.path), "--json"])
    assert printed.exit_code == 0, printed.output
    record = json.loads(printed.output)
    assert record["running"] is False
    assert record["nodes"] == [{"name": "ward", "online": False, "seconds_since_heard": None, "processes": 0}]
    shown = {name: record["run"][name] for name in ("directory", "method", "round", "rounds", "state")}
    assert shown == {
        "directory": str(run), "method": "fedavg + ccvr", "round": 2, "rounds": 5, "state": "training",
    }  # fmt: skip
    (run / "result.json").write_text("{}")
    assert last_run(federation)["state"] == "finished"


def test_before_the_first_run_there_is_none_and_damaged_files_are_no_error(tmp_path):
    federation = initialise(tmp_path / "fed")
    assert last_run(federation) is None
    federation.run_config.write_text("not TOML")
    assert last_run(federation) is None
    federation, _ = submitted(tmp_path / "2", rounds=())
    assert (last_run(federation)["round"], last_run(federation)["state"]) == (0, "waiting")


def test_the_folder_is_described_in_prometheus_form(tmp_path):
    federation, run = submitted(tmp_path)
    text = describe_folder(federation)
    assert f'unskew_run_info{{directory="{run}",method="fedavg + ccvr",state="training"}} 1\n' in text
    assert "unskew_run_round 2\n" in text
    assert "# TYPE unskew_node_online gauge\n" in text
    counts = Counts()
    counts.add("refused", 1, reason="path")
    counts.add("refused", 2, reason="path")
    assert counts.text({"connections": 3}) == (
        "# TYPE unskew_gateway_refused_total counter\n"
        'unskew_gateway_refused_total{reason="path"} 3\n'
        "# TYPE unskew_gateway_connections gauge\n"
        "unskew_gateway_connections 3\n"
    )


def test_health_and_metrics_are_served_on_loopback():
    well = True

    async def healthy():
        return well

    async def run():
        nonlocal well
        port = free_port()

        def get(path):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read()

        async with served(port, healthy, lambda: "a 1\n"):
            answers = [await asyncio.to_thread(get, path) for path in ("/metrics", "/health", "/v1/control/start-run")]
            well = False
            return [*answers, await asyncio.to_thread(get, "/health")]

    metrics, healthy_answer, other, ill = asyncio.run(run())
    assert metrics == (200, b"a 1\n")
    assert healthy_answer == (200, b"ok\n")
    assert other[0] == 404
    assert ill == (503, b"Flower's server does not answer\n")


def test_a_mistake_in_what_is_to_be_run_is_one_message_before_anything_is_submitted(tmp_path):
    federation, run = submitted(tmp_path)
    taken, finished = tmp_path / "taken", tmp_path / "finished"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    recipe = tmp_path / "recipe.toml"

    def message(text, *words):
        recipe.write_text(f'data = "nodes"\nclients = 3\n{text}\n')
        with pytest.raises(UserError) as raised:
            CliRunner().invoke(
                federation_app, ["run", *words, "--federation", str(federation.path)], catch_exceptions=False
            )
        return str(raised.value)

    assert "fedavgg" in message('method = "fedavgg"', str(recipe))
    assert "unknown field `deadlin`" in message("[federation]\ndeadlin = 3", str(recipe))
    for folder in (taken, run):
        assert f"{folder} exists and is not an empty folder" in message("", str(recipe), "--out", str(folder))
    assert str(finished) in message("", "--resume", str(finished))
    assert "is not running on this machine" in message("", str(recipe))  # nothing else is wrong
