"""What a reply must look like, found by doing the job here on two blank images: names and shapes, not values."""

from dataclasses import replace

import numpy as np
import torch

from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.machine import deterministic, neutral
from unskew.core.types import ImageSet, Split, Tensors, Visit
from unskew.data.population import Population
from unskew.engines.blueprint import FROZEN, Blueprint, build, dataset
from unskew.engines.flower.purpose import is_secure
from unskew.engines.jobs import JOBS
from unskew.privacy.questions import MEMBERS, Question
from unskew.privacy.secure_jobs import MaskedJob, shapes_of
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
        name = lasting_name(job, shared)
        if name not in self._known:
            self._known[name] = self._tried(job, shared, visit)
        return self._known[name]

    def _tried(self, job: str, shared: Tensors, visit: Visit) -> Layout | None:
        if self._side is None:
            self._side = build(self._blueprint, self._data)
        work, options = find_job(job, JOBS)
        if is_secure(job) and (fixed := shapes_of(job.partition(" ")[0], len(shared[MEMBERS]))) is not None:
            return fixed
        offsets = np.zeros(visit.client + 2, np.int64)
        offsets[-1] = BLANK
        mine = Population(np.arange(BLANK, dtype=np.int32), offsets)
        side = replace(self._side, population=mine, own_tests={visit.client: torch.arange(BLANK)})
        blank = replace(visit, take=None if visit.take is None else BLANK, ticket=None, keep=False)
        try:
            with neutral(), deterministic(side.device):
                given = side, shared, blank, Key(0).fold("client", visit.client, visit.repeat), options
                if isinstance(work, MaskedJob):
                    return work.shapes(*given)
                answer = work(*given)
        except Exception:  # noqa: BLE001  a method's own code may need more than blank images
            return None
        sums = answer.sums if isinstance(answer, Answer) else answer
        return {name: tuple(value.shape) for name, value in sums.items()}


def lasting_name(job: str, shared: Tensors) -> str:
    """The job's text without what changes from one secure sum to the next: answers to both look the same."""
    if not is_secure(job):
        return job
    name, _, options = job.partition(" ")
    return f"{name} {len(shared[MEMBERS])} {Question.from_text(options).about}"
