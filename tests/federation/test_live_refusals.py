"""Who may not join, tried with Flower's own programs against a server that runs."""

import shutil
import socket
import ssl
import subprocess
from contextlib import suppress

import pytest
from live import Command, Live

from unskew.federation import flower
from unskew.federation.flower import environment
from unskew.federation.folder import CONNECTION, initialise, read_node, toml
from unskew.federation.network import free_port, make_node_key

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    made = Live(tmp_path_factory.mktemp("f"), ["a"])
    try:
        made.start("server")
        yield made
    finally:
        made.close()


def supernode(tmp_path, *words):
    """Flower's own program, without our watcher; its exit code and what it printed."""
    command = [flower.program("flower-supernode"), "--port", str(free_port()), "--max-retries", "2", *words]
    log = tmp_path / "supernode.log"
    with open(log, "wb") as printed:
        ended = subprocess.Popen(command, env=environment(tmp_path / "home"), stdout=printed, stderr=printed)
        try:
            code = ended.wait(200)
        finally:
            ended.kill()
    return code, log.read_text()


def address(live):
    return f"127.0.0.1:{live.federation.settings.port}"


def test_a_node_with_a_key_that_is_not_registered_is_refused_and_told_what_to_do(live, tmp_path):
    stranger = tmp_path / "stranger"
    shutil.copytree(live.federation.node("a"), stranger)
    (stranger / "node.key").write_bytes(make_node_key().private)
    strange = Command("node", str(stranger), "supernode")
    assert strange.ends() == 2
    assert strange.says("the server refuses this node: this node's key is not registered; on the server:")
    live.commands["server"].wait_for("refused 127.0.0.1: this node's key is not registered")


def test_a_node_without_a_key_is_refused(live, tmp_path):
    code, said = supernode(
        tmp_path, "--superlink", address(live), "--root-certificates", str(live.federation.authority)
    )
    assert code != 0
    assert "this node's key is not registered" in said


def test_a_node_that_speaks_plain_text_is_refused(live, tmp_path):
    code, said = supernode(tmp_path, "--superlink", address(live), "--insecure")
    assert code != 0
    assert "Exit Code: 305" in said
    with socket.create_connection(("127.0.0.1", live.federation.settings.port), timeout=10) as plain:
        plain.sendall(b"POST /v1/fleet/activate-node HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        with suppress(ConnectionError):
            assert b"200" not in plain.recv(100)


def test_a_node_that_does_not_trust_the_authority_does_not_connect(live, tmp_path):
    other = initialise(tmp_path / "other", nodes=["a"]).federation
    place = read_node(other.node("a"))
    (place.path / "node.toml").write_text(toml({"name": "a", "server": address(live)}, "for a test"))
    strange = Command("node", str(place.path), "supernode")
    assert strange.ends() == 2
    assert strange.says("has a certificate that cannot be trusted")


def test_nobody_can_submit_code_or_register_a_key_through_the_nodes_port(live, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    connection = toml({"address": address(live), "root-certificates": str(live.federation.authority)}, "for a test")
    (home / "config.toml").write_text(f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\n{connection}')
    (tmp_path / "x.pub").write_bytes(make_node_key().public)
    for words in (
        ["supernode", "register", str(tmp_path / "x.pub"), CONNECTION],
        ["run", str(live.federation.app), CONNECTION],
        ["supernode", "list", CONNECTION],
    ):
        ended = subprocess.run(
            [flower.program("flwr"), *words], env=environment(home), capture_output=True, text=True, check=False
        )
        assert ended.returncode != 0, ended.stdout


def test_flowers_own_port_is_on_loopback_alone(live):
    context = ssl.create_default_context(cafile=str(live.federation.authority))
    port = live.federation.settings.control_port
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        assert secure.version() == "TLSv1.3"
    outside = socket.gethostbyname(socket.gethostname())
    if outside.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError, match=r"."):
        socket.create_connection((outside, port), timeout=5).close()
