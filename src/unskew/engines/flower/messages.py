"""What goes over the wire: a header in JSON and raw tensors, each message whole or refused. Nothing is pickled.

A header says what the message is (``kind``), of which run, its number there, and the name, type and shape of every
tensor; the body is their bytes, little-endian, one after another without gaps.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.files import parse_json
from unskew.core.types import Tensors

PROTOCOL = 1  # both sides must speak the same
MAX_HEADER = 16 * 2**20  # bytes
MAX_BODY = 8 * 2**30  # bytes, where nobody knows how many to expect
MAX_NAME = 300  # characters
DTYPES = {
    name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8",
    "bool")
}  # fmt: skip

Entry = tuple[str, str, tuple[int, ...]]  # name, type, shape


class BadMessage(Exception):
    """A message that is not what it should be; the text says what is wrong with it."""


@dataclass(frozen=True)
class Envelope:
    """A message as bytes."""

    header: bytes
    body: bytes = b""

    def __len__(self) -> int:
        return len(self.header) + len(self.body)


def sealed(fields: Mapping[str, Any], tensors: Sequence[tuple[str, Tensor]] = ()) -> Envelope:
    """The message with these fields and tensors."""
    return with_body(fields, Body.of(tensors))


def with_body(fields: Mapping[str, Any], body: "Body") -> Envelope:
    """The message with these fields, and tensors that go to several nodes."""
    header = {"protocol": PROTOCOL, **fields, "tensors": body.entries}
    text = json.dumps(header, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Envelope(text.encode(), body.content)


@dataclass(frozen=True)
class Body:
    """Tensors as bytes, and what each of them is."""

    entries: list[list[Any]]
    content: bytes

    @staticmethod
    def of(tensors: Sequence[tuple[str, Tensor]]) -> "Body":
        """The bytes of these tensors, one after another."""
        entries = [[name, _dtype(value), list(value.shape)] for name, value in tensors]
        return Body(entries, body_of([value for _, value in tensors]))


def body_of(tensors: Sequence[Tensor]) -> bytes:
    """The raw bytes of these tensors, one after another."""
    if sys.byteorder != "little":
        raise UserError("a federation needs machines that store numbers in little-endian order; this one does not")
    return b"".join(_raw(value).numpy().data for value in tensors if value.numel())


def opened(envelope: Envelope, most: int = MAX_BODY) -> tuple[dict[str, Any], list[tuple[str, Tensor]]]:
    """The fields and tensors of a message; one that is not whole, or larger than ``most`` bytes, is refused."""
    header = read_header(envelope)
    if len(envelope.body) > most:
        raise BadMessage(f"oversized: its tensors take {len(envelope.body):,} bytes, {most:,} are the most")
    entries = [_entry(each) for each in _list(header.pop("tensors", None), "tensors")]
    names = [name for name, _, _ in entries]
    sizes = [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in entries]
    if sum(sizes) != len(envelope.body):
        raise BadMessage(f"its tensors should take {sum(sizes):,} bytes, {len(envelope.body):,} came")
    values, start, content = [], 0, memoryview(envelope.body)
    for (_, dtype, shape), size in zip(entries, sizes, strict=True):
        value = torch.empty(shape, dtype=DTYPES[dtype])  # memory of its own: kernels round by where a tensor begins
        if size:
            _raw(value).numpy().data[:] = content[start : start + size]
        values.append(value)
        start += size
    return header, list(zip(names, values, strict=True))


def read_header(envelope: Envelope) -> dict[str, Any]:
    """The header alone, if it is one of this protocol."""
    if len(envelope.header) > MAX_HEADER:
        raise BadMessage(f"oversized: its header takes {len(envelope.header):,} bytes, {MAX_HEADER:,} are the most")
    try:
        header = parse_json(envelope.header)
    except ValueError as error:
        raise BadMessage(f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadMessage("its header is not a JSON object")
    if (spoken := header.pop("protocol", None)) != PROTOCOL:
        raise BadMessage(
            f"it speaks protocol {str(spoken)[:20]}, this side {PROTOCOL}; install the same version of unskew on "
            "the server and all nodes"
        )
    return header


def named(tensors: Sequence[tuple[str, Tensor]]) -> Tensors:
    """The tensors by name; a name that comes twice is refused."""
    by_name = dict(tensors)
    if len(by_name) < len(tensors):
        raise BadMessage("a tensor comes twice")
    return by_name


def field(header: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a header, of the right type."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    value = header.get(name)
    if type(value) not in kinds:
        words = " or ".join("nothing" if each is type(None) else each.__name__ for each in kinds)
        raise BadMessage(f"its field {name!r} should be {words}, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadMessage(f"its field {name!r} is not finite")
    return value


def _raw(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _dtype(value: Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"tensors of type {name} cannot be sent; there are: {', '.join(DTYPES)}")
    return name


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadMessage(f"its field {name!r} should be a list")
    return value


def _entry(value: Any) -> Entry:
    match value:
        case [str(name), str(dtype), list(shape)] if dtype in DTYPES and len(name) <= MAX_NAME and len(shape) <= 16:
            if all(type(each) is int and 0 <= each <= MAX_BODY for each in shape):
                return name, dtype, tuple(shape)
    raise BadMessage("a tensor is not described by its name, type and shape")
