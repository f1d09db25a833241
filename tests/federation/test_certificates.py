"""The certificates and keys that a federation is made of."""

import socket
import ssl
import threading

import pytest
from cryptography.hazmat.primitives import serialization

from unskew.core.errors import UserError
from unskew.federation.network import days_left, make_authority, make_node_key, make_server_certificate, public_pem

SIGNER = make_authority("here")


@pytest.fixture
def server(tmp_path):
    """A TLS server on loopback, with a certificate for these names; gives the port."""
    sockets = []

    def start(hosts):
        pair = make_server_certificate(SIGNER, hosts)
        (tmp_path / "server.crt").write_bytes(pair.certificate)
        (tmp_path / "server.key").write_bytes(pair.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def serve():
            try:
                while True:
                    connection, _ = listener.accept()
                    try:
                        context.wrap_socket(connection, server_side=True).close()
                    except OSError:
                        connection.close()
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()[1]

    yield start
    for listener in sockets:
        listener.close()


def connect(port, name, trusted=SIGNER):
    context = ssl.create_default_context(cadata=trusted.certificate.decode())
    context.verify_flags |= getattr(ssl, "VERIFY_X509_STRICT", 0)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        return secure.version()


def test_a_strict_verifier_that_trusts_the_authority_takes_every_name_of_the_server(server):
    port = server(["fed.example.org", "localhost", "127.0.0.1", "10.0.0.7"])
    assert [connect(port, name) for name in ("fed.example.org", "localhost", "127.0.0.1", "10.0.0.7")] == [
        "TLSv1.3"
    ] * 4


def test_another_name_is_refused_and_so_is_another_authority(server):
    port = server(["fed.example.org"])
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        connect(port, "other.example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"signature|issuer|self-signed"):
        connect(port, "fed.example.org", trusted=make_authority("here"))


def test_a_certificate_says_how_long_it_is_valid():
    assert 824 < days_left(make_server_certificate(SIGNER, ["a"]).certificate, "it") < 825
    with pytest.raises(UserError, match=r"the server's certificate is damaged: .*--renew"):
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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no key",
        b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJGmYDZBBMlTJRqDcRYXbWXfRKmGq5XFZqYyyPqaiLBg x",
        make_node_key().private,
    ],
)
def test_what_flower_would_not_take_as_a_key_is_refused_with_how_to_make_one(tmp_path, content):
    (tmp_path / "a.pub").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.pub is not a public key for Flower; make one with: ssh-keygen"):
        public_pem(tmp_path / "a.pub")
    with pytest.raises(UserError, match="does not exist"):
        public_pem(tmp_path / "b.pub")
