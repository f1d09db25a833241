"""Charts as files: SVG, PNG or PDF, one chart or several stacked vertically."""

import base64
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt
from PIL import Image as Raster

from unskew.charts import Chart
from unskew.charts.layout import Box, Circle, Layer, Polyline, Shape, Text, lay_out, lay_out_head
from unskew.core.errors import UserError, nearest

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Ubuntu,'DejaVu Sans',sans-serif"
SERIF = "'Times New Roman',Times,'Liberation Serif','DejaVu Serif',serif"
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # by XML, even when escaped
BASE = (
    f"svg.chart{{font-family:{FONT};font-size:12px;max-width:100%;height:auto}}"
    f"svg.chart.serif{{font-family:{SERIF}}}"
    "svg.chart .line{fill:none;stroke-linejoin:round;stroke-linecap:round}"
    "svg.chart .hit{fill:none;pointer-events:all}"
    "svg.chart .bold{font-weight:600}"
    "svg.chart text{font-variant-numeric:tabular-nums}"
    "svg.chart image{image-rendering:pixelated}"
)


# ten colors that are safe for color-blind readers, in the order of their use: blue, vermilion, green, lilac, …
LIGHT = {
    **{str(index): colour for index, colour in enumerate((
        "#0072b2", "#d55e00", "#74bd94", "#b585d0", "#d6be00", "#64ccff", "#6a0000", "#261581", "#5d8f4f", "#7d7380",
    ))},
    "ink": "#222222", "quiet": "#666666", "heat": "#0b4f8a", "grid": "#e6e6e6", "axis": "#aaaaaa", "paper": "#ffffff",
    "pale": "#000000", "half": "#000000", "full": "#ffffff",  # text on pale, medium and full shades of heat
}  # fmt: skip
DARK = {
    **{str(index): colour for index, colour in enumerate((
        "#4ba3e3", "#f0803c", "#5ce39f", "#cf93aa", "#ffe12a", "#bcc7ff", "#c04040", "#6a58ea", "#d0fce2", "#7c798d",
    ))},
    "ink": "#e6e6e6", "quiet": "#a0a4aa", "heat": "#8ecbff", "grid": "#2e3238", "axis": "#666b73", "paper": "#15171c",
    "pale": "#ffffff", "half": "#000000", "full": "#000000",
}  # fmt: skip


def _rules(colours: dict[str, str], before: str = "") -> str:
    rules = ""
    for name, colour in colours.items():
        fill, line = _classes(name)
        rules += f"{before}svg.chart .{fill}{{fill:{colour}}}{before}svg.chart .{line}{{stroke:{colour}}}"
    return rules


def _classes(colour: str) -> tuple[str, str]:
    """The CSS classes for filling with a color, and for lines."""
    return (f"c{colour}", f"l{colour}") if colour.isdigit() else (colour, f"l-{colour}")


# the page's own theme overrides the system's; print is always light
STYLE = (
    BASE
    + _rules(LIGHT)
    + f"@media screen and (prefers-color-scheme:dark){{{_rules(DARK, ':root:not([data-theme=light]) ')}}}"
    + f"@media screen{{{_rules(DARK, ':root[data-theme=dark] ')}}}"
)
ALONE = BASE + _rules(LIGHT) + f"@media screen and (prefers-color-scheme:dark){{{_rules(DARK)}}}"


def svg(*charts: Chart, standalone: bool = True) -> str:
    """Charts stacked vertically, as text. With ``standalone=False`` the page must contain STYLE once."""
    pictures = [lay_out(chart) for chart in charts]
    width, height = max(picture.width for picture in pictures), sum(picture.height for picture in pictures)
    content, top = "", 0
    for picture in pictures:
        clip = "clip-" + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in picture.name)
        clipped = any(layer.clip for layer in picture.layers)
        frame = f'<clipPath id="{clip}">{_shape(picture.frame)}</clipPath>' if clipped else ""
        inside = frame + "".join(_layer(layer, clip) for layer in picture.layers)
        content += f'<g transform="translate(0 {top})">{inside}</g>' if top else inside
        top += picture.height
    sides = [f"{side / 100:g}in" if charts[0].physical else str(side) for side in (width, height)]
    size = f'viewBox="0 0 {width} {height}" width="{sides[0]}" height="{sides[1]}"'
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    description = _escape(" ".join(picture.alt for picture in pictures))
    style = f'<style>{escape(ALONE)}</style><rect class="paper" width="100%" height="100%"/>' if standalone else ""
    kind = "chart serif" if charts[0].serif else "chart"
    head = f'<svg{space} class="{kind}" {size} role="img" aria-label="{description}"><desc>{description}</desc>'
    return f"{head}{style}{content}</svg>\n"


