"""Class statistics: count, sum and second moment of the features of each class, added up over clients.

Shapes: C classes, P of them held, d features.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from unskew.calibration.batches import Encoding, check_batch, images_and_labels, labels_of, resting
from unskew.calibration.covariances import parse_form
from unskew.calibration.forms import MAX_FEATURES, Form, check_square, fault, statistics_bytes
from unskew.calibration.heads import device_of
from unskew.calibration.known_noise import KnownNoise
from unskew.calibration.merging import Merging
from unskew.calibration.statistics_files import read_statistics
from unskew.core.arguments import COUNT, FUNCTION, PATH, SEVERAL, Kind, accepts, optional
from unskew.core.context import neutral
from unskew.core.errors import UserError, a_kind, brief, whole_number
from unskew.core.files import write_whole
from unskew.core.limits import MAX_CLASSES, usable_path
from unskew.core.types import Sums, Tensors

BUFFER = 2048  # features held back before they are added: one product a class for many batches
MAX_EXAMPLES = 2**40  # of a class; the sum over all of them must stay a whole number of 64 bits


@dataclass(frozen=True, eq=False)
class ClassStatistics:
    """What a client sends of its features: for each class it holds N, Σz and a second moment, in float64 on the CPU.

    ``a + b`` is the statistics of both clients' features together; mean and covariance (divisor N − 1) of a sum over
    clients are those of the pooled features. Classes that a client does not hold take no memory.
    """

    classes: int
    form: Form
    held: Tensor  # [P], the classes held, ascending
    number: Tensor  # [P], how many examples of each
    sums: Tensors  # the form's sums, float64
    noise: KnownNoise | None = None  # what was added for privacy

    @staticmethod
    @neutral()
    def empty(classes: int, width: int, form: str | Form = "full") -> "ClassStatistics":
        """Those of a client without examples."""
        form, classes = parse_form(form), whole_number(classes, "classes", 1, MAX_CLASSES)
        width = whole_number(width, "width", 1, MAX_FEATURES)
        none = torch.zeros(0, dtype=torch.int64)
        sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in form.shapes(0, width).items()}
        return ClassStatistics(classes, form, none, none, sums)

    @staticmethod
    @neutral()
    def of_features(features: Tensor, labels: Any, classes: int, form: str | Form = "full") -> "ClassStatistics":
        """Those of features [n, d] with labels [n]: a tensor, a numpy array or a list of whole numbers."""
        form, classes, labels = parse_form(form), whole_number(classes, "classes", 1, MAX_CLASSES), labels_of(labels)
        check_batch(features, labels, classes)
        features = features.detach().cpu().double()
        order = torch.argsort(labels, stable=True)
        held, number = torch.unique_consecutive(labels[order], return_counts=True)
        if not len(held):
            return ClassStatistics.empty(classes, features.shape[1], form)
        shapes = form.shapes(len(held), features.shape[1])
        sums = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
        parts = torch.split_with_sizes(features[order], number.tolist())
        for part, total in zip(parts, sums["sums"], strict=True):
            torch.sum(part, 0, out=total)
        form.measure(features, parts, sums)
        return ClassStatistics(classes, form, held, number, sums)

    @staticmethod
    @neutral(keep_threads=True)
    @accepts(relabel=optional(FUNCTION))
    def measure(
        encoder: nn.Module, batches: Iterable[Any], classes: int, *, form: str | Form = "full",
        relabel: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> "ClassStatistics":  # fmt: skip
        """Those of the encoder's features of (images, labels) batches, in one pass; never all features in memory.

        Images and labels are tensors, numpy arrays or lists, in pairs or in dicts such as {"image": …, "label": …}.
        Images are moved to the encoder's device. The encoder runs in eval mode without gradients and is left as it was.
        The caller's autocast does not count: an encoder that wants one has it in its own ``forward``.
        """
        if not isinstance(encoder, nn.Module):
            raise UserError(f"the encoder must be a torch module, this is {a_kind(encoder)}")
        if not isinstance(batches, Iterable):
            raise UserError(f"batches must be an iterable of (images, labels), this is {a_kind(batches)}")
        form, classes = parse_form(form), whole_number(classes, "classes", 1, MAX_CLASSES)
        device = device_of(encoder)
        dtype = next((value.dtype for value in encoder.parameters()), None)
        total, encode = Merging(), Encoding(encoder, dtype)
        waiting: list[tuple[Tensor, Tensor]] = []
        count = 0

        def take() -> None:
            nonlocal count
            if waiting:
                features, labels = (torch.cat(each) for each in zip(*waiting, strict=True))
                total.add(ClassStatistics.of_features(features, labels, classes, form))
                waiting.clear()
                count = 0

        with resting(encoder), torch.no_grad():
            for batch in batches:
                images, labels = images_and_labels(batch, device, dtype)
                features = encode(images)
                if relabel is not None:
                    labels = relabel(features, labels)
                check_batch(features, labels, classes)
                if waiting and waiting[0][0].shape[1] != features.shape[1]:
                    raise UserError(f"the encoder gave {waiting[0][0].shape[1]} features, then {features.shape[1]}")
                waiting.append((features.clone(), labels.clone()))  # their memory may be used again by the caller
                count += len(labels)
                if count >= BUFFER:
                    take()
        take()
        if total.nothing:
            raise UserError("no batch was given: statistics need at least one, even of no images, to know the features")
        return ClassStatistics(*total.fields())

    @staticmethod
    @neutral()
    @accepts(parts=SEVERAL)
    def merged(parts: "Iterable[ClassStatistics]") -> "ClassStatistics":
        """The statistics of all together, added up one by one: of an iterator only one part is in memory at a time."""
        total = Merging()
        for part in parts:
            total.add(part)
        return ClassStatistics(*total.fields())

    def __add__(self, other: "ClassStatistics") -> "ClassStatistics":
        """The statistics of both together."""
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
        """[C], how many examples of each class."""
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
        """[P, d], the mean feature of each class held, in the order of ``held``."""
        return self.sums["sums"] / self.number[:, None]

    @neutral()
    @accepts(label=COUNT)
    def mean(self, label: int) -> Tensor:
        """[d], the mean feature of a class."""
        place = self._place(label)
        return self.sums["sums"][place] / self.number[place]

    @neutral()
    @accepts(label=COUNT)
    def covariance(self, label: int) -> Tensor:
        """[d, d], the covariance of a class's features with divisor N − 1, as far as the form knows it."""
        place = self._place(label)
        check_square(self.width)
        if self.form.common:
            return self.within()
        if self.number[place] < 2:
            raise UserError(f"class {label} has one example; a covariance needs two")
        return self.form.scatter(self, place) / (self.number[place] - 1)

    @neutral()
    def within(self) -> Tensor:
        """[d, d], the covariance around the classes' own means, pooled over all of them; divisor N − P."""
        degrees = int(self.number.sum()) - len(self.held)
        if degrees < 1:
            raise UserError("no class has two examples; a covariance needs them")
        check_square(self.width)
        return self.form.pooled_scatter(self) / degrees

    @neutral()
    def spread_out(self) -> Sums:
        """The same for all classes, absent ones zero, in float64: what may be added entry by entry."""
        shapes = self.form.shapes(self.classes, self.width)
        sums = {  # in the form's order, whatever the client holds: engines add sums by their order
            name: self.sums[name].clone()
            if name in self.form.common
            else torch.zeros(shape, dtype=torch.float64).index_copy_(0, self.held, self.sums[name])
            for name, shape in shapes.items()
        }
        return {"number": self.counts.double(), **sums}

    @staticmethod
    @neutral()
    @accepts(
        sums=Kind(
            "a dict with 'number', as spread_out gives it",
            lambda each: "number" in (each if isinstance(each, dict) else ()),
        )
    )
    def gathered(sums: Sums, form: str | Form) -> "ClassStatistics":
        """What ``spread_out`` gave, added over clients; classes that no client holds are left out."""
        form, number = parse_form(form), sums["number"].round().long()
        held = number.nonzero()[:, 0]
        rows = {name: value if name in form.common else value[held] for name, value in sums.items() if name != "number"}
        return ClassStatistics(len(number), form, held, number[held], rows)

    def tensors(self) -> Tensors:
        """Every tensor by name."""
        return {"held": self.held, "number": self.number, **self.sums}

    def to_bytes(self) -> bytes:
        """As a safetensors file holds them."""
        about: dict[str, Any] = {"statistics": 1, "classes": self.classes, "form": str(self.form)}
        if self.noise is not None:
            about["noise"] = [self.noise.sums, self.noise.second]
        contiguous = {name: value.contiguous() for name, value in self.tensors().items()}
        return save(contiguous, metadata={"unskew": json.dumps(about)})

    @accepts(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write them to a safetensors file."""
        if not (file := usable_path(path)).name:
            raise UserError(f"{str(path)!r} names no file to write the statistics to; give one")
        write_whole(file, self.to_bytes())

    @staticmethod
    @neutral()
    @accepts(path=PATH)
    def load(path: str | Path) -> "ClassStatistics":
        """Read and check a file that may come from a stranger."""
        classes, form, values, noise = read_statistics(usable_path(path))
        statistics = replace(checked(classes, form, values, str(path)), noise=noise)
        if not statistics.possible():
            raise UserError(f"the statistics of {path} are refused: sums are larger than their squares allow")
        return statistics

    def possible(self) -> bool:
        """Whether any features could have these sums: (Σz)² ≤ N·Σz², but for rounding."""
        least = self.sums["sums"].square() / self.number[:, None]
        squares = self.sums["squares"] if "squares" in self.sums else self.sums["second"].diagonal(dim1=-2, dim2=-1)
        return not bool(((least.sum(0) if self.form.common else least) > squares * (1 + 1e-6) + 1e-6).any())

    def _place(self, label: int) -> int:
        places = (self.held == int(label)).nonzero() if 0 <= label < self.classes else self.held[:0, None]
        if not len(places):
            raise UserError(f"no client holds class {label}; {len(self.held)} of {self.classes} classes are held")
        return int(places[0, 0])


def checked(classes: Any, form: Form, values: Tensors, who: str) -> ClassStatistics:
    """The statistics if they can be real, or a UserError that names the sender."""

    def refuse(why: str) -> UserError:
        return UserError(f"the statistics of {who} are refused: {why}")

    if not isinstance(classes, int) or isinstance(classes, bool) or not 1 <= classes <= MAX_CLASSES:
        raise refuse(f"{brief(classes)} is not a number of classes from 1 to {MAX_CLASSES:,}")
    wanted = {"held", "number", *form.shapes(0, form.least_width)}
    if set(values) != wanted:
        raise refuse(f"they hold {', '.join(sorted(values))}, wanted are {', '.join(sorted(wanted))}")
    held, number = values["held"], values["number"]
    sums = {name: value for name, value in values.items() if name not in ("held", "number")}
    if held.dtype != torch.int64 or number.dtype != torch.int64 or held.dim() != 1 or number.shape != held.shape:
        raise refuse("labels and counts must be one whole number for each class held")
    if bool(((held < 0) | (held >= classes)).any()) or bool((held[1:] <= held[:-1]).any()):
        raise refuse(f"labels must ascend from 0 to {classes - 1}")
    odd = (number < 1) | (number > MAX_EXAMPLES)
    if bool(odd.any()):
        raise refuse(f"class {int(held[odd][0])} has a count of {int(number[odd][0])}")
    if why := fault(form, len(held), sums):
        raise refuse(why)
    return ClassStatistics(classes, form, held, number, sums)
