"""Messages between two ranks over torch.distributed: JSON, and raw tensors beside it. Nothing is pickled.

A message begins with a frame of one size: the length of its JSON, and the JSON as far as it fits. Then come the rest of
it and the bytes of its tensors, in pieces. What crosses is on the CPU, so gloo carries it whatever the ranks compute
with. Whoever writes also tells that it is alive, every second.
"""

import json
import math
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unskew.core.units import format_duration

Message = dict[str, Any]

ALIVE = "alive"  # the message that says nothing else
BEAT = 1.0  # seconds between such messages
PIECE = 16 * 2**20  # bytes that are sent at once: one piece must come within the time that a rank may be silent
FRAME = 512  # bytes: most messages fit, and each transfer costs more than these
LENGTH = 8  # bytes of the frame that say how long the JSON is
LONGEST = 2**30  # bytes of JSON
TAG = 1  # of all our messages
FOREVER = 30 * 24 * 3600.0  # seconds


class Writer:
    """A thread that sends to one rank, in order; the others never wait, and never leave a message half sent.

    ``lost`` is called with the reason when the rank cannot be reached any more.
    """

    def __init__(self, rank: int, lost: Callable[[str], None]) -> None:
        self._rank, self._lost = rank, lost
        self._outbox: SimpleQueue[tuple[Message, tuple[Tensor, ...]] | None] = SimpleQueue()
        self._thread = Thread(target=self._write, daemon=True)
        self._thread.start()

    def send(self, message: Message, *tensors: Tensor) -> None:
        """Send it when those before have gone; the tensors must not change until then."""
        self._outbox.put((message, tensors))

    def finish(self, seconds: float = 5.0) -> None:
        """Send what is left, and end; what is sent later is dropped."""
        self._outbox.put(None)
        self._thread.join(seconds)

    def _write(self) -> None:
        try:
            while True:
                try:
                    due = self._outbox.get(timeout=BEAT)
                except Empty:
                    due = ({ALIVE: True}, ())
                if due is None:
                    return
                _send(self._rank, *due)
        except ConnectionAbortedError:
            return
        except ConnectionError as error:
            self._lost(str(error))


def receive(rank: int, seconds: float = FOREVER) -> tuple[Message, list[Tensor]]:
    """The next message of that rank; ConnectionError where it is gone, or silent for so long.

    Gloo then closes the connections to all ranks: the others that wait get a ConnectionAbortedError, which says nothing
    about their rank.
    """
    frame = bytearray(FRAME)
    _take(torch.frombuffer(frame, dtype=torch.uint8), rank, seconds)
    length = int.from_bytes(frame[:LENGTH], "little")
    if not 0 < length <= LONGEST:
        raise ConnectionError(f"what it sends is no message: {length} bytes of JSON")
    text = frame[LENGTH : LENGTH + length]
    if more := length - len(text):
        rest = bytearray(more)
        _take(torch.frombuffer(rest, dtype=torch.uint8), rank, seconds)
        text += rest
    message: Message = json.loads(text)
    tensors = []
    for size in message.pop("bytes", ()):
        tensors.append(torch.empty(size, dtype=torch.uint8))
        for start in range(0, size, PIECE):
            _take(tensors[-1][start : start + PIECE], rank, seconds)
    return message, tensors


def as_bytes(tensor: Tensor) -> Tensor:
    """[bytes], the tensor's own memory where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(content: Tensor, dtype: str, shape: list[int]) -> Tensor:
    """The tensor whose bytes these are."""
    kind: torch.dtype = getattr(torch, dtype)
    if content.numel() != math.prod(shape) * kind.itemsize:
        raise ConnectionError(f"{content.numel()} bytes came for {dtype} {shape}")
    return content.view(kind).view(shape)


def _send(rank: int, message: Message, tensors: tuple[Tensor, ...]) -> None:
    contents = [as_bytes(each) for each in tensors]
    sizes = {"bytes": [each.numel() for each in contents]} if contents else {}
    text = json.dumps(message | sizes).encode()
    framed = bytearray(len(text).to_bytes(LENGTH, "little") + text.ljust(FRAME - LENGTH))
    _give(torch.frombuffer(framed, dtype=torch.uint8, count=FRAME), rank)
    if len(framed) > FRAME:
        _give(torch.frombuffer(framed, dtype=torch.uint8, offset=FRAME), rank)
    for content in contents:
        for start in range(0, content.numel(), PIECE):
            _give(content[start : start + PIECE], rank)


def _give(tensor: Tensor, rank: int) -> None:
    try:
        work = dist.isend(tensor, rank, tag=TAG)
        assert work is not None
        work.wait(timedelta(seconds=FOREVER))  # the one who reads notices a silent rank
    except RuntimeError as error:
        raise _loss(error) from error


def _take(tensor: Tensor, rank: int, seconds: float) -> None:
    try:
        work = dist.irecv(tensor, rank, tag=TAG)
        assert work is not None
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise _loss(error, seconds) from error


def _loss(error: RuntimeError, seconds: float = FOREVER) -> ConnectionError:
    """Gloo's complaint in few words."""
    said = str(error)
    if "imeout caused pair closure" in said:
        return ConnectionAbortedError(said)
    if "imed out" in said:
        return ConnectionError(f"nothing was heard of it for {format_duration(seconds)}")
    if "losed by peer" in said or "reset by peer" in said or "roken pipe" in said:
        return ConnectionError("its connection closed")
    return ConnectionError(said.partition("\n")[0][:200])
