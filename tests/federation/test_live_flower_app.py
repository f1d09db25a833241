"""recipes/flower_app through Flower's own programs: an app of somebody else's, with our calibration added."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from faults.live import until
from unskew.federation import flower
from unskew.federation.flower import environment
from unskew.federation.network import free_port
from unskew.federation.processes import ProcessGroup, marked

RECIPE = Path(__file__).parents[2] / "recipes" / "flower_app"


@pytest.mark.heavy
def test_the_recipes_app_runs_with_flwr_run_and_gains_from_its_calibration(tmp_path):
    """The commands of its README, on ports that are free here."""
    app, home, port, mark = tmp_path / "app", tmp_path / "home", free_port(3), f"test:{tmp_path}"
    shutil.copytree(RECIPE, app)
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    heard, surroundings = [], environment(home, NO_COLOR="1", COLUMNS="1000")
    with ProcessGroup(mark, tmp_path / "logs", tmp_path) as group:
        link = [flower.program("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
        group.start("superlink", link, surroundings)
        for number in range(2):
            node = [
                *(flower.program("flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}"),
                *("--port", str(free_port()), "--node-config", f"partition-id={number} num-partitions=2"),
            ]
            group.start(f"node {number}", node, surroundings, heard.append)
        until(lambda: sum("SuperNode ID" in line for line in heard) == 2, what=f"both nodes in {heard}")
        ended = subprocess.run(
            [flower.program("flwr"), "run", ".", "--stream", "--run-config", "rounds=2"],
            env=surroundings, cwd=app, capture_output=True, text=True, timeout=1500, check=False,
        )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    found = dict(re.findall(r"after (\S+) (0\.\d+)", said))
    assert set(found) == {"FedAvg", "ccvr"}, said
    assert float(found["ccvr"]) > float(found["FedAvg"]) + 0.05, found
    assert marked(mark) == []
