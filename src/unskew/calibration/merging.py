"""Statistics of many clients added up one after another, in place: what is in memory is the sum, not the clients."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.errors import UserError

if TYPE_CHECKING:
    from unskew.calibration.statistics import ClassStatistics


class Merging:
    """A sum that grows. Every class has rows of its own, made when somebody first holds it."""

    def __init__(self) -> None:
        self._first: ClassStatistics | None = None
        self._number: dict[int, int] = {}
        self._rows: dict[str, dict[int, Tensor]] = {}
        self._common: dict[str, Tensor] = {}  # the one second moment of the form ``shared``

    @property
    def nothing(self) -> bool:
        """Whether nobody has been added yet."""
        return self._first is None

    def add(self, part: "ClassStatistics") -> None:
        """One client more; what does not belong with those before it is refused."""
        first = self._first
        if first is None:
            self._first = first = part
        elif (first.classes, first.form, first.width) != (part.classes, part.form, part.width):
            raise UserError(f"these statistics do not belong together: {first.about()} and {part.about()}")
        labels = part.held.tolist()
        for label, number in zip(labels, part.number.tolist(), strict=True):
            self._number[label] = self._number.get(label, 0) + number
        for name, value in part.sums.items():
            if name in part.form.common:
                self._common[name] = self._common[name].add_(value) if name in self._common else value.clone()
                continue
            rows = self._rows.setdefault(name, {})
            for place, label in enumerate(labels):
                rows[label] = rows[label].add_(value[place]) if label in rows else value[place].clone()

    def total(self) -> "ClassStatistics":
        """The sum; nothing can be added any more."""
        from unskew.calibration.statistics import ClassStatistics

        first = self._first
        if first is None:
            raise UserError("there are no statistics to add up: nobody sent any")
        held = sorted(self._number)
        sums = dict(self._common)
        for name, shape in first.form.shapes(len(held), first.width).items():
            if name in sums:
                continue
            sums[name] = torch.empty(shape, dtype=torch.float64)
            for place, label in enumerate(held):
                sums[name][place] = self._rows[name].pop(label)  # given back at once: never the sum twice in memory
        number = torch.tensor([self._number[label] for label in held], dtype=torch.int64)
        return ClassStatistics(first.classes, first.form, torch.tensor(held, dtype=torch.int64), number, sums)
