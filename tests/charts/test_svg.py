"""A chart becomes an SVG that parses, stays small, is read by everybody and holds nothing that overlaps."""

import base64
import io
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from colours import contrast, linear
from unskew.charts import Axis, Band, Bars, Cells, Chart, Dots, Line, Picture, Rule, Words
from unskew.charts.builders import grouped
from unskew.charts.files import DARK, LIGHT, STYLE, svg
from unskew.charts.layout import Text, lay_out
from unskew.charts.scales import text_width
from unskew.core.errors import UserError

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CLASSES = tuple(enumerate(NAMES))
LONG = tuple((i, f"{name} that has a very long name") for i, name in enumerate(NAMES))
NUMBERS = tuple((i, str(i)) for i in range(100))
ODD = [None, math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0, -1.0, 1e-320, 5.0]
FOREIGN = "<b a=\"1\" c='2'> & ]]> 🎉 \x00\x1b \ud800 \ufffe \n\t " + "very long " * 40


def chart(*marks, x=None, y=None, **knobs):
    return Chart("a-name", "A title", "what is seen", marks, x or Axis(), y or Axis(), **knobs)


def parsed(drawn, **knobs):
    return ET.fromstring(re.sub(' xmlns="[^"]*"', "", svg(drawn, **knobs)))


def found(drawn, path):
    return parsed(drawn, standalone=False).findall(path)


def numbers(element, *names):
    return [float(element.get(name)) for name in names]


def stacked():
    rows = np.arange(100).reshape(10, 10)
    feet = np.vstack([np.zeros(10), rows.cumsum(0)[:-1]])
    each = zip(NAMES, rows.tolist(), feet.tolist(), strict=True)
    return [Bars(range(10), high, low, name=name, colour=c) for c, (name, high, low) in enumerate(each)]


NAMED = Axis("class", ticks=CLASSES)
GALLERY = {
    "lines": chart(
        Band([1, 2, 3], [0.1, 0.2, 0.3], [0.3, 0.4, 0.5]),
        Line([1, 2, 3], [0.2, 0.3, 0.4], name="FedAvg", tips=["one", "two", "three"]),
        Line([1, 2, 3], [0.1, 0.2, 0.9], name="FedAvg + CCVR", colour=1, dashed=True, points=True),
        Rule(y=0.5, label="half"),
        Rule(x=2, label="here"),
        Rule(x=2.1, label="and there"),
        x=Axis("round", kind="count"),
        y=Axis("accuracy", kind="percent"),
    ),
    "stacked": chart(*stacked(), x=Axis("client", ticks=CLASSES), y=Axis("examples", kind="count")),
    "flat": chart(
        Bars(range(10), range(-3, 7), flat=True), x=Axis("change"), y=Axis("layer", ticks=LONG, reverse=True)
    ),
    "slanted": chart(Bars(range(10), range(10)), x=Axis("", ticks=LONG), y=Axis("seconds", kind="seconds")),
    "crowd": chart(Bars(range(100), range(100)), x=Axis("", ticks=tuple((i, f"client {i}") for i in range(100)))),
    "wordy": replace(
        chart(Line([0, 1], [0, 1]), x=Axis("across, in " * 20), y=Axis("upwards, in " * 20)), title="A long title " * 20
    ),
    "edge": chart(Line([0, 2], [0, 2]), x=Axis("", ticks=LONG[:3]), y=Axis(ticks=())),
    "three": chart(Bars(range(3), range(3)), x=Axis("", ticks=LONG[:3])),
    "hundred": chart(Bars(range(100), range(100), width=1), x=Axis("client", ticks=NUMBERS), y=Axis(ticks=NUMBERS)),
    "bubbles": chart(Dots([0, 1, 2], [0, 9, 3], [0, 1, 2], [1, 0.5, 0.1], 12, tips="abc"), y=Axis(ticks=CLASSES)),
    "table": chart(Cells(np.eye(10).tolist(), 0, 1, ".2f"), x=NAMED, y=NAMED, square=True),
    "logs": chart(Line([1, 1e4], [2e3, 4e9], points=True), x=Axis(log=True), y=Axis(log=True, kind="bytes")),
    "pictures": chart(
        *(Picture([[0, 255], [9, 9]], 1.2 * i, 0, 1, 1, name, "a tip") for i, name in CLASSES), frame=False, square=True
    ),
    "methods": chart(*(Line([0, 1], [i, 2], name=f"a method of number {i} with knobs", colour=i) for i in range(13))),
    "nothing": chart(x=Axis("round", kind="count"), y=Axis("accuracy", kind="percent")),
    "huge": chart(Line([1e9, 2e9], [-1e299, 1e299]), x=Axis("examples", kind="count"), y=Axis("loss")),
}
drawn_from_the_gallery = pytest.mark.parametrize("drawn", GALLERY.values(), ids=GALLERY)


