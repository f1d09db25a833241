"""What a run prints before its first round: its data, partition, network, method, engine, what it will need."""

from dataclasses import asdict

import numpy as np
import numpy.typing as npt

from unskew.core import text
from unskew.core.types import EVERYONE, Local
from unskew.core.units import counted, emd_words, format_bytes
from unskew.data.batches import RESIZED_CROP
from unskew.data.population import sizes_in_words
from unskew.round.local_optimizers import uses_sgd
from unskew.runs.config import Config
from unskew.runs.prepare import Overview


def overview_rows(seen: Overview) -> list[tuple[str, str]]:
    """A run's settings and needs, as words and facts."""
    config, images, sizes = seen.config, seen.images, seen.population.sizes
    channels, height, width = images.shape
    kind = "grey" if channels == 1 else "colour"
    return [
        (
            "data",
            f"{images.name}: {_train(seen)}, {_evaluation(seen)}, {len(images.classes):,} classes, "
            f"{width}x{height} {kind}",
        ),
        ("", f"mean {_numbers(images.mean)}, std {_numbers(images.std)}; {_augmented(config)}"),
        *(("", f"note: {note}") for note in (*images.notes, *seen.partition.notes)),
        (
            "partition",
            f"{seen.partition.scheme}: {counted(seen.partition.clients, 'client')} of {_sizes(sizes)}, "
            f"EMD {emd_words(seen.emd)}, hash {seen.partition.hash[:12]}",
        ),
        ("model", f"{config.model}: {seen.parameters:,} parameters"),
        *(("", note) for note in seen.model_notes),
        *([("", f"BatchNorm: {seen.batch_norm}")] if seen.batch_norm else []),
        (
            "method",
            f"{config.method}; {_who_comes(seen)}, epochs {seen.local.epochs}, batch {seen.local.batch}, "
            f"{_steps(seen.local)}"
            if config.rounds
            else f"{config.method}; {_untrained(seen)}",
        ),
        *([("start", f"the classifier of {config.start}")] if config.start else []),
        *(("", f"note: {note}") for note in (*_overruled(seen), *_stopping(config))),
        *_baseline(seen),
        ("engine", f"{seen.engine} ({seen.processes.words}), seed {config.seed}"),
        (
            "needs",
            f"{format_bytes(seen.memory_bytes)} of memory (data {format_bytes(seen.data_bytes)}) and "
            f"{format_bytes(seen.disk_bytes)} on disk",
        ),
        ("run", str(seen.path)),
    ]


def _train(seen: Overview) -> str:
    """How many training images there are, and whether they are somewhere else."""
    here = len(seen.images.train)
    return f"{here:,} train" if here else f"{seen.population.roster.examples:,} train at the nodes"


def _evaluation(seen: Overview) -> str:
    """How many images accuracy is measured on, and which."""
    count = len(seen.images.test)
    if not count:
        return "test images at the nodes"
    return f"{count:,} of them for validation, no test" if seen.config.validation else f"{count:,} test"


def _untrained(seen: Overview) -> str:
    """What a run without rounds does."""
    if seen.algorithm.finish:
        return "rounds 0: nothing is trained, the initial model is calibrated"
    return "rounds 0: nothing is trained, the initial model is evaluated as it is"


def _who_comes(seen: Overview) -> str:
    visits, kept_away = seen.visits, seen.algorithm.available or seen.algorithm.arrive
    take = visits[0].take
    if visits[0].client == EVERYONE:
        return "all examples in one place" if take is None else f"{counted(take, 'example')} a round, all in one place"
    most = "at most " if kept_away else ""
    if take is not None:
        return f"{most}{counted(len(visits), 'visit')} a round of {counted(take, 'example')} each"
    return f"{most}{counted(len(visits), 'client')} a round"


def _overruled(seen: Overview) -> list[str]:
    """The local settings that the method replaces."""
    asked, used = asdict(seen.config.local()), asdict(seen.local)
    return [
        f"the method sets {key.replace('_', ' ')} to {text.spell(used[key])}; --{key.replace('_', '-')} "
        f"{text.spell(asked[key])} has no effect"
        for key in asked
        if asked[key] != used[key]
    ]


def _steps(local: Local) -> str:
    """How clients step, in words: what is as usual is not said."""
    rate = f"lr {local.lr:g}" + ("" if local.schedule == "constant" else f" ({local.schedule})")
    kind = f"momentum {local.momentum:g}" if uses_sgd(local) else local.optimizer
    clip = f"gradients clipped to {local.clip:g}, " if local.clip else ""
    decay = f"weight decay {local.weight_decay:g}" + ("" if local.decay == "all" else " of weights alone")
    return f"{rate}, {kind}, {clip}{decay}"


def _stopping(config: Config) -> list[str]:
    """What --patience will do, and that it looks at the test set."""
    if config.patience is None or not config.rounds:
        return []
    words = f"{counted(config.patience, 'round')} without a better {config.monitor}"
    return [
        f"the run stops after {words}; the best round is chosen with the images that it is evaluated on, so that "
        "its accuracy there is a little too good"
    ]


def _sizes(sizes: npt.NDArray[np.int64]) -> str:
    same = sizes.min() == sizes.max()
    return sizes_in_words(sizes) + ("" if same else f" (median {int(np.median(sizes)):,})")


def _baseline(seen: Overview) -> list[tuple[str, str]]:
    if seen.baseline is None:
        return []
    others = f"; other settings: {', '.join(seen.unlike_baseline)}" if seen.unlike_baseline else ""
    return [("baseline", f"{seen.baseline.path}: {seen.baseline.accuracy:.2%}{others}")]


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _augmented(config: Config) -> str:
    kind = "resized crops" if config.augmentation == RESIZED_CROP else "crops"
    return f"{kind} and flips on" if config.augment else "no augmentation"
