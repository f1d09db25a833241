"""Reads the file formats of CIFAR and the MNIST family; a file that differs from its format is refused.

Shapes: N records in a file, images [N, ch, H, W] (CIFAR) or [N, H, W] (idx), labels [N].
"""

import gzip
import io
import pickletools
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.limits import BLOCK, check_unpacked, read_plain

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

CIFAR_SHAPE = (3, 32, 32)
CIFAR_PIXELS = 3 * 32 * 32
REPLACE = "replace it with the published file"
_DEFLATE_LIMIT = 1032  # the best compression ratio of deflate


def read_file(path: Path) -> bytes:
    """All bytes of a file that must not be empty."""
    if not (raw := read_plain(path)):
        raise UserError(f"{path} is empty; {REPLACE}")
    return raw


def cifar(raw: bytes, path: Path, *, label_bytes: int, classes: int) -> tuple[Images, Labels]:
    """One CIFAR binary file: records of ``label_bytes`` labels (the last one counts) and 3072 pixels."""
    record = label_bytes + CIFAR_PIXELS
    if not raw or len(raw) % record:
        raise UserError(f"{path} is truncated: {len(raw):,} bytes are not records of {record:,} bytes; {REPLACE}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].astype(np.int64)
    _check_labels(labels, path, classes)
    return records[:, label_bytes:].reshape(-1, *CIFAR_SHAPE), labels


def cifar_python(raw: bytes, path: Path, *, key: str, classes: int) -> tuple[Images, Labels]:
    """One batch of CIFAR's Python layout; the labels are under "labels", in CIFAR-100 under "fine_labels"."""
    batch = read_pickle(raw, path)
    data: Any = batch.get("data")
    labels: Any = batch.get(key)
    numbers = labels.tolist() if isinstance(labels, np.ndarray) else labels
    pixels = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (CIFAR_PIXELS,)
    listed = isinstance(numbers, list) and all(type(n) is int and 0 <= n < classes for n in numbers)
    if not pixels or not listed or not len(data) == len(numbers) > 0:
        wanted = f"'data', bytes [N, {CIFAR_PIXELS}], and {key!r}, N whole numbers from 0 to {classes - 1}"
        raise UserError(f"{path} is not a batch in CIFAR's Python layout: it must have {wanted}; {REPLACE}")
    return data.reshape(-1, *CIFAR_SHAPE), np.array(numbers, np.int64)


def _check_labels(labels: Labels, path: Path, classes: int, first: int = 0) -> None:
    wrong = np.flatnonzero((labels < first) | (labels >= first + classes))
    if len(wrong):
        label = f"the label of record {wrong[0]} is {labels[wrong[0]]}"
        raise UserError(f"{path}: {label}, but labels range from {first} to {first + classes - 1}; {REPLACE}")


def idx(raw: bytes, path: Path) -> Images:
    """One idx file of unsigned bytes, gzipped or not: one dimension for labels, three if its name has "images"."""
    dimensions, what = (3, "images") if "images" in path.name else (1, "labels")
    packed = raw[:2] == b"\x1f\x8b"
    stream = gzip.GzipFile(fileobj=io.BytesIO(raw)) if packed else io.BytesIO(raw)
    try:
        magic, *shape = struct.unpack(f">{1 + dimensions}I", stream.read(4 * (1 + dimensions)))
        size = int(np.prod(shape, dtype=object))
        if magic != 0x800 + dimensions or not size:
            raise ValueError(f"it does not begin like an idx file of {what}")
        if size > len(raw) * (_DEFLATE_LIMIT if packed else 1):  # a damaged count must not allocate terabytes
            raise ValueError(f"it is truncated: {size:,} bytes are declared")
        check_unpacked(size, max(BLOCK, len(raw)), str(path))
        body = stream.read(size + 1)
        if len(body) != size:
            raise ValueError(f"it has {'more' if len(body) > size else 'fewer'} than the declared {size:,} bytes")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}); {REPLACE}") from error
    return np.frombuffer(body, np.uint8).reshape(shape)


def join(
    images: Images, labels: Images, paths: tuple[Path, Path], *, classes: int, first: int = 0
) -> tuple[Images, Labels]:
    """Join the images [N, 1, H, W] and labels of two idx files; ``first`` is the smallest label."""
    if len(images) != len(labels):
        raise UserError(f"{paths[0]} has {len(images):,} images, but {paths[1]} {len(labels):,} labels; {REPLACE}")
    numbers = labels.astype(np.int64)
    _check_labels(numbers, paths[1], classes, first)
    return images[:, None], numbers - first


