"""Ports, TLS, certificates and keys."""

import socket
import ssl

import pytest
from cryptography.hazmat.primitives import serialization

from unskew.core.errors import UserError
from unskew.federation import network
from unskew.federation.network import (
    NotReached,
    check_free,
    days_left,
    free_port,
    greet,
    host_and_port,
    make_authority,
    make_node_key,
    make_server_certificate,
    public_pem,
)

SIGNER = network.make_authority("here")


@pytest.fixture
def trusted(tmp_path):
    (tmp_path / "ca.crt").write_bytes(SIGNER.public)
    return tmp_path / "ca.crt"


def tls(tmp_path, hosts, signer=SIGNER):
    pair = network.make_server_certificate(signer, hosts)
    (tmp_path / "s.crt").write_bytes(pair.public)
    (tmp_path / "s.key").write_bytes(pair.private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "s.crt", tmp_path / "s.key")
    return lambda connection: context.wrap_socket(connection, server_side=True).close()


def test_a_server_of_this_federation_is_greeted(serve, trusted, tmp_path):
    greet(f"127.0.0.1:{serve(tls(tmp_path, ['127.0.0.1']))}", trusted)


def test_nobody_there_is_not_reached(trusted):
    with pytest.raises(NotReached, match="refused"):
        greet(f"127.0.0.1:{free_port()}", trusted)


@pytest.mark.parametrize(("name", "signer", "days", "wrong"), [
    ("127.0.0.1", make_authority("there"), 825, r"trusted: .*; this node's ca\.crt belongs to another federation"),
    ("fed.example.org", SIGNER, 825, r"cannot be trusted: .*not valid for .*init DIR --host NAME"),
    ("127.0.0.1", SIGNER, 0, r"expired; check both clocks, or renew it .*--renew"),
])  # fmt: skip
def test_what_is_wrong_with_a_certificate_is_named(serve, trusted, tmp_path, monkeypatch, name, signer, days, wrong):
    monkeypatch.setattr(network, "SERVER_DAYS", days)
    port = serve(tls(tmp_path, [name], signer))
    with pytest.raises(UserError, match=wrong):
        greet(f"127.0.0.1:{port}", trusted)


def test_plain_text_is_refused(serve, trusted):
    port = serve(lambda connection: (connection.sendall(b"HTTP/1.1 400 no\r\n\r\n"), connection.close()))
    with pytest.raises(UserError, match="does not speak TLS"):
        greet(f"127.0.0.1:{port}", trusted)


def test_a_file_that_is_no_certificate_is_refused(tmp_path):
    (tmp_path / "ca.crt").write_text("no")
    with pytest.raises(UserError, match=r"ca\.crt is not a certificate"):
        greet("127.0.0.1:1", tmp_path / "ca.crt")


def test_a_port_in_use_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} of 127\.0\.0\.1, the port in x, cannot be opened: Address"):
            check_free("127.0.0.1", port, "port in x")
    check_free("127.0.0.1", port, "port in x")


def test_a_connection_with_itself_is_no_server(trusted, monkeypatch):
    """Where nobody listens at a local port, TCP may connect a socket that has this port with itself."""
    port, connect = free_port(), socket.create_connection
    own = {"source_address": ("127.0.0.1", port)}
    monkeypatch.setattr(socket, "create_connection", lambda *given, **more: connect(*given, **more, **own))
    with pytest.raises(NotReached, match="no program listens"):
        greet(f"127.0.0.1:{port}", trusted)


def test_a_pair_of_ports_is_free():
    first = free_port(3)
    check_free("127.0.0.1", first, "it")
    check_free("127.0.0.1", first + 1, "it")


@pytest.mark.parametrize(
    ("text", "parts"), [("a.b:1", ("a.b", 1)), ("[::1]:8000", ("::1", 8000)), ("10.0.0.1:65535", ("10.0.0.1", 65535))]
)
def test_an_address_has_two_parts(text, parts):
    assert host_and_port(text) == parts


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a b:1"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UserError, match="give host:port"):
        host_and_port(text)


def connect(port, name, trusted=SIGNER):
    context = ssl.create_default_context(cadata=trusted.public.decode())
    context.verify_flags |= getattr(ssl, "VERIFY_X509_STRICT", 0)
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    with plain, context.wrap_socket(plain, server_hostname=name) as secure:
        return secure.version()


def test_a_strict_verifier_that_trusts_the_authority_takes_every_name_of_the_server(serve, tmp_path):
    names = ["fed.example.org", "localhost", "127.0.0.1", "10.0.0.7"]
    port = serve(tls(tmp_path, names))
    assert [connect(port, name) for name in names] == ["TLSv1.3"] * 4


def test_another_name_is_refused_and_so_is_another_authority(serve, tmp_path):
    port = serve(tls(tmp_path, ["fed.example.org"]))
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        connect(port, "other.example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"signature|issuer|self-signed"):
        connect(port, "fed.example.org", trusted=make_authority("here"))


def test_a_certificate_says_how_long_it_is_valid():
    assert 824 < days_left(make_server_certificate(SIGNER, ["a"]).public, "it") < 825
    with pytest.raises(UserError, match=r"the server's certificate is damaged; .*--renew"):
        days_left(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "the server's certificate")


def test_a_nodes_public_key_is_read_as_the_pem_that_the_node_sends(tmp_path):
    key = make_node_key()
    (tmp_path / "a.pub").write_bytes(key.public)
    private = serialization.load_ssh_private_key(key.private, None)
    sent = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert public_pem(tmp_path / "a.pub") == sent
    assert make_node_key().public != key.public


@pytest.mark.parametrize("content", [
    b"", b"no key", make_node_key().private,
    b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJGmYDZBBMlTJRqDcRYXbWXfRKmGq5XFZqYyyPqaiLBg x",
])  # fmt: skip
def test_what_flower_would_not_take_as_a_key_is_refused_with_how_to_make_one(tmp_path, content):
    (tmp_path / "a.pub").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.pub is not a public key for Flower; make one with: ssh-keygen"):
        public_pem(tmp_path / "a.pub")
