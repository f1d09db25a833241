"""Makes docs/gallery.md and its pictures from real runs: `make gallery`.

With UNSKEW_DATA on CIFAR-10, three runs of 40 rounds, an hour on two cores; without it on the embedded digits, minutes.
Finished runs in the work folder are kept. Pictures of the page itself are taken where chromium is installed.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import unskew
from unskew.analysis import analyse
from unskew.charts.svg import svg
from unskew.report.writing import write_report
from unskew.results import read_result

HERE = Path(__file__).parent
DURING = "silhouette(every=2) + norms(every=5, first=3) + drift(every=5, first=3) + model(every=10, first=1)"
RUNS = {  # name -> partition, method
    "skewed": ("dirichlet(alpha=0.1)", "fedavg"),
    "even": ("iid", "fedavg"),
    "prototypes": ("dirichlet(alpha=0.1)", "prototypes"),
}
CALIBRATIONS = {"skewed": ("ccvr", "lda", "oracle"), "even": (), "prototypes": ("uscc",)}
SHOWN = {  # chart of the skewed run -> what it is in the papers
    "skew-circles": "Who holds what (CCVR, Figure 3, left)",
    "cka-means": "Similarity of local models by layer (CCVR, Figure 2)",
    "cka-classifier": "The classifier, client by client (CCVR, Figure 1)",
    "norms-round-1": "Local classifier rows against label counts in the first round (CCVR, Figure 3)",
    "norms-rounds": "The same, by round",
    "drift-rounds": "How far clients go, by layer and round",
    "separability-pairs": "Distance between class Gaussians (CCVR, section 5.4)",
    "separability-silhouette": "Silhouette by round (FedECCR, Figure 3)",
    "projection-truth": "Features by t-SNE, true classes (CCVR, Figure 5)",
    "projection-before": "The same, as the classifier sees them",
    "projection-ccvr": "The same, after ccvr",
    "confusion-classes": "Accuracy of each class, before and after calibration",
    "inversion-pictures": "Images made again from features (CCVR, Figures 8 and 9)",
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
    target = HERE / "gallery"
    target.mkdir(exist_ok=True)
    page = options.work / "report.html"
    write_report(paths["skewed"], out=page)
    for name in ("even", "prototypes"):
        analyse(paths[name], "skew", "curves", "cka", "norms", "separability", "confusion")
    both = options.work / "comparison.html"
    comparison = write_report(*paths.values(), out=both)
    found = analyse(paths["skewed"])
    charts = {chart.name: chart for each in found.values() for chart in each.charts}
    lines = ["# Gallery", "", __doc__.partition("\n")[0].replace("docs/gallery.md and its", "This page and its"), ""]
    lines += ["Every sentence here was computed from the runs below, as `unskew report` does.", ""]
    for sentence in [sentence for each in found.values() for sentence in each.findings]:
        lines.append(f"- {sentence}")
    lines += ["", "## Three runs side by side", "", *(f"- {sentence}" for sentence in comparison.findings), ""]
    lines += table(paths)
    if pictured(page, target / "report.png", 1200, 1500) and pictured(both, target / "comparison.png", 1200, 1500):
        lines += [
            "",
            "## The page of one run",
            "",
            "![The report's top: findings, facts, who held what](gallery/report.png)",
        ]
        lines += ["", "## The page of several", "", "![Three runs compared: a table, curves](gallery/comparison.png)"]
    lines += ["", "## The figures of the papers, from our own run", ""]
    for name, words in SHOWN.items():
        if name in charts:
            (target / f"{name}.svg").write_text(svg(charts[name]), encoding="utf-8")
            lines += [f"### {words}", "", f"![{charts[name].alt}](gallery/{name}.svg)", ""]
    (HERE / "gallery.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def table(paths: dict[str, Path]) -> list[str]:
    """CKA by layer, silhouette, accuracy of the three runs."""
    found = {
        name: {
            each: json.loads((path / "figures" / f"{each}.json").read_text())["values"]
            for each in ("cka", "separability")
        }
        for name, path in paths.items()
    }
    layers = found["skewed"]["cka"]["layers"]
    lines = [f"| run | accuracy | {' | '.join(f'CKA {layer}' for layer in layers)} | silhouette |"]
    lines.append("| --- |" + " ---: |" * (len(layers) + 2))
    for name, path in paths.items():
        result = read_result(path)
        cells = [f"{mean:.3f}" for mean in found[name]["cka"]["means"]]
        words = f"{result.method}, {result.partition}"
        shown = f"{found[name]['separability']['silhouette']:.4f}"
        lines.append(f"| {words} | {result.accuracy:.2%} | {' | '.join(cells)} | {shown} |")
    return lines


if __name__ == "__main__":
    main()
