"""A node that was killed says, when it is started again, that its last life is over.

Flower gives nobody the place of a node that ended without a word until its heartbeat has run out, which takes up to a
minute. The request that ends the old life is the one that Flower's own part sends when it ends in order. Where it
fails, the node waits for that minute.
"""

import base64
import datetime
import http.client
import ssl
from pathlib import Path
from typing import Any

from unskew.core.files import read_content, write_again
from unskew.core.plugins import require_extra
from unskew.federation.folder import Node
from unskew.federation.network import SECONDS, host_and_port

_PATH = "/v1/fleet/deactivate-node"
_TYPE = "application/protobuf"


def remember(node: Node, number: str) -> None:
    """Write down the number under which the server knows this node."""
    write_again(_file(node), number.encode())


def say_farewell(node: Node) -> bool:
    """Tell the server that the life with the remembered number is over; whether there was one, and it has heard it."""
    content = read_content(_file(node), 100) or b""
    if not content.isdigit():
        return False
    number = int(content)
    _file(node).unlink(missing_ok=True)
    try:
        return _post(node, _varint_field(1, number)) == 200
    except (OSError, http.client.HTTPException, ValueError):
        return False


def _post(node: Node, body: bytes) -> int:
    host, port = host_and_port(node.settings.server)
    trusted = ssl.create_default_context(cafile=str(node.authority))
    connection = http.client.HTTPSConnection(host, port, timeout=SECONDS, context=trusted)
    try:
        connection.request("POST", _PATH, body, {"content-type": _TYPE, "accept": _TYPE, **_signed(node)})
        return connection.getresponse().status
    finally:
        connection.close()


def _signed(node: Node) -> dict[str, str]:
    """The headers by which Flower knows a node: its key, the time, the time signed."""
    s: Any = require_extra("cryptography.hazmat.primitives.serialization", "flower")
    ec: Any = require_extra("cryptography.hazmat.primitives.asymmetric.ec", "flower")
    hashes: Any = require_extra("cryptography.hazmat.primitives.hashes", "flower")
    key = s.load_ssh_private_key(node.key.read_bytes(), None)
    public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    now = datetime.datetime.now(datetime.UTC).isoformat()
    signature = key.sign(now.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    return {
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-timestamp": now,
        "flwr-signature": base64.b64encode(signature).decode(),
    }


def _varint_field(place: int, value: int) -> bytes:
    """A whole number as protobuf writes it."""
    parts = [place << 3]
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _file(node: Node) -> Path:
    return node.path / "last-life"
