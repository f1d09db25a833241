"""One run as a page: who held what, how training went, where the bias sits, what calibration changed, what it cost."""

from collections.abc import Callable, Sequence

from unskew.analysis import MEASURES, Found, confusion, known, measured, parse_measure, skew
from unskew.analysis.phrases import bound
from unskew.charts import Chart
from unskew.core.units import format_bytes, format_duration
from unskew.report.elements import Choice, Column, Page, Section, Table
from unskew.runs.study import FinishedRun, Missing

Parts = list[Chart | Choice | Table]
Studied = dict[str, Found | str]  # by measure: what was found, or why not

LEAD = ("curves", "confusion", "skew", "cka", "norms", "separability", "projection", "inversion")


def studied(
    subject: FinishedRun, only: Sequence[str] = (), without: Sequence[str] = (), again: bool = False
) -> Studied:
    """Every measure of the run, or why it cannot be taken; what was stored is taken as it is where it still fits."""
    found: Studied = {}
    chosen = {parse_measure(source)[0]: parse_measure(source)[1] for source in only}
    left_out = {parse_measure(source)[0] for source in without}
    for name in MEASURES:
        source = chosen.get(name, name)
        if only and name not in chosen:
            continue
        if name in left_out:
            stored = known(subject, source)
            found[name] = stored if stored is not None else f"left out; unskew analyse {subject.path} {name}"
            continue
        try:
            found[name] = measured(subject, source, again=again)
        except Missing as error:
            found[name] = str(error)
    return found


def run_page(subject: FinishedRun, found: Studied) -> Page:
    """The page of one run."""
    result = subject.result
    sections = [
        _section(found, "skew", "Who held what", _SKEW, lambda: _skew_parts(found)),
        _section(found, "curves", "How training went", _CURVES, lambda: [*_charts(found, "curves"), _rounds(subject)]),
        _section(found, "cka", "Where the bias sits: similarity of local models", _CKA, lambda: _cka_parts(found)),
        _section(found, "norms", "Where the bias sits: the classifier's rows", _NORMS, lambda: _charts(found, "norms")),
        _section(found, "drift", "How far clients go", _DRIFT, lambda: _charts(found, "drift")),
        _section(
            found, "separability", "What the features hold", _SEPARABILITY, lambda: _charts(found, "separability")
        ),
        _section(found, "projection", "Features in the plane", _PROJECTION, lambda: _projection_parts(found)),
        _section(found, "confusion", "What calibration changed", _CONFUSION, lambda: _confusion_parts(subject, found)),
        _section(found, "inversion", "What features give away", _INVERSION, lambda: _charts(found, "inversion")),
        Section("cost", "What it cost", _COST, [_costs(subject)]),
        Section("made", "How it was made", _made(subject), [_settings(subject)]),
    ]
    return Page(
        title=f"{result.method} on {result.data}",
        subtitle=f"{result.partition}, {_who(subject)}, {result.rounds} rounds, seed {result.seed}",
        findings=_findings(found),
        facts=_facts(subject),
        sections=[each for each in sections if each is not None],
        footer=f"Made by unskew from {subject.path.name}; weights {result.weights_sha256[:12]}.",
    )


def _section(found: Studied, name: str, title: str, words: str, parts: Callable[[], Parts]) -> Section | None:
    """A measure's section; where it could not be taken, the reason."""
    if name not in found:
        return None
    seen = found[name]
    if isinstance(seen, str):
        return Section(name, title, words, [], missing=[seen])
    return Section(name, title, words, parts(), says=seen.findings, notes=seen.notes)


def _charts(found: Studied, name: str) -> Parts:
    seen = found[name]
    return [] if isinstance(seen, str) else list(seen.charts)


def _findings(found: Studied) -> list[str]:
    """The most telling sentence of each measure; the others stand in its section."""
    said = [seen.findings for name in LEAD if isinstance(seen := found.get(name), Found)]
    return [sentences[0] for sentences in said if sentences]


def _skew_parts(found: Studied) -> Parts:
    seen = found["skew"]
    assert isinstance(seen, Found)
    return [*seen.charts, Choice("client", skew.each_client(seen.values))]


def _cka_parts(found: Studied) -> Parts:
    means, *layers = _charts(found, "cka")
    options = {_layer(chart): chart for chart in layers if isinstance(chart, Chart)}
    return [means, Choice("layer", options, start=next(reversed(options)))]


def _layer(chart: Chart) -> str:
    return chart.title.removeprefix("CKA of ").partition(",")[0]


def _projection_parts(found: Studied) -> Parts:
    """Truth and before side by side, then the calibrations, one at a time."""
    charts = [chart for chart in _charts(found, "projection") if isinstance(chart, Chart)]
    seen = found["projection"]
    assert isinstance(seen, Found)
    names = list(seen.values.predicted)[1:]
    parts: Parts = list(charts[:2])
    if names:
        parts.append(Choice("classifier", dict(zip(names, charts[2:], strict=True))))
    return parts


def _confusion_parts(subject: FinishedRun, found: Studied) -> Parts:
    seen = found["confusion"]
    assert isinstance(seen, Found)
    parts: Parts = [confusion.by_class(seen.values)]
    if tables := confusion.tables(seen.values):
        parts.append(tables.pop("before"))
        parts += [Choice("classifier", tables)] if tables else []
    if len(seen.values.classes) <= confusion.MOST:
        parts.append(Choice("class", confusion.each_class(seen.values)))
    return [_calibrations(subject), *parts] if subject.result.calibrations else parts


