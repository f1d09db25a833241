"""The commands that look at finished runs: analyse and report."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from unskew import analysis
from unskew.analysis import draw_runs
from unskew.analysis.measure import Measured
from unskew.console.comparison import note_unsealed, runs_named
from unskew.console.progress import PlainConsole, StageProgress
from unskew.core.errors import Missing, UserError
from unskew.report.write import write_report
from unskew.runs.seals import DAMAGED, UNSEALED, WHOLE, Examined, examine, seal_folder, unsealed_note

out = PlainConsole()


def check(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    seal: Annotated[
        bool, typer.Option("--seal", help="Take the files as they are from now on: write a new manifest.json.")
    ] = False,
) -> None:
    """Say which files of a run folder are as they were written, which are damaged and which are not sealed."""
    damaged = []
    for path in paths:
        if seal:
            out.print(f"{path}: {len(seal_folder(path))} files are sealed as they are", soft_wrap=True)
            continue
        files = examine(path)
        _show(path, files)
        damaged += [each for each in files if each.state == DAMAGED]
    if damaged:
        raise UserError(f"{len(damaged)} damaged: {'; '.join(each.problem for each in damaged)}")


def _show(path: Path, files: list[Examined]) -> None:
    width = max((len(each.name) for each in files), default=0)
    for each in files:
        if each.state != UNSEALED or not each.name.startswith(("figures/", "logs/", "report")):
            out.print(f"{each.name:<{width}}  {each.state}", soft_wrap=True)
    counts = Counter(each.state for each in files)
    words = [f"{counts[state]} {state}" for state in (WHOLE, UNSEALED, DAMAGED) if counts[state]]
    out.print(f"{path}: {', '.join(words)}", soft_wrap=True)
    if note := unsealed_note(path):
        out.print(f"note: {note}; seal it as it is with: unskew check {path} --seal", soft_wrap=True)


DataDir = Annotated[str | None, typer.Option(help="Where image sets are now (default: where they were for the run).")]
Engine = Annotated[str | None, typer.Option(help="auto | loop | pool | package.module:function (default: the run's).")]
Device = Annotated[str | None, typer.Option(help="auto | cpu | cuda | cuda:N | mps (default: the run's).")]
Workers = Annotated[int | None, typer.Option(help="Processes of the pool (default: the run's).")]


def analyse(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [MEASURE...]",
            help="Finished runs, or folders that have some; then measures: "
            f'{" | ".join(analysis.MEASURES)} | package.module:function; "cka(clients=20)" (default: all; of several '
            "runs: curves).",
        ),
    ],
    data_dir: DataDir = None,
    engine: Engine = None,
    workers: Workers = None,
    device: Device = None,
    form: Annotated[str, typer.Option("--format", help="Of the charts: svg | png | pdf")] = "svg",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Of several runs: where charts go (default: figures beside the runs).")
    ] = None,
    width: Annotated[str | None, typer.Option(metavar="LENGTH", help="Of the charts: 8cm | 84mm | 3.3in.")] = None,
    height: Annotated[str | None, typer.Option(metavar="LENGTH", help="Of the charts: 6cm | 60mm | 2.4in.")] = None,
    title: Annotated[str | None, typer.Option(help='In the place of the charts\' own; "" leaves it out.')] = None,
    against: Annotated[str | None, typer.Option(help="Of curves: round | batches | bytes | seconds alone.")] = None,
) -> None:
    """Take measures of a finished run, or draw several runs in one figure."""
    paths, measures = _told_apart(words)
    runs = runs_named(paths)
    note_unsealed(runs)
    chosen = any(each is not None for each in (folder, width, height, title, against))
    with StageProgress(out) as progress:
        if len(runs) > 1 or chosen:
            draw_runs(
                paths, *measures, out=folder, form=form, width=width, height=height, title=title, against=against,
                data_dir=data_dir, say=progress, observe=_drawn,
            )  # fmt: skip
            return
        analysis.analyse(
            runs[0], *measures, data_dir=data_dir, engine=engine, workers=workers, device=device, form=form,
            say=progress, observe=_taken,
        )  # fmt: skip


def _told_apart(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Runs and measures: the first word is a run, and so is each that is a folder or a path, and no measure's name."""
    runs = [not place or (word not in analysis.MEASURES and _is_path(word)) for place, word in enumerate(words)]
    measures = [word for word, run in zip(words, runs, strict=True) if not run]
    return [Path(word) for word, run in zip(words, runs, strict=True) if run], measures


def _is_path(word: str) -> bool:
    return Path(word).is_dir() or ("/" in word.partition("(")[0] and ":" not in word)


def _taken(source: str, result: Measured | Missing, files: list[Path]) -> None:
    if isinstance(result, Missing):
        out.print(f"{source}: not shown: {result}", soft_wrap=True)
        return
    _drawn(source, [*result.findings, *(f"note: {note}" for note in result.notes)], files)


def _drawn(source: str, findings: Sequence[str], files: list[Path]) -> None:
    for sentence in findings:
        out.print(f"{source}: {sentence}", soft_wrap=True)
    for file in files:
        out.print(f"  {file}", soft_wrap=True)


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Finished runs, or folders that have some; several make a comparison."),
    ],
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
    given, paths = paths, runs_named(paths)
    if file is None and len(given) == 1 and len(paths) > 1:
        file = given[0] / "report.html"
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
