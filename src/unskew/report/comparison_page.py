"""Several runs as one page: their results side by side, their curves with bands over seeds, and what measures say."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from unskew.analysis import Found, cka, confusion, curves, known, measured, norms, parse_measure, separability, skew
from unskew.analysis.phrases import bound
from unskew.charts import Axis, Bars, Chart, Line, Mark
from unskew.charts.groups import grouped
from unskew.core.errors import UserError
from unskew.core.units import format_bytes
from unskew.report.elements import Column, Page, Section, Table
from unskew.runs.result import Calibration
from unskew.runs.study import FinishedRun, Missing

LIGHT = {"skew": "skew", "curves": "curves", "norms": "norms(local=false)"}  # what the folder alone can tell
MOST = 40  # runs that one page can tell apart


def comparison(subjects: Sequence[FinishedRun], only: Sequence[str] = (), again: bool = False) -> Page:
    """The page of several runs.

    Measures that take long are taken as they were stored by ``unskew analyse`` or ``unskew report``; those named in
    ``only`` are taken of every run that lacks them.
    """
    if len(subjects) > MOST:
        raise UserError(f"{len(subjects)} runs are more than one page can show; give at most {MOST}")
    if len({subject.path.resolve() for subject in subjects}) < len(subjects):
        raise UserError("a run is named twice; once is enough")
    names = _names(subjects)
    chosen = {parse_measure(source)[0]: parse_measure(source)[1] for source in only}
    found = {name: _known(subjects, name, chosen, again) for name in _MEASURES}
    if odd := [name for name in chosen if name not in _MEASURES]:
        raise UserError(f"--only {odd[0]}: a comparison shows {', '.join(_MEASURES)}")
    lines = [each.values for each in found["curves"] if isinstance(each, Found)]
    sections = [
        Section("runs", "The runs", "", [_results(subjects, names), *_groups(subjects)]),
        Section("curves", "How training went", _CURVES, curves.draw_together(lines)),
        _section("cka", "Similarity of local models, by layer", _CKA, _similarity(found["cka"], names), found, names),
        _section("norms", "Evenness of the classifier's rows", _NORMS, _rows(found["norms"], names), found, names),
        _section("separability", "Silhouette of the features", _SILHOUETTE, _silhouettes(found["separability"], names),
                 found, names),
        _section("confusion", "Accuracy of each class", _CLASSES, _classes(found["confusion"], names), found, names),
        _section("skew", "Skew of the partitions", _SKEW, _skews(found["skew"], names), found, names),
    ]  # fmt: skip
    methods = list(dict.fromkeys(subject.result.method for subject in subjects))
    return Page(
        title=f"{len(subjects)} runs compared",
        heading="What these runs show",
        subtitle=", ".join(methods[:6]) + (f" and {len(methods) - 6} more" if len(methods) > 6 else ""),
        findings=_findings(subjects, found, names),
        facts=[("runs", str(len(subjects))), ("methods", str(len(methods))),
               ("data", ", ".join(dict.fromkeys(subject.result.data for subject in subjects)))],
        sections=sections,
        footer="Made by unskew. Bands are one standard deviation over seeds.",
    )  # fmt: skip


_MEASURES = ("skew", "curves", "cka", "norms", "separability", "confusion")
Known = list[Found | str]  # what was found, or why not


def _known(subjects: Sequence[FinishedRun], name: str, only: Mapping[str, str], again: bool) -> Known:
    """The measure of each run, or why it is not at hand."""
    results: Known = []
    light = LIGHT.get(name, name)
    for subject in subjects:
        source, taken = only.get(name, name), name in LIGHT or name in only
        stored = None if again and taken else known(subject, source)
        if stored is None and taken:
            try:
                stored = measured(subject, source if name in only else light, again=again)
            except Missing as error:
                results.append(str(error))
                continue
        results.append(stored or f"not taken yet; add --only {name}, or unskew analyse RUN {name}")
    return results


def _names(subjects: Sequence[FinishedRun]) -> list[str]:
    """Each run's own name, with its parents where two share one."""
    for depth in (1, 2, 3):
        names = ["/".join(subject.path.absolute().parts[-depth:]) for subject in subjects]
        if len(set(names)) == len(names):
            return names
    return [str(subject.path.absolute()) for subject in subjects]


def _section(
    name: str, title: str, words: str, charts: list[Chart], found: dict[str, Known], names: list[str]
) -> Section:
    lacking: dict[str, list[str]] = {}
    for run, each in zip(names, found[name], strict=True):
        if isinstance(each, str):
            lacking.setdefault(each, []).append(run)
    missing = [f"{name} of {', '.join(runs)}: {reason}" for reason, runs in lacking.items()]
    if name == "confusion" and charts:
        shown = {getattr(mark, "name", "") for mark in charts[0].marks}
        if left := [run for run, _ in _pairs(found[name], names) if run not in shown]:
            missing.append(f"{', '.join(left)}: other classes, or more than ten runs or thirty classes")
    return Section(name, title, words, charts, missing=missing)


