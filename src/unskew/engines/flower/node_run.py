"""A run as one of its nodes sees it: what was agreed, the client's side, its memories, the messages seen so far."""

import math
import re
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import StorageFailure, UserError
from unskew.core.key import Key
from unskew.core.limits import cache_folder
from unskew.core.machine import physical_memory
from unskew.core.types import Failure, ImageSet, Job, Tensors, Visit
from unskew.data.batches import check_visit
from unskew.data.photographs import silent
from unskew.engines.blueprint import FROZEN, Blueprint, build, dataset, pixels
from unskew.engines.codec import BadMessage
from unskew.engines.features import Frozen, images_sha256, stored_bytes, stored_features
from unskew.engines.flower.agreement import Agreement
from unskew.engines.flower.compact import WireContext, compact, factor_of
from unskew.engines.flower.messages import field
from unskew.engines.flower.node_data import Fitted, NodeData
from unskew.engines.flower.node_memory import NodeMemory
from unskew.engines.flower.node_secret import NodeSecret
from unskew.engines.flower.promises import check_masked
from unskew.round.client import ClientSide, plan_ahead
from unskew.round.client_memory import MemoryFormat
from unskew.round.jobs import answer, decode_job, plugins_of

MAX_VISITS = 100_000  # in one message
MAX_REPEAT = 10**9
MAX_TICKET = 64  # characters
MAX_PARCEL = 2**20  # characters
MEMORY_SHARE = 3  # stored features may take one part in so many of the memory
OUTSIDE = re.compile(r"[\w.]+:\w+")  # package.module:function


@dataclass(frozen=True)
class Asked:
    """A job that the server asks for, checked against this node's clients."""

    job: Job
    key: Key
    visits: tuple[Visit, ...]
    keep: tuple[str, ...]  # tickets of memories that the server refers to


@dataclass(frozen=True)
class Answered:
    """What came of one visit: tensors in their forms, or the reason why not."""

    fields: Mapping[str, Any]
    tensors: tuple[tuple[str, Tensor], ...] = ()