def _calibrations(subject: FinishedRun) -> Table:
    result = subject.result
    rows: list[list[str | int | float | None]] = [["before", result.accuracy, None, result.loss, None, None]]
    for each in result.calibrations.values():
        rows.append([each.name, each.accuracy, each.accuracy - result.accuracy, each.loss, each.bytes_up, each.seconds])
    kinds = ("text", "percent", "percent", "number", "bytes", "seconds")
    names = ("classifier", "accuracy", "gain", "loss", "sent for it", "time")
    columns = [Column(name, kind) for name, kind in zip(names, kinds, strict=True)]
    return Table("Classifiers of this run", columns, rows)


def _rounds(subject: FinishedRun) -> Table:
    names = ("round", "accuracy", "loss", "train_loss", "clients", "examples", "batches_max", "bytes_up", "seconds")
    kinds = ("count", "percent", "number", "number", "count", "count", "count", "bytes", "seconds")
    titles = ("round", "accuracy", "loss", "training loss", "clients", "examples", "batches, most", "sent up", "time")
    columns = [Column(title, kind) for title, kind in zip(titles, kinds, strict=True)]
    return Table("Every round", columns, [[row.get(name) for name in names] for row in subject.rows])


def _costs(subject: FinishedRun) -> Table:
    result = subject.result
    rows: list[list[str | int | float | None]] = [
        ["training", result.bytes_up, result.bytes_down, result.seconds, result.accuracy]
    ]
    for each in result.calibrations.values():
        rows.append([f"calibration by {each.name}", each.bytes_up, None, each.seconds, each.accuracy])
    columns = [Column("what"), Column("sent up", "bytes"), Column("sent down", "bytes"), Column("time", "seconds"),
               Column("accuracy after it", "percent")]  # fmt: skip
    note = "Bytes are those of all clients together. A calibration's download is its encoder, which clients have."
    return Table("Bytes and time", columns, rows, note)


def _settings(subject: FinishedRun) -> Table:
    lines = (subject.path / "config.toml").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(" = ") for line in lines if " = " in line]
    rows = [[key, value.strip('"')] for key, _, value in pairs if key != "data_dir"]
    return Table("Settings", [Column("option"), Column("value")], rows)


def _facts(subject: FinishedRun) -> list[tuple[str, str]]:
    result = subject.result
    facts = [("accuracy", f"{result.accuracy:.2%}")]
    if result.calibrations:
        usable = [each for each in result.calibrations.values() if not bound(each.name)]
        best = max(usable or result.calibrations.values(), key=lambda each: each.accuracy)
        facts.append((f"after {best.name}", f"{best.accuracy:.2%}"))
    if result.relative_accuracy is not None:
        facts.append(("of central training", f"{result.relative_accuracy:.1%}"))
    facts += [
        ("EMD", f"{result.emd:.2f}"),
        ("clients", f"{result.clients:,}"),
        ("rounds", f"{result.rounds:,}"),
        ("model", result.model),
        ("sent", format_bytes(result.bytes_up + result.bytes_down)),
        ("time", format_duration(result.seconds)),
    ]
    return facts


def _who(subject: FinishedRun) -> str:
    result = subject.result
    if "centralised" in result.method:
        return "all examples in one place"
    return f"{result.per_round} of {result.clients} clients a round"


def _made(subject: FinishedRun) -> str:
    return (
        f"unskew run {subject.path.name}/config.toml repeats this run and gives the same weights, sha256 "
        f"{subject.result.weights_sha256}. Local models are not stored: they are made again from the run's keys, as "
        "the clients would make them in the round after the last."
    )


_SKEW = (
    "Each client's labels. EMD is the distance between a client's label distribution and that of all clients, averaged "
    "by size: 0 where all are alike, 2 where nothing is shared."
)
_CURVES = (
    "Accuracy on the test images, against rounds, against the batches of the largest client (for which the others "
    "wait), against bytes and against time."
)
_CKA = (
    "Clients train the server's model once more, each on its own images, and all see the same test images. CKA says "
    "how alike two models' outputs of a layer are: 1 where one is a rotation of the other, 0 where they share nothing."
)
_NORMS = (
    "Each class has a row in the classifier; the longer it is, the more readily the class is predicted. Local rows "
    "that grow with a client's label counts are a sign of bias. What all rows share changes no prediction and is left "
    "out before and after calibration. The last point by round is one visit more, after the last round."
)
_DRIFT = "The distance between the model that a client is sent and the one it sends back, layer by layer."
_SEPARABILITY = (
    "The classes as Gaussians in feature space, summed up over the clients as calibration does. The distance between "
    "two is the sliced Wasserstein distance; calibration can only part what lies apart."
)
_PROJECTION = (
    "One t-SNE embedding of test images' features, coloured by their true class and by what each classifier says. "
    "Where whole islands change colour, the classifier is at fault and not the features."
)
_CONFUSION = "How the test images of each class are classified, with the run's own classifier and after calibration."
_INVERSION = (
    "What somebody who knows the model could make of a feature that a client sends, and of a mean of several: the "
    "image whose feature is nearest to it."
)
_COST = "What was sent and how long it took, for training and for each calibration."
