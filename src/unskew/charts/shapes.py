"""What a drawing is made of, in units of the picture, y downwards, and the colours of light and of dark.

``charts.layout`` makes these of a chart; ``charts.svg`` and ``charts.paper`` write them, and so cannot disagree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unskew.charts import PALETTE, ROLES, Colour
from unskew.core.errors import UserError

# the ten are safe for colour-blind readers, in the order in which charts use them: blue, vermilion, green, lilac, …
LIGHT = {
    **{str(place): colour for place, colour in enumerate((
        "#0072b2", "#d55e00", "#74bd94", "#b585d0", "#d6be00", "#64ccff", "#6a0000", "#261581", "#5d8f4f", "#7d7380",
    ))},
    "ink": "#222222", "quiet": "#666666", "heat": "#0b4f8a", "grid": "#e6e6e6", "axis": "#aaaaaa", "paper": "#ffffff",
    "pale": "#000000", "half": "#000000", "full": "#ffffff",  # text on pale, middling and full shades of heat
}  # fmt: skip
DARK = {
    **{str(place): colour for place, colour in enumerate((
        "#4ba3e3", "#f0803c", "#5ce39f", "#cf93aa", "#ffe12a", "#bcc7ff", "#c04040", "#6a58ea", "#d0fce2", "#7c798d",
    ))},
    "ink": "#e6e6e6", "quiet": "#a0a4aa", "heat": "#8ecbff", "grid": "#2e3238", "axis": "#666b73", "paper": "#15171c",
    "pale": "#ffffff", "half": "#000000", "full": "#000000",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text on its baseline, turned by ``turn`` degrees to the left; ``whole`` is the uncut text."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "start"
    turn: int = 0
    bold: bool = False
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Circle:
    """A circle around (x, y); ``link`` is where it leads to."""

    x: float
    y: float
    radius: float
    tip: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, (x, y) its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Path:
    """Points joined; ``closed`` comes back to the first."""

    points: Sequence[tuple[float, float]]
    closed: bool = False
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Image:
    """Pixels [h][w] or [h][w][3], 0..255, stretched over a rectangle."""

    pixels: Sequence[Sequence[int | Sequence[int]]]
    x: float
    y: float
    width: float
    height: float
    tip: str = ""


Shape = Text | Circle | Box | Path | Image


@dataclass(frozen=True)
class Layer:
    """Shapes of one look: a colour's name, filled or, with a ``stroke``, drawn as lines of that width."""

    colour: str  # a key of LIGHT, or "hit": unseen, and there for the pointer
    shapes: Sequence[Shape]
    stroke: float = 0.0
    dashed: bool = False
    opacity: float = 1.0
    clip: bool = False  # cut off at the drawing's frame
    crisp: bool = False  # edges on whole pixels: neighbours leave no gap


@dataclass(frozen=True)
class Drawing:
    """A whole picture: layers from back to front, and the frame where some of them are cut off."""

    name: str
    alt: str
    width: int
    height: int
    frame: Box
    layers: Sequence[Layer]


def colour_name(colour: Colour) -> str:
    """The name of a colour; numbers beyond the palette begin again."""
    if not isinstance(colour, str):
        return str(int(colour) % PALETTE)
    if colour not in ROLES:
        raise UserError(f"a colour {colour!r}: give a number from 0 to {PALETTE - 1}, or one of {', '.join(ROLES)}")
    return colour


def raster(image: Image) -> npt.NDArray[np.uint8]:
    """The pixels of an image as bytes, [h, w] or [h, w, 3]."""
    pixels = np.nan_to_num(np.asarray(image.pixels, np.float64))
    made = np.clip(pixels, 0, 255).round().astype(np.uint8)
    return made[..., 0] if made.ndim == 3 and made.shape[2] == 1 else made