@drawn_from_the_gallery
def test_every_chart_parses_and_says_what_is_seen(drawn):
    for standalone in (True, False):
        root = parsed(drawn, standalone=standalone)
        assert root.get("role") == "img"
        assert root.get("aria-label") == root.find("desc").text == "what is seen"
        assert root.find("title") is None  # it would pop up over everything
        assert root.get("viewBox") == f"0 0 440 {lay_out(drawn).height}"


@drawn_from_the_gallery
def test_no_two_texts_overlap_and_none_leaves_the_picture(drawn):
    boxes = []
    for layer in lay_out(drawn).layers:
        for text in layer.shapes:
            if isinstance(text, Text) and not text.turn:
                wide = text_width(text.text, text.size)
                left = text.x - {"start": 0, "middle": 0.5, "end": 1}[text.anchor] * wide
                boxes.append((left, text.y - 0.75 * text.size, left + wide, text.y, text.text))
    for left, top, right, bottom, text in boxes:
        assert 0 <= left <= right <= drawn.width, text
        assert 0 <= top <= bottom <= lay_out(drawn).height, text
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one[4], other[4])


@drawn_from_the_gallery
def test_most_of_a_picture_is_what_it_shows(drawn):
    frame = lay_out(replace(drawn, square=False)).frame
    assert frame.width >= 0.5 * drawn.width
    assert frame.height >= 0.45 * drawn.height


@drawn_from_the_gallery
def test_slanted_and_turned_texts_stay_in_the_picture_and_apart(drawn):
    turned = [t for layer in lay_out(drawn).layers for t in layer.shapes if isinstance(t, Text) and t.turn]
    slanted = sorted((t for t in turned if t.turn == 45), key=lambda t: t.x)
    for text in slanted:
        reach = text_width(text.text) / math.sqrt(2)
        assert text.x - reach >= 0
        assert text.y + reach <= drawn.height
    assert all(b.x - a.x >= 14.9 for a, b in pairwise(slanted))
    for text in (t for t in turned if t.turn == 90):
        assert text.x - 10 >= 0
        assert text_width(text.text) / 2 <= min(text.y, drawn.height - text.y)


@drawn_from_the_gallery
def test_colours_are_left_to_the_style_and_the_same_chart_gives_the_same_bytes(drawn):
    text = svg(drawn, standalone=False)
    assert text == svg(drawn, standalone=False)
    assert not re.search(r"#[0-9a-fA-F]{3}|rgb\(|<style", text)
    assert "<style" in svg(drawn)
    used = set(re.findall(r'class="([^"]*)"', text)) - {"chart", "bold"}
    for name in {part for several in used for part in several.split()}:
        assert f"svg.chart .{name}{{" in STYLE, name


values = st.lists(st.one_of(st.sampled_from(ODD), st.floats(), st.integers(-5, 5)), max_size=6)
words = st.text(max_size=30)
marks = st.one_of(
    st.builds(Line, values, values, name=words, colour=st.integers(0, 20), points=st.booleans(), tips=st.lists(words)),
    st.builds(Band, values, values, values, name=words),
    st.builds(Bars, values, values, values, width=st.floats(0, 2), flat=st.booleans(), tips=st.lists(words)),
    st.builds(Dots, values, values, st.lists(st.integers(0, 9)), values, tips=st.lists(words)),
    st.builds(Cells, st.lists(values, max_size=4), st.floats(-1, 1), st.floats(-1, 1), st.sampled_from(("", ".2f"))),
    st.builds(Rule, st.sampled_from(ODD), st.sampled_from(ODD), words),
    st.builds(Words, st.floats(), st.floats(), words),
    st.builds(Picture, st.sampled_from(([], [[]], [[1, 2]], [[[1, 2, 3]]])), st.floats(), st.floats(-3, 3),
              st.floats(0, 2), st.floats(0, 2), words, words),
)  # fmt: skip
axes = st.builds(
    Axis,
    words,
    st.sampled_from((None, 0.0, -1.0, math.nan)),
    st.sampled_from((None, 0.0, 2.0, 1e9)),
    st.one_of(st.none(), st.lists(st.tuples(st.sampled_from(ODD[1:]), words), max_size=5).map(tuple)),
    st.sampled_from(("number", "percent", "count", "bytes", "seconds")),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=100)
