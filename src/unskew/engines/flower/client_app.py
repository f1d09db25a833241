"""The ClientApp: hands a message's bytes to the node service on this machine and returns its answer.

Flower starts a process for every message. This one imports Flower and the standard library alone, so that it starts
in the time that Flower itself needs; PyTorch, the data and the memories are in the node service, which lives on. The
file is complete in itself: an app folder holds a copy of it.
"""

import os
import socket
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

RECORD = "unskew"
PARTS = ("header", "body")
LENGTH = 8  # bytes of a length in front of a part
MOST = 8 * 2**30  # bytes of a part
CHUNK = 2**20

app = ClientApp()


@app.query("unskew")
def answer(message: Message, context: Context) -> Message:
    """The node service's answer to one message."""
    path = str(context.node_config.get("socket") or os.environ.get("UNSKEW_NODE_SOCKET") or "")
    if not path:
        raise RuntimeError("the SuperNode does not say where its node service is: --node-config 'socket=\"…\"'")
    record = message.content.get(RECORD)
    if not isinstance(record, ArrayRecord) or not {"header"} <= set(record) <= set(PARTS):
        raise ValueError("the message is not one of unskew's")
    parts = _asked(Path(path), [record[name].data if name in record else b"" for name in PARTS])
    named = {name: part for name, part in zip(PARTS, parts, strict=True) if part}  # Flower has no empty arrays
    arrays = {name: Array("uint8", (len(part),), "unskew", part) for name, part in named.items()}
    return Message(RecordDict({RECORD: ArrayRecord(arrays)}), reply_to=message)


def _asked(path: Path, parts: list[bytes]) -> list[bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.connect(str(path))
        except OSError as error:
            raise RuntimeError(f"the node service does not answer at {path}: {error.strerror}") from error
        for part in parts:
            line.sendall(len(part).to_bytes(LENGTH, "little"))
            if part:  # the service may have answered an empty last part, and closed, before nothing is sent
                line.sendall(part)
        return [_part(line) for _ in parts]


def _part(line: socket.socket) -> bytes:
    size = int.from_bytes(_exactly(line, LENGTH), "little")
    if size > MOST:
        raise RuntimeError(f"the node service gives {size:,} bytes, {MOST:,} are the most")
    return _exactly(line, size)


def _exactly(line: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = line.recv_into(view[done : done + CHUNK])
        if not count:
            raise RuntimeError("the node service ended before it had answered")
        done += count
    return bytes(content)
