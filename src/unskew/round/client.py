"""3. What they do: the jobs of a client, by name. Each takes what the server sent and a visit, and gives sums.

Jobs have names since a function cannot cross a wire: every process builds the same table from the same blueprint.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.calibration.classifier import load_calibrated
from unskew.calibration.jobs import moments
from unskew.core import tensors
from unskew.core.errors import StorageFailure
from unskew.core.key import Key
from unskew.core.types import Failure, Sums, Tensors, Visit, Visited
from unskew.data.batches import Pixels, Plan, plan
from unskew.data.population import Population
from unskew.models.cut import cut
from unskew.models.layers import Network
from unskew.round.client_memory import Memories
from unskew.round.descent import descend
from unskew.round.watch import Watch, watched

if TYPE_CHECKING:
    from unskew.round.algorithm import Algorithm

Job = Callable[[Tensors, Visit, Key], Sums]

UNFINITE = "its result holds NaN or infinity; a smaller --lr or smaller knobs of the method may help"
CHUNK = 500  # images in one forward pass without gradient: test images in one visit of the job "evaluate"


@dataclass(frozen=True)
class ClientSide:
    """What a process needs to do any client's work. The network's weights are scratch: every job overwrites them."""

    algorithm: "Algorithm"
    network: Network
    train: Pixels
    test: Pixels
    population: Population
    memories: Memories | None = None

    @cached_property
    def weights(self) -> Tensors:
        """The network's own tensors by name, its buffers included."""
        return tensors.of_module(self.network)

    @cached_property
    def params(self) -> Tensors:
        """The network's parameters by name, as autograd knows them."""
        return {f"params/{name}": value for name, value in self.network.named_parameters()}

    @cached_property
    def _references(self) -> dict[str, tuple[Network, Tensors]]:
        return {}

    def load(self, shared: Tensors, *, training: bool) -> None:
        """Overwrite the network's tensors with the server's."""
        torch._foreach_copy_(list(self.weights.values()), [shared[name] for name in self.weights])
        if self.network.training != training:
            self.network.train(training)

    def logits(self, features: Tensor) -> Tensor:
        """[B, d] -> [B, C], through the classifier as the algorithm uses it."""
        classifier, head = self.network.classifier, self.algorithm.head
        if head is None:
            found: Tensor = classifier(features)
            return found
        return F.linear(features, *head(classifier.weight, classifier.bias))

    def reference(self, name: str, model: Tensors) -> nn.Module:
        """The encoder of a second network with these weights, in eval mode; one network for each name is kept."""
        if name not in self._references:
            network = copy.deepcopy(self.network).eval()
            self._references[name] = (network, tensors.of_module(network))
        network, own = self._references[name]
        torch._foreach_copy_(list(own.values()), [model[key] for key in own])
        return network.encoder

    def counts(self, client: int) -> Tensor:
        """[C], how many examples of each class the client holds."""
        labels = self.train.labels.numpy()[self.population.examples(client)]
        return torch.from_numpy(np.bincount(labels, minlength=self.network.classifier.out_features))


def job(side: ClientSide, name: str) -> Job:
    """The job of that name; what follows a colon tells it more, as in ``moments:{…}``."""
    word, _, more = name.partition(":")
    table: dict[str, Job] = {
        "survey": lambda shared, visit, key: survey(side, visit),
        "train": lambda shared, visit, key: train(side, shared, visit, key, Watch.from_text(more) if more else None),
        "moments": lambda shared, visit, key: moments(side, shared, visit, key, more),
        "evaluate": lambda shared, visit, key: evaluate(side, shared, visit),
    }
    return table[word]


def attempt(work: Job, shared: Tensors, visit: Visit, key: Key) -> Sums | Failure:
    """One visit, or the reason why it came to nothing."""
    try:
        sums = work(shared, visit, key.fold("client", visit.client, visit.repeat))
        _check(sums)
    except StorageFailure:
        raise
    except Exception as error:  # noqa: BLE001  whatever a client's code raises, the round decides what follows
        return Failure(visit.client, f"{type(error).__name__}: {error}", visit.repeat)
    if not tensors.finite(sums):
        return Failure(visit.client, UNFINITE, visit.repeat)
    return sums


