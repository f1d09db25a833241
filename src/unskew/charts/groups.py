"""Bars in groups: several values for each of several things, side by side; shares of a whole counted in bins."""

from collections.abc import Callable, Mapping, Sequence

from unskew.charts import PALETTE, Axis, Bars, Chart, Mark, Numbers


def grouped(groups: Mapping[str, Numbers], tip: Callable[[str, int], str] | None = None) -> list[Mark]:
    """One set of bars for each name, a colour each, around 0, 1, 2, …; ``tip(name, place)`` says what a bar is."""
    width, marks = 0.8 / max(len(groups), 1), list[Mark]()
    for place, (name, heights) in enumerate(groups.items()):
        x = [at + (place - (len(groups) - 1) / 2) * width for at in range(len(heights))]
        tips = [] if tip is None else [tip(name, at) for at in range(len(heights))]
        marks.append(Bars(x, heights, width=0.9 * width, colour=place % PALETTE, name=name, tips=tips))
    return marks


def shares_in_bins(name: str, title: str, alt: str, bins: Mapping[str, Sequence[int]], what: str, many: str) -> Chart:
    """How many of ``what`` ("client", ``many`` "clients") have which share, 0 to 1, in equal bins; a group a name."""
    count = max(map(len, bins.values()), default=1)

    def tip(group: str, place: int) -> str:
        number = bins[group][place]
        words = f"{number:,} {what if number == 1 else many}"
        return f"{place / count:.0%} to {(place + 1) / count:.0%}, {group}: {words}"

    ticks = tuple((at * count / 5 - 0.5, f"{at * 20}%") for at in range(6))
    return Chart(
        name, title, alt, grouped(bins, tip), x=Axis("accuracy", low=-0.5, high=count - 0.5, ticks=ticks),
        y=Axis(many, low=0, kind="count"),
    )  # fmt: skip
