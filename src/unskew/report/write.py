"""From run folders to a page on disk: one run explained, or several compared."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from unskew.analysis.measure import Source
from unskew.core.arguments import COUNT, FLAG, FUNCTION, PATH, SEVERAL, TEXT, accepts, optional
from unskew.core.context import neutral
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.report.comparison_page import comparison_page
from unskew.report.html import to_html
from unskew.report.page import Page
from unskew.report.run_page import requests, run_page, take_all
from unskew.runs.study import FinishedRun, Say


@neutral()
@accepts(
    paths=PATH, out=optional(PATH), only=SEVERAL, without=SEVERAL, again=FLAG, data_dir=optional(PATH),
    engine=optional(TEXT), workers=optional(COUNT), device=optional(TEXT), say=optional(FUNCTION),
)  # fmt: skip
def write_report(
    *paths: str | Path, out: str | Path | None = None, only: Sequence[Source] = (),
    without: Sequence[Source] = (), again: bool = False, data_dir: str | Path | None = None,
    engine: str | None = None, workers: int | None = None, device: str | None = None, say: Say | None = None,
    data: Any = None, model: Any = None, method: Any = None,
) -> Page:  # fmt: skip
    """Write the page of one run (by default to its folder), or the comparison of several, and return the page.

    Measures are taken where they are not stored yet; ``only`` and ``without`` choose among them. A measure of your own
    is shown with ``only="package.module:function"`` or a Measure. Runs that were given ``data``, ``model`` or
    ``method`` as values from Python need the same values again.
    """
    if not paths:
        raise UserError("no run was given; give the folder of a finished run")
    requests(only)
    requests(without)
    if out is not None and Path(out).suffix not in (".html", ".htm"):
        raise UserError(f"--out {out}: a report is written as .html")
    if without and len(paths) > 1:
        raise UserError("--without is for the report of one run; a comparison shows what is stored, and --only adds")
    if out is None and len(paths) > 1:
        raise UserError("a comparison has no run folder to go to; say where to write it with --out FILE.html")
    values = {"data": data, "model": model, "method": method}
    target = Path(out) if out is not None else Path(paths[0]) / "report.html"
    with ExitStack() as stack:
        runs = [
            stack.enter_context(
                FinishedRun(
                    path, data_dir=data_dir, engine=engine, workers=workers, device=device, say=say, values=values
                )
            )
            for path in paths
        ]
        if len(runs) == 1:
            page = run_page(runs[0], take_all(runs[0], only, without, again))
        else:
            page = comparison_page(runs, only, again)
    write_whole(target, to_html(page).encode())
    return page
