"""3. What they do: a client's jobs before and during a round, and what a process needs to do any client's work."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.core import tensors
from unskew.core.key import Key, seeded
from unskew.core.packing import Packed
from unskew.core.tensors import Layout
from unskew.core.types import Sums, Tensors, Visit, Visited
from unskew.data.batches import Pixels, Plan, plan
from unskew.data.population import Population
from unskew.models import from_outside
from unskew.models.layers import Network
from unskew.models.passes import Passes, passes
from unskew.round.client_memory import SavedStates
from unskew.round.descent import descend
from unskew.round.jobs import Answer, Job, visit_key
from unskew.round.schedules import in_round
from unskew.round.update import new_room, update_layout
from unskew.round.update import update as weighted_update
from unskew.round.watch import Watch, watched

if TYPE_CHECKING:
    from unskew.privacy.sessions import Sessions
    from unskew.round.algorithm import Algorithm

IMAGES_AT_ONCE = 500  # in one forward pass without gradient
TRAINED_WITH = ("params/", "buffers/", "sent/")  # what a client's training uses of what the server sends


@dataclass(frozen=True)
class ClientSide:
    """What a process needs to do any client's work. The network's weights are scratch: every job overwrites them."""

    algorithm: "Algorithm"
    network: Network
    packed: Packed  # the network's tensors
    train: Pixels
    test: Pixels
    population: Population
    memory: SavedStates | None = None  # None: no method keeps anything
    secret: bytes = b""  # of this machine, for secure sums; the server never sees it
    sessions: "Sessions | None" = None  # what the clients of this machine have answered in secure sums
    own_tests: Mapping[int, Tensor] = field(default_factory=dict)  # by client, which of the test images are its own
    room: Callable[[int], Tensor] = new_room  # where an update of so many numbers is written

    @cached_property
    def weights(self) -> Tensors:
        """The network's own tensors by name, its buffers included."""
        return tensors.of_module(self.network)

    @cached_property
    def params(self) -> Tensors:
        """The network's parameters that are trained, by name, as autograd knows them."""
        return {f"params/{name}": value for name, value in self.network.named_parameters() if value.requires_grad}

    @cached_property
    def update_layout(self) -> Layout:
        """Where everything is in the vector of a visit's update."""
        return update_layout(self.packed)

    @cached_property
    def outside(self) -> bool:
        """Whether the network is not one of ours."""
        return from_outside(self.network)

    @cached_property
    def trained(self) -> list[Tensor]:
        """The parameters that are trained."""
        return list(self.params.values())

    @cached_property
    def passes(self) -> Passes | None:
        """The network's passes by hand, where all its layers are known."""
        return None if self.outside else passes(self.network)

    @cached_property
    def plain(self) -> bool:
        """Whether clients minimise the mean cross-entropy and nothing else."""
        own = self.algorithm
        return not (own.margin or own.terms) and own.blend is None and own.head is None

    @cached_property
    def classifier(self) -> tuple[str, ...]:
        """The names of the classifier's weight and bias."""
        return self.network.classifier_names

    @property
    def device(self) -> torch.device:
        """What this side trains on: the device of its images and its network."""
        return self.train.device

    @cached_property
    def planned(self) -> dict[Key, Plan]:
        """Plans that were drawn ahead, by the key of their visit."""
        return {}

    @cached_property
    def _received(self) -> list[tuple[Tensors, Tensors]]:
        return []

    @cached_property
    def _starts(self) -> list[tuple[Tensors, Tensor, Tensor]]:
        return []

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """[N], the classes of the training examples; on the CPU."""
        return self.train.labels.cpu().numpy()

    @cached_property
    def _references(self) -> dict[str, tuple[Network, Tensors]]:
        return {}

    def received(self, shared: Tensors) -> Tensors:
        """What training uses of what the server sent, on this side's device: copied once a round, not once a visit."""
        if self.device.type == "cpu":
            return shared
        if not self._received or self._received[0][0] is not shared:
            used = {name: value for name, value in shared.items() if name.startswith(TRAINED_WITH)}
            self._received[:] = [(shared, tensors.on_device(used, self.device))]
        return self._received[0][1]

    def load(self, shared: Tensors, *, training: bool) -> None:
        """Overwrite the network's tensors with the server's."""
        shared = self.received(shared)
        torch._foreach_copy_(list(self.weights.values()), [shared[name] for name in self.weights])
        if self.network.training != training:
            self.network.train(training)

    def start(self, shared: Tensors) -> Tensor:
        """Overwrite the network's tensors with the server's and train from there; the server's in float64, as packed.

        They are packed once a round, not once a visit.
        """
        if not self._starts or self._starts[0][0] is not shared:
            model = self.packed.copied(self.received(shared), self.packed.vector.dtype)
            self._starts[:] = [(shared, model, model.cpu().double())]
        _, model, exact = self._starts[0]
        self.packed.vector.copy_(model)
        for name in self.packed.others:
            self.weights[name].copy_(shared[name])
        if not self.network.training:
            self.network.train()
        return exact

    def logits(self, features: Tensor, classifier: nn.Linear | None = None) -> Tensor:
        """[B, d] -> [B, C], through the network's classifier or the given one, as the algorithm uses it."""
        classifier, head = classifier or self.network.classifier, self.algorithm.head
        if head is None:
            logits: Tensor = classifier(features)
            return logits
        return F.linear(features, *head(classifier.weight, classifier.bias))

    def reference(self, name: str, model: Tensors) -> Network:
        """A second network with these weights, in eval mode; one network for each name is kept."""
        if name not in self._references:
            network = copy.deepcopy(self.network).eval()
            self._references[name] = (network, tensors.of_module(network))
        network, own = self._references[name]
        torch._foreach_copy_(list(own.values()), [model[key] for key in own])
        return network

    def counts(self, client: int) -> Tensor:
        """[C], how many examples of each class the client holds; on the CPU."""
        labels = self.labels[self.population.examples(client)]
        return torch.from_numpy(np.bincount(labels, minlength=self.network.classifier.out_features))


