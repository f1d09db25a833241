"""Where the training examples of a class were taken: longitude and latitude, a color for each class."""

from dataclasses import dataclass

import numpy as np

from unskew.analysis.measure import Measure
from unskew.charts import Axis, Chart, Dots, Mark
from unskew.core.errors import Missing, UserError, nearest
from unskew.core.units import counted
from unskew.runs.finished import FinishedRun

MAX_PLACES = 2000  # drawn per class


@dataclass(frozen=True)
class Places:
    """The coordinates of some classes' training examples."""

    classes: list[str]
    counts: list[int]  # examples with coordinates
    points: list[list[tuple[float, float]]]  # longitude and latitude, at most MAX_PLACES per class


def take_places(run: FinishedRun, *, classes: str = "") -> Places:
    """Where the examples of ``classes``, ``"one; another"``, were taken; by default those of the two largest.

    Reference: Hsu, Qi and Brown 2020, Figure 1.
    """
    images = run.images
    if images.places is None:
        raise Missing("the data have no coordinates; a table of photographs needs the columns latitude and longitude")
    labels, known = np.asarray(images.train.labels), np.isfinite(images.places).all(1)
    names = [name.strip() for name in classes.split(";") if name.strip()]
    if unknown := next((name for name in names if name not in images.classes), None):
        raise UserError(f"places: no class is called {unknown!r}; {nearest(unknown, images.classes)}")
    if not names:
        largest = np.argsort(-np.bincount(labels[known], minlength=len(images.classes)), kind="stable")
        names = [images.classes[label] for label in largest[:2]]
    counts, points = [], []
    for name in names:
        places = images.places[known & (labels == images.classes.index(name))]
        shown = np.linspace(0, len(places) - 1, min(len(places), MAX_PLACES)).round().astype(int)
        counts.append(len(places))
        points.append([(float(east), float(north)) for north, east in places[shown]])
    return Places(names, counts, points)


def _draw(values: Places) -> list[Chart]:
    marks: list[Mark] = []
    for colour, (name, points) in enumerate(zip(values.classes, values.points, strict=True)):
        x, y = ([point[at] for point in points] for at in (0, 1))
        marks.append(Dots(x, y, colour, radius=2.5, name=name))
    alt = f"Places of {', '.join(_findings(values))}"
    axes = Axis("longitude, degrees"), Axis("latitude, degrees")
    return [Chart("places", "Where the examples were taken", alt, marks, *axes, 620, 380)]


def _findings(values: Places) -> list[str]:
    pairs = zip(values.classes, values.counts, strict=True)
    return [f"{name}: {counted(count, 'training example')} with coordinates." for name, count in pairs]


PLACES = Measure(
    name="places",
    values=Places,
    take=take_places,
    draw=_draw,
    findings=_findings,
    title="Where the examples are from",
    text="Each dot is a training example at its longitude and latitude.",
    headline=None,
)
