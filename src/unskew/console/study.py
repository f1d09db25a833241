"""The commands about finished runs: analyse, report, compare, check; and check-method."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew import analysis
from unskew.analysis import draw_runs
from unskew.analysis.measure import Measured
from unskew.console.options import Trust, find_runs, note_unsealed, with_options
from unskew.console.progress import Json, StageProgress, out, print_json
from unskew.core.errors import Missing, UserError, nearest
from unskew.report.table import FORMATS
from unskew.report.table import compare as compare_runs
from unskew.report.write import make_report
from unskew.runs.seals import DAMAGED, UNCHANGED, UNSEALED, ExaminedFile, examine, seal_folder, unsealed_note


def check(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    seal: Annotated[
        bool, typer.Option("--seal", help="Accept the files as they are, and write a new manifest.json.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Report which files of a run directory are intact, damaged or not sealed."""
    damaged, examined = [], list[dict[str, Any]]()
    for path in paths:
        if seal:
            out.say(f"{path}: sealed {len(seal_folder(path))} files as they are")
        files = examine(path)
        if not seal:
            _show(path, files)
        damaged += [file for file in files if file.state == DAMAGED]
        examined.append({"run": path, "files": {file.name: file.state for file in files}})
    if as_json:
        print_json(examined)
    if damaged:
        raise UserError(f"{len(damaged)} damaged: {'; '.join(file.problem for file in damaged)}")


def check_method(
    name: Annotated[str, typer.Argument(metavar="METHOD", help='"fedprox(0.1)" | package.module:function(knobs).')],
    neutral: Annotated[str | None, typer.Option(help="The method with its knob at zero: it must be FedAvg.")] = None,
    as_json: Json = False,
) -> None:
    """Test a method, ours or yours, against the laws that every method obeys; about half a minute."""
    from unskew.checks import LawBroken
    from unskew.checks import check_method as test_laws

    laws: list[str] = []
    try:
        for law in test_laws(name, neutral=neutral):
            laws.append(law)
            out.say(law if law.startswith("skipped") else f"kept: {law}")
    except LawBroken as error:
        raise UserError(str(error)) from error
    if as_json:
        print_json({"method": name, "laws": laws})


def _show(path: Path, files: list[ExaminedFile]) -> None:
    width = max((len(file.name) for file in files), default=0)
    for file in files:
        if file.state != UNSEALED or not file.name.startswith(("figures/", "logs/", "report")):
            out.say(f"{file.name:<{width}}  {file.state}")
    counts = Counter(file.state for file in files)
    states = [f"{counts[state]} {state}" for state in (UNCHANGED, UNSEALED, DAMAGED) if counts[state]]
    out.say(f"{path}: {', '.join(states)}")
    if note := unsealed_note(path):
        out.say(f"note: {note}; seal it as it is with: unskew check {path} --seal")


KNOWN = (*analysis.MEASURES, *analysis.ON_REQUEST)
WHERE = ["data_dir", "engine", "workers", "device"]