def _check(sums: Sums) -> None:
    for name, value in sums.items():
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name}: a sum must be a float64 tensor, this is {found}")


def survey(side: ClientSide, visit: Visit) -> Sums:
    """What the methods want to know of every client before the first round. No model is there yet."""
    known = Visited(visit, {}, {}, {}, side.counts(visit.client), 0, side.algorithm.local, lambda: iter(()))
    sums: Sums = {}
    for statistic in side.algorithm.statistics:
        if statistic.survey is not None:
            sums |= tensors.prefixed(statistic.survey(known), f"stat/{statistic.name}/")
    return sums


def train(side: ClientSide, shared: Tensors, visit: Visit, key: Key, watch: Watch | None = None) -> Sums:
    """Start from the server's model, take the plan's steps, answer with weight·(old − new) in float64."""
    algorithm = side.algorithm
    batches = plan(side.population.examples(visit.client), visit.take, algorithm.local, key)
    memory = side.memories.recall(visit) if side.memories else {}
    counts = side.counts(visit.client)
    side.load(shared, training=True)
    loss = descend(side, shared, memory, counts, batches)

    steps = len(batches.counts)
    factor = 1.0 if algorithm.scale is None else algorithm.scale(steps, algorithm.local)
    sums = {
        "weight": _scalar(visit.weight),
        "scaled": _scalar(visit.weight / factor),
        **_weighted_delta(shared, side.weights, visit.weight, factor),
        "metric/loss": _scalar(loss),
        "metric/examples": _scalar(sum(batches.counts)),
        "metric/visits": _scalar(1),
    }
    features = _features(side, batches)
    visited = Visited(visit, shared, memory, side.weights, counts, steps, algorithm.local, features)
    for statistic in algorithm.statistics:
        if statistic.measure is not None:
            sums |= tensors.prefixed(statistic.measure(visited), f"stat/{statistic.name}/")
    if side.memories:
        side.memories.keep(visited)
    return sums if watch is None else sums | tensors.prefixed(watched(side, shared, visit, watch), "watch/")


def evaluate(side: ClientSide, shared: Tensors, visit: Visit) -> Sums:
    """Right answers and loss on the test images of chunk ``visit.client``, by class.

    A calibrated classifier, where one is sent, stands in for the model's own.
    """
    start = visit.client * CHUNK
    index = torch.arange(start, min(start + CHUNK, len(side.test.labels)))
    side.load(shared, training=False)
    with torch.no_grad():
        images, labels = side.test.batch(index)
        if other := tensors.under(shared, "calibrated/"):
            encoder, classifier = load_calibrated(other, lambda layers: cut(side.network, layers))
            logits = classifier(encoder(images))
        else:
            logits = side.logits(side.network.encoder(images))
        loss = F.cross_entropy(logits.double(), labels, reduction="sum")
    right = labels[logits.argmax(1) == labels]
    classes = logits.shape[1]
    return {
        "metric/loss": loss,
        "metric/right": torch.bincount(right, minlength=classes).double(),
        "metric/total": torch.bincount(labels, minlength=classes).double(),
    }


def _features(side: ClientSide, batches: Plan) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """The client's own features of the examples in the plan, each once and as it is, in eval mode."""

    def features() -> Iterator[tuple[Tensor, Tensor]]:
        side.network.eval()
        for index in torch.unique(batches.index[batches.index >= 0]).split(CHUNK):
            images, labels = side.train.batch(index)
            with torch.no_grad():
                found = side.network.encoder(images)
            yield found, labels

    return features


def _weighted_delta(old: Tensors, new: Tensors, weight: float, factor: float) -> Sums:
    # float64 carries float32's differences exactly, so that one client's round is plain SGD to the last bit
    before = tensors.flat({name: old[name] for name in new})
    delta = tensors.shaped(before.sub_(tensors.flat(new)).mul_(weight), new, "delta/")
    if factor != 1:  # of parameters alone: buffers are averaged plainly
        torch._foreach_mul_([value for name, value in delta.items() if name.startswith("delta/params/")], factor)
    return delta


def _scalar(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
