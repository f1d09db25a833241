"""One short federation between real processes, over TLS with node keys: the whole way, in every test run."""

import json

import pytest
from live import Command, Live

import unskew
from unskew.core.errors import UserError
from unskew.federation.processes import marked

RECIPE = """
data = "nodes"
clients = 2
method = "scaffold"
rounds = 2
evaluate_every = 2
batch = 32
lr = 0.02
"""


def test_two_nodes_over_tls_give_the_weights_of_one_process_and_leave_nothing_running(tmp_path):
    """The longest of the quick tests: about half a minute, most of it Flower's starting."""
    live = Live(tmp_path / "f", ["a", "b"])
    with pytest.raises(UserError, match=r"the server of .* is not running on this machine; start it with"):
        live.run(tmp_path / "early", RECIPE)
    try:
        live.start("server", "a", "b")
        said = []
        live.run(tmp_path / "run", RECIPE, said.append)
        second = Command("server", str(live.path))
        assert second.ends() == 2
        assert second.says("is running already, as process")
    finally:
        live.close()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    alone = unskew.run(
        data="digits", partition=f"file:{live.partition}", clients=2, method="scaffold", rounds=2, evaluate_every=2,
        batch=32, lr=0.02, engine="loop", out=tmp_path / "alone",
    )  # fmt: skip
    assert result["weights_sha256"] == alone.weights_sha256
    assert result["engine"] == "flower"
    assert any("round 2/2" in line for line in said)
    assert marked(live.mark("server")) == []