def _layer(layer: Layer, clip: str) -> str:
    fill, line = _classes(layer.colour)
    look = _attributes(
        class_=f"{line} line" if layer.stroke else fill,
        stroke_width=layer.stroke or None,
        stroke_dasharray="5 4" if layer.dashed else None,
        fill_opacity=layer.opacity if layer.opacity < 1 else None,
        clip_path=f"url(#{clip})" if layer.clip else None,
        shape_rendering="crispEdges" if layer.crisp else None,
    )
    return f"<g{look}>{''.join(map(_shape, layer.shapes))}</g>"


def _shape(shape: Shape) -> str:
    if isinstance(shape, Circle):
        circle = _element("circle", shape.tip, cx=shape.x, cy=shape.y, r=shape.radius)
        return f'<a href="{_escape(quote(shape.link))}">{circle}</a>' if shape.link else circle
    if isinstance(shape, Polyline):
        points = "L".join(f"{_number(x)} {_number(y)}" for x, y in shape.points)
        return _element("path", d=f"M{points}{'Z' if shape.closed else ''}")
    if isinstance(shape, Text):
        x, y = _number(shape.x), _number(shape.y)
        look = _attributes(
            x=x,
            y=y,
            font_size=shape.size if shape.size != 12 else None,
            text_anchor=shape.anchor if shape.anchor != "start" else None,
            class_="bold" if shape.bold else None,
            transform=f"rotate({-shape.turn} {x} {y})" if shape.turn else None,
        )
        full = f"<title>{_escape(shape.full)}</title>" if shape.full else ""
        return f"<text{look}>{full}{_escape(shape.text)}</text>"
    sides = {"x": shape.x, "y": shape.y, "width": shape.width, "height": shape.height}
    if shape.pixels is None:
        return _element("rect", shape.tip, **sides, fill_opacity=shape.opacity if shape.opacity < 1 else None)
    file = io.BytesIO()
    Raster.fromarray(_raster(shape.pixels)).save(file, "png")
    link = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return _element("image", shape.tip, **sides, preserveAspectRatio="none", href=link)


def _element(name: str, tip: str = "", **attributes: float | str | None) -> str:
    text = _escape(tip)
    rest = f' data-tip="{text}"><title>{text}</title></{name}>' if tip else "/>"
    return f"<{name}{_attributes(**attributes)}{rest}"


def _attributes(**values: float | str | None) -> str:
    return "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_escape(value) if isinstance(value, str) else _number(value)}"'
        for name, value in values.items()
        if value is not None
    )


