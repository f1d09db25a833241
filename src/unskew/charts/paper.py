"""A chart as PNG or PDF, for papers and slides: the drawing that ``charts.svg`` writes, by matplotlib, light only."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

from unskew.charts import Chart
from unskew.charts.layout import drawing
from unskew.charts.shapes import LIGHT, Box, Circle, Drawing, Image, Layer, Path, Text, raster
from unskew.core.errors import UserError

FORMS = ("png", "pdf")
INCH = 100.0  # units of the picture
DENSITY = 200  # pixels an inch
FONT = "DejaVu Sans"  # comes with matplotlib
SLIM = 0.92  # the letters that come with matplotlib are wider than those of screens


def paper(chart: Chart, form: str) -> bytes:
    """One chart as the bytes of a file, the same for the same chart; nothing global is touched."""
    return paper_sheet([chart], form)


def paper_sheet(charts: Sequence[Chart], form: str) -> bytes:
    """Several charts below one another as the bytes of one file."""
    if form not in FORMS:
        raise UserError(f"a chart as {form!r}: there are png and pdf, and unskew.charts.svg writes SVG")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: a second of import time
    from matplotlib.figure import Figure
    from matplotlib.transforms import Affine2D

    pictures = [drawing(chart) for chart in charts]
    width, height = max(picture.width for picture in pictures), sum(picture.height for picture in pictures)
    figure = Figure(figsize=(width / INCH, height / INCH), dpi=DENSITY, facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    top = 0
    for picture in pictures:
        units = Affine2D().translate(0, top).scale(1 / width, -1 / height).translate(0, 1) + figure.transFigure
        _add(figure, picture, units)
        top += picture.height
    file = io.BytesIO()
    dateless = {"Software": None} if form == "png" else {"CreationDate": None, "Producer": None, "Creator": None}
    figure.savefig(file, format=form, dpi=DENSITY, metadata=dateless)
    return file.getvalue()


def _add(figure: Any, picture: Drawing, units: Any) -> None:
    """Draw a picture's layers, from back to front."""
    for depth, layer in enumerate(picture.layers):
        for artist in _artists(layer, units):
            artist.set(zorder=depth)
            figure.add_artist(artist)
            if layer.clip:
                artist.set_clip_path(_rectangle(picture.frame, transform=units))


def _artists(layer: Layer, units: Any) -> list[Any]:
    """What matplotlib draws of a layer; what is there for the pointer is left out."""
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Circle as Disc
    from matplotlib.patches import Polygon

    if layer.colour == "hit":
        return []
    colour = LIGHT[layer.colour]
    if layer.stroke:
        lines = [shape.points for shape in layer.shapes if isinstance(shape, Path)]
        dashes = (0, (4, 3)) if layer.dashed else "solid"
        width = 72 / INCH * layer.stroke
        return [LineCollection(lines, colors=colour, linewidths=width, linestyles=[dashes], transform=units)]
    patches: list[Any] = []
    opacities: list[float] = []
    for shape in layer.shapes:
        if isinstance(shape, Circle):
            patches.append(Disc((shape.x, shape.y), shape.radius))
        elif isinstance(shape, Box):
            patches.append(_rectangle(shape))
        elif isinstance(shape, Path):
            patches.append(Polygon(shape.points))
        opacities.append(shape.opacity if isinstance(shape, Box) else layer.opacity)
    made: list[Any] = [_image(shape, units) for shape in layer.shapes if isinstance(shape, Image)]
    made += [_text(shape, colour, units) for shape in layer.shapes if isinstance(shape, Text)]
    if patches:
        faces = [to_rgba(colour, opacity) for opacity in opacities]
        look: dict[str, Any] = {"facecolors": faces, "linewidths": 0, "antialiaseds": not layer.crisp}
        made.append(PatchCollection(patches, transform=units, **look))
    return made


def _rectangle(box: Box, **look: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((box.x, box.y), box.width, box.height, **look)


def _image(shape: Image, units: Any) -> Any:
    import numpy as np
    from matplotlib.image import BboxImage
    from matplotlib.transforms import Bbox, TransformedBbox

    place = Bbox.from_bounds(shape.x, shape.y, shape.width, shape.height)
    made = BboxImage(TransformedBbox(place, units), cmap="gray", interpolation="nearest", origin="upper")
    pixels = raster(shape)
    made.set_data(pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2))
    return made


def missing_letters(texts: Iterable[str]) -> set[str]:
    """The letters of these texts that the font of PNG and PDF lacks: they are drawn as boxes."""
    from matplotlib.font_manager import findfont, get_font

    letters = get_font(findfont(FONT))
    return {letter for text in texts for letter in text if not letters.get_char_index(ord(letter))}


def _text(shape: Text, colour: str, units: Any) -> Any:
    from matplotlib.font_manager import FontProperties
    from matplotlib.text import Text as Letters

    weight = "bold" if shape.bold else "normal"
    font = FontProperties(family=FONT, weight=weight, size=SLIM * 72 / INCH * shape.size)
    align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
    look: dict[str, Any] = {"color": colour, "ha": align, "va": "baseline", "transform": units}
    turn: dict[str, Any] = {"rotation": shape.turn, "rotation_mode": "anchor", "parse_math": False}
    return Letters(shape.x, shape.y, _printable(shape.text, font), fontproperties=font, **look, **turn)


def _printable(text: str, font: Any) -> str:
    """The text with a box for each letter that the font lacks; matplotlib would warn of it."""
    from matplotlib.font_manager import findfont, get_font

    letters = get_font(findfont(font))
    return "".join(letter if letters.get_char_index(ord(letter)) else "\u25a1" for letter in text)
