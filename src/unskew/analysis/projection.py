"""Features in the plane: one t-SNE embedding of test images, colored by true class and by predictions."""

import warnings
from collections import Counter
from dataclasses import dataclass

import torch

from unskew.analysis.measure import Choice, Element, Measure, pick_calibrations
from unskew.charts import PALETTE, Axis, Chart, Dots
from unskew.core.errors import Missing
from unskew.runs.finished import FinishedRun

MIN_IMAGES = 5  # an embedding of fewer is meaningless
STEPS = 750  # of t-SNE: 250 more reduce its divergence on 2,000 features by only half a percent


@dataclass(frozen=True)
class Projection:
    """Positions of test images in the plane, and their classes by truth and by each classifier."""

    classes: list[str]
    x: list[float]
    y: list[float]
    truth: list[int]
    predicted: dict[str, list[int]]  # "before" is the run's own classifier


def take_projection(
    run: FinishedRun, *, images: int = 2000, perplexity: float = 30.0, calibrations: int = 3
) -> Projection:
    """t-SNE of the final model's features of at most ``images`` test images, always the same ones for a seed.

    Reference: van der Maaten and Hinton, 2008; Luo et al. 2021, Figure 5.
    """
    outputs, count = run.outputs, len(run.outputs.labels)
    if min(images, count) < MIN_IMAGES or perplexity <= 0:
        raise Missing(f"projection needs at least {MIN_IMAGES} test images and a perplexity above 0")
    if len(run.classes) > PALETTE:
        run.notes.append(f"{len(run.classes):,} classes share {PALETTE} colors")
    index = torch.arange(count)
    if count > images:
        index = torch.randperm(count, generator=run.key.fold("analysis", "images").torch())[:images].sort().values
    run.say("t-SNE", 0, 0)
    points = embed(outputs.features[index], perplexity, run.key.fold("tsne").number() % 2**32)
    x, y = ([round(value, 2) for value in column] for column in points.t().tolist())
    chosen = pick_calibrations(run, calibrations)
    predicted = {name or "before": outputs.predicted[name][index].tolist() for name in chosen}
    return Projection(run.classes, x, y, outputs.labels[index].tolist(), predicted)


def embed(features: torch.Tensor, perplexity: float, seed: int) -> torch.Tensor:
    """[n, 2]; on one thread, so that the same features always give the same picture."""
    from sklearn.manifold import TSNE  # a second to import
    from threadpoolctl import threadpool_limits

    if not bool(features.isfinite().all()):
        raise Missing("the features contain NaN or infinity and cannot be embedded")
    largest = max(1.0, (len(features) - 1) / 3)
    varied = float(features.std(0).max()) > 0
    tsne = TSNE(
        perplexity=min(perplexity, largest),
        init="pca" if varied and features.shape[1] > 1 else "random",
        random_state=seed,
        n_jobs=1,
        max_iter=STEPS,
    )
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # features without spread divide by zero inside
        return torch.from_numpy(tsne.fit_transform(features.cpu().double().numpy()))


def _draw(values: Projection) -> list[Chart]:
    charts = [_draw_plane(values, values.truth, "truth", "Colored by true class", "true class")]
    for name, predicted in values.predicted.items():
        right = sum(a == b for a, b in zip(predicted, values.truth, strict=True)) / len(values.truth)
        title = f"By prediction, {name}: {right:.1%} correct"
        charts.append(_draw_plane(values, predicted, name, title, f"prediction, {name}"))
    return charts


def _draw_plane(values: Projection, labels: list[int], name: str, title: str, by: str) -> Chart:
    marks = []
    for label in sorted(set(labels)):
        class_name = values.classes[label] if len(values.classes) <= PALETTE else ""
        at = [index for index, other in enumerate(labels) if other == label]
        x, y = ([column[index] for index in at] for column in (values.x, values.y))
        marks.append(Dots(x, y, label, radius=2.0, name=class_name))
    axis = Axis(low=min(values.x + values.y), high=max(values.x + values.y))
    alt = f"t-SNE of {len(values.truth):,} test images' features, colored by {by}."
    return Chart(f"projection-{name}", title, alt, marks, axis, axis, 440, 440, frame=False, square=True)


def _findings(values: Projection) -> list[str]:
    true, predicted = Counter(values.truth), Counter(values.predicted["before"])
    label = max(sorted(predicted), key=lambda label: predicted[label] - true[label])
    excess, name = predicted[label] - true[label], values.classes[label]
    if excess < 0.1 * true[label]:
        return ["No class is predicted much more often than it occurs."]
    if not true[label]:
        return [f"{excess:,} images are predicted to be {name}, although none of those shown is."]
    return [f"{name} is predicted too often: {predicted[label] / true[label]:.2f} times as often as it occurs."]


def _show(run: FinishedRun, values: Projection) -> list[Element]:
    truth, before, *others = _draw(values)
    names = [name for name in values.predicted if name != "before"]
    return [truth, before, *([Choice("classifier", dict(zip(names, others, strict=True)))] if others else [])]


PROJECTION = Measure(
    name="projection",
    values=Projection,
    take=take_projection,
    draw=_draw,
    findings=_findings,
    show=_show,
    title="Features in the plane",
    text=(
        "One t-SNE embedding of test images' features, colored by true class and by each classifier's predictions. "
        "If whole islands change color, the classifier is at fault, not the features."
    ),
    calibrations=True,
    headline=7,
)
