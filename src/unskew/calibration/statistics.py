"""Class statistics: the count, sum and second moment of the features of each class, summed over clients.

Shapes: C classes, P of them with examples, d features.
"""

import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from unskew.calibration.classifier import device_of
from unskew.calibration.covariances import (
    MAX_FEATURES,
    Form,
    advise_smaller_form,
    check_memory,
    packed_diagonal,
    parse_form,
    pool_scatters,
    require_memory,
    statistics_bytes,
)
from unskew.core.errors import UserError, a_kind, accepts, brief, whole_number
from unskew.core.files import write_whole
from unskew.core.limits import MAX_CLASSES, check_plain, check_unpacked, size_on_disk, usable_path
from unskew.core.machine import neutral
from unskew.core.types import Sums, Tensors
from unskew.models.any_module import evaluating


@dataclass(frozen=True)
class KnownNoise:
    """Standard deviations of the noise added for privacy."""

    sums: float  # on every entry of Σz
    second: float  # on the diagonal of a second moment; off the diagonal it is smaller by √2

    def __add__(self, other: "KnownNoise") -> "KnownNoise":
        """The noise of a sum of two releases with independent noise."""
        return KnownNoise(math.hypot(self.sums, other.sums), math.hypot(self.second, other.second))


IMAGE_KEYS = ("image", "images", "pixel_values", "x", "img")
LABEL_KEYS = ("label", "labels", "y", "target")


def split_batch(batch: Any, device: torch.device, dtype: torch.dtype | None) -> tuple[Any, Tensor]:
    """Images on the device and labels [n] on the CPU, from a pair or a dict.

    Tensors and integers keep their dtype. Floats in arrays and lists become ``dtype``, the encoder's. Images of any
    other type are passed to the encoder unchanged.
    """
    if isinstance(batch, Mapping):
        images, labels = _find_value(batch, IMAGE_KEYS, "images"), _find_value(batch, LABEL_KEYS, "labels")
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        images, labels = batch
    else:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
        raise UserError(f"batches must be pairs of (images, labels) or dicts with both, not a {kind}")
    if isinstance(images, np.ndarray | list | tuple):
        images = _to_tensor(images, "images")
        if dtype is not None and images.is_floating_point():
            images = images.to(dtype)
    if isinstance(images, Tensor):
        images = images.to(device)
    elif isinstance(images, Mapping):
        images = _move(images, device)
    return images, as_labels(labels)


def _move(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def as_labels(labels: Any) -> Tensor:
    """Labels as a tensor on the CPU: integers as int64, anything else unchanged."""
    values: Tensor = labels if isinstance(labels, Tensor) else _to_tensor(labels, "labels")
    values = values.detach().cpu()
    return values if values.is_floating_point() or values.is_complex() else values.long()


def encode(encoder: nn.Module, images: Any, dtype: torch.dtype | None) -> Any:
    """The encoder's features; images of another dtype are converted if the encoder refuses them.

    Integers are refused instead, since their normalization is unknown. A dict whose keys are parameters of the encoder
    is passed by name. If an output has ``pooler_output`` (Hugging Face), these are the features.
    """
    try:
        output = _call(encoder, images)
    except RuntimeError as error:  # "expected … to have the same dtype", "Input type … and weight type …"
        given = images if isinstance(images, Mapping) else {"images": images}
        other = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.dtype != dtype}
        if not other or dtype is None or not dtype.is_floating_point or "type" not in str(error).lower():
            raise
        converted = {name: x.to(dtype) for name, x in other.items() if x.is_floating_point()}
        if not converted:
            name, x = next(iter(other.items()))
            raise UserError(
                f"the {name} are {x.dtype}, but the encoder takes {dtype}; normalize them as for training, such as "
                "(images / 255 - mean) / std"
            ) from error
        output = _call(encoder, {**images, **converted} if isinstance(images, Mapping) else converted["images"])
    pooled = getattr(output, "pooler_output", None)
    if isinstance(pooled, Tensor):
        return pooled.flatten(1)
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        raise UserError(
            f"the encoder returns {a_kind(output)} with logits, which are a classifier's output; give the part that "
            "returns features, such as model.base_model, or a module that returns the tensor you want"
        )
    if isinstance(tokens := getattr(output, "last_hidden_state", None), Tensor):
        raise UserError(
            f"the encoder returns {a_kind(output)} with last_hidden_state {list(tokens.shape)}; give a module that "
            "makes one feature vector per image of it, such as last_hidden_state[:, 0] or last_hidden_state.mean(1)"
        )
    return output


