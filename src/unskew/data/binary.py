"""Reads the file formats of CIFAR and the MNIST family, and reports what is wrong with a file.

A reader turns a file's bytes into arrays; its path is for errors. Nothing is skipped or repaired.
Shapes: N records in a file, images [N, ch, H, W] (CIFAR) or [N, H, W] (idx), labels [N].
"""

import codecs
import gzip
import io
import pickletools
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError, a_kind
from unskew.core.limits import BLOCK, check_unpacked, read_plain

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

CIFAR_SHAPE = (3, 32, 32)
CIFAR_PIXELS = 3 * 32 * 32
REPLACE = "replace it with a complete copy"
_IDX = {1: ("labels", 0x00000801), 3: ("images", 0x00000803)}  # unsigned bytes in 1 or 3 dimensions
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
        size = f"{len(raw):,} bytes are not a multiple of the record size of {record:,} bytes"
        raise UserError(f"{path} is truncated: {size}; {REPLACE}")
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].astype(np.int64)
    in_range(labels, path, classes=classes)
    return records[:, label_bytes:].reshape(-1, *CIFAR_SHAPE), labels


def check_cifar_python(batch: dict[str, Any], path: Path, *, key: str, classes: int) -> tuple[Images, Labels]:
    """One batch of CIFAR's Python layout; the labels are under "labels", in CIFAR-100 under "fine_labels"."""
    for wanted in ("data", key):
        if wanted not in batch:
            have = ", ".join(map(repr, sorted(batch)[:9])) or "nothing"
            raise UserError(f"{path} has no {wanted!r}, only {have}; use a batch in CIFAR's Python layout")
    data, listed = batch["data"], batch[key]
    pixels = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (CIFAR_PIXELS,)
    if not pixels or not len(data):
        raise UserError(f"{path}: 'data' is not an array of bytes [N, {CIFAR_PIXELS}] with N > 0; {REPLACE}")
    if isinstance(listed, list) and all(type(n) is int and abs(n) < 2**31 for n in listed):
        labels = np.array(listed, np.int64)
    elif isinstance(listed, np.ndarray) and listed.ndim == 1:
        labels = listed.astype(np.int64)
    else:
        raise UserError(f"{path}: {key!r} is not a list of whole numbers; {REPLACE}")
    if len(labels) != len(data):
        raise UserError(f"{path} has {len(data):,} images and {len(labels):,} labels; {REPLACE}")
    in_range(labels, path, classes=classes)
    return data.reshape(-1, *CIFAR_SHAPE), labels


def in_range(labels: Labels, path: Path, *, classes: int, first: int = 0) -> None:
    """Refuse a label outside ``first`` .. ``first + classes - 1``; the message names the record."""
    wrong = np.flatnonzero((labels < first) | (labels >= first + classes))
    if len(wrong):
        label = f"the label of record {wrong[0]} is {labels[wrong[0]]}"
        wanted = f"labels range from {first} to {first + classes - 1}"
        raise UserError(f"{path}: {label}, but {wanted}; it is damaged or belongs to another data set: {REPLACE}")


def idx(raw: bytes, path: Path) -> Images:
    """One idx file of unsigned bytes, gzipped or not: one dimension for labels, three if its name has "images"."""
    dimensions = 3 if "images" in path.name else 1
    what, magic = _IDX[dimensions]
    header_size = 4 * (1 + dimensions)
    packed = raw[:2] == b"\x1f\x8b"
    stream = gzip.GzipFile(fileobj=io.BytesIO(raw)) if packed else io.BytesIO(raw)
    try:
        header = stream.read(header_size)
        if len(header) < 4 or int.from_bytes(header[:4], "big") != magic:
            start = f"{path} starts with {header[:4].hex() or 'nothing'}"
            raise UserError(f"{start}, but an idx file of {what} starts with {magic:08x}; use the published file")
        if len(header) < header_size:
            raise UserError(f"{path} is truncated inside its header of {header_size} bytes; {REPLACE}")
        shape = struct.unpack(f">{dimensions}I", header[4:])
        wanted = int(np.prod(shape, dtype=object))
        if wanted == 0:
            raise UserError(f"{path} declares the shape {_times(shape)}, so it contains no {what}; {REPLACE}")
        # This also bounds the read buffer: a damaged count must not allocate terabytes.
        most = len(raw) * (_DEFLATE_LIMIT if packed else 1)
        if packed and wanted <= most:
            check_unpacked(wanted, max(BLOCK, len(raw)), f"{path} ({_times(shape)} {what})")
        body = stream.read(wanted + 1) if wanted <= most else b""
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged inside its gzip compression ({error}); {REPLACE}") from error
    if wanted > most or len(body) != wanted:
        have = f"{len(body):,}" if len(body) < wanted <= most else "fewer" if wanted > most else "more"
        wrong = "is longer than it declares" if have == "more" else "is truncated"
        raise UserError(f"{path} {wrong}: {_times(shape)} {what} take {wanted:,} bytes, but it has {have}; {REPLACE}")
    return np.frombuffer(body, np.uint8).reshape(shape)


