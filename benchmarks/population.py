"""Many photographers: partitions by user and by place of a table as large as iNaturalist-2017."""

import time
from pathlib import Path

from measure import Row, at_most, medians
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.population import emd
from unskew.data.synthetic_set import Shape, draw_rows

WHOLE = Shape(users=20_000, classes=5089, examples=579_184, test=95_986, balanced=False)


def columns(shape):
    """Labels, users and places of the training examples."""
    rows = draw_rows(shape, Path("nowhere"))
    train = ~rows.test
    return rows.labels[train], rows.users[train], rows.places[train]


def deal(text, labels, users, places, classes):
    return partition_examples(text, labels, clients=None, key=Key(0), users=users, places=places, classes=classes)


def suite(repeats):
    """Seconds of the partitions of 579,184 rows; how like the paper's populations the drawn one is."""
    whole = columns(WHOLE)
    schemes = ("users", "geo(max=30000)", "geo(max=1000)", "geo(max=100)")
    times = medians({text: lambda text=text: deal(text, *whole, WHOLE.classes) for text in schemes}, min(repeats, 3))
    for text, seconds in times.items():
        found = deal(text, *whole, WHOLE.classes)
        yield at_most(f"partition {text}, 579,184 rows", seconds, "s", 10, f"{found.clients:,} clients")
    shape, began = Shape(), time.perf_counter()
    labels, users, places = columns(shape)
    yield Row("drawing 120,300 rows of 9,275 users", time.perf_counter() - began, "s")
    found = deal("users", labels, users, places, shape.classes)
    yield Row("EMD of its users", emd(found.client, labels, shape.classes), "", remark="iNaturalist-User-120k: 1.83")
    for most, paper in ((30_000, "11"), (3_000, "135"), (1_000, "not said"), (100, "3,606")):
        found = deal(f"geo(max={most})", labels, users, places, shape.classes)
        yield Row(f"its clients under geo(max={most})", found.clients, "", remark=f"in the paper: {paper}")