def _results(subjects: Sequence[FinishedRun], names: list[str]) -> Table:
    every = list(dict.fromkeys(name for subject in subjects for name in subject.result.calibrations))[:8]
    columns = [
        Column("run"), Column("method"), Column("data"), Column("partition"), Column("clients", "count"),
        Column("rounds", "count"), Column("seed", "count"), Column("EMD", "number"), Column("accuracy", "percent"),
        *(Column(f"after {name}", "percent") for name in every), Column("loss", "number"), Column("sent", "bytes"),
        Column("time", "seconds"),
    ]  # fmt: skip
    rows = []
    for subject, name in zip(subjects, names, strict=True):
        result = subject.result
        after = [result.calibrations[each].accuracy if each in result.calibrations else None for each in every]
        rows.append(
            [name, result.method, result.data, result.partition, result.clients, result.rounds, result.seed, result.emd,
             result.accuracy, *after, result.loss, result.bytes_up + result.bytes_down, result.seconds]
        )  # fmt: skip
    return Table("Results", columns, rows)


def _groups(subjects: Sequence[FinishedRun]) -> list[Table]:
    """Mean and deviation over seeds, where any settings were run with several."""
    groups = _by_settings(subjects)
    if all(len(group) == 1 for group in groups.values()):
        return []
    rows: list[list[str | int | float | None]] = []
    for label, group in groups.items():
        accuracies = [subject.result.accuracy for subject in group]
        best = [max([each.accuracy for each in _usable(subject)] or [subject.result.accuracy]) for subject in group]
        spread = [stdev(values) if len(values) > 1 else None for values in (accuracies, best)]
        rows.append([label, len(group), fmean(accuracies), spread[0], fmean(best), spread[1]])
    columns = [Column("settings"), Column("seeds", "count"), Column("accuracy, mean", "percent"),
               Column("± deviation", "percent"), Column("best calibration, mean", "percent"),
               Column("± deviation ", "percent")]  # fmt: skip
    return [Table("Over seeds", columns, rows)]


def _usable(subject: FinishedRun) -> list[Calibration]:
    """Its calibrations without those that are bounds for study."""
    return [each for each in subject.result.calibrations.values() if not bound(each.name)]