def join(
    images: Images, labels: Images, paths: tuple[Path, Path], *, classes: int, first: int = 0
) -> tuple[Images, Labels]:
    """Join the images [N, 1, H, W] and labels of two idx files; ``first`` is the smallest label."""
    if len(images) != len(labels):
        sizes = f"{paths[0]} has {len(images):,} images, but {paths[1]} has {len(labels):,} labels"
        raise UserError(f"{sizes}; both files must come from the same data set")
    numbers = labels.astype(np.int64)
    in_range(numbers, paths[1], classes=classes, first=first)
    return images[:, None], numbers - first


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(f"{n:,}" for n in shape)


_GLOBALS = {
    **{f"numpy.{core}.multiarray _reconstruct": "reconstruct" for core in ("core", "_core")},
    **{f"numpy.{core}.numeric _frombuffer": "frombuffer" for core in ("core", "_core")},
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
    **{f"{module} bytes": "bytes" for module in ("__builtin__", "builtins")},
}
_DTYPES = ("u1", "i8")  # pixels, and labels saved as an array
_QUOTED = re.compile(rb"""(['"])((?:[^\\]++|\\(?:x[0-9a-fA-F]{2}|[\\'"nrt]))*+)(?<=['"])""")
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
_SCALARS = (type(None), bool, int, str, bytes)
_CONTAINERS = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT")
_AS_IS = (
    "INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
)  # fmt: skip
_PLAIN: dict[str, Callable[[Any], Any]] = {  # values from opcodes' arguments
    **dict.fromkeys(_AS_IS, lambda argument: argument),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), lambda text: text.encode("latin-1")),  # bytes of Python 2
    "BYTEARRAY8": bytes,
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_DICT": lambda _: {},
}
_MAX_CONTAINERS = 1_000_000  # per file; with protocol 2, Python 3 writes a tuple for each file name


@dataclass(frozen=True)
class _Function:  # a permitted global, which our own code emulates
    kind: str


@dataclass
class _Dtype:
    code: str  # one of _DTYPES
    order: str = "<"


@dataclass
class _Array:
    value: npt.NDArray[Any] | None = None  # None until its state arrives


def read_pickle(raw: bytes, path: Path) -> dict[str, Any]:
    """Read the dict in a pickle of any protocol without executing it: only the opcodes listed here are allowed."""
    machine = _Machine(raw, path)
    try:
        top = machine.run()
    except (ValueError, OverflowError, LookupError, TypeError) as error:  # also UnicodeError
        raise UserError(f"{path} is damaged at byte {machine.at:,}: {error}; {REPLACE}") from error
    if not isinstance(top, dict):
        machine.refuse(f"contains {a_kind(top).replace(' _', ' ')} instead of a dict")
    return {machine.key(k): machine.plain(v) for k, v in top.items()}