_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


@dataclass(frozen=True)
class _Name:
    """Something that the file imports; our own code emulates it."""

    text: str


def read_pickle(raw: bytes, path: Path) -> dict[str, Any]:
    """Read the dict in a pickle of protocol 2 to 5 without executing it: only the opcodes listed here are allowed."""
    stacks: list[list[Any]] = [[]]  # a mark, at the start of a tuple, list or dict, adds one
    memo: dict[int, Any] = {}
    position = encoded = 0
    try:
        argument: Any
        for opcode, argument, at in pickletools.genops(raw):
            position, name, stack = at or 0, opcode.name, stacks[-1]
            match name:
                case "PROTO" | "FRAME" | "STOP":
                    pass
                case "BINSTRING" | "SHORT_BINSTRING":  # bytes of Python 2
                    stack.append(argument.encode("latin-1"))
                case "EMPTY_LIST" | "EMPTY_DICT":
                    stack.append([] if name == "EMPTY_LIST" else {})
                case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                    memo[len(memo) if argument is None else argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "MARK":
                    stacks.append([])
                case "TUPLE" | "APPENDS" | "SETITEMS":
                    values = stacks.pop()
                    _add(name, stacks[-1], values)
                case "TUPLE1" | "TUPLE2" | "TUPLE3" | "APPEND" | "SETITEM":
                    count = {"APPEND": 1, "SETITEM": 2}.get(name) or int(name[-1])
                    values = [stack.pop() for _ in range(count)][::-1]
                    _add(name, stack, values)
                case "GLOBAL":
                    stack.append(_Name(argument.replace("numpy._core", "numpy.core")))
                case "STACK_GLOBAL":
                    function, module = stack.pop(), stack.pop()
                    stack.append(_Name(f"{module} {function}".replace("numpy._core", "numpy.core")))
                case "REDUCE":
                    arguments, function = stack.pop(), stack.pop()
                    stack.append(_call(function, arguments))
                    encoded += len(stack[-1]) if isinstance(stack[-1], bytes) else 0
                    if encoded > len(raw):
                        raise ValueError("it would unpack to more bytes than it contains")
                case "BUILD":
                    state = stack.pop()
                    stack[-1] = _build(stack[-1], state)
                case _ if name in _LITERALS:
                    stack.append(argument)
                case _ if name in _CONSTANTS:
                    stack.append(_CONSTANTS[name])
                case _:
                    raise ValueError(f"the opcode {name} does not belong in a batch of images")
        ((top,),) = stacks
        return {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in top.items()}
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:  # also UnicodeError
        wrong = f"is damaged, or not a batch of images (at byte {position:,}: {error})"
        raise UserError(f"{path} {wrong}; {REPLACE}") from error


def _add(name: str, stack: list[Any], values: list[Any]) -> None:
    """Make a tuple of the values, or add them to the list or dict on the stack."""
    if name.startswith("TUPLE"):
        stack.append(tuple(values))
    elif name.startswith("APPEND"):
        list.extend(stack[-1], values)  # raises TypeError if it is not a list
    elif all(isinstance(key, str | bytes) for key in values[::2]):  # nothing nested is ever hashed
        dict.update(stack[-1], zip(values[::2], values[1::2], strict=True))
    else:
        raise ValueError("a key is not a string")


def _call(function: Any, arguments: Any) -> Any:
    match function, arguments:
        case _Name("__builtin__ bytes" | "builtins bytes"), ():
            return b""
        case _Name("_codecs encode"), (str() as text, "latin1"):
            return text.encode("latin-1")
        case _Name("numpy dtype"), ("u1" | b"u1" | "i8" | b"i8" as code, _, _):
            return np.dtype(code if isinstance(code, str) else code.decode())
        case _Name("numpy.core.multiarray _reconstruct"), _:
            return _Name("array")
        case _Name("numpy.core.numeric _frombuffer"), (bytes() | bytearray() as data, np.dtype() as dtype, shape, "C"):
            return np.frombuffer(data, dtype).reshape(shape)
    raise ValueError(f"unsafe: it calls {function.text if isinstance(function, _Name) else 'a value'}")


def _build(value: Any, state: Any) -> Any:
    match value, state:
        case np.dtype(), (_, "|" | "<" | b"|" | b"<", *_):  # the byte order
            return value
        case _Name("array"), (_, shape, np.dtype() as dtype, False, bytes() as data):
            return np.frombuffer(data, dtype).reshape(shape)
    raise ValueError("unsafe: it sets the state of something other than an array")
