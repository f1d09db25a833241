"""The ClientApp: passes a message's bytes to the node service on this machine and returns its answer.

It is self-contained, since an app folder has a copy of it, and starts fast: it imports only Flower.
"""

import os
import socket
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

RECORD = "unskew"
PARTS = ("header", "body")
LENGTH = 8  # bytes of the length in front of a part
MAX_PART = 8 * 2**30  # bytes
CHUNK = 2**20

app = ClientApp()


@app.query("unskew")
def answer(message: Message, context: Context) -> Message:
    """The node service's answer to one message."""
    path = str(context.node_config.get("socket") or os.environ.get("UNSKEW_NODE_SOCKET") or "")
    if not path:
        raise RuntimeError("the SuperNode has no path to its node service; start it with --node-config 'socket=\"…\"'")
    record = message.content.get(RECORD)
    if not isinstance(record, ArrayRecord) or not {"header"} <= set(record) <= set(PARTS):
        raise ValueError("the content is not an unskew message")
    parts = _ask(Path(path), [record[name].data if name in record else b"" for name in PARTS])
    named = {name: part for name, part in zip(PARTS, parts, strict=True) if part}  # Flower has no empty arrays
    arrays = {name: Array("uint8", (len(part),), "unskew", part) for name, part in named.items()}
    return Message(RecordDict({RECORD: ArrayRecord(arrays)}), reply_to=message)


def _ask(path: Path, parts: list[bytes]) -> list[bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(path))
        except OSError as error:
            raise RuntimeError(f"the node service does not answer at {path}: {error.strerror}") from error
        for part in parts:
            connection.sendall(len(part).to_bytes(LENGTH, "little"))
            if part:  # after an empty last part the service may already have answered and closed the connection
                connection.sendall(part)
        return [_read_part(connection) for _ in parts]


def _read_part(connection: socket.socket) -> bytes:
    size = int.from_bytes(_read_exactly(connection, LENGTH), "little")
    if size > MAX_PART:
        raise RuntimeError(f"the node service announces {size:,} bytes; the limit is {MAX_PART:,}")
    return _read_exactly(connection, size)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = connection.recv_into(view[done : done + CHUNK])
        if not count:
            raise RuntimeError("the node service closed the connection before it answered")
        done += count
    return bytes(content)
