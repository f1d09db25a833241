"""Measures calibrations under differential privacy over several draws of the noise, for docs/explanation/privacy.md.

`make epsilon-table`, minutes. It trains recipes/digits.toml, or takes the finished run that it is given, computes all
features once, and makes every calibration from DRAWS noisy releases at each epsilon. The clear statistics are those
that all clients together would send.
"""

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from methods_table import replaced
from torch import Tensor

import unskew
from unskew.calibration.calibrate import calibrate
from unskew.calibration.federated import real_features
from unskew.calibration.finisher import RealFeatures
from unskew.calibration.protection import add_noise, clip_features
from unskew.core.key import Key
from unskew.models.cut import cut
from unskew.runs.finished import FinishedRun

DOCS = Path(__file__).parents[1]
EPSILONS = (1, 2, 4, 8, 30, 100, 1000)
DRAWS = 10
CLIP, DELTA = 10.0, 1e-5
RELEASED = {"lda": "shared", "ccvr(covariance=diagonal)": "diagonal", "ccvr": "full"}  # calibration -> form


def features_of(run: Path) -> tuple[torch.nn.Module, Tensor, Tensor, Tensor, Tensor]:
    """The classifier; training features and labels, test features and labels."""
    finished = FinishedRun(run, device="cpu")
    side = finished.side
    side.load(finished.model, training=False)
    encoder, head = cut(side.network)
    train, labels = real_features(side, RealFeatures(), Key(0))
    everything = torch.arange(len(side.test.labels))
    with torch.no_grad():
        test = torch.cat([encoder(side.test.batch(some)[0]) for some in torch.split(everything, 2000)])
    return head, train, labels, test, torch.as_tensor(side.test.labels).long()


def measured(run: Path, draws: int, epsilons: Sequence[float], sources: Sequence[str]) -> list[str]:
    """Markdown: accuracy by epsilon, mean and deviation over the draws."""
    head, train, labels, test, truth = features_of(run)
    classes = head.out_features
    assert isinstance(classes, int)
    short, seen = clip_features(train, CLIP), clip_features(test, CLIP)

    def accuracy(source: str, released: unskew.ClassStatistics, features: Tensor) -> float:
        made = calibrate(head, released, source)
        with torch.no_grad():
            answers = made(features).argmax(1)
        return 100 * float((answers == truth).double().mean())

    rows = {}
    wanted = {source: RELEASED[source] for source in sources}
    for epsilon in epsilons:
        cells = []
        for source, form in wanted.items():
            clear = unskew.ClassStatistics.of_features(short, labels, classes, form)
            keys = [Key(draw).fold("epsilon table") for draw in range(draws)]
            found = [accuracy(source, add_noise(clear, CLIP, epsilon, DELTA, key), seen) for key in keys]
            cells.append(f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}")
        rows[f"{epsilon:g}"] = cells
    for name, used, shown in (("no noise", short, seen), ("no noise, not cut", train, test)):
        rows[name] = [
            f"{accuracy(s, unskew.ClassStatistics.of_features(used, labels, classes, f), shown):.2f}"
            for s, f in wanted.items()
        ]
    heads = ["ε", *(f"`{source}`" for source in wanted)]
    lines = [f"| {' | '.join(heads)} |", "| ---: |" + " ---: |" * len(wanted)]
    return [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def main() -> None:
    """Train what is missing, measure, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="a finished run; its table is printed, nothing is written")
    parser.add_argument("--draws", type=int, default=DRAWS, help="of the noise, for each epsilon")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--calibrations", nargs="+", choices=RELEASED, default=list(RELEASED))
    options = parser.parse_args()
    asked = options.draws, options.epsilons, options.calibrations
    warnings.simplefilter("ignore")  # that classes are dropped where noise is strong
    if options.run is not None:
        print("\n".join(measured(options.run, *asked)))  # noqa: T201
        return
    with tempfile.TemporaryDirectory() as folder:
        run = unskew.run(DOCS.parent / "recipes" / "digits.toml", method="fedavg", out=Path(folder) / "digits").path
        lines = measured(run, *asked)
    page = DOCS / "explanation" / "privacy.md"
    page.write_text(replaced(page.read_text(encoding="utf-8"), "draws", lines), encoding="utf-8")


if __name__ == "__main__":
    main()
