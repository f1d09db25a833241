"""What goes over the wire between server and nodes: the codec's envelopes, with the version of the protocol.

A header says what the message is (``kind``), of which run, and its number there.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from unskew.engines.codec import MAX_BODY, NO_TENSORS, BadMessage, Body, Envelope, decode, decode_header, encode

PROTOCOL = 2  # both sides must speak the same


def seal(fields: Mapping[str, Any], tensors: Body | Iterable[tuple[str, Tensor]] = NO_TENSORS) -> Envelope:
    """The message with these fields and tensors."""
    return encode({"protocol": PROTOCOL, **fields}, tensors)


def unseal(envelope: Envelope, most: int = MAX_BODY) -> tuple[dict[str, Any], list[tuple[str, Tensor]]]:
    """The fields and tensors of a message; one that is not whole, or larger than ``most`` bytes, is refused."""
    read_header(envelope)
    header, tensors = decode(envelope, most)
    del header["protocol"]
    return header, tensors


def read_header(envelope: Envelope) -> dict[str, Any]:
    """The header alone, if it is one of this protocol."""
    header = decode_header(envelope)
    if (spoken := header.pop("protocol", None)) != PROTOCOL:
        raise BadMessage(
            f"it speaks protocol {str(spoken)[:20]}, this side {PROTOCOL}; install the same version of unskew on "
            "the server and all nodes"
        )
    return header


def field(header: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a header, of the right type."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    value = header.get(name)
    if type(value) not in kinds:
        expected = " or ".join("nothing" if option is type(None) else option.__name__ for option in kinds)
        raise BadMessage(f"its field {name!r} should be {expected}, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadMessage(f"its field {name!r} is not finite")
    return value
