"""Charts of a sweep: every value in its place, what failed crossed out, lines only where settings share a momentum."""

from pathlib import Path
from types import SimpleNamespace

from unskew.charts import Cells, Dots, Words
from unskew.runs.config import Config, with_values
from unskew.sweeps.sweep import Sweep, TriedSetting, folder_name, grid, parse_over, sweep_charts
from unskew.sweeps.tasks import RunFailure


def made(over, scores, settings=None, **base):
    """A sweep whose settings came to these scores, None for one that diverged."""
    dimensions = parse_over(over)
    outcomes = [
        TriedSetting(
            folder_name(values), values, with_values(Config(**base), values, "--over"),
            (RunFailure("NaN", diverged=True) if score is None else SimpleNamespace(accuracy=score),), "accuracy",
        )
        for values, score in zip(settings or grid(dimensions), scores, strict=True)
    ]  # fmt: skip
    return Sweep(Path("sweep"), dimensions, (0,), "accuracy", tuple(outcomes))


def charts_of(*given, **base):
    return {chart.name: chart for chart in sweep_charts(made(*given, **base))}


def test_a_heat_map_has_every_combination_and_crosses_out_what_failed():
    chart = charts_of(["lr=0.1,1", "momentum=0,0.9"], [0.5, 0.75, 0.25, None])["sweep-lr-momentum"]
    (cells,) = [mark for mark in chart.marks if isinstance(mark, Cells)]
    assert [list(line) for line in cells.values] == [[50, 25], [75, None]]  # a row for each momentum
    assert [(mark.x, mark.y) for mark in chart.marks if isinstance(mark, Words)] == [(1, 1)]


def test_a_chart_by_one_option_is_of_the_best_of_the_others_and_says_so():
    charts = charts_of(["lr=0.1,1", "momentum=0,0.9"], [0.5, 0.75, 0.25, None])
    (line,) = charts["sweep-lr"].marks
    assert list(line.y) == [0.75, 0.25]
    assert charts["sweep-lr"].title == "Accuracy by lr, best over the other options"
    assert charts_of(["lr=0.1,1"], [0.5, 0.75])["sweep-lr"].title == "Accuracy by lr"


def test_effective_rates_are_a_line_for_each_momentum_with_its_whole_name():
    over = ["lr=0.1,1", "method=fedavg,fedavgm(0.9)"]
    chart = charts_of(over, [0.5, 0.75, 0.25, 0.1], momentum=0.5)["sweep-effective-rate"]
    assert {mark.name: [round(x, 9) for x in mark.x] for mark in chart.marks} == {
        "momentum 0.5": [0.2, 2.0], "momentum 0.5, server's 0.9": [2.0, 20.0],
    }  # fmt: skip


def test_searched_momenta_that_no_two_settings_share_are_dots_without_a_legend():
    settings = [{"lr": 0.1 * place, "momentum": 0.1 * place} for place in range(1, 4)]
    chart = charts_of(["lr=0.01..1 log", "momentum=0..0.9"], [0.5, 0.75, 0.25], settings)["sweep-effective-rate"]
    (dots,) = chart.marks
    assert isinstance(dots, Dots)
    assert (len(dots.x), dots.name) == (3, "")
