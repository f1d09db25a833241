"""Ports, TLS, certificates and keys: creating them, and checking them before a program needs them."""

import datetime
import ipaddress
import re
import secrets
import socket
import ssl
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import read_content
from unskew.core.plugins import require_extra

SECONDS = 5.0  # for a connection


class NotReached(Exception):
    """No server answers there at the moment."""


def check_free(host: str, port: int, what: str) -> None:
    """Refuse a port that is in use."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        why = f"{error.strerror or error}; stop the program that uses it, or choose another port"
        raise UserError(f"port {port} of {host}, the {what}, cannot be opened: {why}") from error


def free_port(count: int = 1) -> int:
    """The first of ``count`` consecutive free ports on loopback.

    They are below the range for outgoing connections, which could take one of them before we do.
    """
    for _ in range(1000):
        first = 10_000 + secrets.randbelow(20_000)
        with ExitStack() as trials, suppress(OSError):
            for port in range(first, first + count):
                trials.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise UserError(f"127.0.0.1 has no {count} consecutive free ports; stop some programs and try again")


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``host:port``."""
    found = re.fullmatch(r"\[?([^\]\s]+?)\]?:([0-9]{1,5})", address)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise UserError(f"server {address!r}: give host:port, such as fed.example.org:8000")
    return found[1], int(found[2])


def greet(address: str, authority: Path, *, name: str | None = None) -> None:
    """Make a TLS handshake with a server certified by this authority; raises NotReached or UserError."""
    host, port = host_and_port(address)
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"{authority} is not a certificate: {error}") from error
    try:
        with socket.create_connection((host, port), timeout=SECONDS) as plain:
            if plain.getsockname() == plain.getpeername():  # TCP allows this if nobody listens on a local port
                raise NotReached("no program listens on this port")
            with context.wrap_socket(plain, server_hostname=name or host):
                return
    except ssl.SSLCertVerificationError as error:
        why = f"{error.verify_message}; {_advice(error)}"
        raise UserError(f"the server at {address} has a certificate that cannot be trusted: {why}") from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise NotReached("the connection was closed") from error
    except ssl.SSLError as error:
        raise UserError(
            f"{address} does not speak TLS, so it is not this federation's server; check the address"
        ) from error
    except OSError as error:
        raise NotReached(str(error.strerror or error)) from error


def _advice(error: ssl.SSLCertVerificationError) -> str:
    if "not valid for" in error.verify_message:
        return "it was issued for another name: create the federation with unskew federation init DIR --host NAME"
    if "expired" in error.verify_message or "not yet" in error.verify_message:
        return "check both clocks, or renew it on the server: unskew federation init DIR --renew"
    return "this node's ca.crt belongs to another federation; copy it from the server again"


AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # the longest that strict verifiers accept

_MOST_BYTES = 2**20  # of a certificate or key file


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class NodeKey:
    """A node's key pair in OpenSSH's formats."""

    private: bytes
    public: bytes


def make_authority(name: str) -> Pair:
    """A certificate authority for one federation, which can sign only end certificates."""
    x509 = _crypto("x509")
    key = _new_key()
    subject = _name(f"{name} authority")
    usage = {use: use in ("digital_signature", "key_cert_sign", "crl_sign") for use in _USES}
    builder = (
        _builder(subject, subject, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _sign(builder, key, key)


def make_server_certificate(signer: Pair, hosts: Iterable[str]) -> Pair:
    """A certificate for a server with these names and addresses."""
    x509, oid = _crypto("x509"), _crypto("x509.oid")
    issuer = load_certificate(signer.certificate, "the authority's certificate")
    signer_key = _serialization().load_pem_private_key(signer.key, None)
    key, names = _new_key(), list(dict.fromkeys(hosts))
    builder = (
        _builder(_name(names[0][:64]), issuer.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()),
            critical=False,
        )
    )
    return _sign(builder, key, signer_key)


def make_node_key() -> NodeKey:
    """A new key for a node."""
    s = _serialization()
    key = _new_key()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())
    public = key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
    return NodeKey(private, public + b"\n")


def public_pem(path: Path) -> bytes:
    """An OpenSSH public key file as the PEM that a node sends with each request."""
    s, ec = _serialization(), _crypto("hazmat.primitives.asymmetric.ec")
    content = read_content(path, _MOST_BYTES)
    if content is None:
        raise UserError(f"{path} does not exist; give the public key of a node")
    try:
        key = s.load_ssh_public_key(content)
    except (ValueError, _crypto("exceptions").UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise UserError(
            f"{path} is not a public key for Flower; make one with: ssh-keygen -t ecdsa -b 384 -f node.key -N ''"
        )
    return bytes(key.public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))


def first_certificate(content: bytes) -> bytes:
    """The first certificate in a PEM file; of several authorities, the one that signs."""
    end = b"-----END CERTIFICATE-----\n"
    return content.partition(end)[0] + end


def load_certificate(content: bytes, what: str) -> Any:
    """A certificate from PEM; ``what`` names it in messages."""
    try:
        return _crypto("x509").load_pem_x509_certificate(content)
    except ValueError as error:
        raise UserError(
            f"{what} is damaged: {error}; make a new one with unskew federation init DIR --renew"
        ) from error


def days_left(content: bytes, what: str) -> float:
    """Days until a certificate expires; negative if it has expired."""
    ends = load_certificate(content, what).not_valid_after_utc
    return float((ends - _now()).total_seconds() / 86400)


_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _crypto(module: str) -> Any:
    return require_extra(f"cryptography.{module}", "flower")


def _serialization() -> Any:
    return _crypto("hazmat.primitives.serialization")


def _new_key() -> Any:
    ec = _crypto("hazmat.primitives.asymmetric.ec")
    return ec.generate_private_key(ec.SECP384R1())


def _name(text: str) -> Any:
    x509 = _crypto("x509")
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> Any:
    x509 = _crypto("x509")
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: Any, issuer: Any, public: Any, days: int) -> Any:
    x509, now = _crypto("x509"), _now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=10))  # a node's clock may be a little behind
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _sign(builder: Any, key: Any, signer: Any) -> Pair:
    s, hashes = _serialization(), _crypto("hazmat.primitives.hashes")
    certificate = builder.sign(signer, hashes.SHA384())
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    return Pair(certificate.public_bytes(s.Encoding.PEM), private)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
