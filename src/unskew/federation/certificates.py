"""The certificates and keys of a federation: an authority, the server's certificate, the nodes' keys.

All are on the curve P-384, which Flower asks for.
"""

import datetime
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import read_content
from unskew.core.plugins import require_extra

AUTHORITY_DAYS = 3650
SERVER_DAYS = 825  # what browsers and strict verifiers accept at most

_MOST_BYTES = 2**20  # of a certificate or key file


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, both as PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class NodeKey:
    """A node's key: the private part in OpenSSH's PEM, the public part as a line that OpenSSH writes."""

    private: bytes
    public: bytes


def authority(name: str) -> Pair:
    """A certificate authority for one federation; it may sign the server's certificate and nothing below it."""
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
    return _signed(builder, key, key)


def server_certificate(signer: Pair, hosts: Iterable[str]) -> Pair:
    """A certificate for a server that is reached by these names and addresses."""
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
    return _signed(builder, key, signer_key)


def node_key() -> NodeKey:
    """A new key for a node."""
    s = _serialization()
    key = _new_key()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())
    public = key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
    return NodeKey(private, public + b"\n")


def public_pem(path: Path) -> bytes:
    """The public key in a file of OpenSSH's form, as the PEM that a node sends with each request."""
    s, ec = _serialization(), _crypto("hazmat.primitives.asymmetric.ec")
    content = read_content(path, _MOST_BYTES)
    if content is None:
        raise UserError(f"{path} cannot be read: it is not there")
    try:
        key = s.load_ssh_public_key(content)
    except (ValueError, _crypto("exceptions").UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise UserError(
            f"{path} is not a public key that Flower takes; make one with: ssh-keygen -t ecdsa -b 384 -f node.key -N ''"
        )
    return bytes(key.public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))


def load_certificate(content: bytes, what: str) -> Any:
    """A certificate from PEM; ``what`` names it in messages."""
    try:
        return _crypto("x509").load_pem_x509_certificate(content)
    except ValueError as error:
        raise UserError(
            f"{what} is damaged: {error}; make a new one with unskew federation init DIR --renew"
        ) from error


def days_left(content: bytes, what: str) -> float:
    """How many days a certificate is still valid; negative when it has expired."""
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


def _signed(builder: Any, key: Any, signer: Any) -> Pair:
    s, hashes = _serialization(), _crypto("hazmat.primitives.hashes")
    certificate = builder.sign(signer, hashes.SHA384())
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    return Pair(certificate.public_bytes(s.Encoding.PEM), private)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
