"""The commands that look at finished runs: analyse and report."""

from pathlib import Path
from typing import Annotated

import typer

from unskew import analysis, runs
from unskew.analysis import Found
from unskew.analysis.subject import Missing, Subject
from unskew.errors import UserError
from unskew.report.busy import Busy
from unskew.report.console import PlainConsole

out = PlainConsole()

DataDir = Annotated[str | None, typer.Option(help="Where image sets lie now (default: where they lay for the run).")]
Engine = Annotated[str | None, typer.Option(help="auto | loop | pool (default: the run's).")]
Workers = Annotated[int | None, typer.Option(help="Processes of the pool (default: the run's).")]


def analyse(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")],
    measures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MEASURE...]", help=f'{" | ".join(analysis.MEASURES)}; "cka(clients=20)" (default: all)'
        ),
    ] = None,
    data_dir: DataDir = None,
    engine: Engine = None,
    workers: Workers = None,
    form: Annotated[str, typer.Option("--format", help="Of the pictures: svg | png | pdf")] = "svg",
) -> None:
    """Take measures of a finished run: values and pictures go into its folder figures."""

    def observe(source: str, found: Found | Missing, files: list[Path]) -> None:
        if isinstance(found, Missing):
            out.print(f"{source}: not shown: {found}", soft_wrap=True)
            return
        for sentence in found.findings:
            out.print(f"{source}: {sentence}", soft_wrap=True)
        for note in found.notes:
            out.print(f"{source}: note: {note}", soft_wrap=True)
        for file in files:
            out.print(f"  {file}", soft_wrap=True)

    with Busy(out) as busy:
        analysis.analyse(
            path, *(measures or []), data_dir=data_dir, engine=engine, workers=workers, form=form, say=busy,
            observe=observe,
        )  # fmt: skip


def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished runs; several make a comparison.")],
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Where to write it (default: RUN/report.html).")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="MEASURE", help="Show this measure alone; repeatable.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="MEASURE", help="Do not take this measure; repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Take measures anew that were taken before.")] = False,
    data_dir: DataDir = None,
    engine: Engine = None,
    workers: Workers = None,
) -> None:
    """Make one page that explains a run, or compares several: opens offline, pictures included."""
    from unskew.report.comparison import comparison  # matplotlib and scikit-learn are imported where they are used
    from unskew.report.page import page
    from unskew.report.story import story, studied

    for source in (*(only or ()), *(without or ())):
        analysis.parse(source)
    if file is not None and file.suffix not in (".html", ".htm"):
        raise UserError(f"--out {file}: a report is written as .html")
    if len(paths) > 1 and file is None:
        raise UserError("a comparison belongs to no run: say where it goes with --out FILE.html")
    subjects = []
    with Busy(out) as busy:
        try:
            for path in paths:
                subjects.append(Subject(path, data_dir=data_dir, engine=engine, workers=workers, say=busy))
            if len(subjects) == 1:
                found = studied(subjects[0], only or (), without or (), again)
                made, target = story(subjects[0], found), file or paths[0] / "report.html"
            else:
                made, target = comparison(subjects, only or (), again), file or Path("comparison.html")
        finally:
            for subject in subjects:
                subject.close()
        content = page(made)
    runs.write_whole(target, content.encode())
    for sentence in made.findings:
        out.print(sentence, soft_wrap=True)
    for section in made.sections:
        for words in section.missing:
            out.print(f"not shown, or to be known: {section.title}: {words}", soft_wrap=True)
    out.print(f"written to {target}", soft_wrap=True)
