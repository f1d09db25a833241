"""One photograph as pixels: which formats are read, what is refused and why, scaling of the shorter side.

Shapes: [ch, H, W] one image, bytes; ch is 1 where the photograph is gray, otherwise 3.
"""

import io
import os
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from unskew.core.errors import UserError, brief
from unskew.core.limits import check_plain, check_unpacked, size_on_disk

DAMAGE = (OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, OverflowError, struct.error)
UNREADABLE = (*DAMAGE, MemoryError, KeyError, AttributeError, ZeroDivisionError, Image.DecompressionBombError)
GRAY = {"1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N"}
DEEPER = ("I", "F")  # more than 16 bits a pixel, whose white nobody knows
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO", "JPEG2000", "PPM", "AVIF", "HEIF")  # none runs a program
HEIC = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")  # how such files begin
ORIENTATION = 0x0112  # EXIF: how the camera was held
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
DECODER = 2  # changes when the same file would give other pixels
SPARE = 2  # a JPEG is read at half, a quarter or an eighth of its size, if that is this many times what is wanted
LONGEST = 4  # sides: of a longer strip the middle is kept


@dataclass(frozen=True)
class NoBytes:
    """In a column of images, one of which only the path was written."""

    path: str


Picture = Path | bytes | NoBytes  # where it is, or its file's content
Pixels = npt.NDArray[np.uint8]


class Broken(Exception):
    """A photograph that cannot be used; the message says why, and not which one it is."""


def decode(given: Picture | None, size: int | None) -> Pixels:
    """[ch, H, W]: upright, as EXIF records it; with ``size`` scaled (bilinear) so that the shorter side has it.

    Nothing is cut off but the ends of a strip that is more than ``LONGEST`` times as long as it is wide. Transparency
    is dropped; of several frames the first is taken; 16 bits become 8.
    """
    where = _plain(given)
    try:
        with Image.open(where, formats=_formats()) as picture:
            if picture.mode in DEEPER:
                raise Broken(f"has more than 16 bits per channel ({picture.mode}); save it with 8 or 16")
            taken = len(given) if isinstance(given, bytes) else size_on_disk([Path(str(given))])
            check_unpacked(picture.size[0] * picture.size[1] * len(picture.getbands()), taken, "the picture")
            if size is not None:
                picture.draft(None, (SPARE * size, SPARE * size))
            picture.load()  # turns a TIFF by itself
            turn = TURNS.get(_orientation(picture))
            plain = _flatten(picture) if turn is None else _flatten(picture).transpose(turn)
    except UserError as error:
        raise Broken(str(error).removeprefix("the picture ")) from error
    except Image.DecompressionBombError as error:
        raise Broken(f"claims to have more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels; scale it down") from error
    except UnidentifiedImageError as error:
        raise Broken(_unknown(where)) from error
    except UNREADABLE as error:
        raise Broken(f"is damaged ({str(error)[:100] or type(error).__name__})") from error
    if size is not None:
        plain = _shorten(plain)
        width, height = (max(size, round(side * size / min(plain.size))) for side in plain.size)
        plain = plain.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(plain)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def center(pixels: Pixels, size: int | None) -> Pixels:
    """[ch, size, size], the middle of a photograph whose shorter side has that size; without a size all of it."""
    if size is None:
        return pixels
    top, left = (pixels.shape[1] - size) // 2, (pixels.shape[2] - size) // 2
    return pixels[:, top : top + size, left : left + size]


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    Image.init()
    with suppress(ImportError):
        import_module("pillow_heif").register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _flatten(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16"):
        levels = np.asarray(picture).astype(np.uint32)
        return Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
    mode = "L" if picture.mode in GRAY else "RGB"
    # By way of RGBA: a palette with transparency has no direct way to RGB.
    return picture.convert("RGBA").convert(mode) if picture.mode in ("P", "PA") else picture.convert(mode)


def _shorten(picture: Image.Image) -> Image.Image:
    """The middle of a strip: scaled whole, a strip of one pixel's width would take gigabytes."""
    most = LONGEST * min(picture.size)
    width, height = (min(side, most) for side in picture.size)
    left, top = (picture.size[0] - width) // 2, (picture.size[1] - height) // 2
    return picture if (width, height) == picture.size else picture.crop((left, top, left + width, top + height))


def _orientation(picture: Image.Image) -> int:
    try:
        return int(picture.getexif().get(ORIENTATION, 1))
    except UNREADABLE:
        return 1


def _plain(given: Picture | None) -> Path | io.BytesIO:
    if given is None:
        raise Broken("has no bytes")
    if isinstance(given, NoBytes):
        raise Broken(f"has no bytes, only the path {brief(given.path)}; put paths into a column called path")
    if isinstance(given, bytes):
        if not given:
            raise Broken("is empty")
        return io.BytesIO(given)
    try:
        check_plain(given)
        if not os.stat(given).st_size:
            raise Broken("is empty")
    except UserError as error:
        raise Broken(str(error).removeprefix(f"{given} ")) from error
    except FileNotFoundError as error:
        raise Broken(f"does not exist{_hint(given)}") from error
    except OSError as error:
        raise Broken(f"cannot be read: {error.strerror or error}") from error
    return given


def _hint(path: Path) -> str:
    if re.search(r"(^|/)(https?|s3|gs):/", str(path)):
        return ": it is a web address; download the file, and give its path"
    if "\\" in str(path):
        return ": it is a Windows path; give it relative to the table, with / between folders"
    return ""


def _unknown(where: Path | io.BytesIO) -> str:
    """Why it is not read: telephones write HEIC, which needs a plug-in."""
    start = b""
    with suppress(OSError), where if isinstance(where, io.BytesIO) else where.open("rb") as file:
        file.seek(0)
        start = file.read(12)
    if start[4:8] == b"ftyp" and start[8:12] in HEIC:
        return "is in the HEIC format; install its plug-in (pip install pillow-heif), or convert it to JPEG"
    return "is not a picture"