def survey(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums:
    """What the methods ask every client before the first round. There is no model yet."""
    known = Visited(visit, {}, {}, {}, side.counts(visit.client), 0, side.algorithm.local, lambda: iter(()))
    sums: Sums = {}
    for statistic in side.algorithm.statistics:
        if statistic.survey is not None:
            sums |= tensors.prefixed(statistic.survey(known), f"stat/{statistic.name}/")
    return sums


def plan_ahead(side: ClientSide, shared: Tensors, visits: Sequence[Visit], key: Key) -> None:
    """Draw the plans of the next visits that train, one after another.

    They are the same in any order. Between two trainings drawing takes four times as long: its code has to come back
    from memory each time.
    """
    side.planned.clear()
    local, clients = in_round(side.algorithm.local, shared), side.population.clients
    for visit in visits:
        if 0 <= visit.client < clients:  # any other fails when its turn comes
            own = visit_key(key, visit)
            side.planned[own] = plan(side.population.examples(visit.client), visit.take, local, own)


def train(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Answer:
    """Start from the server's model, take the plan's steps, answer with weight·(old − new) in float64.

    Training is on the side's device. What follows it (the update, statistics, memories) is on the CPU, so that a
    method's own functions need not know about devices, and float64 is available on every machine.
    """
    algorithm = side.algorithm
    local = in_round(algorithm.local, shared)
    batches = side.planned.pop(key, None) or plan(side.population.examples(visit.client), visit.take, local, key)
    memory = {} if side.memory is None else side.memory.recall(visit)
    before = side.start(shared)
    received, recalled = side.received(shared), tensors.on_device(memory, side.device)
    with seeded(key.fold("forward")) if side.outside else nullcontext():
        loss = descend(side, received, recalled, visit.client, batches.to(side.device), local)

    steps = len(batches.counts)
    factor = 1.0 if algorithm.scale is None else algorithm.scale(steps, local)
    numbers = (visit.weight, visit.weight / factor, loss, float(sum(batches.counts)), 1.0)
    update = weighted_update(side, shared, before, factor, numbers)
    if not algorithm.statistics and algorithm.mechanism is None and side.memory is None and not options:
        return Answer(update)
    sums, model = update.by_name(), tensors.on_device(side.weights, "cpu")
    visited = Visited(
        visit, shared, memory, model, side.counts(visit.client), steps, local, _features(side, batches), side.classifier
    )
    for statistic in algorithm.statistics:
        if statistic.measure is not None:
            sums |= tensors.prefixed(statistic.measure(visited), f"stat/{statistic.name}/")
    if algorithm.mechanism is not None:
        sums = algorithm.mechanism.clipped(sums)
    kept = side.memory.values(visited) if side.memory is not None and visit.keep else None
    if options:  # recording: what is looked at travels beside the sums
        sums |= tensors.prefixed(watched(side, shared, visit, Watch.from_text(options)), "watch/")
    return Answer(sums, kept)


def _features(side: ClientSide, batches: Plan) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """The client's own features of the examples in the plan, each once and as it is, in eval mode; on the CPU."""

    def features() -> Iterator[tuple[Tensor, Tensor]]:
        side.network.eval()
        for index in torch.unique(batches.index[batches.index >= 0]).split(IMAGES_AT_ONCE):
            images, labels = side.train.batch(index)
            with torch.no_grad():
                values = side.network.encoder(images)
            yield values.cpu(), labels.cpu()

    return features


JOBS: Mapping[str, Job] = {"survey": survey, "train": train}
