"""Makes docs/explanation/gallery.md and its pictures from real runs: `make gallery`.

With UNSKEW_DATA on CIFAR-10, three runs of 40 rounds, an hour on two cores; without it on the embedded digits, minutes.
Finished runs in the work folder are kept. Pictures of the page itself are taken where chromium is installed.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

import unskew
from unskew.analysis import MEASURES, parse_measure
from unskew.analysis.cka import Similarity, differ_clearly
from unskew.analysis.measure import load_or_take
from unskew.analysis.norms import unevenness
from unskew.charts.files import svg
from unskew.report.write import write_report
from unskew.runs.finished import FinishedRun
from unskew.runs.result import read_result

PAGE = Path(__file__).parents[1] / "explanation" / "gallery.md"
DURING = "silhouette(every=2) + norms(every=5, first=3) + drift(every=5, first=3) + model(every=10, first=1)"
RUNS = {  # name -> partition, method
    "skewed": ("dirichlet(alpha=0.1)", "fedavg"),
    "even": ("iid", "fedavg"),
    "prototypes": ("dirichlet(alpha=0.1)", "prototypes"),
}
PAPERS = "ccvr(relu=true, tukey=0.5)"  # with the transformation of CCVR's section 5.1
CALIBRATIONS = {"skewed": ("ccvr", PAPERS, "lda", "oracle"), "even": (), "prototypes": ("uscc",)}
SHOWN = {  # chart of the skewed run -> what it is in the papers
    "skew-circles": "Examples of each class, by client (CCVR, Figure 3, left)",
    "cka-means": "Similarity of local models by layer (CCVR, Figure 2)",
    "cka-classifier": "The classifier, client by client (CCVR, Figure 1)",
    "norms-round-1": "Local classifier rows against label counts in the first round (CCVR, Figure 3)",
    "norms-rounds": "The same, by round",
    "drift-rounds": "How far local models move, by layer and round",
    "separability-pairs": "Distance between class Gaussians (CCVR, section 5.4)",
    "separability-silhouette": "Silhouette by round (FedECCR, Figure 3)",
    "projection-truth": "Features by t-SNE, true classes (CCVR, Figure 5)",
    "projection-before": "The same, as the classifier sees them",
    "projection-ccvr": "The same, after ccvr",
    "confusion-classes": "Accuracy of each class, before and after calibration",
    "inversion-pictures": "Images reconstructed from features (CCVR, Figures 8 and 9)",
    "curves-bytes": "Accuracy by bytes",
}
BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
           "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip


def trained(work: Path, name: str) -> Path:
    """The run of that name, finished, calibrated and measured."""
    partition, method = RUNS[name]
    path, folder = work / name, os.environ.get("UNSKEW_DATA")
    if not (path / "result.json").exists():
        size = {"data": "cifar10", "rounds": 40, "evaluate_every": 2} if folder else {"rounds": 20, "lr": 0.02}
        unskew.run(
            partition=partition, method=method, data_dir=folder, clients=10, epochs=5, seed=0, during=DURING, out=path,
            **size,
        )  # fmt: skip
    there = read_result(path).calibrations
    if missing := [each for each in CALIBRATIONS[name] if each not in there]:
        unskew.calibrate_run(path, *missing)
    return path


def pictured(page: Path, target: Path, width: int, height: int) -> bool:
    """The top of a page as a picture, if there is a browser."""
    if shutil.which("chromium") is None:
        return False
    with tempfile.TemporaryDirectory() as profile:
        shot = [f"--user-data-dir={profile}", f"--screenshot={target}", f"--window-size={width},{height}"]
        subprocess.run(["chromium", *BROWSER, *shot, page.absolute().as_uri()], check=True, capture_output=True)
    return True


def main() -> None:
    """Train what is missing, measure, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/gallery"))
    options = parser.parse_args()
    paths = {name: trained(options.work, name) for name in RUNS}
    target = PAGE.with_suffix("")
    target.mkdir(exist_ok=True)
    page = options.work / "report.html"
    write_report(paths["skewed"], out=page)
    for name in ("even", "prototypes"):
        with FinishedRun(paths[name]) as run:
            for measure in ("skew", "curves", "cka", "norms", "separability", "confusion"):
                load_or_take(run, parse_measure(measure))
    both = options.work / "comparison.html"
    write_report(*paths.values(), out=both)
    with FinishedRun(paths["skewed"]) as run:
        measures = [load_or_take(run, parse_measure(name)) for name in MEASURES]
    charts = {chart.name: chart for each in measures for chart in each.charts}
    lines = [
        "# Gallery",
        "",
        "Charts of three real runs, made by `unskew analyse` and `unskew report`. `make gallery` generates this page.",
        "",
    ]
    more = "[Analyze a run](../how-to/analysis.md#over-more-seeds) repeats some of this with more seeds."
    lines += [*claims(paths), "", f"One run each, seed 0; {more}", ""]
    lines += ["## Three runs compared", ""]
    lines += table(paths)
    if pictured(page, target / "report.png", 1200, 1500) and pictured(both, target / "comparison.png", 1200, 1500):
        lines += [
            "",
            "## The report of one run",
            "",
            "![The report's top: findings, facts, who held what](gallery/report.png)",
        ]
        lines += [
            "",
            "## The report of several runs",
            "",
            "![Three runs compared: a table, curves](gallery/comparison.png)",
        ]
    lines += ["", "## The papers' figures, from our own run", ""]
    for name, words in SHOWN.items():
        if name in charts:
            (target / f"{name}.svg").write_text(svg(charts[name]), encoding="utf-8")
            lines += [f"### {words}", "", f"![{charts[name].alt}](gallery/{name}.svg)", ""]
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def claims(paths: dict[str, Path]) -> list[str]:
    """What the papers found, and whether it shows in our runs; every figure is taken from them."""
    seen = {name: stored(path, "cka")["means"] for name, path in paths.items()}
    skewed, even = seen["skewed"], seen["even"]
    falls = sum(after < before for before, after in pairwise(skewed))
    below = sum(a < b for a, b in zip(skewed, even, strict=True))
    norms = stored(paths["skewed"], "norms")
    first, last = norms["rounds"][0], norms["rounds"][-1]
    other = stored(paths["even"], "norms")["rounds"][-1]
    before = unevenness(norms["server"])
    after = {name: unevenness(norms["calibrated"][name]) for name in ("ccvr", PAPERS)}
    least = min(range(len(skewed) - 1), key=lambda place: skewed[place])
    clear = differ_clearly(Similarity(**stored(paths["skewed"], "cka")), len(skewed) - 1, least)
    silhouettes = {name: stored(path, "separability")["silhouette"] for name, path in paths.items()}
    rows = [
        ("local models are less similar in deeper layers (CCVR)", falls == len(skewed) - 1,
         f"CKA falls at {falls} of {len(skewed) - 1} steps"),
        ("the classifier is the least similar layer (CCVR)", clear,
         f"{skewed[-1]:.3f}; the least of the others is {skewed[least]:.3f}"),
        ("skew makes local models less similar in every layer (CCVR)", below == len(skewed),
         f"{below} of {len(skewed)} layers; classifier {skewed[-1]:.2f} against {even[-1]:.2f}"),
        ("classifier rows follow label counts early in training (CCVR)", first["correlation"] > 0.5,
         f"correlation {first['correlation']:.2f} {first['when']}, {last['correlation']:.2f} {last['when']}"),
        ("local classifiers end more uneven under skew (CCVR)", last["unevenness"] > other["unevenness"],
         f"deviation of row norms / mean {last['unevenness']:.3f} against {other['unevenness']:.3f}"),
        *((f"calibration evens out the rows: {name}", each < before, f"{before:.3f} before, {each:.3f} after")
          for name, each in after.items()),
        ("prototype contrast separates the classes better (FedECCR)", silhouettes["prototypes"] > silhouettes["skewed"],
         f"silhouette {silhouettes['prototypes']:.4f} against {silhouettes['skewed']:.4f}"),
    ]  # fmt: skip
    lines = ["| the papers' finding | in this one run | measured |", "| --- | --- | --- |"]
    return lines + [f"| {claim} | {'yes' if holds else '**no**'} | {words} |" for claim, holds, words in rows]


def stored(path: Path, measure: str) -> dict:
    """The values of a measure, as they are stored in the run's folder."""
    return json.loads((path / "figures" / f"{measure}.json").read_text())["values"]


def table(paths: dict[str, Path]) -> list[str]:
    """CKA by layer, silhouette, accuracy of the three runs."""
    layers = stored(paths["skewed"], "cka")["layers"]
    lines = [f"| run | accuracy | {' | '.join(f'CKA {layer}' for layer in layers)} | silhouette |"]
    lines.append("| --- |" + " ---: |" * (len(layers) + 2))
    for path in paths.values():
        result = read_result(path)
        cells = [f"{mean:.3f}" for mean in stored(path, "cka")["means"]]
        shown = f"{stored(path, 'separability')['silhouette']:.4f}"
        lines.append(f"| {result.method}, {result.partition} | {result.accuracy:.2%} | {' | '.join(cells)} | {shown} |")
    return lines


if __name__ == "__main__":
    main()
