"""What real nodes send and get, read in front of TLS: under ``secure`` nothing of a single client is in it."""

import json
import ssl
from contextlib import closing

import pytest

from faults.live import Live
from faults.wires import Wire
from leaks import Leaks
from nodes import exchange_of, federated, registered
from unskew.engines.flower.node import Node, read_node_data
from unskew.federation.folder import read_node, toml

pytestmark = pytest.mark.heavy

NAMES = ["a", "b", "c"]
METHOD = "scaffold + ccvr(per_class=20) + withhold(5)"
OPTIONS = {"data": "nodes", "clients": 3, "rounds": 1, "epochs": 1, "batch": 32, "lr": 0.02, "seed": 0}


class Tap(Wire):
    """A wire with the server's own certificate, so that what passes can be read."""

    def __init__(self, federation) -> None:
        self._heard: dict[object, bytearray] = {}  # by one direction of one connection
        near = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        near.load_cert_chain(federation.certificate, federation.key)
        far = ssl.create_default_context(cafile=str(federation.authority))
        super().__init__(federation.settings.port, near=near, far=far)

    def heard(self, part: bytes, connection: object) -> None:
        self._heard.setdefault(connection, bytearray()).extend(part)

    def taken(self) -> bytes:
        """All that has passed since the last time."""
        before, self._heard = self._heard, {}
        return b"|".join(before.values())


def twin(folder, partition, method):
    """The same federation in this process: what of the clients could be on the wire, and the weights."""
    folder.mkdir()
    nodes = {}
    for number, name in enumerate(NAMES):
        data = read_node_data(name, "digits", partition=f"file:{partition}", clients=(number,))
        nodes[100 + number] = Node(data, folder / name, registered=registered(folder, name, NAMES))
    leaks, known = Leaks(), set()

    def between(node, question, reply):
        leaks.add_work(nodes[node], question)
        if nodes[node]._runs and node not in known:
            known.add(node)
            leaks.add_data(nodes[node], node - 100)
        return reply

    result = federated(folder, exchange_of(nodes, between=between), **OPTIONS, method=method)
    return leaks, result


def test_under_secure_no_byte_that_real_nodes_send_or_get_is_of_a_single_client(tmp_path):
    live = Live(tmp_path / "f", NAMES)
    tap = Tap(live.federation)
    for name in NAMES:
        node = read_node(live.federation.node(name))
        (node.path / "node.toml").write_text(toml({"name": name, "server": f"127.0.0.1:{tap.port}"}, "for a test"))
    passed = {}
    methods = {"secure": f"{METHOD} + secure(updates=true)", "plain": METHOD}
    with closing(tap), closing(live):
        live.start("server", *NAMES)
        for out, method in methods.items():
            recipe = {**OPTIONS, "method": method}
            tap.taken()
            live.run(tmp_path / out, "".join(f"{name} = {json.dumps(value)}\n" for name, value in recipe.items()))
            passed[out] = tap.taken()
    for out, method in methods.items():
        leaks, result = twin(tmp_path / f"twin-{out}", live.partition, method)
        written = json.loads((tmp_path / out / "result.json").read_text())
        assert written["weights_sha256"] == result.weights_sha256  # so this is what to look for
        assert len(passed[out]) > result.bytes_up + result.bytes_down
        expected = set() if out == "secure" else {
            "an update", "a client's statistics", "a client's metrics", "label counts",
        }  # fmt: skip
        assert leaks.found(passed[out]) == expected