@given(st.builds(Chart, words, words, words, st.lists(marks, max_size=4), axes, axes, st.integers(1, 600),
                 st.integers(1, 600), st.booleans(), st.booleans()))  # fmt: skip
def test_whatever_the_numbers_are_the_picture_parses_and_all_coordinates_are_numbers(drawn):
    root = parsed(drawn)
    for element in root.iter():
        for name in ("x", "y", "cx", "cy", "r", "d", "fill-opacity"):
            assert not re.search("[a-km-yA-KN-Y]", element.get(name, "")), (name, element.get(name))
        for name in ("width", "height", "r"):
            assert not element.get(name, "").startswith("-")


@given(st.text())
@settings(max_examples=50)
def test_ids_are_as_different_as_names(name):
    cut = chart(Line([0, 1], [0, 9]), y=Axis(high=1))
    own = [e.get("id") for e in parsed(replace(cut, name=name)).iter() if e.get("id")]
    other = [e.get("id") for e in parsed(replace(cut, name=name + " ")).iter() if e.get("id")]
    assert len(own) == 1
    assert own != other
    assert re.fullmatch(r"[\w-]+", own[0], re.ASCII)


def test_foreign_words_are_shown_as_they_are():
    ticks = ((0, FOREIGN), (1, "b"))
    marks = (
        Line([0, 1], [0, 1], name=FOREIGN, tips=[FOREIGN]),
        Bars([0], [1], tips=[FOREIGN]),
        Rule(x=0.5, label=FOREIGN),
        Words(0, 0, FOREIGN),
        Picture([[1]], 0, 0, 1, 1, FOREIGN, FOREIGN),
    )
    root = parsed(Chart(FOREIGN, FOREIGN, FOREIGN, marks, Axis(FOREIGN, ticks=ticks), Axis(FOREIGN)))
    clean = re.sub("[\x00\x1b\ud800\ufffe]", "\ufffd", FOREIGN)
    assert root.get("aria-label") == clean
    assert root.find(".//image").get("data-tip") == clean
    assert root.find(".//image/title").text == clean
    assert sum(text.text == clean for text in root.iterfind(".//text/title")) >= 6  # what was cut is whole in there


def test_each_mark_with_a_tip_says_it_twice_and_a_dot_may_lead_to_a_file():
    drawn = chart(
        Line([0, 1], [0, 1], tips=["l0", "l1"]),
        Bars([0, 1], [1, 2], tips=["b0", "b1"]),
        Dots([0, 1], [1, 2], tips=["d0", "d1"], links=["runs/a b/x.html"]),
        Cells([[1, 2]], 0, 1, tips=[["c0", "c1"]]),
        Picture([[1]], 0, 0, 1, 1, tip="p0"),
    )
    told = [element for element in parsed(drawn).iter() if element.get("data-tip")]
    assert " ".join(sorted(element.get("data-tip") for element in told)) == "b0 b1 c0 c1 d0 d1 l0 l1 p0"
    assert all(element.find("title").text == element.get("data-tip") for element in told)
    (link,) = found(drawn, ".//a")
    assert (link.get("href"), link[0].get("data-tip")) == ("runs/a%20b/x.html", "d0")


def test_every_rule_of_the_style_is_about_charts_alone():
    selectors = re.findall(r"([^{}]+)\{[^{}]*\}", re.sub(r"@media[^{]*\{", "", STYLE))
    assert selectors
    assert all(re.match(r"(:root\S* )?svg\.chart(\.serif)?( |$)", selector) for selector in selectors)


def test_a_page_switched_to_light_stays_light_on_a_dark_screen():
    dark = re.search(r"@media screen and \(prefers-color-scheme:dark\)\{(.*?\})\}", STYLE)[1]
    assert dark.count(DARK["0"]) == 2
    assert all(rule.startswith(":root:not([data-theme=light]) ") for rule in re.findall(r"[^{}]+(?=\{)", dark))
    assert f":root[data-theme=dark] svg.chart .c0{{fill:{DARK['0']}}}" in STYLE
    assert f"@media screen and (prefers-color-scheme:dark){{svg.chart .c0{{fill:{DARK['0']}}}" in svg(chart())
    assert set(DARK) == set(LIGHT)


# Machado, Oliveira and Fernandes 2009, severity 1: what the three kinds of colour blindness make of linear RGB
EYES = {
    "all": (1, 0, 0, 0, 1, 0, 0, 0, 1),
    "protan": (0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998),
    "deutan": (0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881),
    "tritan": (1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900),
}
CONES = (0.41222147, 0.53633254, 0.05144599, 0.2119035, 0.68069955, 0.10739696, 0.08830246, 0.28171884, 0.6299787)
LAB = (0.21045426, 0.79361779, -0.00407205, 1.9779985, -2.42859221, 0.45059371, 0.02590404, 0.78277177, -0.80867577)


