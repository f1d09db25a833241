"""Charts as files: SVG, PNG or PDF, one chart or several below one another."""

import base64
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

from PIL import Image as Raster

from unskew.charts import Chart
from unskew.charts.layout import head_bottom, lay_out
from unskew.charts.scales import DARK, LIGHT, Box, Circle, Drawing, Image, Layer, Polyline, Shape, Text, raster
from unskew.core.errors import UserError

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Ubuntu,'DejaVu Sans',sans-serif"
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # by XML, even when escaped
BASE = (
    f"svg.chart{{font-family:{FONT};font-size:12px;max-width:100%;height:auto}}"
    "svg.chart .line{fill:none;stroke-linejoin:round;stroke-linecap:round}"
    "svg.chart .hit{fill:none;pointer-events:all}"
    "svg.chart .bold{font-weight:600}"
    "svg.chart text{font-variant-numeric:tabular-nums}"
    "svg.chart image{image-rendering:pixelated}"
)


def _rules(colours: dict[str, str], before: str = "") -> str:
    made = []
    for name, colour in colours.items():
        fill, line = _classes(name)
        made.append(f"{before}svg.chart .{fill}{{fill:{colour}}}{before}svg.chart .{line}{{stroke:{colour}}}")
    return "".join(made)


def _classes(colour: str) -> tuple[str, str]:
    """The class that fills with a colour, and the one that draws lines of it."""
    return (f"c{colour}", f"l{colour}") if colour.isdigit() else (colour, f"l-{colour}")


# a page's own switch goes before the reader's system; paper is white
STYLE = (
    BASE
    + _rules(LIGHT)
    + f"@media screen and (prefers-color-scheme:dark){{{_rules(DARK, ':root:not([data-theme=light]) ')}}}"
    + f"@media screen{{{_rules(DARK, ':root[data-theme=dark] ')}}}"
)
ALONE = BASE + _rules(LIGHT) + f"@media screen and (prefers-color-scheme:dark){{{_rules(DARK)}}}"


def svg(chart: Chart, *, standalone: bool = True) -> str:
    """The chart as text. A page that has charts with ``standalone=False`` has STYLE once."""
    picture = lay_out(chart)
    return _document(picture.width, picture.height, picture.alt, _content(picture), standalone, chart.physical)


def svg_sheet(charts: Sequence[Chart]) -> str:
    """Several charts below one another, as the text of one file."""
    pictures = [lay_out(chart) for chart in charts]
    tops = [0, *accumulate(picture.height for picture in pictures)]
    groups = (
        f'<g transform="translate(0 {top})">{_content(picture)}</g>'
        for top, picture in zip(tops, pictures, strict=False)
    )
    width, alt = max((picture.width for picture in pictures), default=0), " ".join(picture.alt for picture in pictures)
    return _document(width, tops[-1], alt, "".join(groups), True)


def _document(width: int, height: int, alt: str, content: str, standalone: bool, physical: bool = False) -> str:
    sides = [f"{side / 100:g}in" if physical else str(side) for side in (width, height)]
    size = f'viewBox="0 0 {width} {height}" width="{sides[0]}" height="{sides[1]}"'
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    description = _escaped(alt)
    style = f'<style>{escape(ALONE)}</style><rect class="paper" width="100%" height="100%"/>' if standalone else ""
    head = f'<svg{space} class="chart" {size} role="img" aria-label="{description}"><desc>{description}</desc>'
    return f"{head}{style}{content}</svg>\n"


def _content(picture: Drawing) -> str:
    clip = _identity(picture.name)
    clipped = any(layer.clip for layer in picture.layers)
    frame = f'<clipPath id="{clip}">{_shape(picture.frame)}</clipPath>' if clipped else ""
    return frame + "".join(_layer(layer, clip) for layer in picture.layers)


def _identity(name: str) -> str:
    """A name as an id: other charts of the page have other names, and so other ids."""
    return "clip-" + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in name)


def _layer(layer: Layer, clip: str) -> str:
    fill, line = _classes(layer.colour)
    look = f'class="{line} line" stroke-width="{_number(layer.stroke)}"' if layer.stroke else f'class="{fill}"'
    if layer.dashed:
        look += ' stroke-dasharray="5 4"'
    if layer.opacity < 1:
        look += f' fill-opacity="{_number(layer.opacity)}"'
    if layer.clip:
        look += f' clip-path="url(#{clip})"'
    if layer.crisp:
        look += ' shape-rendering="crispEdges"'
    return f"<g {look}>{''.join(map(_shape, layer.shapes))}</g>"


