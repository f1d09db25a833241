"""Bars in groups: several values for each of several things, side by side."""

from collections.abc import Callable, Mapping

from unskew.charts import PALETTE, Bars, Mark, Numbers


def grouped(groups: Mapping[str, Numbers], tip: Callable[[str, int], str] | None = None) -> list[Mark]:
    """One set of bars for each name, a colour each, around 0, 1, 2, …; ``tip(name, place)`` says what a bar is."""
    width, marks = 0.8 / max(len(groups), 1), list[Mark]()
    for place, (name, heights) in enumerate(groups.items()):
        x = [at + (place - (len(groups) - 1) / 2) * width for at in range(len(heights))]
        tips = [] if tip is None else [tip(name, at) for at in range(len(heights))]
        marks.append(Bars(x, heights, width=0.9 * width, colour=place % PALETTE, name=name, tips=tips))
    return marks
