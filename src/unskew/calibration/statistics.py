"""Class statistics: the count, sum and second moment of the features of each class, summed over clients.

Shapes: C classes, P of them with examples, d features.
"""

import inspect
import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from unskew.calibration.classifier import require_finite
from unskew.calibration.covariances import (
    MAX_FEATURES,
    Form,
    LowRank,
    Shared,
    advise_smaller_form,
    check_memory,
    packed_diagonal,
    parse_form,
    require_memory,
    statistics_bytes,
    unpack,
)
from unskew.core.errors import UserError, a_kind, accepts, whole_number
from unskew.core.files import usable_path, write_whole
from unskew.core.limits import MAX_CLASSES, check_plain, check_unpacked, size_on_disk
from unskew.core.machine import neutral
from unskew.core.types import Sums, Tensors
from unskew.models.any_module import evaluating
from unskew.models.networks import device_of

IMAGE_KEYS = ("image", "images", "pixel_values", "x", "img")
LABEL_KEYS = ("label", "labels", "y", "target")
BUFFER = 2048  # features collected before they are added: one product per class for many batches
MAX_EXAMPLES = 2**40  # of a class; the sum over all classes must fit in 64 bits


@dataclass(frozen=True)
class KnownNoise:
    """Standard deviations of the noise added for privacy."""

    sums: float  # on every entry of Σz
    second: float  # on the diagonal of a second moment; off the diagonal it is smaller by √2

    def __add__(self, other: "KnownNoise") -> "KnownNoise":
        """The noise of a sum of two releases with independent noise."""
        return KnownNoise(math.hypot(self.sums, other.sums), math.hypot(self.second, other.second))


def _read_batch(batch: Any, device: torch.device, dtype: torch.dtype | None) -> tuple[Any, Tensor]:
    """Images on the device and labels [n] on the CPU, from a pair or a dict.

    Floats in arrays and lists become ``dtype``, the encoder's. Images that are not numbers are passed on unchanged.
    """
    if isinstance(batch, Mapping):
        found = ([batch[key] for key in keys if key in batch] for keys in (IMAGE_KEYS, LABEL_KEYS))
        batch = [values[0] for values in found if values]
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise UserError(
            "batches must be pairs of (images, labels) or dicts with both, under "
            f"{' or '.join(IMAGE_KEYS)} and {' or '.join(LABEL_KEYS)}"
        )
    images, labels = batch
    if isinstance(images, np.ndarray | list | tuple):
        images = _as_tensor(images)
        images = images.to(dtype) if dtype is not None and images.is_floating_point() else images
    return _map_tensors(lambda value: value.to(device), images), _as_labels(labels)


def _as_labels(labels: Any) -> Tensor:
    """Labels as a tensor on the CPU: integers as int64, anything else unchanged."""
    values = _as_tensor(labels).detach().cpu()
    return values if values.is_floating_point() or values.is_complex() else values.long()


def _as_tensor(values: Any) -> Tensor:
    try:
        if isinstance(values, list | tuple) and values and isinstance(values[0], Tensor):
            return torch.stack(list(values))
        return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        wanted = "tensors, numpy arrays or lists of numbers"
        raise UserError(f"images and labels must be {wanted}, not {a_kind(values)} ({error})") from error


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _map_tensors(function, part) for name, part in value.items()}
    return function(value) if isinstance(value, Tensor) else value


def _encode(encoder: nn.Module, images: Any, dtype: torch.dtype | None) -> Any:
    """The encoder's features; images of another floating-point dtype are converted if the encoder refuses them.

    Integers are refused instead, since their normalization is unknown. A dict whose keys are parameters of the encoder
    is passed by name. If an output has ``pooler_output`` (Hugging Face), these are the features.
    """

    def call(images: Any) -> Any:
        if not isinstance(images, Mapping):
            return encoder(images)
        parameters = inspect.signature(encoder.forward).parameters
        any_name = [knob.kind for knob in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]
        if any_name or set(images) <= set(parameters):
            return encoder(**images)
        try:
            return encoder(images)
        except (AttributeError, LookupError, TypeError) as error:
            given, wanted = ", ".join(map(repr, images)), ", ".join(parameters)
            raise UserError(f"the encoder takes {wanted}, not a dict with {given} ({error!r})") from error

    try:
        output = call(images)
    except RuntimeError as error:  # "expected … to have the same dtype", "Input type … and weight type …"
        given = images.values() if isinstance(images, Mapping) else [images]
        other = [value.dtype for value in given if isinstance(value, Tensor) and value.dtype != dtype]
        if not other or dtype is None or "type" not in str(error).lower():
            raise
        if not any(kind.is_floating_point for kind in other):
            raise UserError(
                f"the images are {other[0]}, but the encoder takes {dtype}; normalize them as for training, such as "
                "(images / 255 - mean) / std"
            ) from error
        output = call(_map_tensors(lambda value: value.to(dtype) if value.is_floating_point() else value, images))
    pooled = getattr(output, "pooler_output", None)
    return pooled.flatten(1) if isinstance(pooled, Tensor) else output


