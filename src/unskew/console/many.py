"""Several runs on the command line: a setting with several seeds, and folders of runs."""

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unskew.console import comparison as comparing
from unskew.console.comparison import flat, seed_sheet
from unskew.console.plain import PlainConsole
from unskew.console.progress import StageProgress
from unskew.console.watch import watched
from unskew.core.units import emd_words
from unskew.report.write import write_report
from unskew.runs import config as configs
from unskew.runs.journal import read_metrics
from unskew.runs.result import VALIDATION, Result
from unskew.runs.seeds import FINISHED, describe_steps, plan_seeds

out = PlainConsole()


def lists_seeds(recipe: Path | None) -> bool:
    """Whether a recipe asks for several seeds."""
    return recipe is not None and bool(configs.read_recipe(recipe)[1])


def run_seeds(
    recipe: Path | None, seeds: str | None, folder: Path | None, log: Sequence[str] | None, page: bool,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Train one setting with each seed, then show mean and deviation."""
    with StageProgress(out) as say:
        plan = plan_seeds(recipe, seeds=seeds, out=folder, say=say, **options)
    out.print(f"{plan.path}: {describe_steps(plan.steps)}", soft_wrap=True)
    results: list[Result] = []
    for step in plan.steps:
        if step.state == FINISHED:
            results.append(plan.complete(step))
            out.print(f"seed {step.seed}: finished already, accuracy {results[-1].accuracy:.2%}")
            continue
        out.print(f"seed {step.seed}", style="bold")
        again = f"to go on, give the same command again, with --out {shlex.quote(str(plan.path))}"
        results.append(watched(log, partial(plan.complete, step), again))
    show_seeds(results)
    if page:
        target = plan.path / "report.html"
        found = write_report(*(result.path for result in results), out=target if len(results) > 1 else None)
        for sentence in found.findings:
            out.print(sentence, soft_wrap=True)
        out.print(f"written to {target if len(results) > 1 else results[0].path / 'report.html'}", soft_wrap=True)


def show_seeds(results: Sequence[Result]) -> None:
    """The table with mean and deviation over seeds."""
    compared = comparing.side_by_side(results, [read_metrics(each.path) for each in results])
    single = comparing.figures(compared)
    keys = [key for key in single[0] if key in ("accuracy", "relative", "loss") or key.startswith("after ")]
    lines = [
        {"seed": str(result.seed)} | {key: row[key].words("-") for key in keys} | {"emd": emd_words(result.emd)}
        for result, row in zip(results, single, strict=True)
    ]
    mean = seed_sheet(compared).rows[0]
    lines.append({"seed": f"mean ± deviation, n = {len(results)}"} | {key: mean[key] for key in (*keys, "emd")})
    for table in flat(lines, list(lines[0]), out.width):
        out.print(table)
    if results[0].evaluated_on == VALIDATION:
        out.print("accuracy is on the validation images")
