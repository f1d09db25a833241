"""The commands about finished runs: analyse, report, compare, check; and check-method."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew import analysis
from unskew.analysis import draw_runs
from unskew.analysis.measure import Measured
from unskew.console.options import Format, Trust, find_runs, note_unsealed, option, with_options
from unskew.console.progress import Json, StageProgress, out, print_json
from unskew.core.errors import Missing, UserError, nearest
from unskew.report.table import FORMATS
from unskew.report.table import compare as compare_runs
from unskew.report.write import make_report
from unskew.runs.seals import DAMAGED, examine, seal_folder, unsealed_note


def check(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    seal: Annotated[bool, option("Accept the files as they are, and write a new manifest.json.", "--seal")] = False,
    as_json: Json = False,
) -> None:
    """Report which files of a run directory are intact, damaged or not sealed."""
    damaged, examined = [], list[dict[str, Any]]()
    for path in paths:
        if seal:
            out.say(f"{path}: sealed {len(seal_folder(path))} files as they are")
        files = examine(path)
        if not seal:
            width = max((len(file.name) for file in files), default=0)
            out.say(*(f"{file.name:<{width}}  {file.state}" for file in files))
            counts = Counter(file.state for file in files)
            out.say(f"{path}: {', '.join(f'{count} {state}' for state, count in counts.items())}")
            if note := unsealed_note(path):
                out.say(f"note: {note}; seal it as it is with: unskew check {path} --seal")
        damaged += [file.problem for file in files if file.state == DAMAGED]
        examined.append({"run": path, "files": {file.name: file.state for file in files}})
    if as_json:
        print_json(examined)
    if damaged:
        raise UserError(f"{len(damaged)} damaged: {'; '.join(damaged)}")


def check_method(
    name: Annotated[str, typer.Argument(metavar="METHOD", help='"fedprox(0.1)" | package.module:function(knobs).')],
    neutral: Annotated[str | None, option("The method with its knob at zero: it must be FedAvg.")] = None,
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
    form: Format = "svg",
    folder: Annotated[
        Path | None, option("For several runs: the folder for charts (default: figures, next to the runs).", "--out")
    ] = None,
    width: Annotated[str | None, option("Width of the charts: 8cm | 84mm | 3.3in.", metavar="LENGTH")] = None,
    height: Annotated[str | None, option("Height of the charts: 6cm | 60mm | 2.4in.", metavar="LENGTH")] = None,
    title: Annotated[str | None, option('Title of the charts; "" for none.')] = None,
    against: Annotated[str | None, option("Draw curves only against round | batches | bytes | seconds.")] = None,
    names: Annotated[str, option('Names for the legend, in order: "FedAvg, FedProx".', metavar="NAME,NAME…")] = "",
    serif: Annotated[bool, option("Use a serif font, as most papers do.", "--serif")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure a finished run, or draw several runs in one figure."""
    shown: list[dict[str, Any]] = []

    def show(source: str, result: Measured | Missing | Sequence[str], files: list[Path]) -> None:
        missing = str(result) if isinstance(result, Missing) else None
        notes = list(result.notes) if isinstance(result, Measured) else []
        findings = list(
            result.findings if isinstance(result, Measured) else () if isinstance(result, Missing) else result
        )
        shown.append({"measure": source, "findings": findings, "notes": notes, "missing": missing, "files": files})
        lines = [*findings, *(f"note: {note}" for note in notes), *([f"not shown: {missing}"] if missing else [])]
        out.say(*(f"{source}: {line}" for line in lines), *(f"  {file}" for file in files))

    paths = [Path(arguments[0]), *(Path(text) for text in arguments[1:] if _is_run(text))]
    measures = [text for text in arguments[1:] if not _is_run(text)]
    runs = find_runs(paths)
    note_unsealed(runs)
    look: dict[str, Any] = {"out": folder, "width": width, "height": height, "title": title, "against": against}
    for_paper = serif or names or any(value is not None for value in look.values())
    with StageProgress(out) as progress:
        common: dict[str, Any] = {"form": form, "trust": trust, "say": progress, "observe": show}
        if len(runs) > 1 or for_paper:
            draw_runs(paths, *measures, names=names, serif=serif, data_dir=options.get("data_dir"), **look, **common)
        else:
            analysis.analyse(runs[0], *measures, **common, **options)
    if as_json:
        print_json(shown)


def _is_run(text: str) -> bool:
    is_path = Path(text).is_dir() or ("/" in text.partition("(")[0] and ":" not in text)
    return is_path and text not in KNOWN


@with_options(WHERE, default="the run's")
def report(
    options: dict[str, Any],
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Finished runs, or folders of runs; several are compared."),
    ],
    file: Annotated[
        Path | None, option("Where to write it (default: RUN/report.html).", "--out", metavar="FILE.html")
    ] = None,
    only: Annotated[
        list[str] | None,
        option("Show only this measure, ours or package.module:function; repeatable.", metavar="MEASURE"),
    ] = None,
    without: Annotated[list[str] | None, option("Leave out this measure; repeatable.", metavar="MEASURE")] = None,
    again: Annotated[bool, option("Repeat measures that are already stored.")] = False,
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
        Path | None, option("A run with --method centralised, for relative accuracy.", metavar="RUN")
    ] = None,
    at_round: Annotated[
        int | None, option("Accuracy at this round (default: the last that all runs reached).", metavar="N")
    ] = None,
    at_batch: Annotated[
        int | None, option("Accuracy at this batch count (default: the largest that all reached).", metavar="N")
    ] = None,
    columns: Annotated[
        str,
        option(
            'The columns to show, such as "method,accuracy,after"; the beginning of a name is enough '
            "(default: those that differ and fit).",
            metavar="NAME,NAME…",
        ),
    ] = "",
    form: Annotated[str, option("The format.", "--format", metavar="|".join(FORMATS))] = "table",
    each: Annotated[bool, option("One row per run, even if runs differ only in the seed.", "--each")] = False,
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
