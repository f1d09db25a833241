"""What a reply must look like, found by doing the job here on two blank images: names, types and shapes, not values."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.machine import deterministic, neutral
from unskew.core.types import ImageSet, Job, Split, Tensors, Visit
from unskew.data.population import Population
from unskew.engines.blueprint import FROZEN, Blueprint, build, dataset
from unskew.privacy.secure_sum import CHECK, Masked, SecureJob, describe, expected_extra
from unskew.round.client import ClientSide

BLANK = 2  # images: BatchNorm cannot train on one

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # by name, type and shape


@dataclass(frozen=True)
class Expected:
    """The names, types and shapes of a reply's sums and extra; None where two blank images cannot tell."""

    sums: Shapes | None
    extra: Shapes

    def bytes(self, shared: Tensors) -> int:
        """What the tensors of one reply may take at most."""
        if self.sums is None:
            return 16 * sum(value.numel() for value in shared.values()) + 2**26
        shapes = [*self.sums.values(), *self.extra.values()]
        return 8 * sum(int(torch.Size(shape).numel()) for _, shape in shapes)


class Template:
    """A client with two blank images, in the place of any client."""

    def __init__(self, blueprint: Blueprint, mean: tuple[float, ...], std: tuple[float, ...], frozen: Tensors) -> None:
        self._blueprint = replace(blueprint, device="cpu", stored=False)
        part = Split(np.zeros((BLANK, *blueprint.shape), np.uint8), np.zeros(BLANK, np.int64))
        classes = tuple(map(str, range(blueprint.classes)))
        images = ImageSet("blank", classes, part, part, mean, std)
        nobody = Population(np.zeros(0, np.int32), np.zeros(1, np.int64))
        self._data = dataset(images, nobody) | tensors.prefixed(frozen, FROZEN)
        self._side: ClientSide | None = None
        self._known: dict[tuple[str, bool], Expected] = {}  # by job, and whether it is a client's first visit

    def expect(self, job: Job, shared: Tensors, visit: Visit) -> Expected:
        """What the visit's reply to the job looks like: what is recorded comes from a client's first visit alone."""
        question = _lasting_name(job), visit.repeat == 0
        if question not in self._known:
            self._known[question] = self._try(job, shared, visit)
        return self._known[question]

    def _try(self, job: Job, shared: Tensors, visit: Visit) -> Expected:
        if isinstance(job, SecureJob) and not isinstance(job, Masked):
            return Expected({}, {name: ("uint8", (size,)) for name, size in expected_extra(job).items()})
        if self._side is None:
            self._side = build(self._blueprint, self._data)
        offsets = np.zeros(visit.client + 2, np.int64)
        offsets[-1] = BLANK
        mine = Population(np.arange(BLANK, dtype=np.int32), offsets)
        side = replace(self._side, population=mine, own_tests={visit.client: torch.arange(BLANK)})
        blank = replace(visit, take=None if visit.take is None else BLANK, ticket=None, keep=False)
        work = job.inner if isinstance(job, Masked) else job
        try:
            with neutral(), deterministic(side.device):
                reply = work(side, shared, blank, Key(0).fold("client", visit.client, visit.repeat))
        except Exception:  # noqa: BLE001  a method's own code may need more than blank images
            return Expected(None, {})
        sums = _shapes(dict(reply.sums))
        if isinstance(job, Masked):
            sums = dict(sorted({**sums, CHECK: ("int64", ())}.items()))
        return Expected(sums, _shapes(dict(reply.extra)))


def _shapes(values: Tensors) -> Shapes:
    return {name: (str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in values.items()}


def _lasting_name(job: Job) -> str:
    """The job without what changes from one secure sum or round to the next: replies to both look the same."""
    if isinstance(job, SecureJob):
        return f"{type(job).__name__} {len(job.members)} {_lasting_name(job.inner)}"
    inner = getattr(job, "inner", None)
    if inner is not None:
        return f"{type(job).__name__} {_lasting_name(inner)}"
    return describe(msgspec.structs.replace(job, round=0) if hasattr(job, "round") else job)  # type: ignore[type-var]
