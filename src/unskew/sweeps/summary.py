"""What a sweep leaves in its folder at the end: a table, charts, and the best setting as a recipe."""

import csv
import io
from dataclasses import replace
from pathlib import Path

from unskew.charts.files import FORMATS, chart_bytes
from unskew.core.errors import UserError, nearest
from unskew.core.files import write_whole
from unskew.core.units import counted
from unskew.runs import config as configs
from unskew.sweeps.figures import sweep_charts
from unskew.sweeps.folder import BEST, TABLE
from unskew.sweeps.outcomes import Outcome, Sweep, effective_rates
from unskew.sweeps.space import spelled, words


def table(sweep: Sweep) -> list[dict[str, str]]:
    """A row for each setting, the best first: its values, its score and deviation over the seeds, what went wrong."""
    rates = effective_rates(sweep.outcomes)
    by_name = dict(zip((each.name for each in sweep.outcomes), rates or (), strict=False))
    rows = []
    for each in sweep.ranked:
        row = {name.replace("_", " "): spelled(value) for name, value in each.values.items()}
        if rates:
            row["effective lr"] = f"{by_name[each.name]:.4g}"
        row |= _scores(sweep, each)
        rows.append(row)
    return rows


def _scores(sweep: Sweep, each: Outcome) -> dict[str, str]:
    score, loss = each.score, sweep.by == "loss"
    name = sweep.by if sweep.by in ("accuracy", "loss") else f"after {sweep.by}"
    scale, decimals = (1, 4) if loss else (100, 2)
    row = {name: f"{scale * score.mean:.{decimals}f}" if score else ""}
    if len(sweep.seeds) > 1:
        row["±"] = f"{scale * score.deviation:.{decimals}f}" if score and score.deviation is not None else ""
        row["n"] = str(score.count) if score else ""
    return row | {"failed": each.failure}


def write_summary(sweep: Sweep, form: str = "svg") -> list[Path]:
    """Write table.csv, best.toml and the charts; the files that were written."""
    check_format(form)
    rows, text = table(sweep), io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files = {sweep.path / TABLE: text.getvalue().encode()}
    if sweep.best:
        files[sweep.path / BEST] = best_recipe(sweep, sweep.best).encode()
    for chart in sweep_charts(sweep):
        files[sweep.path / "figures" / f"{chart.name}.{form}"] = chart_bytes(chart, form)
    for path, content in files.items():
        write_whole(path, content)
    return list(files)


def best_recipe(sweep: Sweep, best: Outcome) -> str:
    """The best setting as a recipe that trains on all training images and is evaluated on the test images."""
    assert best.score is not None
    several = len(sweep.seeds) > 1
    config = replace(best.config, seed=sweep.seeds[0])
    lines = configs.to_toml(config).splitlines()[1:]
    kept = [line for line in lines if not line.startswith(("validation =", *(["seed ="] if several else [])))]
    score = best.score.words(decimals=4) if sweep.by == "loss" else f"{best.score.words(100)} %"
    over = f" over {counted(len(sweep.seeds), 'seed')}" if several else ""
    header = [
        f"# The best of {counted(len(sweep.outcomes), 'setting')}: {words(best.values)}.",
        f"# On the validation images: {sweep.by} {score}{over}. This recipe holds nothing out.",
    ]
    seeds = [f"seeds = {list(sweep.seeds)}"] if several else []
    return "\n".join([*header, *kept, *seeds]) + "\n"


def check_format(form: str) -> None:
    """Refuse a format that charts are not written in."""
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
