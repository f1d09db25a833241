"""Messages as bytes: a header in JSON and the raw bytes of tensors. Damaged messages are refused; nothing is pickled.

The header has the message's fields, and the name, type and shape of every tensor; the body is their bytes,
little-endian, without gaps. Pool, torchrun and federation share it.
"""

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.files import parse_json
from unskew.core.types import Tensors

MAX_HEADER = 16 * 2**20  # bytes
MAX_BODY = 8 * 2**30  # bytes, unless the caller sets a lower limit
MAX_NAME = 300  # characters
MAX_TENSORS = 20_000  # in one message; the largest networks have a few thousand
TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in TYPES}

Entry = tuple[str, str, tuple[int, ...]]  # name, type, shape


class BadMessage(Exception):
    """An invalid message. ``logged`` is the reason for logs, without content from the sender."""

    def __init__(self, reason: str, logged: str | None = None) -> None:
        super().__init__(reason)
        self.logged = logged or reason


@dataclass(frozen=True)
class Envelope:
    """A message as bytes."""

    header: bytes
    body: bytes = b""

    def __len__(self) -> int:
        return len(self.header) + len(self.body)

    def to_bytes(self) -> bytes:
        """Header and body in one piece."""
        return b"".join((len(self.header).to_bytes(8, "little"), self.header, self.body))

    @staticmethod
    def from_bytes(content: bytes) -> "Envelope":
        """Read what ``to_bytes`` returned."""
        end = 8 + int.from_bytes(content[:8], "little")
        return Envelope(content[8:end], content[end:])


@dataclass(frozen=True)
class Body:
    """Tensors as bytes, with their names, types and shapes."""

    entries: list[Entry]
    content: bytes

    @cached_property
    def sha256(self) -> bytes:
        """The hash of the bytes, computed once for all recipients."""
        return hashlib.sha256(self.content).digest()

    @staticmethod
    def of(tensors: Iterable[tuple[str, Tensor]]) -> "Body":
        """The bytes of these tensors, one after another."""
        if sys.byteorder != "little":
            raise UserError("only little-endian machines can exchange tensors, but this one is big-endian")
        pairs = list(tensors)
        entries = [(name, _dtype(value), tuple(value.shape)) for name, value in pairs]
        return Body(entries, b"".join(raw(value).numpy().data for _, value in pairs if value.numel()))


NO_TENSORS = Body([], b"")


def encode(fields: Mapping[str, Any], tensors: Body | Iterable[tuple[str, Tensor]] = NO_TENSORS) -> Envelope:
    """A message with these fields and tensors."""
    body = tensors if isinstance(tensors, Body) else Body.of(tensors)
    return Envelope(msgspec.json.encode({**fields, "tensors": body.entries}), body.content)


def decode_header(envelope: Envelope) -> dict[str, Any]:
    """Only the fields."""
    if len(envelope.header) > MAX_HEADER:
        raise BadMessage(f"oversized: its header takes {len(envelope.header):,} bytes; the limit is {MAX_HEADER:,}")
    try:
        header = parse_json(envelope.header)
    except ValueError as error:
        raise BadMessage(f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadMessage("its header is not a JSON object")
    return header


def decode(envelope: Envelope, most: int = MAX_BODY) -> tuple[dict[str, Any], list[tuple[str, Tensor]]]:
    """The fields and tensors of a message; a damaged one, or one above ``most`` bytes, is refused."""
    header = decode_header(envelope)
    return header, decode_tensors(header.pop("tensors", None), envelope.body, most)


def decode_tensors(described: Any, body: bytes, most: int) -> list[tuple[str, Tensor]]:
    """The tensors in a message's body; ``described`` is its list of names, types and shapes."""
    if len(body) > most:
        raise BadMessage(f"oversized: its tensors take {len(body):,} bytes; the limit is {most:,}")
    try:
        entries = msgspec.convert(described, list[Entry])
    except msgspec.ValidationError as error:
        raise BadMessage(f"its tensors are not described by name, type and shape: {error}") from error
    if len(entries) > MAX_TENSORS:
        raise BadMessage(f"it has {len(entries):,} tensors; the limit is {MAX_TENSORS:,}")
    for name, dtype, shape in entries:
        if dtype not in DTYPES or len(name) > MAX_NAME or len(shape) > 16 or not all(0 <= n <= MAX_BODY for n in shape):
            raise BadMessage("a tensor is not described by its name, type and shape")
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in entries]
    if sum(sizes) != len(body):
        raise BadMessage(f"its tensors should take {sum(sizes):,} bytes, but {len(body):,} arrived")
    tensors, start, content = list[tuple[str, Tensor]](), 0, memoryview(body)
    for (name, dtype, shape), size in zip(entries, sizes, strict=True):
        value = torch.empty(shape, dtype=DTYPES[dtype])  # aligned, because alignment affects how kernels round
        if size:
            raw(value).numpy().data[:] = content[start : start + size]
        tensors.append((name, value))
        start += size
    return tensors


def by_name(tensors: Iterable[tuple[str, Tensor]]) -> Tensors:
    """The tensors by name; a repeated name is refused."""
    named: Tensors = {}
    for name, value in tensors:
        if name in named:
            raise BadMessage("a tensor appears twice")
        named[name] = value
    return named


def raw(value: Tensor) -> Tensor:
    """[bytes], the tensor's own memory if it is contiguous and on the CPU."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _dtype(value: Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"tensors of type {name} cannot be sent; supported types: {', '.join(DTYPES)}")
    return name