def _shape(shape: Shape) -> str:
    if isinstance(shape, Circle):
        position = f'<circle cx="{_number(shape.x)}" cy="{_number(shape.y)}" r="{_number(shape.radius)}"'
        circle = position + _tip(shape.tip, "circle")
        return f'<a href="{_escaped(quote(shape.link))}">{circle}</a>' if shape.link else circle
    if isinstance(shape, Box):
        full = f' fill-opacity="{_number(shape.opacity)}"' if shape.opacity < 1 else ""
        return f"<rect{_rectangle(shape)}{full}{_tip(shape.tip, 'rect')}"
    if isinstance(shape, Polyline):
        points = "L".join(f"{_number(x)} {_number(y)}" for x, y in shape.points)
        return f'<path d="M{points}{"Z" if shape.closed else ""}"{_tip(shape.tip, "path")}'
    if isinstance(shape, Image):
        link = f' preserveAspectRatio="none" href="data:image/png;base64,{_png(shape)}"'
        return f"<image{_rectangle(shape)}{link}{_tip(shape.tip, 'image')}"
    return _text(shape)


def _rectangle(shape: Box | Image) -> str:
    position = f' x="{_number(shape.x)}" y="{_number(shape.y)}"'
    return f'{position} width="{_number(shape.width)}" height="{_number(shape.height)}"'


def _text(shape: Text) -> str:
    x, y = _number(shape.x), _number(shape.y)
    look = f' font-size="{_number(shape.size)}"' if shape.size != 12 else ""
    look += f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    look += ' class="bold"' if shape.bold else ""
    look += f' transform="rotate({-shape.turn} {x} {y})"' if shape.turn else ""
    whole = f"<title>{_escaped(shape.whole)}</title>" if shape.whole else ""
    return f'<text x="{x}" y="{y}"{look}>{whole}{_escaped(shape.text)}</text>'


def _tip(tip: str, element: str) -> str:
    """The end of an element, with its tooltip."""
    text = _escaped(tip)
    return f' data-tip="{text}"><title>{text}</title></{element}>' if tip else "/>"


