"""The picture shows what the partition holds, for one client and for ten thousand."""

import io
import sys

import numpy as np
import pytest

from unskew.core.key import Key
from unskew.data.partition import partition
from unskew.data.population import Partition
from unskew.report.partition_plot import MOST, partition_figure

LABELS = np.arange(6000) % 10
NAMES = [f"class {c}" for c in range(10)]


def dealt(text, clients, labels=LABELS, classes=10, users=None) -> Partition:
    return partition(text, labels, clients=clients, key=Key(4), classes=classes, users=users)


def words(figure) -> str:
    return " | ".join(text.get_text() for text in figure.texts)


def titles(figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def png(figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file)
    return file.getvalue()


def test_the_title_says_scheme_seed_clients_examples_and_emd():
    figure = partition_figure(dealt("dirichlet-client(0)", 10), LABELS, NAMES)
    assert words(figure).startswith("dirichlet-client(alpha=0.0) | seed 4")
    for part in ("10 clients", "6,000 examples", "EMD 1.80"):
        assert part in words(figure)


def test_bubbles_have_areas_in_proportion_to_the_counts():
    client = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    figure = partition_figure(Partition(client, 2, "by hand", 0), labels, ["a", "b"])
    bubbles = figure.axes[0].collections[0]
    assert bubbles.get_offsets().tolist() == [[0, 0], [0, 1], [1, 1]]  # client across, class down
    assert (bubbles.get_sizes() / bubbles.get_sizes()[2]).tolist() == pytest.approx([3 / 4, 1 / 4, 1])
    assert figure.axes[0].yaxis_inverted()


def test_bars_are_as_high_as_clients_are_large():
    made = dealt("dirichlet(0.3)", 12)
    bars = partition_figure(made, LABELS, NAMES).axes[1].patches
    assert [bar.get_height() for bar in bars] == np.bincount(made.client, minlength=12).tolist()


def test_beyond_sixty_clients_ranks_and_a_sample_are_shown_and_said():
    few = partition_figure(dealt("iid", MOST), LABELS, NAMES)
    many = partition_figure(dealt("iid", MOST + 1), LABELS, NAMES)
    assert "of them below" not in words(few)
    assert "61 clients (60 of them below)" in words(many)
    assert any("by rank" in title for title in titles(many))
    assert many.axes[2].images[0].get_array().shape == (10, 60)


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
    figure = partition_figure(dealt(text, clients, labels, classes), labels, [str(c) for c in range(classes)])
    assert png(figure).startswith(b"\x89PNG")


def test_odd_names_of_users_and_classes_are_drawn_as_they_are():
    users = np.array(["$x_1$", "a very long name indeed", "_%&"])[np.arange(6000) % 3]
    names = ["$\\frac$", "_", "a class whose name does not end", *NAMES[3:]]
    figure = partition_figure(dealt("users", None, users=users), LABELS, names)
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["$x_1$", "_%&", "a very…"]
    assert png(figure)


def test_examples_of_nobody_are_counted_in_the_title_and_empty_clients_drawn():
    client = np.where(np.arange(6000) < 100, -1, 2).astype(np.int32)
    figure = partition_figure(Partition(client, 4, "by hand", 0), LABELS, NAMES)
    assert "5,900 examples  ·  100 held by nobody" in words(figure)
    assert png(figure)
    assert png(partition_figure(Partition(client * 0 - 1, 100, "by hand", 0), LABELS, NAMES))


def test_the_same_partition_gives_the_same_picture_and_nothing_global_is_touched():
    before = "matplotlib.pyplot" in sys.modules
    made = dealt("dirichlet(0.1)", 10)
    assert png(partition_figure(made, LABELS, NAMES)) == png(partition_figure(made, LABELS, NAMES))
    assert ("matplotlib.pyplot" in sys.modules) == before
