"""``unskew federation init`` and the folders that it makes."""

import socket
import ssl
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from unskew.core.errors import UserError
from unskew.federation.folder import ROSTER, RUN_CONFIG, initialise, read_federation, read_node
from unskew.federation.network import make_node_key, public_pem
from unskew.privacy.signing import load_private, point_of, read_roster

FLWR = Path(sys.executable).parent / "flwr"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_has_all_that_server_and_nodes_need_and_its_secrets_are_private(tmp_path):
    made = initialise(tmp_path / "fed", nodes=["a", "b"], host="fed.example.org", port=9000)
    federation = read_federation(tmp_path / "fed")
    assert vars(federation) == vars(made)
    assert (federation.settings.listen, federation.settings.control_port) == ("0.0.0.0", 9001)
    node = read_node(federation.node("a"))
    assert (node.settings.name, node.settings.server) == ("a", "fed.example.org:9000")
    assert node.authority.read_bytes() == federation.authority.read_bytes()
    assert [mode(path) for path in (node.key, federation.key, federation.authority_key)] == [0o600] * 3
    assert sorted(federation.public_keys()) == ["a", "b"]
    assert b"PRIVATE" not in b"".join(path.read_bytes() for path in federation.public_keys().values())


def test_a_server_on_loopback_listens_there_alone(tmp_path):
    assert initialise(tmp_path, nodes=["a"]).settings.listen == "127.0.0.1"