def _call(encoder: nn.Module, images: Any) -> Any:
    """The encoder's output; inputs in a dict by name, where its parameters have these names."""
    if not isinstance(images, Mapping):
        return encoder(images)
    if takes_by_name(encoder, images):
        return encoder(**images)
    try:
        return encoder(images)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"the encoder cannot take the inputs {', '.join(map(repr, images))}: {type(error).__name__}: {error}; its "
            f"parameters are {', '.join(inspect.signature(encoder.forward).parameters)}"
        ) from error


def takes_by_name(encoder: nn.Module, images: Mapping[str, Any]) -> bool:
    """Whether the encoder has parameters with the names of these inputs."""
    parameters = inspect.signature(encoder.forward).parameters
    return set(images) <= set(parameters) or [knob.kind for knob in parameters.values()] == [
        inspect.Parameter.VAR_KEYWORD
    ]


def check_batch(features: Any, labels: Tensor, classes: int) -> None:
    """Refuse a batch without valid features and labels."""
    if not isinstance(features, Tensor):
        raise UserError(f"features must be a tensor [n, d], not {a_kind(features)}")
    if features.dim() != 2 or labels.dim() != 1 or len(features) != len(labels) or not features.shape[1]:
        shapes = f"{list(features.shape)} and {list(labels.shape)}"
        raise UserError(f"features must be [n, d] and labels [n], not {shapes}")
    if features.is_complex() or labels.is_complex() or labels.is_floating_point():
        raise UserError(f"features must be real and labels whole numbers, not {features.dtype} and {labels.dtype}")
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise UserError(
            f"labels must be in 0..{classes - 1}; these range from {int(labels.min())} to {int(labels.max())}"
        )


def _find_value(batch: Mapping[Any, Any], keys: tuple[str, ...], what: str) -> Any:
    for key in keys:
        if key in batch:
            return batch[key]
    have = ", ".join(map(repr, batch)) or "nothing"
    raise UserError(f"a dict batch must have its {what} under {', '.join(keys)}; this one has: {have}")


def _to_tensor(values: Any, what: str) -> Tensor:
    try:
        if isinstance(values, list | tuple) and values and isinstance(values[0], Tensor):
            return torch.stack(list(values))
        return torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        wanted = "a tensor, a numpy array or a list of numbers"
        raise UserError(f"{what} must be {wanted}, not {a_kind(values)} ({error})") from error


class Merging:
    """A growing sum: a class's row is created when the first client has it."""

    def __init__(self, without: str = "there are no statistics to add: no client sent any") -> None:
        self._without = without  # the message if nothing was added
        self._kind: tuple[int, Form, int] | None = None  # classes, form and width of all statistics so far
        self._about = ""  # describes the first statistics
        self._number: dict[int, int] = {}  # by class
        self._rows: dict[str, dict[int, Tensor]] = {}  # of each sum, by class
        self._common: Tensors = {}  # sums that all classes share
        self._noise: KnownNoise | None = None  # an upper bound for classes that some parts lack

    def add(self, part: "ClassStatistics") -> None:
        """Add a client's statistics; refused if they do not match the previous ones."""
        if not hasattr(part, "held"):
            raise UserError(f"only ClassStatistics can be added, not {a_kind(part)}")
        kind, labels = (part.classes, part.form, part.width), part.held.tolist()
        if self._kind is None:
            self._kind, self._about = kind, part.about()
        elif self._kind != kind:
            raise UserError(f"these statistics cannot be added: {self._about} and {part.about()}")
        if part.noise is not None:
            self._noise = part.noise if self._noise is None else self._noise + part.noise
        if new := set(labels) - set(self._number):
            check_memory(part.form, len(self._number) + len(new), part.width, len(self._number))
        for label, number in zip(labels, part.number.tolist(), strict=True):
            self._number[label] = self._number.get(label, 0) + number
        for name, value in part.sums.items():
            if name in part.form.common:
                _accumulate(self._common, name, value)
                continue
            rows = self._rows.setdefault(name, {})
            for label, row in zip(labels, value, strict=True):
                _accumulate(rows, label, row)

    def total(self) -> "ClassStatistics":
        """The sum; nothing can be added after this."""
        if self._kind is None:
            raise UserError(self._without)
        (classes, form, width), held = self._kind, sorted(self._number)
        sums = dict(self._common)
        for name, shape in form.shapes(len(held), width).items():
            if name not in sums:
                sums[name] = torch.empty(shape, dtype=torch.float64)
                for row, label in zip(sums[name], held, strict=True):
                    row.copy_(self._rows[name].pop(label))  # freed at once: the sum is never in memory twice
        number = torch.tensor([self._number[label] for label in held], dtype=torch.int64)
        return ClassStatistics(classes, form, torch.tensor(held, dtype=torch.int64), number, sums, self._noise)


