"""A chart on paper: PNG and PDF of the same drawing, the same bytes each time, nothing global touched."""

import io
import subprocess
import sys

import numpy as np
from PIL import Image

from unskew.charts import Axis, Band, Bars, Cells, Chart, Dots, Line, Picture, Rule, Words
from unskew.charts.files import chart_bytes

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
        assert b"CreationDate" not in made
        assert b"Software" not in made


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
    def ink(high):
        line = Line([0, 1, 2], [0, 10, 0])
        drawn = pixels(Chart("n", "A title", "", (line,), y=Axis(high=high), height=300))
        return (np.abs(drawn - (0x00, 0x72, 0xB2)).sum(axis=2) < 60)[:50].sum()

    assert ink(1) == 0


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
