"""What a reply must look like, found by doing the job here on two blank images: names and shapes, not values."""

import os
from dataclasses import replace

import numpy as np
import torch

from unskew.core import tensors
from unskew.core.context import neutral
from unskew.core.images import ImageSet, Split
from unskew.core.key import Key
from unskew.core.machine import deterministic
from unskew.core.types import Tensors, Visit
from unskew.data.population import Population
from unskew.engines.blueprint import FROZEN, Blueprint, build, dataset
from unskew.engines.jobs import JOBS
from unskew.round.client import ClientSide
from unskew.round.jobs import Answer, find_job

BLANK = 2  # images: BatchNorm cannot train on one

Layout = dict[str, tuple[int, ...]]  # the shape of each sum, by name


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
        self._known: dict[str, Layout | None] = {}

    def layout(self, job: str, shared: Tensors, visit: Visit) -> Layout | None:
        """The names and shapes of the sums that the job answers with; None where two blank images cannot tell."""
        if job not in self._known:
            self._known[job] = self._tried(job, shared, visit)
        return self._known[job]

    def _tried(self, job: str, shared: Tensors, visit: Visit) -> Layout | None:
        if self._side is None:
            self._side = replace(build(self._blueprint, self._data), secret=os.urandom(32))
        work, options = find_job(job, JOBS)
        offsets = np.zeros(visit.client + 2, np.int64)
        offsets[-1] = BLANK
        mine = Population(np.arange(BLANK, dtype=np.int32), offsets)
        side = replace(self._side, population=mine, own_tests={visit.client: torch.arange(BLANK)})
        blank = replace(visit, take=None if visit.take is None else BLANK, ticket=None, keep=False)
        try:
            with neutral(), deterministic(side.device):
                answer = work(side, shared, blank, Key(0).fold("client", visit.client, visit.repeat), options)
        except Exception:  # noqa: BLE001  a method's own code may need more than blank images
            return None
        sums = answer.sums if isinstance(answer, Answer) else answer
        return {name: tuple(value.shape) for name, value in sums.items()}