def _accumulate(sums: dict[Any, Tensor], name: str | int, value: Tensor) -> None:
    if name in sums:
        sums[name] += value
    else:
        sums[name] = value.clone()


BUFFER = 2048  # features collected before they are added: one product per class for many batches
MAX_EXAMPLES = 2**40  # of a class; the sum over all classes must fit in 64 bits


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
        """The statistics of a client without examples.

        Parameters
        ----------
        classes
            The number of classes.
        width
            The number of features.
        form
            How much of the second moments is kept.
        """
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
        form, classes, labels = parse_form(form), whole_number(classes, "classes", 1, MAX_CLASSES), as_labels(labels)
        check_batch(features, labels, classes)
        features = features.detach().cpu()
        order = torch.argsort(labels, stable=True)
        held, number = torch.unique_consecutive(labels[order], return_counts=True)
        if not len(held):
            return ClassStatistics.empty(classes, features.shape[1], form)
        check_memory(form, len(held), features.shape[1])
        shapes = form.shapes(len(held), features.shape[1])
        sums = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
        parts = torch.split_with_sizes(features.index_select(0, order).double(), number.tolist())
        for part, total in zip(parts, sums["sums"], strict=True):
            torch.sum(part, 0, out=total)
        if not bool(sums["sums"].isfinite().all()):  # thousands of times fewer numbers than features
            raise UserError("the features contain NaN or infinity; check the encoder and its images")
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
        if not isinstance(batches, Iterable):
            raise UserError(f"batches must be an iterable of (images, labels), not {a_kind(batches)}")
        form, classes = parse_form(form), whole_number(classes, "classes", 1, MAX_CLASSES)
        device = device_of(encoder)
        dtype = next((value.dtype for value in encoder.parameters()), None)
        total = Merging(
            "no batches were given; give at least one, even an empty one, so that the number of features is known"
        )
        waiting: list[tuple[Tensor, Tensor]] = []

        def flush() -> None:
            if waiting:
                features, labels = (torch.cat(parts) for parts in zip(*waiting, strict=True))
                total.add(ClassStatistics.of_features(features, labels, classes, form))
                waiting.clear()

        with evaluating(encoder), torch.no_grad():
            for batch in batches:
                images, labels = split_batch(batch, device, dtype)
                try:
                    features = encode(encoder, images, dtype)
                except (TypeError, IndexError, KeyError):
                    if not isinstance(batch, Mapping) or isinstance(images, Mapping):
                        raise
                    features = encode(encoder, _move(batch, device), dtype)
                if relabel is not None:
                    labels = relabel(features, labels)
                check_batch(features, labels, classes)
                if waiting and waiting[0][0].shape[1] != features.shape[1]:
                    raise UserError(
                        f"the encoder returned {waiting[0][0].shape[1]} features per image, then {features.shape[1]}"
                    )
                waiting.append((features.clone(), labels.clone()))  # the caller may reuse their memory
                if sum(len(labels) for _, labels in waiting) >= BUFFER:
                    flush()
        flush()
        return total.total()

    @staticmethod
    @neutral()
    @accepts
    def merged(parts: Iterable["ClassStatistics"]) -> "ClassStatistics":
        """Add statistics one by one; from an iterator, only one part is in memory at a time."""
        total = Merging()
        for part in parts:
            total.add(part)
        return total.total()

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
        if self.form.common:
            return self.within()
        self._require_square()
        if self.number[row] < 2:
            raise UserError(f"class {label} has one example; a covariance needs at least two")
        return self.form.scatter(self, row) / (self.number[row] - 1)

    @neutral()
    def within(self) -> Tensor:
        """[d, d], the covariance around the class means, pooled over all classes; divisor N − P."""
        degrees = self.degrees
        self._require_square()
        return pool_scatters(self) / degrees

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
        try:
            if self.noise is not None:
                metadata["noise"] = [self.noise.sums, self.noise.second]
            if advice := advise_smaller_form(self.form, len(self.held), self.width, int(self.number.sum())):
                warnings.warn(advice, stacklevel=2)
            contiguous = {name: value.contiguous() for name, value in self.tensors().items()}
            return save(contiguous, metadata={"unskew": json.dumps(metadata)})
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"these statistics cannot be saved: {error}; make them with ClassStatistics.measure or of_features"
            ) from error

    @accepts
    def save(self, path: str | Path) -> None:
        """Write them to a safetensors file."""
        if not (file := usable_path(path)).name:
            raise UserError(f"{str(path)!r} is not a file name; give a file to write the statistics to")
        write_whole(file, self.to_bytes())

    @staticmethod
    @neutral()
    @accepts
    def load(path: str | Path) -> "ClassStatistics":
        """Read and check a file, which may be untrusted."""
        file = usable_path(path)
        check_plain(file)
        if not file.exists():
            raise UserError(f"{file} does not exist; give a file written by ClassStatistics.save")
        check_unpacked(file.stat().st_size, size_on_disk([file]), str(file))  # it may be sparse
        try:
            with safe_open(file, framework="pt") as content:
                metadata = json.loads((content.metadata() or {})["unskew"])
                # copies, since safe_open maps the file, which may change
                values = {name: content.get_tensor(name).clone() for name in content.keys()}  # noqa: SIM118
            if metadata["statistics"] != 2:
                raise ValueError(f"they have version {metadata['statistics']!r}")
            noise = KnownNoise(*map(float, metadata["noise"])) if "noise" in metadata else None
            if noise is not None and not (0 <= noise.sums < math.inf and 0 <= noise.second < math.inf):
                raise ValueError(f"the noise is {metadata['noise']}")
            classes, form = metadata["classes"], parse_form(metadata["form"])
        except Exception as error:  # an untrusted file may cause any error
            line = str(error).partition("\n")[0]
            raise UserError(f"{file} does not contain class statistics of this version: {line}") from error
        statistics = replace(check_statistics(classes, form, values, str(path)), noise=noise)
        if not statistics.possible():
            raise UserError(f"the statistics of {path} are refused: its sums are larger than its sums of squares allow")
        return statistics

    def possible(self) -> bool:
        """Whether any features could have these sums: (Σz)² ≤ N·Σz², up to rounding."""
        least = self.sums["sums"].square() / self.number[:, None]
        return not bool(((least.sum(0) if self.form.common else least) > self.squares() * (1 + 1e-6) + 1e-6).any())

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


