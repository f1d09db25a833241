"""Charts as files for a paper: the size that was asked for, whole legends, the same bytes each time, nothing global."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from unskew.charts import Axis, Band, Bars, Cells, Chart, Dots, Line, Picture, Rule, Words
from unskew.charts.files import chart_bytes, for_paper, length
from unskew.charts.layout import Text, lay_out
from unskew.charts.scales import text_width
from unskew.core.errors import UserError

ALL = Chart(
    "all",
    "Everything at once: $x_1$ and $\\frac$ are no formulas",
    "every mark",
    (
        Line([0, 1, 2], [0, None, 2], name="$a line$", points=True, dashed=True, tips=["tip"]),
        Band([0, 1, 2], [0, 1, 1], [1, 2, 2], colour=1),
        Bars([0, 1, 2], [1, 2, 3], colour=[2, 3, 4], name="bars"),
        Dots([0, 1], [1, 1], [5, 6], [1, 0.5], 8),
        Rule(y=1, label="a rule"),
        Picture([[0, 255]], 2, 2, 1, 1, "a picture"),
        Words(1, 1, "🎉 界 \ud800 \x00 \n$"),
    ),
    Axis("across", high=1.5),
    Axis("upwards", kind="percent"),
)


def pixels(chart):
    return np.asarray(Image.open(io.BytesIO(chart_bytes([chart], "png"))).convert("RGB")).astype(int)


def test_both_forms_are_files_of_their_kind_and_the_same_each_time():
    for form, magic in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        made = chart_bytes([ALL], form)
        assert made.startswith(magic)
        assert made == chart_bytes([ALL], form)
        assert not re.search(b"CreationDate|Software", made)


def test_bars_have_their_place_and_their_colour():
    drawn = pixels(Chart("n", "", "", (Bars([0, 1], [1, 0]),), frame=False))
    blue = np.abs(drawn - (0x00, 0x72, 0xB2)).sum(axis=2) < 10
    assert blue[:, :400].mean() > 0.5
    assert blue[:, 440:].sum() == 0


def test_tables_have_their_shades_and_pictures_their_pixels():
    table = pixels(Chart("n", "", "", (Cells([[0, 1]], 0, 1),), frame=False))
    assert table[300, 150].sum() > table[300, 600].sum() + 300
    image = Picture([[[255, 0, 0], [0, 0, 255]], [[0, 255, 0], [0, 0, 0]]], 0, 0, 1, 1)
    shown = pixels(Chart("n", "", "", (image,), frame=False))
    corners = [shown[y, x].tolist() for y in (100, 500) for x in (100, 780)]
    assert corners == [[255, 0, 0], [0, 0, 255], [0, 255, 0], [0, 0, 0]]


def test_what_is_cut_off_by_a_given_end_is_not_drawn_beyond_it():
    drawn = pixels(Chart("n", "A title", "", (Line([0, 1, 2], [0, 10, 0]),), y=Axis(high=1), height=300))
    assert (np.abs(drawn - (0x00, 0x72, 0xB2)).sum(axis=2) < 60)[:50].sum() == 0


def test_matplotlib_is_imported_where_it_is_used_and_nothing_global_is_touched():
    script = (
        "import sys, unskew.charts.files, unskew.charts.files as paper\n"
        "from unskew.charts import Chart, Line\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import matplotlib\n"
        "def state(): return {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != 'backend'}\n"
        "before = state()\n"
        "paper.chart_bytes([Chart('n', 't', 'a', (Line([0, 1], [0, 1]),))], 'png')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert state() == before\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


NAMES = [
    "fedavg", "fedavgm(0.9) + fedvc(256) + fedir + ccvr(per_class=2000) · dirichlet(alpha=0.1) (3 seeds)",
    "package.module_with_a_long_name:function_with_a_long_name(first_knob=0.001,second_knob=12345)",
    *(f"method {number}" for number in range(12)),
]  # fmt: skip


def chart(names=NAMES, **knobs):
    marks = [Line([0, 1, 2], [0.1, 0.2, 0.1 * place], name, place % 10) for place, name in enumerate(names)]
    return Chart("curves", "A title", "alt", marks, x=Axis("rounds"), y=Axis("accuracy", kind="percent"), **knobs)


def texts(drawn):
    return [shape for layer in lay_out(drawn).layers for shape in layer.shapes if isinstance(shape, Text)]


@pytest.mark.parametrize("width", ["5cm", "8cm", "17cm"])
def test_a_whole_legend_has_every_name_to_its_last_letter_inside_the_picture(width):
    drawn = for_paper(chart(), length(width, "--width"))
    said = texts(drawn)
    joined = "".join(text.text for text in said).replace(" ", "")
    for name in NAMES:
        assert name.replace(" ", "") in joined
    assert "…" not in joined
    assert not re.search(r"\+\d+more", joined)
    level = [text for text in said if not text.turn and text.anchor == "start"]
    assert all(text.x + text_width(text.text) <= drawn.width for text in level)
    assert max(text.y for text in said) <= drawn.height


def test_entries_of_a_whole_legend_do_not_overlap():
    said = [text for text in texts(for_paper(chart(), 315)) if text.anchor == "start" and not text.turn]
    for one, other in combinations(said, 2):
        apart = one.x + text_width(one.text) <= other.x or other.x + text_width(other.text) <= one.x
        assert apart or abs(one.y - other.y) >= 12, (one, other)


def test_a_legend_is_whole_on_a_page_too_and_takes_nothing_from_the_plot():
    said = "".join(text.text for text in texts(chart())).replace(" ", "")
    assert all(name.replace(" ", "") in said for name in NAMES)
    few, many = lay_out(chart(["one"])), lay_out(chart())
    assert (few.height, many.height > 300) == (300, True)
    assert many.frame.height == pytest.approx(few.frame.height, abs=40)
    few, many = (lay_out(for_paper(chart(names), 315)) for names in (["one"], NAMES))
    assert many.frame.height == pytest.approx(few.frame.height, abs=20)
    assert many.height > few.height


def test_a_pdf_has_true_type_letters_and_serif_ones_where_asked_for():
    plain, serif = (chart_bytes([replace(chart(["one"]), serif=each)], "pdf") for each in (False, True))
    for made, family in ((plain, b"DejaVuSans"), (serif, b"STIXGeneral")):
        assert family in made
        assert b"/CIDFontType2" in made
        assert b"/Type3" not in made
    assert 'class="chart serif"' in chart_bytes([replace(chart(["one"]), serif=True)], "svg").decode()


def test_the_size_is_the_one_that_was_chosen():
    drawn = for_paper(chart(["one", "two"]), length("8cm", "--width"), length("6cm", "--height"))
    assert (drawn.width, drawn.height) == (315, 236)
    picture = Image.open(io.BytesIO(chart_bytes([drawn], "png")))
    assert picture.size == (630, 472)
    assert picture.info["dpi"] == pytest.approx((200, 200), abs=0.1)
    svg = chart_bytes([drawn], "svg").decode()
    assert 'viewBox="0 0 315 236" width="3.15in" height="2.36in"' in svg
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+)", chart_bytes([drawn], "pdf"))
    assert [float(side) / 72 for side in box.groups()] == pytest.approx([3.15, 2.36], abs=0.01)


def test_a_height_that_leaves_no_room_is_refused_with_one_that_does():
    with pytest.raises(UserError, match=r"legend leave no room for the plot; give --height ([\d.]+)cm or more") as said:
        for_paper(chart(), 315, 120)
    enough = re.search(r"--height ([\d.]+cm)", str(said.value))[1]
    assert for_paper(chart(), 315, length(enough, "--height"))


def test_lengths_have_four_units_and_anything_else_is_refused():
    assert {length(text, "--width") for text in ("5.08cm", "50.8mm", "2in", "144pt")} == {200}
    for text in ("8", "cm", "-3cm", "8 feet", "0.1cm", "9999cm", "", "1e3cm", "8cm;"):
        with pytest.raises(UserError, match="--width"):
            length(text, "--width")
