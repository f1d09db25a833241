"""The picture shows what the partition is, for one client and for ten thousand."""

import numpy as np
import pytest

from unskew.analysis.skew import partition_charts
from unskew.charts import Words
from unskew.charts.files import FORMATS, chart_bytes
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.partition_files import holdings_of, read_holdings, to_arrays
from unskew.data.population import Partition
from unskew.runs.folder import write_arrays

LABELS = np.arange(6000) % 10
NAMES = [f"class {c}" for c in range(10)]
BEGINS = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}


def dealt(text, clients, labels=LABELS, classes=10, users=None) -> Partition:
    return partition_examples(text, labels, clients=clients, key=Key(4), classes=classes, users=users)


def words(charts) -> str:
    """The heading, title and lines."""
    lines = [mark.text for mark in charts[0].marks if isinstance(mark, Words)]
    return " ".join([charts[0].title, *lines])


def chart(charts, name):
    return next(each for each in charts if each.name == name)


def test_the_heading_says_scheme_seed_clients_examples_emd_and_the_finding():
    said = words(partition_charts(dealt("dirichlet-client(0)", 10), LABELS, NAMES))
    assert said.startswith("dirichlet-client(alpha=0.0) seed 4 · ")
    for part in ("10 clients", "6,000 examples", "EMD 1.80", "of the 10 classes make up 90% of their examples"):
        assert part in said


def test_circles_have_areas_in_proportion_to_the_counts():
    client = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    circles = chart(partition_charts(Partition(client, 2, "by hand", 0), labels, ["a", "b"]), "skew-circles")
    (dots,) = circles.marks
    assert list(zip(dots.x, dots.y, strict=True)) == [(0, 0), (0, 1), (1, 1)]  # client across, class down
    assert list(dots.area) == pytest.approx([3 / 4, 1 / 4, 1])
    assert circles.y.reverse


def test_the_file_of_a_partition_has_the_same_holdings(tmp_path):
    made = dealt("dirichlet(0.3)", 12)
    write_arrays(tmp_path / "p.npz", to_arrays(made, LABELS, 10))
    ours, read = holdings_of(made, LABELS, 10), read_holdings(tmp_path / "p.npz")
    for name in ("scheme", "names", "emd"):
        assert getattr(ours, name) == getattr(read, name)
    assert np.array_equal(ours.sizes, read.sizes)
    assert np.array_equal(ours.cells, read.cells)


def test_beyond_sixty_clients_ranks_and_a_sample_are_shown_and_said():
    few = partition_charts(dealt("iid", 60), LABELS, NAMES)
    many = partition_charts(dealt("iid", 60 + 1), LABELS, NAMES)
    assert "of them below" not in words(few)
    assert "61 clients (60 shown, evenly spaced by size)" in words(many)
    assert "sorted" in chart(many, "skew-sizes").title
    assert len(set(chart(many, "skew-circles").marks[0].x)) == 60


@pytest.mark.parametrize(
    ("text", "clients", "classes"),
    [
        ("iid", 1, 1),
        ("dirichlet(0.1)", 10, 10),
        ("dirichlet(0.5, min_size=0)", 60, 40),
        ("dirichlet(1e-3, min_size=0)", 100, 10),
        ("dirichlet-client(0.1)", 3000, 1203),
        ("dirichlet(1e-3, min_size=0)", 70, 1203),
    ],
)
def test_every_size_of_partition_becomes_a_picture(text, clients, classes):
    labels = np.arange(6000) % classes
    charts = partition_charts(dealt(text, clients, labels, classes), labels, [str(c) for c in range(classes)])
    assert len({each.width for each in charts}) == 1
    assert chart_bytes(charts, "png").startswith(BEGINS["png"])


@pytest.mark.parametrize("form", FORMATS)
def test_one_file_has_all_charts_in_every_form(form):
    made = dealt("dirichlet(0.1)", 10)
    content = chart_bytes(partition_charts(made, LABELS, NAMES), form)
    assert content.startswith(BEGINS[form])
    assert content == chart_bytes(partition_charts(made, LABELS, NAMES), form)
    if form == "svg":
        text = content.decode()
        assert text.count("<svg") == 1
        for each in partition_charts(made, LABELS, NAMES):
            assert each.title in text


def test_odd_names_of_users_and_classes_are_drawn_as_they_are():
    users = np.array(["$x_1$", "a very long name indeed", "_%&"])[np.arange(6000) % 3]
    names = ["$\\frac$", "_", "a class whose name does not end", *NAMES[3:]]
    charts = partition_charts(dealt("users", None, users=users), LABELS, names)
    assert [word for _, word in chart(charts, "skew-sizes").x.ticks] == ["$x_1$", "_%&", "a very long name indeed"]
    assert all(chart_bytes(charts, form) for form in FORMATS)


def test_examples_in_no_client_are_counted_in_the_heading_and_empty_clients_drawn():
    client = np.where(np.arange(6000) < 100, -1, 2).astype(np.int32)
    charts = partition_charts(Partition(client, 4, "by hand", 0), LABELS, NAMES)
    assert "5,900 examples · 100 without a client" in words(charts)
    assert chart_bytes(charts, "svg")
    nothing = partition_charts(Partition(client * 0 - 1, 100, "by hand", 0), LABELS, NAMES)
    assert "0 examples · 6,000 without a client" in words(nothing)
    assert chart_bytes(nothing, "svg")