def _check_batch(features: Any, labels: Tensor, classes: int) -> None:
    if not isinstance(features, Tensor):
        raise UserError(
            f"features must be a tensor [n, d], not {a_kind(features)}; give a module that returns one, such as the "
            "base_model of a Hugging Face model with last_hidden_state.mean(1)"
        )
    fit = features.dim() == 2 and features.shape[1] > 0 and features.shape[:1] == labels.shape
    if not fit or features.is_complex() or labels.is_floating_point() or labels.is_complex():
        given = [f"{value.dtype} {list(value.shape)}" for value in (features, labels)]
        raise UserError(f"features must be real numbers [n, d] and labels whole numbers [n], not {' and '.join(given)}")
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise UserError(
            f"labels must be in 0..{classes - 1}; these range from {int(labels.min())} to {int(labels.max())}"
        )


@dataclass(frozen=True, eq=False)
class ClassStatistics:
    """The count, sum and second moment of a client's features for every class, in float64 on the CPU.

    ``a + b`` are the statistics of both clients' features together: mean and covariance (divisor N − 1) of a sum over
    clients are those of the pooled features. Classes that a client does not have take no memory.

    Parameters
    ----------
    classes
        The number of classes C.
    form
        How much of the second moments is kept: full, diagonal, shared or low-rank.
    held
        [P], the classes that have examples, ascending.
    number
        [P], the number of examples of each.
    sums
        The form's sums.
    noise
        The size of the noise added for privacy, if any.
    """

    classes: int
    form: Form
    held: Tensor
    number: Tensor
    sums: Tensors
    noise: KnownNoise | None = None

    @staticmethod
    @neutral()
    def empty(classes: int, width: int, form: str | Form = "full") -> "ClassStatistics":
        """The statistics of a client without examples, for ``width`` features."""
        form, classes = parse_form(form), whole_number(classes, "classes", 1, MAX_CLASSES)
        width = whole_number(width, "width", 1, MAX_FEATURES)
        none = torch.zeros(0, dtype=torch.int64)
        sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in form.shapes(0, width).items()}
        return ClassStatistics(classes, form, none, none, sums)

    @staticmethod
    @neutral()
    def of_features(features: Tensor, labels: Any, classes: int, form: str | Form = "full") -> "ClassStatistics":
        """The statistics of features.

        Parameters
        ----------
        features
            [n, d].
        labels
            [n], a tensor, a numpy array or a list of whole numbers.
        classes
            The number of classes.
        form
            How much of the second moments is kept.
        """
        form, classes, labels = parse_form(form), whole_number(classes, "classes", 1, MAX_CLASSES), _as_labels(labels)
        _check_batch(features, labels, classes)
        features = features.detach().cpu()
        order = torch.argsort(labels, stable=True)
        held, number = torch.unique_consecutive(labels[order], return_counts=True)
        check_memory(form, len(held), features.shape[1])
        shapes = form.shapes(len(held), features.shape[1])
        sums = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
        parts = torch.split_with_sizes(features.index_select(0, order).double(), number.tolist())
        for part, total in zip(parts, sums["sums"], strict=True):
            torch.sum(part, 0, out=total)
        require_finite(sums["sums"])  # thousands of times fewer numbers than features
        form.measure(features, parts, sums)
        return ClassStatistics(classes, form, held, number, sums)

    @staticmethod
    @neutral(keep_threads=True)
    @accepts
    def measure(
        encoder: nn.Module,
        batches: Iterable[Any],
        classes: int,
        *,
        form: str | Form = "full",
        relabel: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> "ClassStatistics":
        """Measure the statistics of an encoder's features in one pass, without having all features in memory.

        Parameters
        ----------
        encoder
            From images to features [n, d]. It runs in eval mode without gradients; its mode is restored afterwards. The
            caller's autocast has no effect; an encoder that needs it can use it in its ``forward``.
        batches
            Images and labels: tensors, numpy arrays or lists, in pairs or in dicts such as {"image": …, "label": …}.
            Images are moved to the encoder's device.
        classes
            The number of classes.
        form
            How much of the second moments is kept: "full", "diagonal", "shared" or "low-rank(32)".
        relabel
            Maps features and labels to other labels.
        """
        if not isinstance(encoder, nn.Module):
            raise UserError(f"the encoder must be a torch module, not {a_kind(encoder)}")
        form, classes = parse_form(form), whole_number(classes, "classes", 1, MAX_CLASSES)
        device = device_of(encoder)
        dtype = next((value.dtype for value in encoder.parameters()), None)

        def summed(waiting: list[tuple[Tensor, Tensor]]) -> ClassStatistics:
            features, labels = (torch.cat(values) for values in zip(*waiting, strict=True))
            return ClassStatistics.of_features(features, labels, classes, form)

        def parts() -> Iterator[ClassStatistics]:
            waiting, count = list[tuple[Tensor, Tensor]](), 0
            for batch in batches:
                images, labels = _read_batch(batch, device, dtype)
                try:
                    features = _encode(encoder, images, dtype)
                except (TypeError, IndexError, KeyError):
                    if not isinstance(batch, Mapping) or isinstance(images, Mapping):
                        raise
                    features = _encode(encoder, _map_tensors(lambda value: value.to(device), batch), dtype)
                if relabel is not None:
                    labels = relabel(features, labels)
                _check_batch(features, labels, classes)
                waiting.append((features.clone(), labels.clone()))  # the caller may reuse their memory
                count += len(labels)
                if count >= BUFFER:
                    yield summed(waiting)
                    waiting, count = [], 0
            if waiting:
                yield summed(waiting)

        with evaluating(encoder), torch.no_grad():
            return _merge(parts())

    @staticmethod
    @neutral()
    @accepts
    def merged(parts: Iterable["ClassStatistics"]) -> "ClassStatistics":
        """Add statistics one by one; from an iterator, only one part is in memory at a time."""
        return _merge(parts)

    def __add__(self, other: "ClassStatistics") -> "ClassStatistics":
        """The statistics of both clients' features together."""
        if not isinstance(other, ClassStatistics):
            return NotImplemented
        return ClassStatistics.merged((self, other))

    @property
    def width(self) -> int:
        """d."""
        return self.sums["sums"].shape[1]

    @property
    @neutral()
    def counts(self) -> Tensor:
        """[C], the number of examples of each class."""
        return torch.zeros(self.classes, dtype=torch.int64).index_copy(0, self.held, self.number)

    @property
    def size(self) -> int:
        """The bytes that a client sends for these statistics."""
        return statistics_bytes(self.form, len(self.held), self.width)

    def about(self) -> str:
        """A short description."""
        return f"{self.form} over {self.classes} classes of {self.width} features, {len(self.held)} held"

    @neutral()
    def means(self) -> Tensor:
        """[P, d], the mean feature of each class in ``held``."""
        return self.sums["sums"] / self.number[:, None]

    @neutral()
    @accepts
    def mean(self, label: int) -> Tensor:
        """[d], the mean feature of a class."""
        return self.means()[self._row(label)]

    @neutral()
    @accepts
    def covariance(self, label: int) -> Tensor:
        """[d, d], the covariance of a class's features with divisor N − 1, to the extent the form has it."""
        row = self._row(label)
        if isinstance(self.form, Shared):
            return self.within()
        if self.number[row] < 2:
            raise UserError(f"class {label} has one example; a covariance needs at least two")
        self._require_square()
        return self.form.scatter(self, row) / (self.number[row] - 1)

    @neutral()
    def within(self) -> Tensor:
        """[d, d], the covariance around the class means, pooled over all classes; divisor N − P."""
        degrees = self.degrees
        self._require_square()
        if isinstance(self.form, Shared):
            return (unpack(self.sums["second"], self.width) - self.means().t() @ self.sums["sums"]) / degrees
        total = torch.zeros(self.width, self.width, dtype=torch.float64)
        for row in range(len(self.held)):
            total += self.form.scatter(self, row)
        return total / degrees

    @property
    def degrees(self) -> int:
        """N − P, the divisor of the pooled covariance."""
        if (degrees := int(self.number.sum()) - len(self.held)) < 1:
            raise UserError("no class has two examples; a covariance needs at least two")
        return degrees

    def _require_square(self) -> None:
        what = f"covariances of {self.width:,} features"  # small diagonal sums may lead to large covariances
        require_memory(16 * self.width**2, what, "use fewer features")  # two float64 matrices at once

    @neutral()
    def to_sums(self) -> Sums:
        """The sums for all classes, absent ones zero, in float64, so that they can be added entry by entry."""
        shapes = self.form.shapes(self.classes, self.width)
        sums = {  # in the form's order, whatever the client has: engines add sums by their order
            name: self.sums[name].clone()
            if name in self.form.common
            else torch.zeros(shape, dtype=torch.float64).index_copy_(0, self.held, self.sums[name])
            for name, shape in shapes.items()
        }
        return {"number": self.counts.double(), **sums}

    def tensors(self) -> Tensors:
        """Every tensor by name."""
        return {"held": self.held, "number": self.number, **self.sums}

    def to_bytes(self) -> bytes:
        """The content of a safetensors file."""
        metadata: dict[str, Any] = {"statistics": 2, "classes": self.classes, "form": str(self.form)}
        if self.noise is not None:
            metadata["noise"] = [self.noise.sums, self.noise.second]
        if advice := advise_smaller_form(self.form, len(self.held), self.width, int(self.number.sum())):
            warnings.warn(advice, stacklevel=2)
        contiguous = {name: value.contiguous() for name, value in self.tensors().items()}
        return save(contiguous, metadata={"unskew": json.dumps(metadata)})

    @accepts
    def save(self, path: str | Path) -> None:
        """Write them to a safetensors file."""
        write_whole(usable_path(path), self.to_bytes())

    @staticmethod
    @neutral()
    @accepts
    def load(path: str | Path) -> "ClassStatistics":
        """Read and check a file, which may be untrusted."""
        file = usable_path(path)
        check_plain(file)
        try:
            check_unpacked(file.stat().st_size, size_on_disk([file]), str(file))  # it may be sparse
            with safe_open(file, framework="pt") as content:
                metadata = json.loads((content.metadata() or {})["unskew"])
                # copies, since safe_open maps the file, which may change
                values = {name: content.get_tensor(name).clone() for name in content.keys()}  # noqa: SIM118
            if metadata["statistics"] != 2:
                raise ValueError(f"they have version {metadata['statistics']!r}")
            noise = KnownNoise(*map(float, metadata["noise"])) if "noise" in metadata else None
            if noise is not None and not (0 <= noise.sums < math.inf and 0 <= noise.second < math.inf):
                raise ValueError(f"the noise is {metadata['noise']}")
            form = parse_form(metadata["form"])
        except Exception as error:  # an untrusted file may cause any error
            line = str(error).partition("\n")[0]
            raise UserError(f"{file} does not contain class statistics of this version: {line}") from error
        statistics = check_statistics(metadata.get("classes"), form, values, str(path))
        # no features have these sums if (Σz)² > N·Σz², up to rounding
        least = statistics.sums["sums"].square() / statistics.number[:, None]
        least = least.sum(0) if statistics.form.common else least
        if bool((least > statistics.squares() * (1 + 1e-6) + 1e-6).any()):
            reason = "the sums are too large for the sums of squares; compute them again"
            raise UserError(f"the statistics in {path} are inconsistent: {reason}")
        return replace(statistics, noise=noise)

    def squares(self) -> Tensor:
        """[P, d], Σz² of each class, or [d] if classes share the second moment."""
        if "squares" in self.sums:
            return self.sums["squares"]
        second = self.sums["second"]
        return second[..., packed_diagonal(self.width)] if second.numel() else self.sums["sums"]

    def _row(self, label: int) -> int:
        rows = (self.held == int(label)).nonzero() if 0 <= label < self.classes else self.held[:0, None]
        if not len(rows):
            raise UserError(
                f"no client has class {label}; only {len(self.held)} of {self.classes} classes have examples"
            )
        return int(rows[0, 0])


def _merge(parts: Iterable[ClassStatistics]) -> ClassStatistics:
    """The sum of statistics; a class's row is created when the first client has it."""
    kind, about = None, ""  # classes, form and width of all statistics, and a description of the first
    numbers: Counter[int] = Counter()  # examples by class
    rows: dict[tuple[str, int | None], Tensor] = {}  # by sum and class; None: all classes share the sum
    noise: KnownNoise | None = None  # an upper bound for classes that some parts lack
    for part in parts:
        if not isinstance(part, ClassStatistics):
            raise UserError(f"only ClassStatistics can be added, not {a_kind(part)}")
        if kind is None:
            kind, about = (part.classes, part.form, part.width), part.about()
        elif kind != (part.classes, part.form, part.width):
            raise UserError(f"these statistics cannot be added: {about} and {part.about()}")
        if part.noise is not None:
            noise = part.noise if noise is None else noise + part.noise
        labels = part.held.tolist()
        if new := set(labels) - set(numbers):
            check_memory(part.form, len(numbers) + len(new), part.width, len(numbers))
        numbers.update(dict(zip(labels, part.number.tolist(), strict=True)))
        for name, value in part.sums.items():
            shared = name in part.form.common
            for label, row in zip([None] if shared else labels, [value] if shared else value, strict=True):
                rows[name, label] = rows[name, label].add_(row) if (name, label) in rows else row.clone()
    if kind is None:
        raise UserError("there are no statistics to add; give at least one client or batch, even an empty one")
    (classes, form, width), held = kind, sorted(numbers)
    sums: Tensors = {}
    for name, shape in form.shapes(len(held), width).items():
        if name in form.common:
            sums[name] = rows[name, None]
            continue
        sums[name] = torch.empty(shape, dtype=torch.float64)
        for row, label in zip(sums[name], held, strict=True):
            row.copy_(rows.pop((name, label)))  # freed at once: the sum is never in memory twice
    number = torch.tensor([numbers[label] for label in held], dtype=torch.int64)
    return ClassStatistics(classes, form, torch.tensor(held, dtype=torch.int64), number, sums, noise)


@neutral()
def from_sums(sums: Sums, form: Form) -> ClassStatistics:
    """Statistics from ``to_sums``, added over clients; classes without examples are left out."""
    number = sums["number"].round().long()
    held = number.nonzero()[:, 0]
    rows = {name: value if name in form.common else value[held] for name, value in sums.items() if name != "number"}
    return ClassStatistics(len(number), form, held, number[held], rows)


def check_statistics(classes: Any, form: Form, values: Tensors, who: str) -> ClassStatistics:
    """Statistics from checked values; a UserError names the sender ``who``."""

    def require(condition: object, rule: str) -> None:
        if not condition:
            raise UserError(f"the statistics of {who} are rejected: {rule}")

    whole = isinstance(classes, int) and not isinstance(classes, bool)
    require(whole and 1 <= classes <= MAX_CLASSES, f"the number of classes must be from 1 to {MAX_CLASSES:,}")
    wanted = {"held", "number", *form.shapes(0, MAX_FEATURES)}
    require(set(values) == wanted, f"they contain {', '.join(sorted(values))} instead of {', '.join(sorted(wanted))}")
    held, number = values["held"], values["number"]
    sums = {name: value for name, value in values.items() if name not in ("held", "number")}
    integers = held.dtype == number.dtype == torch.int64
    require(integers and held.dim() == 1 and number.shape == held.shape, "each class needs a label and a count")
    in_range, ascending = (held >= 0) & (held < classes), held[1:] > held[:-1]
    require(in_range.all() and ascending.all(), f"labels must ascend from 0 to {classes - 1}")
    require(((number >= 1) & (number <= MAX_EXAMPLES)).all(), f"counts must be from 1 to {MAX_EXAMPLES:,}")
    require(sums["sums"].dim() == 2, "the sums must have a row for each class")
    width = sums["sums"].shape[1]
    least = form.rank if isinstance(form, LowRank) else 1
    require(least <= width <= MAX_FEATURES, f"there are {width} features")
    for name, shape in form.shapes(len(held), width).items():
        value = sums[name]
        require(value.dtype == torch.float64, "sums must be float64")
        require(tuple(value.shape) == shape, f"{name} has the shape {tuple(value.shape)}, expected {shape}")
        require(value.isfinite().all(), f"{name} contains NaN or infinity")
    statistics = ClassStatistics(classes, form, held, number, sums)
    require((statistics.squares() >= 0).all(), "sums of squares must not be negative")
    return statistics
