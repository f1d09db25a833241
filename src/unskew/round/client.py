"""3. What they do: the jobs of a client, by name. Each takes what the server sent and a visit, and gives sums.

Jobs have names since a function cannot cross a wire: every process builds the same table from the same blueprint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew import tensors
from unskew.data.batches import Pixels, Plan, plan
from unskew.data.population import Population
from unskew.key import Key
from unskew.models.layers import Network
from unskew.round.objective import objective
from unskew.types import Failure, Local, Step, Sums, Tensors, Visit

if TYPE_CHECKING:
    from unskew.algorithm import Algorithm

Job = Callable[[Tensors, Visit, Key], Sums]

EVALUATION_CHUNK = 500  # test images in one visit of the job "evaluate"


@dataclass(frozen=True)
class Bench:
    """What a process needs to do any client's work. The network's weights are scratch: every job overwrites them."""

    algorithm: "Algorithm"
    network: Network
    train: Pixels
    test: Pixels
    population: Population

    @cached_property
    def weights(self) -> Tensors:
        """The network's own tensors by name, its buffers included."""
        return tensors.of_module(self.network)

    @cached_property
    def params(self) -> Tensors:
        """The network's parameters by name, as autograd knows them."""
        return {f"params/{name}": value for name, value in self.network.named_parameters()}

    def load(self, shared: Tensors, *, training: bool) -> None:
        """Overwrite the network's tensors with the server's."""
        torch._foreach_copy_(list(self.weights.values()), [shared[name] for name in self.weights])
        if self.network.training != training:
            self.network.train(training)


def jobs(bench: Bench) -> dict[str, Job]:
    """The table of jobs."""
    return {
        "train": lambda shared, visit, key: train(bench, shared, visit, key),
        "evaluate": lambda shared, visit, key: evaluate(bench, shared, visit),
    }


def attempt(job: Job, shared: Tensors, visit: Visit, key: Key) -> Sums | Failure:
    """One visit, or the reason why it came to nothing."""
    try:
        sums = job(shared, visit, key.fold("client", visit.client, visit.repeat))
    except Exception as error:  # noqa: BLE001  whatever a client's code raises, the round decides what follows
        return Failure(visit.client, f"{type(error).__name__}: {error}")
    if not tensors.finite(sums):
        return Failure(visit.client, "its result holds NaN or infinity; a smaller --lr may help")
    return sums


def train(bench: Bench, shared: Tensors, visit: Visit, key: Key) -> Sums:
    """Start from the server's model, take the plan's steps, answer with weight·(old − new) in float64."""
    batches = plan(bench.population.examples(visit.client), visit.take, bench.algorithm.local, key)
    bench.load(shared, training=True)
    loss = descend(bench, shared, batches)
    examples = sum(batches.counts)
    return {
        "weight": _scalar(visit.weight),
        **_weighted_delta(shared, bench.weights, visit.weight),
        "metric/loss": _scalar(loss),
        "metric/examples": _scalar(examples),
        "metric/visits": _scalar(1),
    }


def descend(bench: Bench, shared: Tensors, batches: Plan) -> float:
    """SGD along the plan, in place; the sum of the loss over all examples seen."""
    network, terms, total = bench.network, bench.algorithm.terms, 0.0
    values = list(bench.params.values())
    update = sgd(values, bench.algorithm.local)
    for step, count in enumerate(batches.counts):
        images, labels = bench.train.batch(*_row(batches, step, count))
        features = network.encoder(images)
        logits = network.classifier(features)
        value = objective(terms, Step(features, logits, labels, bench.params, shared)).value()
        update(torch.autograd.grad(value, values))
        total += value.item() * count
    return total


def sgd(values: list[Tensor], local: Local) -> Callable[[tuple[Tensor, ...]], None]:
    """PyTorch's SGD (v ← m·v + g + λ·w, v₀ = g; w ← w − η·v) as one fused call for all parameters."""
    moving = local.momentum != 0
    velocity = [torch.empty_like(value) for value in values] if moving else []
    first = True

    def update(gradients: tuple[Tensor, ...]) -> None:
        nonlocal first
        with torch.no_grad():
            torch._fused_sgd_(
                values,
                [gradient.contiguous() for gradient in gradients],  # the fused call reads memory, not strides
                velocity,
                weight_decay=local.weight_decay,
                momentum=local.momentum,
                lr=local.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=first,
            )
        first = False

    return update


def evaluate(bench: Bench, shared: Tensors, visit: Visit) -> Sums:
    """Right answers and loss on the test images of chunk ``visit.client``, by class."""
    start = visit.client * EVALUATION_CHUNK
    index = torch.arange(start, min(start + EVALUATION_CHUNK, len(bench.test.labels)))
    bench.load(shared, training=False)
    with torch.no_grad():
        images, labels = bench.test.batch(index)
        logits = bench.network(images)
        loss = F.cross_entropy(logits.double(), labels, reduction="sum")
    right = labels[logits.argmax(1) == labels]
    classes = logits.shape[1]
    return {
        "metric/loss": loss,
        "metric/right": torch.bincount(right, minlength=classes).double(),
        "metric/total": torch.bincount(labels, minlength=classes).double(),
    }


def _row(batches: Plan, step: int, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if batches.shift is None or batches.flip is None:
        return batches.index[step, :count], None, None
    return batches.index[step, :count], batches.shift[step, :count], batches.flip[step, :count]


def _weighted_delta(old: Tensors, new: Tensors, weight: float) -> Sums:
    # float64 carries float32's differences exactly, so that one client's round is plain SGD to the last bit
    before = tensors.flat({name: old[name] for name in new})
    return tensors.shaped(before.sub_(tensors.flat(new)).mul_(weight), new, "delta/")


def _scalar(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
