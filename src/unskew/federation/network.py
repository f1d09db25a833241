"""Ports, TLS, certificates and keys: creating them, and checking them before a program needs them."""

import ipaddress
import re
import secrets
import socket
import ssl
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import read_content
from unskew.core.plugins import require_extra


class NotReached(Exception):
    """No server answers there at the moment."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at this address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)


def check_free(host: str, port: int, what: str) -> None:
    """Refuse a port that is in use."""
    try:
        listen(host, port).close()
    except OSError as error:
        problem = f"port {port} of {host}, the {what}, cannot be opened: {error.strerror}"
        raise UserError(f"{problem}; choose another port") from error


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


def greet(address: str, authority: Path) -> None:
    """Make a TLS handshake with a server certified by this authority; raises NotReached or UserError."""
    host, port = host_and_port(address)
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except OSError as error:
        raise UserError(f"{authority} is not a certificate: {error}") from error
    try:
        with socket.create_connection((host, port), timeout=5.0) as plain:
            if plain.getsockname() == plain.getpeername():  # TCP allows this if nobody listens on a local port
                raise NotReached("no program listens on this port")
            with context.wrap_socket(plain, server_hostname=host):
                return
    except ssl.SSLCertVerificationError as error:
        why, advice = error.verify_message, "this node's ca.crt belongs to another federation; copy it again"
        if "not valid for" in why:
            advice = "it was issued for another name: create the federation with unskew federation init DIR --host NAME"
        elif "expired" in why or "not yet" in why:
            advice = "check both clocks, or renew it on the server: unskew federation init DIR --renew"
        raise UserError(f"the server at {address} has a certificate that cannot be trusted: {why}; {advice}") from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise NotReached("the connection was closed") from error
    except ssl.SSLError as error:
        raise UserError(f"{address} is not this federation's server: it does not speak TLS") from error
    except OSError as error:
        raise NotReached(str(error.strerror or error)) from error


AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # the longest that strict verifiers accept


@dataclass(frozen=True)
class Pair:
    """A private key, and its public key or certificate; PEM, but a node's are in OpenSSH's formats."""

    public: bytes
    private: bytes


def make_authority(name: str) -> Pair:
    """A certificate authority for one federation, which can sign only end certificates."""
    x509, key = _crypto("x509"), _new_key()
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    critical = [usage, x509.BasicConstraints(ca=True, path_length=0)]
    return _certify(key, f"{name} authority", key, None, AUTHORITY_DAYS, critical, [])


def make_server_certificate(signer: Pair, hosts: Iterable[str]) -> Pair:
    """A certificate for a server with these names and addresses."""
    x509, names = _crypto("x509"), list(dict.fromkeys(hosts))
    signer_key = _crypto("hazmat.primitives.serialization").load_pem_private_key(signer.private, None)
    alternatives: list[Any] = []
    for host in names:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            alternatives.append(x509.DNSName(host))
    others = [
        x509.SubjectAlternativeName(alternatives),
        x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()),
    ]
    issuer = _load(signer.public, "the authority's certificate").subject
    critical = [x509.BasicConstraints(ca=False, path_length=None)]
    return _certify(_new_key(), names[0][:64], signer_key, issuer, SERVER_DAYS, critical, others)


def make_node_key() -> Pair:
    """A new key for a node."""
    s, key = _crypto("hazmat.primitives.serialization"), _new_key()
    public = key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH) + b"\n"
    return Pair(public, key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption()))


def public_pem(path: Path) -> bytes:
    """An OpenSSH public key file as the PEM that a node sends with each request."""
    s, ec = _crypto("hazmat.primitives.serialization"), _crypto("hazmat.primitives.asymmetric.ec")
    try:
        key = s.load_ssh_public_key(read_content(path, 2**20) or b"")
    except (ValueError, _crypto("exceptions").UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        command = "ssh-keygen -t ecdsa -b 384 -f node.key -N ''"
        raise UserError(f"{path} is not a public key for Flower; make one with: {command}")
    return bytes(key.public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))


def first_certificate(content: bytes) -> bytes:
    """The first certificate in a PEM file; of several authorities, the one that signs."""
    end = b"-----END CERTIFICATE-----\n"
    return content.partition(end)[0] + end


def days_left(content: bytes, what: str) -> float:
    """Days until a certificate expires; negative if it has expired."""
    return float((_load(content, what).not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400)


def _load(content: bytes, what: str) -> Any:
    try:
        return _crypto("x509").load_pem_x509_certificate(content)
    except ValueError as error:
        raise UserError(f"{what} is damaged; make a new one with unskew federation init DIR --renew") from error


def _crypto(module: str) -> Any:
    return require_extra(f"cryptography.{module}", "flower")


def _new_key() -> Any:
    ec = _crypto("hazmat.primitives.asymmetric.ec")
    return ec.generate_private_key(ec.SECP384R1())


def _certify(
    key: Any, name: str, signer: Any, issuer: Any, days: int, critical: Iterable[Any], others: Iterable[Any]
) -> Pair:
    """A certificate for this key, with these critical and other extensions; without an issuer it is its own."""
    x509, s, now = _crypto("x509"), _crypto("hazmat.primitives.serialization"), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=10))  # a node's clock may be a little behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extensions, are_critical in ((critical, True), (others, False)):
        for extension in extensions:
            builder = builder.add_extension(extension, critical=are_critical)
    certificate = builder.sign(signer, _crypto("hazmat.primitives.hashes").SHA384())
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    return Pair(certificate.public_bytes(s.Encoding.PEM), private)