def _by_settings(subjects: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    groups: dict[str, list[FinishedRun]] = {}
    for name, subject in zip(curves.named([curves.settings(each) for each in subjects]), subjects, strict=True):
        groups.setdefault(name, []).append(subject)
    return groups


def _pairs(found: Known, names: list[str]) -> list[tuple[str, Found]]:
    return [(name, each) for name, each in zip(names, found, strict=True) if isinstance(each, Found)]


def _similarity(found: Known, names: list[str]) -> list[Chart]:
    marks: list[Mark] = []
    ticks: tuple[tuple[float, str], ...] = ()
    for colour, (name, each) in enumerate(_pairs(found, names)):
        seen: cka.Similarity = each.values
        ticks = tuple(enumerate(seen.layers)) if len(seen.layers) > len(ticks) else ticks
        tips = [f"{name}, {layer}: {mean:.3f}" for layer, mean in zip(seen.layers, seen.means, strict=True)]
        marks.append(Line(list(range(len(seen.means))), seen.means, name, colour % 10, points=True, tips=tips))
    if not marks:
        return []
    alt = f"Mean CKA between local models by layer, for {len(marks)} runs."
    return [Chart("compare-cka", "Mean CKA between local models", alt, marks, x=Axis("layer", ticks=ticks),
                  y=Axis("mean CKA", high=1), width=640, height=360)]  # fmt: skip


def _rows(found: Known, names: list[str]) -> list[Chart]:
    pairs = _pairs(found, names)
    if not pairs:
        return []
    before = [norms.unevenness(each.values.server) for _, each in pairs]
    usable = [[v for name, v in each.values.calibrated.items() if not bound(name)] for _, each in pairs]
    after = [min(map(norms.unevenness, rows), default=None) for rows in usable]
    local = [each.values.rounds[-1]["unevenness"] if each.values.rounds else None for _, each in pairs]
    marks = grouped({"local classifiers": local, "before calibration": before,
                     "after calibration": after})  # fmt: skip
    ticks = tuple((place, name) for place, (name, _) in enumerate(pairs))
    alt = "Deviation of the classifier's row norms, before and after calibration."
    return [Chart("compare-norms", "Deviation of row norms / their mean", alt, marks, x=Axis("", ticks=ticks),
                  y=Axis("", low=0, kind="percent"), width=640, height=340)]  # fmt: skip


def _silhouettes(found: Known, names: list[str]) -> list[Chart]:
    pairs = _pairs(found, names)
    ends = [(name, each.values.silhouette) for name, each in pairs if each.values.silhouette is not None]
    charts = []
    if len(ends) > 1:
        ticks = tuple((place, name) for place, (name, _) in enumerate(ends))
        bars = Bars(list(range(len(ends))), [v for _, v in ends], tips=[f"{n}: {v:.4f}" for n, v in ends])
        alt = "Silhouette of test features at the end: " + ", ".join(f"{n} {v:.3f}" for n, v in ends) + "."
        charts.append(Chart("compare-silhouette", "Silhouette at the end", alt, [bars], x=Axis("", ticks=ticks)))
    marks: list[Mark] = []
    for colour, (name, each) in enumerate(pairs):
        seen: separability.Separability = each.values
        if len(seen.rounds) > 1:
            rounds, values = [int(r) for r, _ in seen.rounds], [v for _, v in seen.rounds]
            marks.append(Line(rounds, values, name, colour % 10))
    if marks:
        alt = f"Silhouette of test features by round, for {len(marks)} runs."
        charts.append(
            Chart("compare-silhouette-rounds", "Silhouette by round", alt, marks, x=Axis("round", kind="count"))
        )
    return charts


def _classes(found: Known, names: list[str]) -> list[Chart]:
    pairs = [(name, each) for name, each in _pairs(found, names) if len(each.values.classes) <= 30]
    if not pairs:
        return []
    classes = pairs[0][1].values.classes
    pairs = [(name, each) for name, each in pairs if each.values.classes == classes][:10]
    groups = {name: confusion.accuracy(each.values, "before") for name, each in pairs}

    def tip(name: str, label: int) -> str:
        share = groups[name][label]
        return f"{classes[label]}, {name}: {'none' if share is None else f'{share:.1%}'}"

    return [Chart("compare-classes", "Accuracy of each class, before calibration", "Accuracy by class and run.",
                  grouped(groups, tip),
                  x=Axis("class", ticks=tuple(enumerate(classes))), y=Axis("", low=0, high=1, kind="percent"),
                  width=880, height=340)]  # fmt: skip


def _skews(found: Known, names: list[str]) -> list[Chart]:
    pairs = _pairs(found, names)
    if not pairs:
        return []
    emds: list[tuple[str, skew.Skew]] = [(name, each.values) for name, each in pairs]
    bars = Bars(list(range(len(emds))), [seen.emd for _, seen in emds], tips=[f"{n}: {s.emd:.3f}" for n, s in emds])
    ticks = tuple((place, name) for place, (name, _) in enumerate(emds))
    alt = "EMD of each run's partition."
    return [Chart("compare-emd", "EMD of the partition", alt, [bars], x=Axis("", ticks=ticks), y=Axis("EMD", low=0))]


def _findings(subjects: Sequence[FinishedRun], found: dict[str, Known], names: list[str]) -> list[str]:
    """The best and the worst settings, what calibration adds, and who is most alike."""
    groups = _by_settings(subjects)
    means = {label: fmean(subject.result.accuracy for subject in group) for label, group in groups.items()}
    said = []
    if len(means) > 1:
        best, worst = max(means, key=lambda each: means[each]), min(means, key=lambda each: means[each])
        said.append(f"Highest accuracy: {best}, {means[best]:.2%}; lowest: {worst}, {means[worst]:.2%}.")
    gains = [
        max(each.accuracy for each in _usable(subject)) - subject.result.accuracy
        for subject in subjects if _usable(subject)
    ]  # fmt: skip
    if gains:
        low, high = min(gains), max(gains)
        said.append(f"The best calibration of each run changes accuracy by {low:+.2%} to {high:+.2%}.")
    sent = [subject.result.bytes_up + subject.result.bytes_down for subject in subjects]
    least_sent, most_sent = format_bytes(min(sent)), format_bytes(max(sent))
    said.append(f"Training sent {least_sent if least_sent == most_sent else f'{least_sent} to {most_sent}'} a run.")
    alike = [(each.values.means[-1], name) for name, each in _pairs(found["cka"], names)]
    if len(alike) > 1:
        most, least = max(alike), min(alike)
        said.append(
            f"Local classifiers are most alike in {most[1]} (CKA {most[0]:.2f}) and least in {least[1]} "
            f"({least[0]:.2f})."
        )
    ends = [(each.values.silhouette, name) for name, each in _pairs(found["separability"], names)
            if each.values.silhouette is not None]  # fmt: skip
    if len(ends) > 1:
        high_end, low_end = max(ends), min(ends)
        said.append(
            f"The features of {high_end[1]} part the classes best (silhouette {high_end[0]:.4f}), those of "
            f"{low_end[1]} least ({low_end[0]:.4f})."
        )
    return said


_CURVES = "Runs that differ in nothing but the seed are one line, their mean, with a band of one standard deviation."
_CKA = "Every client trains the final model once more; CKA says how alike two clients' outputs of a layer then are."
_NORMS = "How unequal the lengths of the classes' rows in the classifier are, before calibration and after."
_SILHOUETTE = "How much nearer test features lie to their own class than to the next: from −1 to 1."
_CLASSES = "Accuracy of each class with the run's own classifier."
_SKEW = "How far the clients' label distributions lie from the whole: 0 where all are alike, 2 where nothing is shared."