def _png(image: Image) -> str:
    file = io.BytesIO()
    Raster.fromarray(raster(image)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def _number(value: float) -> str:
    """At most two decimals, and no sign before zero."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _escaped(text: str) -> str:
    return escape(FORBIDDEN.sub("\ufffd", text), {'"': "&quot;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})


FORMS = ("png", "pdf")
INCH = 100.0  # units of the picture
DENSITY = 200  # pixels an inch
PAPER_FONT = "DejaVu Sans"  # comes with matplotlib
SLIM = 0.92  # the letters that come with matplotlib are wider than those of screens


def paper(chart: Chart, form: str) -> bytes:
    """One chart as the bytes of a file, the same for the same chart; nothing global is touched."""
    return paper_sheet([chart], form)


def paper_sheet(charts: Sequence[Chart], form: str) -> bytes:
    """Several charts below one another as the bytes of one file."""
    if form not in FORMS:
        raise UserError(f"a chart as {form!r}: there are png and pdf, and unskew.charts.files writes SVG")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: a second of import time
    from matplotlib.figure import Figure
    from matplotlib.transforms import Affine2D

    pictures = [lay_out(chart) for chart in charts]
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
                artist.set_clip_path(_draw_rectangle(picture.frame, transform=units))


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
        lines = [shape.points for shape in layer.shapes if isinstance(shape, Polyline)]
        dashes = (0, (4, 3)) if layer.dashed else "solid"
        width = 72 / INCH * layer.stroke
        return [LineCollection(lines, colors=colour, linewidths=width, linestyles=[dashes], transform=units)]
    patches: list[Any] = []
    opacities: list[float] = []
    for shape in layer.shapes:
        if isinstance(shape, Circle):
            patches.append(Disc((shape.x, shape.y), shape.radius))
        elif isinstance(shape, Box):
            patches.append(_draw_rectangle(shape))
        elif isinstance(shape, Polyline):
            patches.append(Polygon(shape.points))
        opacities.append(shape.opacity if isinstance(shape, Box) else layer.opacity)
    made: list[Any] = [_image(shape, units) for shape in layer.shapes if isinstance(shape, Image)]
    made += [_draw_text(shape, colour, units) for shape in layer.shapes if isinstance(shape, Text)]
    if patches:
        faces = [to_rgba(colour, opacity) for opacity in opacities]
        look: dict[str, Any] = {"facecolors": faces, "linewidths": 0, "antialiaseds": not layer.crisp}
        made.append(PatchCollection(patches, transform=units, **look))
    return made


def _draw_rectangle(box: Box, **look: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((box.x, box.y), box.width, box.height, **look)


def _image(shape: Image, units: Any) -> Any:
    import numpy as np
    from matplotlib.image import BboxImage
    from matplotlib.transforms import Bbox, TransformedBbox

    position = Bbox.from_bounds(shape.x, shape.y, shape.width, shape.height)
    made = BboxImage(TransformedBbox(position, units), cmap="gray", interpolation="nearest", origin="upper")
    pixels = raster(shape)
    made.set_data(pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2))
    return made


def missing_letters(texts: Iterable[str]) -> set[str]:
    """The letters of these texts that the font of PNG and PDF lacks: they are drawn as boxes."""
    from matplotlib.font_manager import findfont, get_font

    letters = get_font(findfont(PAPER_FONT))
    return {letter for text in texts for letter in text if not letters.get_char_index(ord(letter))}


def _draw_text(shape: Text, colour: str, units: Any) -> Any:
    from matplotlib.font_manager import FontProperties
    from matplotlib.text import Text as Letters

    weight = "bold" if shape.bold else "normal"
    font = FontProperties(family=PAPER_FONT, weight=weight, size=SLIM * 72 / INCH * shape.size)
    align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
    look: dict[str, Any] = {"color": colour, "ha": align, "va": "baseline", "transform": units}
    turn: dict[str, Any] = {"rotation": shape.turn, "rotation_mode": "anchor", "parse_math": False}
    return Letters(shape.x, shape.y, _printable(shape.text, font), fontproperties=font, **look, **turn)


def _printable(text: str, font: Any) -> str:
    """The text with a box for each letter that the font lacks; matplotlib would warn of it."""
    from matplotlib.font_manager import findfont, get_font

    letters = get_font(findfont(font))
    return "".join(letter if letters.get_char_index(ord(letter)) else "\u25a1" for letter in text)


FORMATS = ("svg", "png", "pdf")


def chart_bytes(chart: Chart, form: str) -> bytes:
    """One chart as the bytes of a file."""
    if form == "svg":
        return svg(chart).encode()

    return paper(chart, form)


def sheet_bytes(charts: Sequence[Chart], form: str) -> bytes:
    """Several charts below one another as the bytes of one file."""
    if form == "svg":
        return svg_sheet(charts).encode()

    return paper_sheet(charts, form)


UNITS_PER_INCH = 100  # units of a chart; letters of 12 units are 8.6 pt
UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
LEAST, MOST = 1.0, 40.0  # inches
PLOT = 110  # units below title and legend that axes and plot need at least
SHAPE = 300 / 440  # height over width where only one was chosen


def length(text: str, name: str) -> int:
    """A length in units of a chart; ``name`` is the option that it was given with."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*(in|cm|mm|pt)\s*", text)
    if match is None:
        raise UserError(f"{name} {text[:40]}: give a length such as 8cm, 84mm, 3.3in or 240pt")
    inches = float(match[1]) * UNITS[match[2]]
    if not LEAST <= inches <= MOST:
        raise UserError(f"{name} {text[:40]}: give {LEAST * 2.54:.3g}cm to {MOST * 2.54:.0f}cm")
    return round(UNITS_PER_INCH * inches)


def for_paper(chart: Chart, width: int | None = None, height: int | None = None) -> Chart:
    """The chart with its whole legend in that size; without a height it is as high as legend and plot need."""
    wide = width or chart.width
    chart = replace(chart, width=wide, whole_legend=True, physical=True)
    head = head_bottom(chart)
    if height is None:
        short = head_bottom(replace(chart, marks=()))
        return replace(chart, height=round(max(SHAPE * wide, PLOT) + head - short))
    if height < head + PLOT:
        problem = f"the title and the legend take {head / UNITS_PER_INCH * 2.54:.1f} cm of the height"
        least = (head + PLOT) / UNITS_PER_INCH * 2.54
        raise UserError(f"{problem}; give --height {least + 0.05:.1f}cm or more, a larger --width, or fewer runs")
    return replace(chart, height=height)