def oklab(rgb):
    """Björn Ottosson's space, in which equal distances look equal; 0.02 is just noticed."""
    return np.reshape(LAB, (3, 3)) @ np.cbrt(np.reshape(CONES, (3, 3)) @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("eyes", EYES)
def test_the_ten_colours_are_told_apart_by_all_eyes(theme, eyes):
    seen = [oklab(np.reshape(EYES[eyes], (3, 3)) @ linear(theme[str(c)])) for c in range(10)]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 0.06


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_numbers_are_read_on_every_shade_and_texts_on_the_background(theme):
    shades = np.linspace(0, 1, 50)
    drawn = chart(*(Cells([[float(v)]], 0, 1, ".2f") for v in shades))
    back, heat = (np.array([int(theme[name][i : i + 2], 16) for i in (1, 3, 5)]) for name in ("paper", "heat"))
    cells = [layer for layer in lay_out(drawn).layers if layer.colour in ("heat", "pale", "half", "full")]
    pairs = [(a, b) for a, b in pairwise(cells) if a.colour == "heat" != b.colour]
    assert len(pairs) == 50
    for box, text in pairs:
        mixed = back + box.shapes[0].opacity * (heat - back)
        own = linear("#" + "".join(f"{round(part):02x}" for part in mixed))
        assert contrast(own, linear(theme[text.colour])) > 4.5
    for role in ("ink", "quiet"):
        assert contrast(linear(theme[role]), linear(theme["paper"])) > 4.5


def test_areas_are_shares_of_the_largest_dot():
    circles = found(chart(Dots([0, 1, 2, 3, 4], [1] * 5, area=[1, 0.25, 0, None, 9], radius=8)), ".//circle")
    assert [numbers(circle, "r") for circle in circles] == [[8], [4], [8]]


def test_bars_are_as_long_as_their_numbers_and_stand_on_their_bases():
    low, high = found(chart(Bars([0, 1], [2, 4], [0, 2], width=1), y=Axis(low=0, high=6)), ".//rect")
    (x, y, w, h), (x2, y2, w2, h2) = (numbers(bar, "x", "y", "width", "height") for bar in (low, high))
    assert (h2, x + w, y2 + h2, w) == pytest.approx((2 * h, x2, y, w2), abs=0.03)


def test_a_missing_number_breaks_a_line_and_a_lone_point_is_a_dot():
    drawn = chart(Line([0, 1, 2, 3, 4, 5], [1, 2, math.nan, 3, None, 2]))
    lines = [path.get("d") for path in found(drawn, "g[@class='l0 line']/path")]
    assert [line.count("L") for line in lines] == [1]
    assert len(found(drawn, "g[@class='c0']/circle")) == 2


def test_beyond_a_given_end_bars_are_cut_and_dots_are_left_out():
    marks = Bars([0, 1], [1, 9]), Dots([0, 1], [2, 9], colour=1), Rule(y=9), Rule(x=9)
    drawn = chart(*marks, x=Axis(high=2), y=Axis(low=0, high=2))
    low, high = (numbers(bar, "y", "height") for bar in found(drawn, "g[@class='c0']/rect"))
    assert high[1] == pytest.approx(2 * low[1], abs=0.03)
    assert len(found(drawn, ".//circle")) == 1
    assert not found(drawn, "g[@class='l-quiet line']")


@pytest.mark.parametrize("backwards", [False, True])
def test_axes_run_to_the_right_and_upwards_unless_they_are_reversed_and_with_square_their_units_are_equal(backwards):
    axis = Axis(reverse=backwards)
    (x, y), (x2, y2) = (
        numbers(dot, "cx", "cy") for dot in found(chart(Dots([0, 1], [0, 1]), x=axis, y=axis, square=True), ".//circle")
    )
    assert (x < x2, y > y2) == (not backwards, not backwards)
    assert abs(x - x2) == pytest.approx(abs(y - y2), abs=0.03)


def test_row_zero_of_a_table_is_on_top_and_none_is_empty():
    drawn = chart(Cells([[0, 1], [None, 2]], 0, 2), y=Axis(ticks=((0, "top"), (1, "below"))))
    table, scale = found(drawn, "g[@class='heat']")
    places = [numbers(cell, "x", "y") for cell in table]
    assert len(places) == 3
    assert places[0][1] == places[1][1] < places[2][1]
    shades = [float(cell.get("fill-opacity", 1)) for cell in table]
    assert shades == pytest.approx([0.08, 0.54, 1])
    legend = [float(cell.get("fill-opacity", 1)) for cell in scale]
    assert legend == sorted(legend, reverse=True)
    heights = {text.text: numbers(text, "y")[0] for text in found(drawn, ".//text")}
    assert heights["top"] < heights["below"]
    assert heights["2"] < heights["0"]


def test_neighbouring_cells_share_their_border():
    drawn = chart(Cells([[1] * 97], 0, 1))
    cells = [numbers(cell, "x", "width") for cell in found(drawn, "g[@class='heat']")[0]]
    assert all(x + width == pytest.approx(after, abs=1e-6) for (x, width), (after, _) in pairwise(cells))


def test_numbers_too_small_to_read_become_tips():
    wide = chart(Cells([[0.5] * 5], 0, 1, ".0%"))
    narrow = chart(Cells([[0.5] * 100], 0, 1, ".0%"))
    assert [text.text for text in found(wide, ".//text")].count("50%") == 5
    assert [text.text for text in found(narrow, ".//text")].count("50%") == 0
    assert len(found(narrow, ".//rect[@data-tip='50%']")) == 100


def test_a_legend_names_each_name_once():
    few = chart(Line([0], [0], name="a"), Band([0], [0], [0], name="a"), Line([0], [1]), Bars([0], [1], name="b"))
    assert [text.text for text in found(few, ".//text") if text.text in ("a", "b")] == ["a", "b"]


def test_names_that_do_not_fit_are_slanted_and_numbers_thinned_out():
    slanted = [text for text in found(GALLERY["slanted"], ".//text") if "rotate(-45" in text.get("transform", "")]
    assert len(slanted) == 10
    assert all("".join(text.itertext()).endswith("…") and text.find("title").text for text in slanted)
    row = [text for text in found(GALLERY["hundred"], ".//text[@text-anchor='middle']") if text.text.isdigit()]
    assert 5 < len(row) < 50
    assert not any(text.get("transform") for text in row)


def test_pictures_hold_their_pixels():
    grey, colour = [[0, 255], [128, 1]], [[[255, 0, 0], [0, 0, 300]]]
    drawn = chart(Picture(grey, 0, 0, 1, 1, label="grey"), Picture(colour, 2, 0, 1, 1), frame=False, square=True)
    images = found(drawn, ".//image")
    held = [Image.open(io.BytesIO(base64.b64decode(image.get("href").split(",")[1]))) for image in images]
    assert np.asarray(held[0]).tolist() == grey
    assert np.asarray(held[1]).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    assert numbers(images[0], "width") == numbers(images[0], "height")
    (label,) = [text for text in found(drawn, ".//text") if text.text == "grey"]
    assert numbers(label, "y")[0] > sum(numbers(images[0], "y", "height"))


def test_an_unknown_colour_is_refused_and_numbers_begin_again_after_ten():
    with pytest.raises(UserError, match="'red'; give a number from 0 to 9, or one of ink, quiet, heat"):
        svg(chart(Line([0, 1], [0, 1], colour="red")))
    assert found(chart(Line([0, 1], [0, 1], colour=13)), "g[@class='l3 line']")


def test_groups_stand_around_whole_numbers_without_touching():
    marks = grouped({"a": [1, 2], "b": [3, None], "c": [5, 6]})
    places = sorted((x, mark.width) for mark in marks for x in mark.x)
    for (left, width), (right, _) in pairwise(places):
        assert left + width / 2 < right - width / 2
    assert [round(sum(mark.x[at] for mark in marks) / 3, 12) for at in (0, 1)] == [0, 1]
    assert [(mark.name, mark.colour) for mark in marks] == [("a", 0), ("b", 1), ("c", 2)]
    assert list(marks[1].height) == [3, None]


# Several charts in one file


def test_a_sheet_has_its_charts_below_one_another():
    first = Chart("one", "The first", "a", [Line([0, 1], [0, 1])], width=300, height=200)
    second = Chart("two", "The second", "b", [Line([0, 1], [1, 0])], width=400, height=100)
    text = svg(first, second)
    assert 'viewBox="0 0 400 300"' in text
    assert re.findall(r'<g transform="translate\(0 (\d+)\)">', text) == ["200"]
    assert text.index("The first") < text.index("The second")
    ids = re.findall(r'<clipPath id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert 'aria-label="a b"' in text
    ET.fromstring(text)
