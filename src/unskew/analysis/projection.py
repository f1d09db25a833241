"""Features in the plane: one t-SNE embedding of test images, coloured by truth, by prediction before and after."""

import warnings
from dataclasses import dataclass

import torch

from unskew.analysis.measure import Choice, Element, Measure, pick_calibrations
from unskew.charts import PALETTE, Axis, Chart, Dots
from unskew.core.errors import Missing, UserError
from unskew.runs.finished import FinishedRun

MIN_IMAGES = 5  # an embedding of fewer means nothing
STEPS = 750  # of t-SNE: 250 more lower its divergence on 2,000 features by half a per cent


@dataclass(frozen=True)
class Projection:
    """Places of test images in the plane, and their classes by truth and by each classifier."""

    classes: list[str]
    x: list[float]
    y: list[float]
    truth: list[int]
    predicted: dict[str, list[int]]  # "before" is the run's own classifier


def take_projection(
    run: FinishedRun, *, images: int = 2000, perplexity: float = 30.0, calibrations: int = 3
) -> Projection:
    """t-SNE of the final model's features, of at most ``images`` test images; the same ones for the same seed.

    Reference: van der Maaten and Hinton, 2008; Luo et al. 2021, Figure 5.
    """
    if images < MIN_IMAGES or perplexity <= 0:
        raise UserError(
            f"projection(images={images}, perplexity={perplexity}): give {MIN_IMAGES} images or more, and a perplexity "
            "above 0"
        )
    outputs = run.outputs
    if len(run.classes) > PALETTE:
        run.notes.append(
            f"{len(run.classes):,} classes share {PALETTE} colours: the same colour is not always the same class"
        )
    count = len(outputs.labels)
    if count < MIN_IMAGES:
        raise Missing(f"the test set has {count} images, too few for an embedding")
    index = torch.arange(count)
    if count > images:
        index = torch.randperm(count, generator=run.key.fold("analysis", "images").torch())[:images].sort().values
    run.say("t-SNE", 0, 0)
    places = embed(outputs.features[index], perplexity, run.key.fold("tsne").number() % 2**32)
    predicted = {
        name or "before": outputs.predicted[name][index].tolist() for name in pick_calibrations(run, calibrations)
    }
    return Projection(
        classes=run.classes,
        x=[round(value, 2) for value in places[:, 0].tolist()],
        y=[round(value, 2) for value in places[:, 1].tolist()],
        truth=outputs.labels[index].tolist(),
        predicted=predicted,
    )


def embed(features: torch.Tensor, perplexity: float, seed: int) -> torch.Tensor:
    """[n, 2]; one thread, so that the same features give the same picture."""
    from sklearn.manifold import TSNE  # a second to import
    from threadpoolctl import threadpool_limits

    if not bool(features.isfinite().all()):
        raise Missing("the features have NaN or infinity; they cannot be embedded")
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


def draw_projection(values: Projection) -> list[Chart]:
    """The same places three times or more, coloured by truth and by each classifier's predictions."""
    return [truth_chart(values), *prediction_charts(values).values()]


def truth_chart(values: Projection) -> Chart:
    """Coloured by the true class."""
    return _plane(values, values.truth, "truth", "Coloured by their true class")


def prediction_charts(values: Projection) -> dict[str, Chart]:
    """By classifier, coloured by its predictions; "before" is first."""
    charts = {}
    for name, predicted in values.predicted.items():
        wrong = sum(a != b for a, b in zip(predicted, values.truth, strict=True)) / len(values.truth)
        title = f"By prediction, {name}: {1 - wrong:.1%} right"
        charts[name] = _plane(values, predicted, name, title)
    return charts


def _plane(values: Projection, labels: list[int], name: str, title: str) -> Chart:
    marks = []
    for label in sorted(set(labels)):
        at = [place for place, each in enumerate(labels) if each == label]
        named = values.classes[label] if len(values.classes) <= 10 else ""
        x, y = ([numbers[place] for place in at] for numbers in (values.x, values.y))
        marks.append(Dots(x, y, label % 10, radius=2.0, name=named))
    by = "their true class" if name == "truth" else f"prediction, {name}"
    low, high = min(values.x + values.y), max(values.x + values.y)
    return Chart(
        f"projection-{name}", title, f"t-SNE of {len(values.truth):,} test images' features, coloured by {by}.", marks,
        x=Axis(low=low, high=high), y=Axis(low=low, high=high), width=440, height=440, frame=False, square=True,
    )  # fmt: skip


def projection_findings(values: Projection) -> list[str]:
    """Which class is predicted too often."""
    before = values.predicted["before"]
    counts = {label: before.count(label) - values.truth.count(label) for label in set(values.truth) | set(before)}
    label = max(counts, key=lambda each: counts[each])
    true = values.truth.count(label)
    if counts[label] < 0.1 * true:
        return ["No class is predicted much more often than it occurs."]
    if not true:
        return [f"{counts[label]:,} images are predicted to be {values.classes[label]}, and none of those shown is."]
    return [
        f"The class that is predicted too often is {values.classes[label]}: {before.count(label) / true:.2f} times as "
        "often as it occurs."
    ]


def show_projection(run: FinishedRun, values: Projection) -> list[Element]:
    """Truth and before side by side, then the calibrations, one at a time."""
    charts = prediction_charts(values)
    before = charts.pop("before")
    return [truth_chart(values), before, *([Choice("classifier", charts)] if charts else [])]


PROJECTION = Measure(
    name="projection",
    values=Projection,
    take=take_projection,
    draw=draw_projection,
    findings=projection_findings,
    show=show_projection,
    title="Features in the plane",
    text=(
        "One t-SNE embedding of test images' features, coloured by their true class and by what each classifier says. "
        "Where whole islands change colour, the classifier is at fault and not the features."
    ),
    calibrations=True,
    headline=7,
)
