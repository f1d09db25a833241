"""A chart as SVG: for pages, which have its style once, or as a file that looks right by itself, light and dark."""

import base64
import io
import re
from collections.abc import Sequence
from itertools import accumulate
from urllib.parse import quote
from xml.sax.saxutils import escape

from PIL import Image as Raster

from unskew.charts import Chart
from unskew.charts.layout import drawing
from unskew.charts.shapes import DARK, LIGHT, Box, Circle, Drawing, Image, Layer, Path, Shape, Text, raster

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
    picture = drawing(chart)
    return _document(picture.width, picture.height, picture.alt, _content(picture), standalone, chart.physical)


def svg_sheet(charts: Sequence[Chart]) -> str:
    """Several charts below one another, as the text of one file."""
    pictures = [drawing(chart) for chart in charts]
    tops = [0, *accumulate(picture.height for picture in pictures)]
    moved = (
        f'<g transform="translate(0 {top})">{_content(picture)}</g>'
        for top, picture in zip(tops, pictures, strict=False)
    )
    width, alt = max((picture.width for picture in pictures), default=0), " ".join(picture.alt for picture in pictures)
    return _document(width, tops[-1], alt, "".join(moved), True)


def _document(width: int, height: int, alt: str, content: str, standalone: bool, physical: bool = False) -> str:
    sides = [f"{side / 100:g}in" if physical else str(side) for side in (width, height)]
    size = f'viewBox="0 0 {width} {height}" width="{sides[0]}" height="{sides[1]}"'
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    words = _escaped(alt)
    style = f'<style>{escape(ALONE)}</style><rect class="paper" width="100%" height="100%"/>' if standalone else ""
    head = f'<svg{space} class="chart" {size} role="img" aria-label="{words}"><desc>{words}</desc>'
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
        place = f'<circle cx="{_number(shape.x)}" cy="{_number(shape.y)}" r="{_number(shape.radius)}"'
        circle = place + _tip(shape.tip, "circle")
        return f'<a href="{_escaped(quote(shape.link))}">{circle}</a>' if shape.link else circle
    if isinstance(shape, Box):
        full = f' fill-opacity="{_number(shape.opacity)}"' if shape.opacity < 1 else ""
        return f"<rect{_rectangle(shape)}{full}{_tip(shape.tip, 'rect')}"
    if isinstance(shape, Path):
        points = "L".join(f"{_number(x)} {_number(y)}" for x, y in shape.points)
        return f'<path d="M{points}{"Z" if shape.closed else ""}"{_tip(shape.tip, "path")}'
    if isinstance(shape, Image):
        link = f' preserveAspectRatio="none" href="data:image/png;base64,{_png(shape)}"'
        return f"<image{_rectangle(shape)}{link}{_tip(shape.tip, 'image')}"
    return _text(shape)


def _rectangle(shape: Box | Image) -> str:
    place = f' x="{_number(shape.x)}" y="{_number(shape.y)}"'
    return f'{place} width="{_number(shape.width)}" height="{_number(shape.height)}"'


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