class _Machine:
    """The stacks, the memo and the position in the stream; not recursive, so nesting costs nothing."""

    def __init__(self, raw: bytes, path: Path) -> None:
        self.raw, self.path, self.at = raw, path, 0
        self.stacks: list[list[Any]] = [[]]  # a mark, at the start of a tuple, list or dict, adds one
        self.memo: dict[int, Any] = {}
        self.encoded, self.containers = 0, 0  # bytes from _codecs.encode, limited to the file's size; lists
        self.flat: set[int] = set()  # ids of lists known to be of scalars: a file may refer to one list many times

    def refuse(self, why: str) -> NoReturn:
        raise UserError(f"{self.path} {why} (at byte {self.at:,}); {REPLACE} from the data set's own archive")

    def run(self) -> Any:
        stream = io.BytesIO(self.raw)
        while (code := stream.read(1)) != b".":
            self.at = stream.tell()
            opcode = _OPCODES.get(code.decode("latin-1"))
            if opcode is None:
                self.refuse(f"is damaged: {f'unknown opcode {code!r}' if code else 'it has no end'}")
            self.containers += opcode.name in _CONTAINERS
            if self.containers > _MAX_CONTAINERS:
                self.refuse(f"is unsafe: it has more than {_MAX_CONTAINERS:,} lists")
            if opcode.name == "STRING":
                self.push(self.unquote(stream.readline()))
            else:
                self.step(opcode.name, opcode.arg.reader(stream) if opcode.arg else None)
        ((top,),) = self.stacks
        if stream.read(1):
            self.refuse("continues after its end")
        return top

    def unquote(self, line: bytes) -> bytes:
        """Parse a string written by Python 2's repr."""
        if (match := _QUOTED.fullmatch(line, 0, len(line) - 1)) is None or not line.endswith(match[1] + b"\n"):
            self.refuse("has a string without quotes, or with an unknown escape")
        unescaped: bytes = codecs.escape_decode(match[2][:-1])[0]
        return unescaped

    def push(self, value: Any) -> None:
        self.stacks[-1].append(value)

    def take(self, count: int | None = None) -> list[Any]:
        """Pop the last ``count`` values, or all since the last mark, and the mark."""
        if count is None:
            return self.stacks.pop() if len(self.stacks) > 1 else self.refuse("has a list without a beginning")
        return [self.stacks[-1].pop() for _ in range(count)][::-1]

    def step(self, name: str, argument: Any) -> None:
        match name:
            case "PROTO" | "FRAME":
                pass
            case _ if name in _PLAIN:
                self.push(_PLAIN[name](argument))
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self.memo[len(self.memo) if argument is None else argument] = self.stacks[-1][-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                self.push(self.memo[argument])
            case "MARK":
                self.stacks.append([])
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                self.push(tuple(self.take(None if name == "TUPLE" else int(name[-1]))))
            case "LIST":
                self.push(self.take())
            case "DICT":
                self.push(self.pairs(self.take()))
            case "APPEND" | "APPENDS":
                values = self.take(1 if name == "APPEND" else None)
                list.extend(self.stacks[-1][-1], values)  # raises TypeError if it is not a list
            case "SETITEM" | "SETITEMS":
                pairs = self.pairs(self.take(2 if name == "SETITEM" else None))
                dict.update(self.stacks[-1][-1], pairs)
            case "GLOBAL":
                self.push(self.function(argument))
            case "STACK_GLOBAL":
                self.push(self.function(" ".join(map(str, self.take(2)))))
            case "REDUCE":
                self.push(self.call(*self.take(2)))
            case "BUILD":
                self.build(*self.take(1))
            case _:
                self.refuse(f"is unsafe: the opcode {name} does not belong in a batch of images")

    def pairs(self, values: list[Any]) -> dict[str, Any]:
        return {self.key(k): v for k, v in zip(values[::2], values[1::2], strict=True)}

    def key(self, key: Any) -> str:
        """A dict's key as text; other keys are refused, so that nothing nested is ever hashed."""
        if not isinstance(key, str | bytes):
            self.refuse("has a dict whose keys are not strings")
        return key.decode("latin-1") if isinstance(key, bytes) else key

    def plain(self, value: Any) -> Any:
        if isinstance(value, _Array) and value.value is not None:
            return value.value
        if type(value) is list and id(value) not in self.flat and all(type(v) in _SCALARS for v in value):
            self.flat.add(id(value))
        if type(value) in _SCALARS or id(value) in self.flat:
            return value
        return self.refuse("contains more than text, numbers, flat lists and arrays")

    def function(self, name: str) -> _Function:
        if name not in _GLOBALS:
            self.refuse(f"is unsafe: it imports {name.replace(' ', '.')[:200]!r}, which no batch of images needs")
        return _Function(_GLOBALS[name])

    def call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Function) or type(arguments) is not tuple:
            self.refuse("is unsafe: it calls something other than the allowed functions")
        match function.kind, arguments:
            case "bytes", ():
                return b""
            case "encode", (str() as text, "latin1" | "latin-1"):
                self.encoded += len(text)
                if self.encoded > len(self.raw):
                    self.refuse("would unpack to more bytes than it contains")
                return text.encode("latin-1")
            case "dtype", (str() | bytes() as code, int(), int()) if self.key(code) in _DTYPES:
                return _Dtype(self.key(code))
            case "reconstruct", (_Function("ndarray"), tuple(), str() | bytes()):
                return _Array()
            case "frombuffer", (bytes() as data, _Dtype() as dtype, tuple() as shape, "C" | "F" as order):
                return _Array(self.array(data, dtype, shape, order))
        return self.refuse(f"calls {function.kind!r} with arguments that do not belong in a batch of images")

    def build(self, state: Any) -> None:
        match self.stacks[-1][-1], state:
            case _Dtype() as dtype, (int(), "|" | "<" | ">" | b"|" | b"<" | b">" as order, *_):
                dtype.order = self.key(order)
            case _Array() as array, (int(), tuple() as shape, _Dtype() as dtype, int() as fortran, bytes() as data):
                array.value = self.array(data, dtype, shape, "F" if fortran else "C")
            case _:
                self.refuse("is unsafe: it sets the state of something other than a byte array")

    def array(self, data: bytes, dtype: _Dtype, shape: tuple[Any, ...], order: str) -> npt.NDArray[Any]:
        """A view of ``data``, whose length must match the declared shape."""
        if len(shape) > 4 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
            self.refuse("declares an array of an impossible shape")
        kind = np.dtype(dtype.order + dtype.code)
        size = int(np.prod(shape, dtype=object)) * kind.itemsize
        if size != len(data):
            self.refuse(f"declares an array of {size:,} bytes but contains {len(data):,}")
        flat = np.frombuffer(data, kind)
        return flat.reshape(shape, order="F") if order == "F" else flat.reshape(shape)
