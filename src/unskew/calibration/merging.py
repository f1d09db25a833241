"""Statistics of many clients added up one after another, in place: only the sum is in memory."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unskew.calibration.covariances import Diagonal, LowRank, Shared
from unskew.calibration.forms import Form, check_memory
from unskew.calibration.known_noise import KnownNoise
from unskew.core.errors import UserError, a_kind
from unskew.core.types import Tensors

if TYPE_CHECKING:
    from unskew.calibration.statistics import ClassStatistics

BLOCK_BYTES = 2**25  # rows are kept in blocks: many small pieces of memory would leave holes between them


class Merging:
    """A sum that grows. A class has a row in every sum, the next free one when a client first has it."""

    def __init__(self) -> None:
        self._kind: tuple[int, Form, int] | None = None  # classes, form and width of all statistics so far
        self._about = ""  # the first statistics, in words
        self._rows: dict[int, int] = {}  # of each label
        self._number: list[int] = []  # of each row
        self._blocks: dict[str, list[Tensor]] = {}
        self._common: dict[str, Tensor] = {}  # sums that are one for all classes
        self._noise: KnownNoise | None = None  # where a part has a class that another lacks, this is the most it can be

    @property
    def nothing(self) -> bool:
        """Whether nothing has been added yet."""
        return self._kind is None

    def add(self, part: "ClassStatistics") -> None:
        """Add a client's statistics; refused where they do not belong with those before."""
        if not hasattr(part, "held"):
            raise UserError(f"only ClassStatistics can be added up, this is {a_kind(part)}")
        kind = part.classes, part.form, part.width
        if self._kind is None:
            self._kind, self._about = kind, part.about()
        elif self._kind != kind:
            raise UserError(f"these statistics do not belong together: {self._about} and {part.about()}")
        if part.noise is not None:
            self._noise = part.noise if self._noise is None else self._noise + part.noise
        for label, number in zip(part.held.tolist(), part.number.tolist(), strict=True):
            row = self._rows.setdefault(label, len(self._rows))
            if row == len(self._number):
                self._number.append(0)
            self._number[row] += number
        rows = torch.tensor([self._rows[label] for label in part.held.tolist()], dtype=torch.int64)
        for name, value in part.sums.items():
            if name not in part.form.common:
                self._add_rows(name, value, rows)
            elif name in self._common:
                self._common[name] += value
            else:
                self._common[name] = value.clone()

    def _add_rows(self, name: str, value: Tensor, rows: Tensor) -> None:
        assert self._kind is not None
        (classes, form, width), blocks = self._kind, self._blocks.setdefault(name, [])
        shape = value.shape[1:]
        size = max(1, min(classes, BLOCK_BYTES // (8 * shape.numel())))
        if len(blocks) * size < len(self._number):
            others = Shared(), Diagonal(), LowRank(min(32, width))
            check_memory(form, others, len(self._number), width)
        while len(blocks) * size < len(self._number):
            blocks.append(torch.zeros(size, *shape, dtype=torch.float64))
        for place, block in enumerate(blocks):
            mine = (rows // size == place).nonzero()[:, 0]
            if len(mine):
                block.index_add_(0, rows[mine] - place * size, value if len(mine) == len(rows) else value[mine])

    def fields(self) -> tuple[int, Form, Tensor, Tensor, Tensors, KnownNoise | None]:
        """The fields of the sum's ClassStatistics, in their order; nothing can be added after this."""
        if self._kind is None:
            raise UserError("there are no statistics to add up: no client sent any")
        (classes, form, width), held = self._kind, sorted(self._rows)
        order = torch.tensor([self._rows[label] for label in held], dtype=torch.int64)  # the rows, by label
        places = torch.empty_like(order)
        places[order] = torch.arange(len(held))
        sums = dict(self._common)
        for name, shape in form.shapes(len(held), width).items():
            if name in sums:
                continue
            sums[name], done = torch.empty(shape, dtype=torch.float64), 0
            while blocks := self._blocks.get(name):
                block = blocks.pop(0)  # given back as soon as it is copied: never the whole sum twice in memory
                some = places[done : done + len(block)]
                sums[name][some] = block[: len(some)]
                done += len(block)
        number = torch.tensor([self._number[row] for row in order.tolist()], dtype=torch.int64)
        return classes, form, torch.tensor(held, dtype=torch.int64), number, sums, self._noise
