"""From run folders to a page on disk: one run explained, or several compared."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from unskew import analysis
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.report.comparison_page import comparison
from unskew.report.elements import Page
from unskew.report.html import page
from unskew.report.run_page import run_page, studied
from unskew.runs.study import FinishedRun, Say


def write_report(
    *paths: str | Path, out: str | Path | None = None, only: Sequence[str] = (), without: Sequence[str] = (),
    again: bool = False, data_dir: str | Path | None = None, engine: str | None = None, workers: int | None = None,
    say: Say | None = None,
) -> Page:  # fmt: skip
    """Write the page of one run (by default to its folder), or the comparison of several; what it says comes back.

    Measures are taken where they are not stored yet; ``only`` and ``without`` choose among them.
    """
    if not paths:
        raise UserError("no run was named; give the folder of a finished run")
    for source in (*only, *without):
        analysis.parse_measure(source)
    if out is not None and Path(out).suffix not in (".html", ".htm"):
        raise UserError(f"--out {out}: a report is written as .html")
    if without and len(paths) > 1:
        raise UserError("--without is for the report of one run; a comparison shows what is stored, and --only adds")
    if out is None and len(paths) > 1:
        raise UserError("a comparison belongs to no run: say where it goes with --out FILE.html")
    target = Path(out) if out is not None else Path(paths[0]) / "report.html"
    with ExitStack() as stack:
        subjects = [
            stack.enter_context(FinishedRun(path, data_dir=data_dir, engine=engine, workers=workers, say=say))
            for path in paths
        ]
        if len(subjects) == 1:
            made = run_page(subjects[0], studied(subjects[0], only, without, again))
        else:
            made = comparison(subjects, only, again)
    write_whole(target, page(made).encode())
    return made