@neutral()
def from_sums(sums: Sums, form: Form) -> ClassStatistics:
    """Statistics from ``to_sums``, added over clients; classes without examples are left out."""
    number = sums["number"].round().long()
    held = number.nonzero()[:, 0]
    rows = {name: value if name in form.common else value[held] for name, value in sums.items() if name != "number"}
    return ClassStatistics(len(number), form, held, number[held], rows)


def check_statistics(classes: Any, form: Form, values: Tensors, who: str) -> ClassStatistics:
    """Statistics from checked values; a UserError names the sender ``who``."""

    def refuse(reason: str) -> UserError:
        return UserError(f"the statistics of {who} are refused: {reason}")

    if not isinstance(classes, int) or isinstance(classes, bool) or not 1 <= classes <= MAX_CLASSES:
        raise refuse(f"{brief(classes)} is not a number of classes from 1 to {MAX_CLASSES:,}")
    wanted = {"held", "number", *form.shapes(0, form.least_width)}
    if set(values) != wanted:
        raise refuse(f"they contain {', '.join(sorted(values))} instead of {', '.join(sorted(wanted))}")
    held, number = values["held"], values["number"]
    sums = {name: value for name, value in values.items() if name not in ("held", "number")}
    if held.dtype != torch.int64 or number.dtype != torch.int64 or held.dim() != 1 or number.shape != held.shape:
        raise refuse("labels and counts must be one whole number per class with examples")
    if bool(((held < 0) | (held >= classes)).any()) or bool((held[1:] <= held[:-1]).any()):
        raise refuse(f"labels must ascend from 0 to {classes - 1}")
    impossible = (number < 1) | (number > MAX_EXAMPLES)
    if bool(impossible.any()):
        raise refuse(f"class {int(held[impossible][0])} has a count of {int(number[impossible][0])}")
    if any(value.dtype != torch.float64 for value in sums.values()):
        raise refuse("sums must be float64")
    actual, least = tuple(sums["sums"].shape), form.least_width
    if len(actual) != 2 or not least <= actual[1] <= MAX_FEATURES:
        raise refuse(f"sums has the shape {actual}, expected ({len(held)}, d) with d from {least} to {MAX_FEATURES}")
    for name, shape in form.shapes(len(held), actual[1]).items():
        if tuple(sums[name].shape) != shape:
            raise refuse(f"{name} has the shape {tuple(sums[name].shape)}, expected {shape}")
        if not bool(sums[name].isfinite().all()):
            raise refuse(f"{name} contains NaN or infinity")
    statistics = ClassStatistics(classes, form, held, number, sums)
    if bool((statistics.squares() < 0).any()):
        raise refuse("sums of squares must not be negative")
    return statistics
