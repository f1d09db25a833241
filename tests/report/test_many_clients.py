"""A page of thousands of clients and hundreds of classes: distributions instead of a bar for each."""

import time

import numpy as np
import pytest

import unskew
from unskew.analysis.confusion import MAX_PAIRS, MAX_TABLE_CLASSES
from unskew.analysis.measure import Choice, Table
from unskew.charts import Bars, Cells, Chart, Dots, Line
from unskew.core.types import ImageSet, Split
from unskew.report.write import make_report

CLIENTS, CLASSES = 2000, 300
ONLY = ("skew", "curves", "norms", "drift", "separability", "confusion", "fairness")


def crowd() -> ImageSet:
    """Tiny pictures of 300 classes that 2,000 users took, 1 to 9 each and one of them 500."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 10, CLIENTS)
    sizes[7] = 500
    centres = draw.integers(40, 216, (CLASSES, 1, 4, 4))

    def part(count):
        labels = draw.integers(0, CLASSES, count)
        return Split((centres[labels] + draw.integers(-30, 30, (count, 1, 4, 4))).astype(np.uint8), labels)

    users = np.repeat([f"u{user:04d}" for user in range(CLIENTS)], sizes)
    names = tuple(f"class {label}" for label in range(CLASSES))
    return ImageSet("crowd", names, part(len(users)), part(900), (0.5,), (0.25,), users=users)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "run"
    unskew.run(
        data=crowd(), partition="users", per_round=20, rounds=1, epochs=1, batch=8, model="tiny-cnn",
        engine="loop", out=path,
    )  # fmt: skip
    began = time.process_time()
    _, made = make_report(path, only=ONLY, data=crowd())
    return made, path, time.process_time() - began


def charts(page):
    for section in page.sections:
        for element in section.elements:
            if isinstance(element, Chart):
                yield element
            elif isinstance(element, Choice):
                yield from element.options.values()


@pytest.fixture
def made(written):
    return written[0]


def test_the_page_is_small_and_quick(written):
    _, path, seconds = written
    assert (path / "report.html").stat().st_size < 2_000_000
    assert seconds < 30  # of the processor; about 3
    assert all(file.stat().st_size < 1_000_000 for file in (path / "figures").iterdir())


def test_no_chart_has_a_mark_for_each_client_or_class(made):
    most = {Bars: 60, Dots: 2100, Line: 400, Cells: 60 * CLASSES}
    for chart in charts(made):
        for mark in (mark for mark in chart.marks if type(mark) in most):
            size = len(mark.values) * len(mark.values[0]) if isinstance(mark, Cells) else len(mark.x)
            assert size <= most[type(mark)], chart.name


def test_what_is_left_out_is_said(made):
    notes = {section.name: " ".join((*section.notes, *(e.title for e in section.elements if isinstance(e, Chart))))
             for section in made.sections}  # fmt: skip
    assert "60 of 2,000 clients" in notes["skew"]
    assert "10 of 2,000 clients" in notes["norms"]
    assert "10 of 2,000 clients" in notes["drift"]
    assert "classes" in notes["norms"]


def test_all_clients_are_in_the_sorted_curves(made):
    found = {chart.name: chart for chart in charts(made)}
    assert found["skew-sizes"].marks[0].y[-1] == 500
    assert found["skew-classes"].marks[0].y[0] == 1
    assert 0 < found["skew-distance"].marks[0].y[0] < found["skew-distance"].marks[0].y[-1] < 2
    assert len(found["confusion-classes"].marks[0].y) == pytest.approx(CLASSES, abs=30)


def test_confused_and_close_classes_are_ranked(made):
    assert CLASSES > MAX_TABLE_CLASSES
    tables = {element.title: element for section in made.sections for element in section.elements
              if isinstance(element, Table)}  # fmt: skip
    images = [row[3] for row in tables["Most confused pairs"].rows if row[0] == "before"]
    assert len(images) == MAX_PAIRS
    assert images == sorted(images, reverse=True)
    distances = [row[2] for row in tables["Closest classes"].rows]
    assert distances == sorted(distances)
