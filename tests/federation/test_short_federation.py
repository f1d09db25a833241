"""One short federation between real processes, over TLS with node keys: the whole way, in every test run."""

from contextlib import closing

import pytest

import unskew
from faults.live import LOCAL, Command, Live, recipe
from unskew.core.errors import UserError
from unskew.federation.processes import marked
from unskew.runs.result import read_result

# one round, and the server's own test images: Flower starts a process of a second for every message
RECIPE = recipe(2, 1, "scaffold", data="digits")


def test_two_nodes_over_tls_give_the_weights_of_one_process_and_leave_nothing_running(tmp_path):
    """The longest of the quick tests, most of it Flower's starting; longer ones are in test_live_weights.py."""
    live = Live(tmp_path / "f", ["a", "b"])
    with pytest.raises(UserError, match=r"the server of .* is not running on this machine; start it with"):
        live.run(tmp_path / "early", RECIPE)
    with closing(live):
        live.start("server", "a", "b")
        said = []
        live.run(tmp_path / "run", RECIPE, said.append)
        second = Command("server", str(live.path))
        assert second.ends() == 2
        assert second.says("is already running as process")
    result = read_result(tmp_path / "run")
    alone = unskew.run(
        data="digits", partition=f"file:{live.partition}", clients=2, method="scaffold", rounds=1, engine="loop",
        out=tmp_path / "alone", **LOCAL,
    )  # fmt: skip
    assert result.weights_sha256 == alone.weights_sha256
    assert result.engine == "flower"
    assert any("round 1/1" in line for line in said)
    assert marked(live.mark("server")) == []
