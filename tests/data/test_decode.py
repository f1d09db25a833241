"""Photographs as people have them and as nobody should: decoded alike, or refused with a reason."""

import io
import warnings
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image, ImageOps

from photo_tables import hollow_png
from unskew.data import decode as decoding
from unskew.data.decode import Broken, center, decode


@pytest.fixture(autouse=True)
def silence():
    with warnings.catch_warnings(action="ignore"):
        yield


def saved(picture, form="PNG", **options):
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


@pytest.fixture
def colours():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8))


GREY = ("1", "L", "LA")


@pytest.mark.parametrize(
    ("form", "mode"),
    [*(("PNG", grey) for grey in GREY), ("JPEG", "CMYK"), ("JPEG", "L"), ("WEBP", "RGB"), ("BMP", "RGB"),
     ("TIFF", "RGB"), ("GIF", "P")],
)  # fmt: skip
def test_common_formats_are_read_and_grey_stays_one_channel(colours, form, mode):
    assert decode(saved(colours.convert(mode), form), None).shape == (1 if mode in GREY else 3, 9, 14)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "JPEG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_picture_is_turned_as_the_camera_was_held(colours, turn, form):
    exif = Image.Exif()
    exif[decoding.ORIENTATION] = turn
    content = saved(colours, form, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert np.array_equal(decode(content, None), np.asarray(upright).transpose(2, 0, 1))


def test_odd_exif_data_do_not_make_a_picture_broken(colours):
    exif = Image.Exif()
    exif[decoding.ORIENTATION] = 6
    upright = decode(saved(colours, "JPEG", exif=exif), None)
    exif[0x0128] = 2  # the unit of the resolution, a whole number; some cameras write it as a text
    odd = exif.tobytes().replace(b"\x01\x28\x00\x03", b"\x01\x28\x00\x02")
    assert np.array_equal(decode(saved(colours, "JPEG", exif=odd), None), upright)


def test_a_size_scales_the_shorter_side_and_the_center_is_the_middle():
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 200  # the middle third
    whole = decode(saved(Image.fromarray(wide)), 10)
    assert whole.shape == (3, 10, 30)
    assert (center(whole, 10) == 200).all()
    tall = decode(saved(Image.fromarray(wide.transpose(1, 0, 2))), 5)
    assert tall.shape == (3, 15, 5)
    assert (center(tall, 5)[:, 1:4] == 200).all()


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_become_eight(form):
    levels = np.array([[0, 128, 257, 32896, 65407, 65535]], np.uint16)
    assert decode(saved(Image.fromarray(levels), form), None).ravel().tolist() == [0, 0, 1, 128, 255, 255]


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_the_inks_of_a_printer_become_colors(form):
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta and yellow make red
    red, green, blue = decode(saved(ink, form), None)[:, 8, 8].tolist()
    assert red > 200
    assert max(green, blue) < 60


def test_heic_is_read_where_its_plugin_is_installed():
    heif = pytest.importorskip("pillow_heif")
    heif.register_heif_opener()
    content = saved(Image.new("RGB", (64, 48), "red"), "HEIF")
    assert decode(content, None).shape == (3, 48, 64)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("https://example.org/a.jpg", "a web address; download the file"),
        (r"C:\photos\a.jpg", "a Windows path; use /"),
        ("a.jpg", "cannot be read .No such file"),
    ],
)
def test_a_missing_file_gets_a_hint(tmp_path, path, hint):
    with pytest.raises(Broken, match=hint):
        decode(tmp_path / path, None)


def test_a_strip_does_not_take_gigabytes():
    strip = saved(Image.new("RGB", (60_000, 1), "red"))
    assert decode(strip, 64).shape == (3, 64, 256)


def test_a_large_jpeg_is_read_at_a_fraction_of_its_size(monkeypatch):
    big = saved(Image.new("RGB", (1600, 1200), "red"), "JPEG")
    seen = []
    monkeypatch.setattr(decoding, "_flatten", lambda picture: seen.append(picture.size) or picture)
    decode(big, 64)
    assert seen == [(200, 150)]  # an eighth: its shorter side is at least twice what is wanted


EVIL = {
    "is not a picture": lambda: b"just words",
    "is in the HEIC format; install its plug-in (pip install pillow-heif), or": lambda: (
        b"\0\0\0\x24ftypheic" + bytes(40)
    ),
    "is empty": lambda: b"",
    "has no bytes": lambda: None,
    "exceeds limit": lambda: hollow_png(60_000),
    "unpacks to": lambda: hollow_png(12_000),
    "is damaged": lambda: saved(Image.new("RGB", (400, 400), "red"), "JPEG")[:700],
    "has more than 16 bits per channel (F)": lambda: saved(Image.new("F", (4, 4)), "TIFF"),
}


@pytest.mark.parametrize("why", EVIL)
def test_what_cannot_be_used_is_refused_with_a_reason(why):
    with pytest.raises(Broken) as caught:
        decode(EVIL[why](), 16)
    assert why in str(caught.value)


def test_a_program_in_postscript_is_not_run():
    with pytest.raises(Broken, match="is not a picture"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", 8)


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_file_is_refused_or_read_but_never_anything_else(colours, seed):
    draw = np.random.default_rng(seed)
    for form in ("JPEG", "PNG", "GIF", "WEBP", "TIFF"):
        content = bytearray(saved(colours, form))
        for place in draw.integers(0, len(content), 6):
            content[place] = draw.integers(0, 256)
        with suppress(Broken):
            assert min(decode(bytes(content), 8).shape[1:]) == 8
