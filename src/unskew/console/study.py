"""The commands that look at finished runs: analyse and report."""

from pathlib import Path
from typing import Annotated

import typer

from unskew import analysis
from unskew.analysis.measure import Measured
from unskew.console.check import note_unsealed
from unskew.console.plain import PlainConsole
from unskew.console.stage_progress import StageProgress
from unskew.core.errors import Missing
from unskew.report.write import write_report

out = PlainConsole()

DataDir = Annotated[str | None, typer.Option(help="Where image sets are now (default: where they were for the run).")]
Engine = Annotated[str | None, typer.Option(help="auto | loop | pool | package.module:function (default: the run's).")]
Device = Annotated[str | None, typer.Option(help="auto | cpu | cuda | cuda:N | mps (default: the run's).")]
Workers = Annotated[int | None, typer.Option(help="Processes of the pool (default: the run's).")]


def analyse(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")],
    measures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MEASURE...]",
            help=f'{" | ".join(analysis.MEASURES)} | package.module:function; "cka(clients=20)" (default: all)',
        ),
    ] = None,
    data_dir: DataDir = None,
    engine: Engine = None,
    workers: Workers = None,
    device: Device = None,
    form: Annotated[str, typer.Option("--format", help="Of the charts: svg | png | pdf")] = "svg",
) -> None:
    """Take measures of a finished run: values and charts go into its folder figures."""

    def observe(source: str, result: Measured | Missing, files: list[Path]) -> None:
        if isinstance(result, Missing):
            out.print(f"{source}: not shown: {result}", soft_wrap=True)
            return
        for sentence in result.findings:
            out.print(f"{source}: {sentence}", soft_wrap=True)
        for note in result.notes:
            out.print(f"{source}: note: {note}", soft_wrap=True)
        for file in files:
            out.print(f"  {file}", soft_wrap=True)

    note_unsealed([path])
    with StageProgress(out) as progress:
        analysis.analyse(
            path, *(measures or []), data_dir=data_dir, engine=engine, workers=workers, device=device, form=form,
            say=progress, observe=observe,
        )  # fmt: skip


def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished runs; several make a comparison.")],
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Where to write it (default: RUN/report.html).")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MEASURE", help="Show only this measure, or your own package.module:function; repeatable."
        ),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="MEASURE", help="Do not take this measure; repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Take measures again that are stored already.")] = False,
    data_dir: DataDir = None,
    engine: Engine = None,
    workers: Workers = None,
    device: Device = None,
) -> None:
    """Make one page that explains a run, or compares several: opens offline, pictures included."""
    note_unsealed(paths)
    with StageProgress(out) as progress:
        page = write_report(
            *paths, out=file, only=only or (), without=without or (), again=again, data_dir=data_dir, engine=engine,
            workers=workers, device=device, say=progress,
        )  # fmt: skip
    for sentence in page.findings:
        out.print(sentence, soft_wrap=True)
    for section in page.sections:
        for words in section.missing:
            out.print(f"not shown: {section.title}: {words}", soft_wrap=True)
        for words in section.notes:
            out.print(f"note: {section.title}: {words}", soft_wrap=True)
    out.print(f"written to {file or paths[0] / 'report.html'}", soft_wrap=True)
