"""Messages between two ranks over torch.distributed: the codec's envelopes. Nothing is pickled.

A message begins with a frame of fixed size: the lengths of header and body, and as much of the header as fits. The
rest of the header and the body follow in pieces. Messages are on the CPU, so gloo can carry them on any device. A
writer also sends a heartbeat every second.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from unskew.core.types import Tensors
from unskew.core.units import format_duration
from unskew.engines.codec import MAX_BODY, MAX_HEADER, BadMessage, Body, Envelope, by_name, decode_tensors, encode

Message = dict[str, Any]

ALIVE = "alive"  # the message of a heartbeat
BEAT = 1.0  # seconds between heartbeats
PIECE = 16 * 2**20  # bytes sent at once; a piece must arrive before the rank counts as lost
FRAME = 4096  # bytes; most headers fit, and a second transfer would cost more
LENGTH = 8  # bytes of a length
TAG = 1  # of all our messages
FOREVER = 30 * 24 * 3600.0  # seconds


class Writer:
    """A thread that sends messages to one rank, in order, so that other threads never wait.

    ``lost`` is called with the reason when the rank can no longer be reached.
    """

    def __init__(self, rank: int, lost: Callable[[str], None]) -> None:
        self._rank, self._lost = rank, lost
        self._outbox: SimpleQueue[Envelope | None] = SimpleQueue()
        self._thread = Thread(target=self._write, daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any], tensors: Body | Iterable[tuple[str, Tensor]] = ()) -> None:
        """Queue a message; the tensors are copied now."""
        self._outbox.put(encode(message, tensors))

    def finish(self, seconds: float = 5.0) -> None:
        """Send what is queued, and end; later messages are dropped."""
        self._outbox.put(None)
        self._thread.join(seconds)

    def _write(self) -> None:
        try:
            while True:
                try:
                    message = self._outbox.get(timeout=BEAT)
                except Empty:
                    message = encode({ALIVE: True})
                if message is None:
                    return
                _send(self._rank, message)
        except ConnectionAbortedError:
            return
        except ConnectionError as error:
            self._lost(str(error))


def receive(rank: int, seconds: float = FOREVER) -> tuple[Message, Tensors]:
    """The next message of that rank; ConnectionError if it is lost, or silent for ``seconds``.

    Gloo then closes the connections to all ranks: threads waiting for other ranks get a ConnectionAbortedError.
    """
    frame = bytearray(FRAME)
    _receive_piece(frame, rank, seconds)
    header, body = (int.from_bytes(frame[at : at + LENGTH], "little") for at in (0, LENGTH))
    if not (0 < header <= MAX_HEADER and 0 <= body <= MAX_BODY):
        raise ConnectionError(f"it sent invalid message lengths, {header} and {body} bytes")
    text = frame[2 * LENGTH : 2 * LENGTH + header]
    rest, content = bytearray(header - len(text)), torch.empty(body, dtype=torch.uint8).numpy().data
    for part in (memoryview(rest), content):
        for start in range(0, len(part), PIECE):
            _receive_piece(part[start : start + PIECE], rank, seconds)
    try:
        message = msgspec.json.decode(text + rest)
        return message, by_name(decode_tensors(message.pop("tensors"), content))
    except (BadMessage, msgspec.DecodeError) as error:
        raise ConnectionError(f"a message cannot be read: {error}") from error


def _send(rank: int, envelope: Envelope) -> None:
    lengths = len(envelope.header).to_bytes(LENGTH, "little") + len(envelope.body).to_bytes(LENGTH, "little")
    framed = lengths + envelope.header.ljust(FRAME - 2 * LENGTH)
    for part in (framed[:FRAME], framed[FRAME:], envelope.body):
        for start in range(0, len(part), PIECE):
            piece = torch.frombuffer(bytearray(part[start : start + PIECE]), dtype=torch.uint8)
            try:
                work = dist.isend(piece, rank, tag=TAG)
                assert work is not None
                work.wait(timedelta(seconds=FOREVER))  # the reading thread notices a silent rank
            except RuntimeError as error:
                raise _connection_error(error) from error


def _receive_piece(room: bytearray | memoryview, rank: int, seconds: float) -> None:
    try:
        work = dist.irecv(torch.frombuffer(room, dtype=torch.uint8), rank, tag=TAG)
        assert work is not None
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise _connection_error(error, seconds) from error


def _connection_error(error: RuntimeError, seconds: float = FOREVER) -> ConnectionError:
    """Gloo's error as a short ConnectionError."""
    text = str(error)
    if "imeout caused pair closure" in text:
        return ConnectionAbortedError(text)
    if "imed out" in text:
        return ConnectionError(f"nothing was received from it for {format_duration(seconds)}")
    if "losed by peer" in text or "reset by peer" in text or "roken pipe" in text:
        return ConnectionError("its connection closed")
    return ConnectionError(text.partition("\n")[0][:200])
