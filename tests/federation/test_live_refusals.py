"""Who may not join, tried with Flower's own programs against a server that runs."""

import base64
import http.client
import shutil
import socket
import ssl
import subprocess
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from faults.live import Command, Live
from unskew.federation import flower
from unskew.federation.flower import environment
from unskew.federation.folder import CONNECTION, initialise, read_node, toml
from unskew.federation.network import free_port, make_node_key, public_pem
from unskew.federation.processes import marked

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with closing(Live(tmp_path_factory.mktemp("f"), ["a"])) as made:
        made.start("server")
        yield made


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
    assert strange.says("the server refuses this node: this node's key is not registered; on the server, run:")
    live.commands["server"].wait_for("refused 127.0.0.1: this node's key is not registered")


def test_a_node_without_a_key_is_refused(live, tmp_path):
    trust = ("--root-certificates", str(live.federation.authority))
    code, said = supernode(tmp_path, "--superlink", address(live), *trust)
    assert code != 0
    assert "Failed to initialize the connection" in said
    live.commands["server"].wait_for("refused 127.0.0.1: this port is for the nodes of a federation")  # register-node


def test_a_node_that_speaks_plain_text_is_refused(live, tmp_path):
    code, said = supernode(tmp_path, "--superlink", address(live), "--insecure")
    assert code != 0
    assert "Exit Code: 305" in said
    with socket.create_connection(("127.0.0.1", live.federation.settings.port), timeout=10) as plain:
        plain.sendall(b"POST /v1/fleet/activate-node HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        with suppress(ConnectionError):
            assert b"200" not in plain.recv(100)


def test_a_node_that_does_not_trust_the_authority_does_not_connect(live, tmp_path):
    other = initialise(tmp_path / "other", nodes=["a"])
    place = read_node(other.node("a"))
    (place.path / "node.toml").write_text(toml({"name": "a", "server": address(live)}, "for a test"))
    strange = Command("node", str(place.path), "supernode")
    assert strange.ends() == 2
    assert strange.says("has a certificate that cannot be trusted")


@pytest.mark.parametrize("port", ["the nodes'", "Flower's own"])
def test_nobody_without_the_token_can_submit_code_or_register_a_key(live, tmp_path, port):
    home, federation = tmp_path / "home", live.federation
    home.mkdir()
    own = port == "Flower's own"
    where = f"127.0.0.1:{federation.settings.control_port}" if own else address(live)
    authority = str(federation.local_authority if own else federation.authority)
    connection = toml({"address": where, "root-certificates": authority}, "for a test")
    (home / "config.toml").write_text(f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\n{connection}')
    (tmp_path / "x.pub").write_bytes(make_node_key().public)
    for words in (
        ["supernode", "register", str(tmp_path / "x.pub"), CONNECTION],
        ["run", str(federation.app), CONNECTION],
        ["supernode", "list", CONNECTION],
    ):
        ended = subprocess.run(
            [flower.program("flwr"), *words], env=environment(home), capture_output=True, text=True, check=False
        )
        assert ended.returncode != 0, ended.stdout
    assert flower.runs(federation) == []  # with the token, the same command answers


def test_a_node_with_its_own_key_reaches_no_operators_route(live):
    """The attack that once ran code everywhere: a path that leaves the nodes' part of Flower's server."""
    key = load_ssh_private_key((live.federation.node("a") / "node.key").read_bytes(), None)
    pem = base64.b64encode(public_pem(live.federation.public_keys()["a"])).decode()
    trust = ssl.create_default_context(cafile=str(live.federation.authority))
    for path in ("/v1/fleet/../control/list-nodes", "/v1/control/list-nodes", "/v1/fleet/%2e%2e/control/list-nodes"):
        signed = datetime.now(UTC).isoformat()
        signature = base64.b64encode(key.sign(signed.encode(), ec.ECDSA(hashes.SHA256()))).decode()
        line = http.client.HTTPSConnection("127.0.0.1", live.federation.settings.port, context=trust, timeout=20)
        headers = {"flwr-public-key": pem, "flwr-timestamp": signed, "flwr-signature": signature}
        line.request("POST", path, b"", headers)
        assert line.getresponse().status == 404
        line.close()


def test_no_program_has_a_secret_on_its_command_line_and_all_files_are_the_servers_own(live):
    federation = live.federation
    secrets = [federation.token("gateway"), federation.token("operator"), federation.secret.read_bytes().hex()]
    for number in marked(live.mark("server")):
        words = Path(f"/proc/{number}/cmdline").read_text()
        assert not any(secret in words for secret in secrets)
    for file in (federation.path / "server").rglob("*"):
        assert file.stat().st_mode & 0o077 == 0 or file.suffix in (".crt", ".toml"), file


def test_a_replaced_key_joins_a_server_that_runs_and_the_old_one_is_refused(live):
    live.start("a")
    folder, public = live.federation.node("a"), live.federation.public_keys()["a"]
    old, new = (folder / "node.key").read_bytes(), make_node_key()
    public.write_bytes(new.public)
    live.commands["a"].wait_for("the server refuses this node")
    assert live.commands.pop("a").ends() == 2
    (folder / "node.key").write_bytes(new.private)
    live.start("a")
    (folder / "node.key").write_bytes(old)  # the running node notices, and is refused
    assert live.commands.pop("a").ends() == 2


def test_flowers_own_port_is_on_loopback_alone(live):
    context = ssl.create_default_context(cafile=str(live.federation.local_authority))
    port = live.federation.settings.control_port
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    with plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
        assert secure.version() == "TLSv1.3"
    outside = socket.gethostbyname(socket.gethostname())
    if outside.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError, match=r"."):
        socket.create_connection((outside, port), timeout=5).close()
