"""The transport over Flower's grid: our messages inside Flower's, polled at short intervals.

Flower's ``send_and_receive`` polls every three seconds, so we push and pull through its public functions. Header and
body are separate arrays: Flower stores equal arrays once, so a model goes to the SuperLink once for all nodes.
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from unskew.core.plugins import require_extra
from unskew.engines.flower.messages import Envelope, Presence, Response, Transport, printable

KIND = "query.unskew"  # the message type that our ClientApp handles
RECORD = "unskew"
ONLINE = "online"  # the status of a node with a recent heartbeat
TTL = 6 * 3600.0  # seconds that Flower keeps a message for an offline node; the engine's deadlines are shorter


class GridExchange(Transport):
    """Nodes behind Flower's SuperLink."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> Mapping[int, Presence]:
        """The nodes that are connected now, by id."""
        return {
            node.node_id: Presence(node.name or None, node.last_activated_at, fingerprint(node.public_key))
            for node in self._grid.get_nodes()
            if node.status in ("", ONLINE)
        }

    def send(self, node: int, message: Envelope) -> str | None:
        """Push the message and return its id."""
        pushed = Message(content=wrap(message), dst_node_id=node, message_type=KIND, ttl=TTL)
        return next(iter(self._grid.push_messages([pushed])), None) or None

    def receive(self, ids: Iterable[str]) -> dict[str, Response]:
        """Pull the replies that have arrived."""
        wanted = list(ids)
        messages = self._grid.pull_messages(wanted) if wanted else ()
        return {message.metadata.reply_to_message_id: _read_reply(message) for message in messages}


def fingerprint(pem: bytes) -> str | None:
    """A public key's fingerprint as ``ssh-keygen -l`` prints it; None if ``pem`` is not a key."""
    keys = require_extra("cryptography.hazmat.primitives.serialization", "flower")
    try:
        line = keys.load_pem_public_key(pem).public_bytes(keys.Encoding.OpenSSH, keys.PublicFormat.OpenSSH)
    except ValueError:
        return None
    return "SHA256:" + b64encode(hashlib.sha256(b64decode(line.split()[1])).digest()).decode().rstrip("=")


def wrap(envelope: Envelope) -> RecordDict:
    """A message as Flower records."""
    parts = {"header": envelope.header, "body": envelope.body}
    arrays = {name: Array("uint8", (len(part),), "unskew", part) for name, part in parts.items() if part}
    return RecordDict({RECORD: ArrayRecord(arrays)})


def unwrap(content: RecordDict) -> Envelope:
    """The message in Flower records. Raises ValueError if there is none."""
    record: Any = content.get(RECORD)
    if len(content) != 1 or not isinstance(record, ArrayRecord) or not {"header"} <= set(record) <= {"header", "body"}:
        raise ValueError("its content is not an unskew message")
    return Envelope(*(record[name].data if name in record else b"" for name in ("header", "body")))


def _read_reply(message: Message) -> Response:
    if message.has_error():
        return f"its node reported an error: {printable(message.error.reason)}"
    try:
        return unwrap(message.content)
    except ValueError as error:
        return f"its reply is refused: {error}"