def test_nodes_are_added_later_and_nothing_that_was_there_changes(tmp_path):
    initialise(tmp_path, nodes=["a"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    initialise(tmp_path, nodes=["b"])
    assert [path.name for path in before if path.read_bytes() != before[path]] == [ROSTER]
    assert sorted(read_federation(tmp_path).public_keys()) == ["a", "b"]


def test_every_node_has_the_keys_of_all_nodes_also_of_those_that_come_later_or_sign_with_another_key(tmp_path):
    (tmp_path / "hers.pub").write_bytes((own := make_node_key()).public)
    federation = initialise(tmp_path / "fed", nodes=["a", "b"])
    initialise(tmp_path / "fed", keys={"c": tmp_path / "hers.pub"})
    (federation.node("c") / "node.key").write_bytes(own.private)
    rosters = [read_roster(federation.node(name) / ROSTER) for name in ("a", "b", "c")]
    assert rosters[0] == rosters[1] == rosters[2]
    assert sorted(rosters[0].values()) == ["a", "b", "c"]
    assert mode(federation.node("a") / "signing.key") == 0o600
    for name, key in (("a", "signing.key"), ("b", "signing.key"), ("c", "node.key")):
        private = load_private(federation.node(name) / key)
        assert rosters[0][point_of(private.public_key())] == name


@pytest.mark.parametrize(("content", "wrong"), [
    (None, r"roster.txt, the list of the federation's nodes, is missing"),
    (b"ward\n", "roster.txt: every line needs a name and a key, such as: ward ecdsa-sha2-nistp384"),
    (b"# nodes\n\nward ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJKK\n", "roster.txt: every line needs a name and a key"),
    (b"\xff\xfe\x00", "roster.txt: every line needs a name and a key"),
])  # fmt: skip
def test_a_roster_that_is_none_is_refused(tmp_path, content, wrong):
    if content is not None:
        (tmp_path / ROSTER).write_bytes(content)
    with pytest.raises(UserError, match=wrong):
        read_roster(tmp_path / ROSTER)


@pytest.mark.parametrize("content", [None, b"x"])
def test_a_signing_key_that_is_none_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "node.key").write_bytes(content)
    with pytest.raises(UserError, match=r"node\.key is not a P-384 key; create one"):
        load_private(tmp_path / "node.key")


def test_a_node_may_keep_its_private_key_and_hand_in_the_public_one(tmp_path):
    (tmp_path / "hers.pub").write_bytes(make_node_key().public)
    made = initialise(tmp_path / "fed", keys={"c": tmp_path / "hers.pub"})
    assert public_pem(made.public_keys()["c"]) == public_pem(tmp_path / "hers.pub")
    assert not read_node(made.node("c")).key.exists()


def test_a_renewed_certificate_is_new_and_signed_by_the_same_authority(tmp_path):
    federation = initialise(tmp_path, nodes=["a"])
    before, authority = federation.certificate.read_bytes(), federation.authority.read_bytes()
    initialise(tmp_path, renew=True)
    assert federation.certificate.read_bytes() != before
    assert federation.authority.read_bytes() == authority


@pytest.mark.parametrize(("given", "message"), [
    ({"nodes": ["../a"]}, r"node name '\.\./a': give at most 32 letters"),
    ({"nodes": ["a", "a"]}, "node a exists already"), ({"port": 0, "host": "x"}, "--port 0"),
    ({"port": 70000}, "--port 70000"), ({"host": "http://x"}, "--host 'http://x': give the name or address"),
    ({"keys": {"c": Path("nowhere.pub")}}, "nowhere.pub is not a public key"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        initialise(tmp_path / "fed", **given)
    assert not (tmp_path / "fed").exists()


def test_a_folder_that_is_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="give one, or a new or empty folder"):
        initialise(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_another_address_or_a_known_node_is_refused_for_a_federation_that_is_there(tmp_path):
    initialise(tmp_path, nodes=["a"])
    with pytest.raises(UserError, match=r"this federation uses 127\.0\.0\.1:8000; to change it, edit"):
        initialise(tmp_path, port=9)
    with pytest.raises(UserError, match="node a exists already"):
        initialise(tmp_path, nodes=["a"])


def test_a_damaged_or_mistaken_folder_is_named(tmp_path):
    federation = initialise(tmp_path / "fed", nodes=["a"])
    with pytest.raises(UserError, match="is a node's folder; give the folder of the server's machine"):
        read_federation(federation.node("a"))
    with pytest.raises(UserError, match=r"is the server's folder; give a node's folder, such as .*nodes/NAME \(a\)"):
        read_node(federation.path)
    with pytest.raises(UserError, match="is not a federation's folder; unskew federation init DIR makes one"):
        read_federation(tmp_path)
    with pytest.raises(UserError, match="is not a node's folder"):
        read_node(tmp_path)
    for content, message in [
        ("port = [", "Invalid"),
        ('port = "x"', "missing required field host|port: expected int, got str"),
        ("prot = 1", "unknown key 'prot'; did you mean 'port'"),
        ("port = 1", "missing required field host"),
    ]:
        (federation.path / "federation.toml").write_text(content)
        with pytest.raises(UserError, match=message):
            read_federation(federation.path)


def test_flower_takes_the_app_folder_as_it_is(tmp_path):
    federation = initialise(tmp_path, nodes=["a"])
    project = tomllib.loads((federation.app / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert set(config) == set(RUN_CONFIG)
    assert config["recipe"] == str(tmp_path / "recipe.toml")
    built = subprocess.run(
        [FLWR, "build", "--app", federation.app], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert list(tmp_path.glob("*.fab"))


def test_an_authority_is_replaced_in_two_steps_and_no_node_is_locked_out_between_them(serve, tmp_path):
    federation = initialise(tmp_path, nodes=["a", "b"])

    def trusts(bundle):
        """Whether a node with this ca.crt accepts the server's certificate."""
        context, server = ssl.create_default_context(cadata=bundle.decode()), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(federation.certificate, federation.key)
        port = serve(lambda connection: server.wrap_socket(connection, server_side=True).close())
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
                context.wrap_socket(plain, server_hostname="127.0.0.1").close()
        except ssl.SSLError:
            return False
        return True

    old = federation.authority.read_bytes()
    initialise(tmp_path, renew_authority=True)
    both = (federation.node("b") / "ca.crt").read_bytes()
    assert both.count(b"BEGIN CERTIFICATE") == 2
    assert trusts(old)
    assert trusts(both)
    initialise(tmp_path, renew=True)
    new = (federation.node("a") / "ca.crt").read_bytes()
    assert new.count(b"BEGIN CERTIFICATE") == 1
    assert trusts(new)
    assert trusts(both)
    assert not trusts(old)
    with pytest.raises(UserError, match="--renew-authority first"):
        initialise(tmp_path, renew=True, renew_authority=True)
