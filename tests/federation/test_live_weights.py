"""Three nodes over TLS and one process give the same weights, for every kind of method: between real processes."""

import subprocess
from contextlib import closing

import pytest

import unskew
from faults.live import LOCAL, Live, recipe
from unskew.federation import flower
from unskew.federation.flower import environment
from unskew.runs.result import read_result

pytestmark = pytest.mark.heavy

METHODS = ("fedavgm(0.9) + fedvc(64) + fedir + ccvr + withhold(5)", "moon", "scaffold", "fedeccr")


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with closing(Live(tmp_path_factory.mktemp("f") / "f", ["a", "b", "c"])) as made:
        made.start("server", "a", "b", "c")
        yield made


@pytest.mark.parametrize("method", METHODS)
def test_three_nodes_over_tls_give_the_weights_of_one_process(live, tmp_path, method):
    live.run(tmp_path / "run", recipe(3, 2, method), min_replies=3)
    result = read_result(tmp_path / "run")
    alone = unskew.run(
        data="digits", partition=f"file:{live.partition}", clients=3, method=method, rounds=2, evaluate_every=2,
        engine="loop", out=tmp_path / "alone", **LOCAL,
    )  # fmt: skip
    assert (result.engine, result.failures) == ("flower", 0)
    assert result.weights_sha256 == alone.weights_sha256
    accuracies = [{name: each.accuracy for name, each in made.calibrations.items()} for made in (result, alone)]
    assert accuracies[0] == accuracies[1]


def test_flowers_own_command_runs_the_app_folder_with_the_recipe_beside_it(live):
    (live.path / "recipe.toml").write_text(recipe(3, 1, "fedavg", data="digits"))
    ended = subprocess.run(
        [flower.program("flwr"), "run", str(live.federation.app), "--stream"],
        env=environment(live.federation.flower_home), capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert read_result(live.path / "runs" / "first").engine == "flower"
