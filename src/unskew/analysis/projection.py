"""Features in the plane: one t-SNE embedding of test images, coloured by truth, by prediction before and after."""

import warnings
from dataclasses import dataclass

import torch

from unskew.analysis.confusion import best
from unskew.charts import Axis, Chart, Dots
from unskew.core.errors import UserError
from unskew.runs.study import FinishedRun, Missing

LEAST = 5  # images from which an embedding means anything
STEPS = 750  # of t-SNE: 250 more lower its divergence on 2,000 features by half a per cent


@dataclass(frozen=True)
class Projection:
    """Places of test images in the plane, and their classes by truth and by each classifier."""

    classes: list[str]
    x: list[float]
    y: list[float]
    truth: list[int]
    predicted: dict[str, list[int]]  # "before" is the run's own classifier


def measure(subject: FinishedRun, *, images: int = 2000, perplexity: float = 30.0, calibrations: int = 3) -> Projection:
    """t-SNE of the final model's features, of at most so many test images; the same ones for the same seed.

    Reference: van der Maaten and Hinton, 2008; Luo et al. 2021, Figure 5.
    """
    if images < LEAST or perplexity <= 0:
        raise UserError(f"projection places {LEAST} images or more, with a perplexity above 0")
    outputs = subject.outputs
    count = len(outputs.labels)
    if count < LEAST:
        raise Missing(f"the test set has {count} images, too few for an embedding")
    index = torch.arange(count)
    if count > images:
        index = torch.randperm(count, generator=subject.key.fold("analysis", "images").torch())[:images].sort().values
    subject.say("t-SNE", 0, 0)
    places = embedded(outputs.features[index], perplexity, subject.key.fold("tsne").number() % 2**32)
    predicted = {name or "before": outputs.predicted[name][index].tolist() for name in best(subject, calibrations)}
    return Projection(
        classes=subject.classes,
        x=[round(value, 2) for value in places[:, 0].tolist()],
        y=[round(value, 2) for value in places[:, 1].tolist()],
        truth=outputs.labels[index].tolist(),
        predicted=predicted,
    )


def embedded(features: torch.Tensor, perplexity: float, seed: int) -> torch.Tensor:
    """[n, 2]; one thread, so that the same features give the same picture."""
    from sklearn.manifold import TSNE  # a second to import
    from threadpoolctl import threadpool_limits

    if not bool(features.isfinite().all()):
        raise Missing("the features hold NaN or infinity; nothing can be embedded")
    most = max(1.0, (len(features) - 1) / 3)
    varied = float(features.std(0).max()) > 0
    tsne = TSNE(
        perplexity=min(perplexity, most),
        init="pca" if varied and features.shape[1] > 1 else "random",
        random_state=seed,
        n_jobs=1,
        max_iter=STEPS,
    )
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # features without spread divide by zero inside
        return torch.from_numpy(tsne.fit_transform(features.double().numpy()))


def draw(found: Projection) -> list[Chart]:
    """The same places three times or more, coloured by truth and by each classifier's predictions."""
    charts = [_plane(found, found.truth, "truth", "Coloured by their true class")]
    for name, predicted in found.predicted.items():
        wrong = sum(a != b for a, b in zip(predicted, found.truth, strict=True)) / len(found.truth)
        title = f"By prediction, {name}: {1 - wrong:.1%} right"
        charts.append(_plane(found, predicted, name, title))
    return charts


def _plane(found: Projection, labels: list[int], name: str, title: str) -> Chart:
    marks = []
    for label in sorted(set(labels)):
        at = [place for place, each in enumerate(labels) if each == label]
        named = found.classes[label] if len(found.classes) <= 10 else ""
        x, y = ([values[place] for place in at] for values in (found.x, found.y))
        marks.append(Dots(x, y, label % 10, radius=2.0, name=named))
    by = "their true class" if name == "truth" else f"prediction, {name}"
    low, high = min(found.x + found.y), max(found.x + found.y)
    return Chart(
        f"projection-{name}", title, f"t-SNE of {len(found.truth):,} test images' features, coloured by {by}.", marks,
        x=Axis(low=low, high=high), y=Axis(low=low, high=high), width=440, height=440, frame=False, square=True,
    )  # fmt: skip


def findings(found: Projection) -> list[str]:
    """Which class swallows the others."""
    before = found.predicted["before"]
    counts = {label: before.count(label) - found.truth.count(label) for label in set(found.truth) | set(before)}
    label = max(counts, key=lambda each: counts[each])
    true = found.truth.count(label)
    if counts[label] < 0.1 * true:
        return ["No class is predicted much more often than it occurs."]
    if not true:
        return [f"{counts[label]:,} images are predicted to be {found.classes[label]}, and none of those shown is."]
    return [
        f"The class that is predicted too often is {found.classes[label]}: {before.count(label) / true:.2f} times as "
        "often as it occurs."
    ]
