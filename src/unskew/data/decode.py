"""Decodes one photograph to pixels: formats, reasons to reject a file, scaling of the shorter side.

Shapes: [ch, H, W] one image, bytes; ch is 1 for a gray photograph, otherwise 3.
"""

import io
import os
import re
import struct
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from unskew.core.errors import UserError
from unskew.core.limits import check_plain, check_unpacked, size_on_disk

DAMAGE = (OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, OverflowError, struct.error)
UNREADABLE = (*DAMAGE, MemoryError, KeyError, AttributeError, ZeroDivisionError, Image.DecompressionBombError)
GRAY = {"1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N"}
DEEPER = ("I", "F")  # more than 16 bits per pixel, with an unknown white level
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "MPO", "JPEG2000", "PPM", "AVIF", "HEIF")  # none runs a program
HEIC = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")  # their brands
ORIENTATION = 0x0112  # the EXIF tag
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
DECODER = 2  # version: changes when the same file gives other pixels
SPARE = 2  # a JPEG is read at 1/2, 1/4 or 1/8 of its size if that is still this many times the wanted size
LONGEST = 4  # a strip longer than this many times its width is cut to its middle


Picture = Path | bytes  # its path, or its file's content
Pixels = npt.NDArray[np.uint8]


class Broken(Exception):
    """A photograph that cannot be used; the message gives the reason, not the name."""


def decode(source: Picture | None, size: int | None) -> Pixels:
    """[ch, H, W]: upright according to EXIF; with ``size``, scaled (bilinear) so that it is the shorter side.

    Only strips more than ``LONGEST`` times as long as they are wide are cut. Transparency is dropped; of several frames
    the first is used; 16 bits become 8.
    """
    where = _plain(source)
    try:
        with Image.open(where, formats=_formats()) as picture:
            if picture.mode in DEEPER:
                raise Broken(f"has more than 16 bits per channel ({picture.mode}); save it with 8 or 16")
            stored = len(source) if isinstance(source, bytes) else size_on_disk([Path(str(source))])
            check_unpacked(picture.size[0] * picture.size[1] * len(picture.getbands()), stored, "the picture")
            if size is not None:
                picture.draft(None, (SPARE * size, SPARE * size))
            picture.load()  # already turns a TIFF
            turn = None
            with suppress(*UNREADABLE):
                turn = TURNS.get(int(picture.getexif().get(ORIENTATION, 1)))
            plain = _flatten(picture) if turn is None else _flatten(picture).transpose(turn)
    except UserError as error:
        raise Broken(str(error).removeprefix("the picture ")) from error
    except UnidentifiedImageError as error:
        raise Broken(_unknown(where)) from error
    except UNREADABLE as error:
        raise Broken(f"is damaged ({str(error)[:100] or type(error).__name__})") from error
    if size is not None:
        # Cut a strip to its middle: scaled up in full, one that is a pixel wide would take gigabytes.
        width, height = (min(side, LONGEST * min(plain.size)) for side in plain.size)
        left, top = (plain.size[0] - width) // 2, (plain.size[1] - height) // 2
        plain = plain.crop((left, top, left + width, top + height))
        width, height = (max(size, round(side * size / min(plain.size))) for side in plain.size)
        plain = plain.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(plain)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def center(pixels: Pixels, size: int | None) -> Pixels:
    """[ch, size, size], the middle of a photograph whose shorter side is ``size``; without a size, all of it."""
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
    # A palette with transparency cannot be converted to RGB directly.
    return picture.convert("RGBA").convert(mode) if picture.mode in ("P", "PA") else picture.convert(mode)


def _plain(source: Picture | None) -> Path | io.BytesIO:
    if source is None:
        raise Broken("has no bytes; put paths into a column called path")
    try:
        if not isinstance(source, bytes):
            check_plain(source)
        if not (len(source) if isinstance(source, bytes) else os.stat(source).st_size):
            raise Broken("is empty")
    except UserError as error:
        raise Broken(str(error).removeprefix(f"{source!s} ")) from error
    except OSError as error:
        web = re.search(r"(^|/)(https?|s3|gs):/", str(source))
        hint = ": a web address; download the file" if web else ": a Windows path; use /" if "\\" in str(source) else ""
        raise Broken(f"cannot be read ({error.strerror or error}){hint}") from error
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _unknown(where: Path | io.BytesIO) -> str:
    """Why the format is not read: phones write HEIC, which needs a plug-in."""
    start = b""
    with suppress(OSError), where if isinstance(where, io.BytesIO) else where.open("rb") as file:
        file.seek(0)
        start = file.read(12)
    if start[4:8] == b"ftyp" and start[8:12] in HEIC:
        return "is in the HEIC format; install its plug-in (pip install pillow-heif), or convert it to JPEG"
    return "is not a picture"