def _number(value: float) -> str:
    """At most two decimals, and no sign before zero."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _escape(text: str) -> str:
    return escape(FORBIDDEN.sub("\ufffd", text), {'"': "&quot;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})


FORMATS = ("svg", "png", "pdf")
INCH = 100  # units of a chart; a font size of 12 units is 8.6 pt
DENSITY = 200  # pixels per inch
SLIM = 0.92  # matplotlib's fonts are wider than those of browsers


def check_format(form: str) -> None:
    """Reject an unknown format."""
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")


def chart_bytes(charts: Sequence[Chart], form: str) -> bytes:
    """Charts stacked vertically, as the bytes of one file; the same charts always have the same bytes."""
    if form == "svg":
        return svg(*charts).encode()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.transforms import Affine2D

    pictures = [lay_out(chart) for chart in charts]
    width, height = max(picture.width for picture in pictures), sum(picture.height for picture in pictures)
    figure = Figure(figsize=(width / INCH, height / INCH), dpi=DENSITY, facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    top = 0
    for chart, picture in zip(charts, pictures, strict=True):
        units = Affine2D().translate(0, top).scale(1 / width, -1 / height).translate(0, 1) + figure.transFigure
        frame = picture.frame
        for depth, layer in enumerate(layer for layer in picture.layers if layer.colour != "hit"):
            for artist in _artists(layer, units, chart.serif):
                artist.set(zorder=depth)
                figure.add_artist(artist)
                if layer.clip:
                    artist.set_clip_path(Rectangle((frame.x, frame.y), frame.width, frame.height, transform=units))
        top += picture.height
    file = io.BytesIO()
    dateless = {"Software": None} if form == "png" else {"CreationDate": None, "Producer": None, "Creator": None}
    with rc_context({"pdf.fonttype": 42}):  # TrueType, because publishers refuse Type 3 fonts
        figure.savefig(file, format=form, dpi=DENSITY, metadata=dateless)
    return file.getvalue()


def _artists(layer: Layer, units: Any, serif: bool) -> list[Any]:
    from matplotlib import collections, patches
    from matplotlib.colors import to_rgba
    from matplotlib.image import BboxImage
    from matplotlib.text import Text as Letters
    from matplotlib.transforms import Bbox, TransformedBbox

    colour = LIGHT[layer.colour]
    if layer.stroke:
        lines = [shape.points for shape in layer.shapes if isinstance(shape, Polyline)]
        look: dict[str, Any] = {"colors": colour, "linewidths": 72 / INCH * layer.stroke}
        dashes = [(0, (4, 3)) if layer.dashed else "solid"]
        return [collections.LineCollection(lines, **look, linestyles=dashes, transform=units)]
    artists, filled = list[Any](), list[Any]()
    for shape in layer.shapes:
        if isinstance(shape, Text):
            font = _font("bold" if shape.bold else "normal", SLIM * 72 / INCH * shape.size, serif)
            missing = missing_characters([shape.text], font)  # matplotlib would warn about them
            text = shape.text.translate(dict.fromkeys(map(ord, missing), "\u25a1"))
            align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            turn: dict[str, Any] = {"rotation": shape.turn, "rotation_mode": "anchor", "ha": align, "va": "baseline"}
            look = {"color": colour, "fontproperties": font, "parse_math": False}
            artists.append(Letters(shape.x, shape.y, text, transform=units, **turn, **look))
        elif isinstance(shape, Box) and shape.pixels is not None:
            position = Bbox.from_bounds(shape.x, shape.y, shape.width, shape.height)
            image = BboxImage(TransformedBbox(position, units), cmap="gray", interpolation="nearest", origin="upper")
            image.set_data(np.asarray(Raster.fromarray(_raster(shape.pixels)).convert("RGB")))
            artists.append(image)
        else:
            look = {"facecolor": to_rgba(colour, shape.opacity if isinstance(shape, Box) else layer.opacity)}
            look |= {"linewidth": 0, "antialiased": not layer.crisp}
            if isinstance(shape, Circle):
                filled.append(patches.Circle((shape.x, shape.y), shape.radius, **look))
            elif isinstance(shape, Box):
                filled.append(patches.Rectangle((shape.x, shape.y), shape.width, shape.height, **look))
            else:
                filled.append(patches.Polygon(shape.points, **look))
    if filled:
        artists.append(collections.PatchCollection(filled, match_original=True, transform=units))
    return artists


def _font(weight: str = "normal", size: float = 12.0, serif: bool = False) -> Any:
    from matplotlib.font_manager import FontProperties

    family = "STIXGeneral" if serif else "DejaVu Sans"  # both come with matplotlib
    return FontProperties(family=family, weight=weight, size=size)


def missing_characters(texts: Iterable[str], font: Any = None) -> set[str]:
    """The characters that the font of PNG and PDF lacks, which are drawn as boxes."""
    from matplotlib.font_manager import findfont, get_font

    letters = get_font(findfont(font or _font()))
    return {letter for text in texts for letter in text if not letters.get_char_index(ord(letter))}


def _raster(pixels: Sequence[Sequence[int | Sequence[int]]]) -> npt.NDArray[np.uint8]:
    """The pixels as bytes, [h, w] or [h, w, 3]."""
    content = np.clip(np.asarray(pixels, np.float64), 0, 255).round().astype(np.uint8)
    return content[..., 0] if content.ndim == 3 and content.shape[2] == 1 else content


UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
LEAST, MOST = 1.0, 40.0  # inches
PLOT = 110  # minimum height of axes and plot, in units
SHAPE = 300 / 440  # default height over width


def length(text: str, name: str) -> int:
    """Parse a length, in units of a chart; ``name`` is the option's name."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(in|cm|mm|pt)\s*", text)
    inches = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not LEAST <= inches <= MOST:
        raise UserError(f"{name} {text[:40]}: give a length from 1in to 40in, such as 8cm, 84mm, 3.3in or 240pt")
    return round(INCH * inches)


def for_paper(chart: Chart, width: int | None = None, height: int | None = None) -> Chart:
    """The chart in this size; without a height, it is as high as legend and plot need."""
    wide = width or chart.width
    chart = replace(chart, width=wide, physical=True)
    _, head = lay_out_head(chart)
    if height is None:
        _, short = lay_out_head(replace(chart, marks=()))
        return replace(chart, height=round(max(SHAPE * wide, PLOT) + head - short))
    if height < head + PLOT:
        enough = f"--height {(head + PLOT) / INCH * 2.54 + 0.05:.1f}cm or more, a larger --width, or fewer runs"
        raise UserError(f"the title and legend leave no room for the plot; give {enough}")
    return replace(chart, height=height)
