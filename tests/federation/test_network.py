"""Ports and TLS, tried beforehand."""

import socket
import ssl
import threading

import pytest

from unskew.core.errors import UserError
from unskew.federation import network
from unskew.federation.network import NotReached, check_free, free_port, greet, host_and_port

SIGNER = network.make_authority("here")


@pytest.fixture
def serve(tmp_path):
    """Start a server that answers each connection with ``answer``; gives the port."""
    listeners = []

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def loop():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                try:
                    answer(connection)
                except OSError:
                    connection.close()

        threading.Thread(target=loop, daemon=True).start()
        return listener.getsockname()[1]

    yield start
    for listener in listeners:
        listener.close()


@pytest.fixture
def trusted(tmp_path):
    (tmp_path / "ca.crt").write_bytes(SIGNER.certificate)
    return tmp_path / "ca.crt"


def tls(tmp_path, hosts, signer=SIGNER):
    pair = network.make_server_certificate(signer, hosts)
    (tmp_path / "s.crt").write_bytes(pair.certificate)
    (tmp_path / "s.key").write_bytes(pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "s.crt", tmp_path / "s.key")
    return lambda connection: context.wrap_socket(connection, server_side=True).close()


def test_a_server_of_this_federation_is_greeted(serve, trusted, tmp_path):
    greet(f"127.0.0.1:{serve(tls(tmp_path, ['127.0.0.1']))}", trusted)


def test_nobody_there_is_not_reached(trusted):
    with pytest.raises(NotReached, match="refused"):
        greet(f"127.0.0.1:{free_port()}", trusted)


def test_another_federation_is_named_as_such(serve, trusted, tmp_path):
    port = serve(tls(tmp_path, ["127.0.0.1"], network.make_authority("there")))
    with pytest.raises(UserError, match=r"cannot be trusted: .*; this node's ca\.crt belongs to another federation"):
        greet(f"127.0.0.1:{port}", trusted)


def test_another_name_is_named_as_such(serve, trusted, tmp_path):
    port = serve(tls(tmp_path, ["fed.example.org"]))
    with pytest.raises(UserError, match=r"cannot be trusted: .*not valid for .*init DIR --host NAME"):
        greet(f"127.0.0.1:{port}", trusted)


def test_an_expired_certificate_is_named_as_such(serve, trusted, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "SERVER_DAYS", 0)
    port = serve(tls(tmp_path, ["127.0.0.1"]))
    with pytest.raises(UserError, match=r"expired; check both clocks, or renew it .*--renew"):
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


def test_a_connection_with_itself_is_no_server(tmp_path, monkeypatch):
    """Where nobody listens at a local port, TCP may connect a socket that has this port with itself."""
    port, connect = free_port(), socket.create_connection
    own = {"source_address": ("127.0.0.1", port)}
    monkeypatch.setattr(socket, "create_connection", lambda *given, **more: connect(*given, **more, **own))
    (tmp_path / "ca.crt").write_bytes(SIGNER.certificate)
    with pytest.raises(NotReached, match="no program listens"):
        greet(f"127.0.0.1:{port}", tmp_path / "ca.crt")


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