@with_options(WHERE, default="the run's")
def analyse(
    options: dict[str, Any],
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [MEASURE...]",
            help="Finished runs, or folders of runs; then measures: "
            f'{" | ".join(KNOWN)} | package.module:function; "cka(clients=20)" (default: all but '
            f"{' and '.join(analysis.ON_REQUEST)}, or curves for several runs).",
        ),
    ],
    form: Annotated[str, typer.Option("--format", help="Format of the charts: svg | png | pdf")] = "svg",
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="For several runs: the folder for charts (default: figures, next to the runs)."),
    ] = None,
    width: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Width of the charts: 8cm | 84mm | 3.3in.")
    ] = None,
    height: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Height of the charts: 6cm | 60mm | 2.4in.")
    ] = None,
    title: Annotated[str | None, typer.Option(help='Title of the charts; "" for none.')] = None,
    against: Annotated[
        str | None, typer.Option(help="Draw curves only against round | batches | bytes | seconds.")
    ] = None,
    names: Annotated[
        str, typer.Option(metavar="NAME,NAME…", help='Names for the legend, in its order: "FedAvg, FedProx".')
    ] = "",
    serif: Annotated[bool, typer.Option("--serif", help="Use a serif font, as most papers do.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure a finished run, or draw several runs in one figure."""
    shown: list[dict[str, Any]] = []

    def show(source: str, result: Measured | Missing | Sequence[str], files: list[Path]) -> None:
        missing, notes, findings = None, list[str](), list[str]()
        if isinstance(result, Missing):
            missing = str(result)
        elif isinstance(result, Measured):
            findings, notes = list(result.findings), list(result.notes)
        else:
            findings = list(result)
        shown.append({"measure": source, "findings": findings, "notes": notes, "missing": missing, "files": files})
        out.say(*(f"{source}: {sentence}" for sentence in (*findings, *(f"note: {note}" for note in notes))))
        out.say(*([f"{source}: not shown: {missing}"] if missing else []), *(f"  {file}" for file in files))

    paths, measures = _split_arguments(arguments)
    runs = find_runs(paths)
    note_unsealed(runs)
    for_paper = serif or names or any(option is not None for option in (folder, width, height, title, against))
    with StageProgress(out) as progress:
        if len(runs) > 1 or for_paper:
            draw_runs(
                paths, *measures, out=folder, form=form, width=width, height=height, title=title, against=against,
                names=names, serif=serif,
                data_dir=options.get("data_dir"), trust=trust, say=progress, observe=show,
            )  # fmt: skip
        else:
            analysis.analyse(runs[0], *measures, form=form, trust=trust, say=progress, observe=show, **options)
    if as_json:
        print_json(shown)


def _split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separate runs from measures: the first argument is a run, and so are paths that are not names of measures."""
    paths, measures = [Path(arguments[0])], list[str]()
    for text in arguments[1:]:
        is_path = Path(text).is_dir() or ("/" in text.partition("(")[0] and ":" not in text)
        if is_path and text not in KNOWN:
            paths.append(Path(text))
        else:
            measures.append(text)
    return paths, measures


@with_options(WHERE, default="the run's")
def report(
    options: dict[str, Any],
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Finished runs, or folders of runs; several are compared."),
    ],
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", help="Where to write it (default: RUN/report.html).")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="MEASURE", help="Show only this measure, ours or package.module:function; repeatable."),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="MEASURE", help="Leave out this measure; repeatable.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Repeat measures that are already stored.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write one HTML page that explains a run or compares several; it works offline."""
    runs = find_runs(paths)
    if file is None and len(paths) == 1 and len(runs) > 1:
        file = paths[0] / "report.html"
    note_unsealed(runs)
    with StageProgress(out) as progress:
        path, page = make_report(
            *runs, out=file, only=only or (), without=without or (), again=again, trust=trust, say=progress, **options
        )
    missing = [f"{section.title}: {reason}" for section in page.sections for reason in section.missing]
    notes = [f"{section.title}: {note}" for section in page.sections for note in section.notes]
    out.say(*page.findings, *(f"not shown: {reason}" for reason in missing), *(f"note: {note}" for note in notes))
    out.say(f"written to {path}")
    if as_json:
        print_json({"report": path, "findings": page.findings, "missing": missing, "notes": notes})


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders of them.")],
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run with --method centralised, for relative accuracy.")
    ] = None,
    at_round: Annotated[
        int | None, typer.Option(metavar="N", help="Accuracy at this round (default: the last that all runs reached).")
    ] = None,
    at_batch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Accuracy at this batch count (default: the largest that all runs reached)."),
    ] = None,
    columns: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME…",
            help='The columns to show, such as "method,accuracy,after"; the beginning of a name is enough '
            "(default: those that differ and fit).",
        ),
    ] = "",
    form: Annotated[str, typer.Option("--format", metavar="|".join(FORMATS), help="The format.")] = "table",
    each: Annotated[
        bool, typer.Option("--each", help="One row per run, even if runs differ only in the seed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare finished runs in a table; runs that differ only in the seed share a row with mean ± deviation."""
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
    paths = find_runs(paths)
    note_unsealed([*paths, *([baseline] if baseline else [])])
    table = compare_runs(*paths, baseline=baseline, at_round=at_round, at_batch=at_batch, columns=columns, each=each)
    if form == "table" and not as_json:
        out.print(table.render(out.width))
    else:
        print(table.text("json" if as_json else form))  # noqa: T201  for programs: no wrapping, no color
