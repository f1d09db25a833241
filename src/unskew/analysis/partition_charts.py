"""A partition as charts, before any run: the charts of the measure ``skew``, below a heading."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unskew.analysis.skew import draw_skew, skew_findings, skew_of
from unskew.charts import Axis, Chart, Words
from unskew.charts.scales import wrap
from unskew.data.partition_files import Holdings
from unskew.data.population import Ints, Partition, cells, emd

MAX_CLIENTS = 60  # shown one by one
LINE, MARGIN = 17, 8  # units of the picture
FULL_WIDTH = 640  # at least, so that the facts fit on a line


def partition_charts(partition: Partition, labels: Ints, class_names: Sequence[str]) -> list[Chart]:
    """The partition of these labels: a heading with the facts, then the charts of its skew, all equally wide."""
    held = holdings_of(partition, labels, len(class_names))
    values = skew_of(held, class_names, MAX_CLIENTS)
    charts = draw_skew(values)
    width = max(FULL_WIDTH, *(chart.width for chart in charts))
    sentences = skew_findings(values) if held.sizes.any() else []
    heading = _heading(partition, _facts(partition, held, len(labels)), sentences, width)
    return [heading, *(replace(chart, width=width) for chart in charts)]


def holdings_of(partition: Partition, labels: Ints, classes: int) -> Holdings:
    """How many examples of each class every client has."""
    held = partition.client[partition.client >= 0]
    return Holdings(
        scheme=partition.scheme,
        names=partition.names,
        sizes=np.bincount(held, minlength=partition.clients).astype(np.int64),
        cells=np.stack(cells(partition.client, labels, classes), axis=1).astype(np.int64),
        emd=emd(partition.client, labels, classes),
        hash=partition.hash,
    )


def _facts(partition: Partition, held: Holdings, examples: int) -> str:
    total = int(held.sizes.sum())
    shown = f" ({MAX_CLIENTS} of them below, evenly by size)" if partition.clients > MAX_CLIENTS else ""
    facts = [f"seed {partition.seed}", _count(partition.clients, "client") + shown, _count(total, "example")]
    if left := examples - total:
        facts.append(f"{left:,} in no client")
    return " · ".join([*facts, f"EMD {held.emd:.2f}"])


def _heading(partition: Partition, facts: str, sentences: Sequence[str], width: int) -> Chart:
    """The scheme as a title, the facts and the finding below it."""
    lines = [line for text in (facts, *sentences) for line in wrap(text, width - 2 * MARGIN)]
    marks = [Words(0, place, line, "quiet", "start") for place, line in enumerate(lines)]
    titles = wrap(partition.scheme, (width - 2 * MARGIN) / 1.15, 14)
    height = 3 * MARGIN + 18 * len(titles) + LINE * len(lines)
    return Chart(
        "partition", partition.scheme, facts, marks, x=Axis(low=0, high=1),
        y=Axis(low=-0.7, high=len(lines) - 0.3, reverse=True), width=width, height=height, frame=False,
    )  # fmt: skip


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