class NodeRun:
    """The node's part in one run; its weights are scratch, and one message is worked on at a time."""

    def __init__(
        self, agreement: Agreement, data: NodeData, frozen: Tensors, folder: Path, *, own: NodeSecret, device: str,
        plugins: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.agreement = agreement
        self._plugins = plugins
        local = agreement.blueprint.local
        for what in (agreement.blueprint.method, agreement.blueprint.model, local.schedule, local.optimizer):
            check_plugins(what, plugins)
        held, blueprint = data.fitted(agreement), replace(agreement.blueprint, device=device)
        images = held.images
        if blueprint.stored:
            blueprint, images = _stored(blueprint, held, frozen, agreement.views)
        side = build(blueprint, dataset(images, held.population) | tensors.prefixed(frozen, FROZEN))
        self._memory = None
        if side.algorithm.remember:
            self._memory = NodeMemory(folder / "memories", MemoryFormat(side.algorithm.remember, side.weights))
        self.side: ClientSide = replace(
            side, memory=self._memory, secret=own.secret, sessions=own.sessions, own_tests=held.tests
        )

    def asked(self, header: Mapping[str, Any]) -> Asked:
        """What the header of a message asks for; refused where it is not for this node."""
        try:
            job = decode_job(field(header, "job", dict))
        except ValueError as error:
            raise BadMessage(f"its job cannot be read: {str(error)[:300]}") from error
        for name in plugins_of(job):
            check_plugins(name, self._plugins)
        check_masked(job, self.side.algorithm)
        path = field(header, "key", list)
        if not all(type(part) in (int, str) for part in path):
            raise BadMessage("its key is not a path of texts and whole numbers")
        visits = field(header, "visits", list)
        if not 0 < len(visits) <= MAX_VISITS:
            raise BadMessage(f"it asks for {len(visits):,} visits")
        checked = tuple(self._visit(each) for each in visits)
        if len({(visit.client, visit.repeat) for visit in checked}) < len(checked):
            raise BadMessage("it asks for one visit twice")
        keep = field(header, "keep", list)
        if not all(isinstance(ticket, str) and len(ticket) <= MAX_TICKET for ticket in keep):
            raise BadMessage("its tickets are not texts")
        key = Key(field(header, "seed", int), tuple(path))
        return Asked(job, key, checked, tuple(keep))

    def check_shared(self, shared: Tensors) -> None:
        """Refuse a model that is not this network's, and any number that is not finite."""
        model = {name: value for name, value in shared.items() if name.startswith(("params/", "buffers/"))}
        if model and model.keys() != self.side.weights.keys():
            odd = sorted(model.keys() ^ self.side.weights.keys())
            raise BadMessage(f"its model is not the network that was agreed on: {odd[0]}")
        for name, value in model.items():
            own = self.side.weights[name]
            if value.shape != own.shape or value.dtype != own.dtype:
                raise BadMessage(f"its model has another {name}: {value.dtype} {list(value.shape)}")
        if not tensors.finite({name: value for name, value in shared.items() if value.is_floating_point()}):
            raise BadMessage("its tensors hold NaN or infinity")

    def work(self, asked: Asked, shared: Tensors) -> list[Answered]:
        """Do the job for each visit."""
        if self._memory is not None:
            self._memory.clear(asked.visits, asked.keep)
        plan_ahead(self.side, asked.job, shared, asked.visits, asked.key)
        return [self._visit_client(asked.job, shared, visit, asked.key) for visit in asked.visits]

    def _visit_client(self, job: Job, shared: Tensors, visit: Visit, key: Key) -> Answered:
        about = {"client": visit.client, "repeat": visit.repeat}
        try:
            local = self.side.algorithm.local
            size = len(self.side.population.examples(visit.client)) if visit.take is None else visit.take
            check_visit(size, local, self.agreement.blueprint.shape)
            mine = visit if self._memory is None else self._memory.assign(visit)
            reply = answer(self.side, job, shared, mine, key)
        except (StorageFailure, UserError) as error:
            return Answered(about | {"failure": str(error)})
        if isinstance(reply, Failure):
            return Answered(about | {"failure": reply.reason})
        context = WireContext(shared, visit.weight, factor_of(reply.sums, visit.weight))
        sent = compact(reply.sums, context)
        fields = about | {
            "forms": [form for _, form, _ in sent],
            "extra": len(reply.extra),
            "factor": context.factor,
            "ticket": reply.ticket,
        }
        if self._memory is not None and self._memory.lost:
            fields["anew"] = True
            self._memory.lost.clear()
        return Answered(fields, (*((name, value) for name, _, value in sent), *reply.extra.items()))

    def _visit(self, values: Any) -> Visit:
        if not isinstance(values, dict):
            raise BadMessage("a visit is not an object")
        client, repeat = field(values, "client", int), field(values, "repeat", int)
        if client not in self.agreement.numbers.values():
            raise BadMessage(f"client {client} is not one of this node's")
        weight = float(field(values, "weight", (int, float)))
        most = max(1, len(self.side.population.examples(client)))
        if not (math.isfinite(weight) and 0 < weight <= most):
            raise BadMessage(f"client {client} cannot weigh {weight:g}: it has {most:,} examples")
        take, ticket = field(values, "take", (int, type(None))), field(values, "ticket", (str, type(None)))
        if not (0 <= repeat <= MAX_REPEAT and (take is None or 0 < take <= MAX_REPEAT)):
            raise BadMessage(f"the visit to client {client} has numbers that are not possible")
        if ticket is not None and len(ticket) > MAX_TICKET:
            raise BadMessage(f"the ticket of client {client} is not one")
        parcel = field(values, "parcel", str)
        if len(parcel) > MAX_PARCEL:
            raise BadMessage(f"the parcel of client {client} has {len(parcel):,} characters")
        try:
            content = b64decode(parcel, validate=True)
        except ValueError as error:
            raise BadMessage(f"the parcel of client {client} cannot be read") from error
        return Visit(client, weight, take, repeat, ticket, field(values, "keep", bool), parcel=content)


def _stored(blueprint: Blueprint, held: Fitted, frozen: Tensors, views: int) -> tuple[Blueprint, ImageSet]:
    """The frozen part's output in the place of the images, computed once; where it is too large, the images."""
    network = blueprint.whole()
    tensors.overwrite_some(network, frozen)
    parts = pixels(blueprint, dataset(held.images, held.population))
    part = Frozen(blueprint, network, parts, images_sha256(held.images), views)
    if stored_bytes(held.images, part.cut.shape, views) > physical_memory() / MEMORY_SHARE:
        return replace(blueprint, stored=False), held.images
    return blueprint, stored_features(part, held.images, cache_folder(), silent)


def check_plugins(what: str, allowed: tuple[str, ...]) -> None:
    """Refuse code that the server names and the node's settings do not: importing it would run it here."""
    if strange := [name for name in OUTSIDE.findall(what) if name not in allowed]:
        raise BadMessage(
            f"{strange[0]} is code that this node has not allowed; whoever runs the node may add it to its plugins"
        )
