"""3. Local training: a client's jobs before and during a round, and what a process needs to do them."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unskew.core import tensors
from unskew.core.key import Key, no_global_draws, seeded
from unskew.core.tensors import ALIGN, DOUBLE, Layout, Packed, PackedSums
from unskew.core.types import Displacement, Job, Local, Loss, Reply, Step, Sums, Tensors, TestPart, Visit, Visited
from unskew.data.batches import Pixels, Plan, plan
from unskew.data.population import Population
from unskew.models.networks import InParts, Network, by_layer
from unskew.models.passes import Passes, build_passes
from unskew.round.client_memory import ClientMemory, SavedStates
from unskew.round.jobs import register, visit_key
from unskew.round.local_optimizers import clip_gradients, make_optimizer, with_round_rate

if TYPE_CHECKING:
    from unskew.privacy.sessions import Sessions
    from unskew.privacy.signing import Signer
    from unskew.round.algorithm import Algorithm


def objective(algorithm: "Algorithm", step: Step) -> Loss:
    """The loss of one mini-batch: margins, then cross-entropy, then the blend, then the terms."""
    logits = step.logits
    for margin in algorithm.margin:
        logits = logits + margin(step)
    example = F.cross_entropy(logits, step.labels, reduction="none")
    loss = Loss(example if algorithm.blend is None else algorithm.blend(example, step))
    for term in algorithm.terms:
        loss = term(loss, step)
    return loss


NUMBERS = ("weight", "scaled", "metric/loss", "metric/examples", "metric/visits")
HEAD = ALIGN // DOUBLE  # length of the vector's head: the numbers, then zeros
new_room = partial(torch.empty, dtype=torch.float64)  # memory for a vector of that many numbers


def pack_update(
    side: "ClientSide", shared: Tensors, before: Tensor, factor: float, numbers: tuple[float, ...]
) -> PackedSums:
    """A visit's update; ``before`` is the server's packed model in float64, ``numbers`` are those named above.

    float64 represents the differences of float32 exactly, so one client's round is plain SGD to the last bit.
    """
    weight, vector = numbers[0], side.room(HEAD + len(before))
    vector[:HEAD] = torch.tensor((*numbers, *(0.0,) * (HEAD - len(numbers))), dtype=torch.float64)
    delta = vector[HEAD:]
    delta.copy_(side.packed.vector)
    torch.sub(before, delta, out=delta).mul_(weight)
    update = PackedSums(side.update_layout, vector)
    if factor == 1 and not side.packed.others:
        return update
    sums = update.by_name()
    for name in side.packed.others:
        sums[f"delta/{name}"] = (shared[name].double() - side.weights[name].cpu().double()).mul_(weight)
    if factor != 1:  # only for parameters: buffers are averaged
        torch._foreach_mul_([value for name, value in sums.items() if name.startswith("delta/params/")], factor)
    if not side.packed.others:
        return update
    names = (*NUMBERS[:2], *(f"delta/{name}" for name in side.weights), *NUMBERS[2:])
    return PackedSums.of({name: sums[name] for name in names})


def descend(side: "ClientSide", shared: Tensors, memory: Tensors, client: int, batches: Plan, local: Local) -> float:
    """Take the plan's steps in place, on the side's device; return the sum of the loss over all examples."""
    losses = list[Tensor]()
    update = make_optimizer(side.trained, local, len(batches.counts))
    algorithm = side.algorithm
    changed = algorithm.margin or algorithm.blend or algorithm.terms or algorithm.head
    by_hand = None if changed else side.passes  # they minimise only the mean cross-entropy
    gradients_of = _by_autograd(side, shared, memory, client) if by_hand is None else by_hand.gradients
    if algorithm.perturbation is not None:
        gradients_of = _perturbed(side, algorithm.perturbation(shared, memory), gradients_of)
    added = algorithm.correction(shared, memory) if algorithm.correction is not None else {}
    correction = [added[name] for name in side.params] if added else None
    for step in range(len(batches.counts)):
        loss, gradients = gradients_of(*side.train.batch(*batches.row(step)))
        if local.clip:  # before the correction, so that scaffold's control variates are means of clipped gradients
            gradients = clip_gradients(gradients, local.clip)
        update(gradients if correction is None else torch._foreach_add(list(gradients), correction))
        losses.append(loss)  # read after the last step: reading a loss waits for the device
    total = 0.0  # a loop, since sum() rounds differently from Python 3.12 on
    for value, count in zip(torch.stack(losses).flatten().tolist() if losses else [], batches.counts, strict=True):
        total += value * count
    return total


Gradients = Callable[[Tensor, Tensor], tuple[Tensor, Sequence[Tensor]]]  # images, labels -> loss, its gradients


def _by_autograd(side: "ClientSide", shared: Tensors, memory: Tensors, client: int) -> Gradients:
    """The methods' loss and its gradients, by autograd; a reference model is loaded at its first use in a visit."""
    algorithm, counts = side.algorithm, side.counts(client).to(side.device)
    encoder = side.network.encoder if side.passes is None else side.passes.encode
    loaded: dict[str, Network] = {}

    def encode(images: Tensor, name: str) -> Tensor:
        if name not in loaded:
            loaded[name] = side.reference(name, shared if name == "shared" else tensors.under(memory, f"{name}/"))
        with torch.no_grad():
            features: Tensor = loaded[name].encoder(images)
        return features

    def predict(images: Tensor, name: str) -> Tensor:
        features = encode(images, name)
        with torch.no_grad():
            return side.logits(features, loaded[name].classifier)

    def gradients_of(images: Tensor, labels: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        features = encoder(images)
        logits = side.logits(features)
        others = partial(encode, images), partial(predict, images)
        step = Step(features, logits, labels, side.params, shared, memory, counts, *others, side.classifier)
        value = objective(algorithm, step).value()
        gradients = torch.autograd.grad(value, side.trained, materialize_grads=True)  # zero for unused parameters
        return value.detach(), gradients

    return gradients_of


def _perturbed(side: "ClientSide", displacement: Displacement, gradients_of: Gradients) -> Gradients:
    """The gradients at the model plus a displacement; the model itself does not change."""
    buffers = [value for name, value in side.weights.items() if name.startswith("buffers/")]

    def perturbed(images: Tensor, labels: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        def gradient() -> Tensors:
            before = [value.clone() for value in buffers]
            _, gradients = gradients_of(images, labels)
            if buffers:  # this pass is not a step: BatchNorm's running statistics must not change
                torch._foreach_copy_(buffers, before)
            return dict(zip(side.params, gradients, strict=True))

        added = displacement(gradient)
        if not added:
            return gradients_of(images, labels)
        with torch.no_grad():
            before = [value.clone() for value in side.trained]
            torch._foreach_add_(side.trained, [added[name] for name in side.params])
        result = gradients_of(images, labels)
        with torch.no_grad():
            torch._foreach_copy_(side.trained, before)
        return result

    return perturbed


def accumulated(steps: int, momentum: float) -> float:
    """‖a‖₁: how many plain gradients these steps of SGD with momentum amount to.

    With gradients g₁ … g_τ the model moves by η·Σ a_t·g_t, a_t = (1 − m^(τ−t+1)) / (1 − m); without momentum ‖a‖₁ = τ.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


IMAGES_AT_ONCE = 500  # in one forward pass without gradient
TRAINED_WITH = ("params/", "buffers/", "sent/")  # the tensors from the server that training uses


@dataclass(frozen=True)
class ClientSide:
    """What a process needs to do any client's work. The network's weights are scratch: every job overwrites them."""

    algorithm: "Algorithm"
    network: Network
    packed: Packed  # the network's tensors
    train: Pixels
    test: Pixels
    population: Population
    memory: SavedStates | None = None  # None: no method stores anything
    secret: bytes = b""  # of this machine, for secure sums; the server never sees it
    sessions: "Sessions | None" = None  # the answers of this machine's clients in secure sums
    signer: "Signer | None" = None  # of a federation's node, for sums that a dishonest server cannot unmask
    own_tests: Mapping[int, Tensor] = field(default_factory=dict)  # the indices of each client's test images
    room: Callable[[int], Tensor] = new_room  # allocates an update of that length
    planned: dict[Key, Plan] = field(init=False, default_factory=dict)  # drawn in advance, by the visit's key
    _received: list[tuple[Tensors, Tensors]] = field(init=False, default_factory=list)
    _starts: list[tuple[Tensors, Tensor, Tensor]] = field(init=False, default_factory=list)
    _references: dict[str, tuple[Network, Tensors]] = field(init=False, default_factory=dict)

    @property
    def memory_file(self) -> ClientMemory | None:
        """The clients' memories, if they are in a file."""
        return self.memory if isinstance(self.memory, ClientMemory) else None

    @cached_property
    def weights(self) -> Tensors:
        """The network's tensors by name, buffers included."""
        return tensors.of_module(self.network)

    @cached_property
    def params(self) -> Tensors:
        """The trained parameters by name, for autograd."""
        return {f"params/{name}": value for name, value in self.network.named_parameters() if value.requires_grad}

    @cached_property
    def update_layout(self) -> Layout:
        """The layout of an update's vector: the numbers, then the tensors as in the network."""
        numbers: Layout = [(name, "float64", [], index * DOUBLE) for index, name in enumerate(NUMBERS)]
        deltas: Layout = [
            (f"delta/{name}", "float64", list(shape), (HEAD + start) * DOUBLE)
            for name, (shape, _, start) in self.packed.positions.items()
        ]
        return [*numbers[:2], *deltas, *numbers[2:]]

    @cached_property
    def trained(self) -> list[Tensor]:
        """The trained parameters."""
        return list(self.params.values())

    @property
    def outside(self) -> bool:
        """Whether the network is a user's own."""
        return bool(self.network.origin)

    @cached_property
    def passes(self) -> Passes | None:
        """The network's hand-written passes, if all its layers have them."""
        return None if self.outside else build_passes(self.network)

    @cached_property
    def classifier(self) -> tuple[str, ...]:
        """The names of the classifier's weight and bias."""
        return self.network.classifier_names

    @property
    def device(self) -> torch.device:
        """The device of the images and the network."""
        return self.train.device

    @cached_property
    def labels(self) -> npt.NDArray[np.int64]:
        """[N], the training examples' classes; on the CPU."""
        return self.train.labels.cpu().numpy()

    def received(self, shared: Tensors) -> Tensors:
        """The server's tensors for training, on this side's device: copied once per round, not per visit."""
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
        """Overwrite the network's tensors with the server's for training; return the server's, packed, in float64.

        They are packed once per round, not per visit.
        """
        if not self._starts or self._starts[0][0] is not shared:
            model = self.packed.copied(self.received(shared))
            self._starts[:] = [(shared, model, model.cpu().double())]
        _, model, exact = self._starts[0]
        self.packed.vector.copy_(model)
        for name in self.packed.others:
            self.weights[name].copy_(shared[name])
        if not self.network.training:
            self.network.train()
        return exact

    def logits(self, features: Tensor, classifier: nn.Linear | None = None) -> Tensor:
        """[B, d] -> [B, C], through the network's or another classifier, transformed by the algorithm's head."""
        classifier, head = classifier or self.network.classifier, self.algorithm.head
        if head is None:
            logits: Tensor = classifier(features)
            return logits
        return F.linear(features, *head(classifier.weight, classifier.bias))

    def reference(self, name: str, model: Tensors) -> Network:
        """A second network with these weights, in eval mode; there is one per name."""
        if name not in self._references:
            network = copy.deepcopy(self.network).eval()
            self._references[name] = (network, tensors.of_module(network))
        network, weights = self._references[name]
        torch._foreach_copy_(list(weights.values()), [model[key] for key in weights])
        return network

    def close(self) -> None:
        """Close the files of memories and sessions."""
        for file in (self.memory, self.sessions):
            if file is not None:
                file.close()

    def counts(self, client: int) -> Tensor:
        """[C], the client's examples of each class; on the CPU."""
        labels = self.labels[self.population.examples(client)]
        return torch.from_numpy(np.bincount(labels, minlength=self.network.classifier.out_features))


@register
class Survey(msgspec.Struct, frozen=True, tag="survey"):
    """Measure what the methods need from every client before the first round, without a model."""

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Measure the statistics' surveys."""
        known = Visited(visit, {}, {}, {}, side.counts(visit.client), 0, side.algorithm.local, lambda: iter(()))
        sums: Sums = {}
        for statistic in side.algorithm.statistics:
            if statistic.survey is not None:
                sums |= tensors.prefixed(statistic.survey(known), f"stat/{statistic.name}/")
        return Reply(sums)


@register
class Train(msgspec.Struct, frozen=True, tag="train"):
    """Start from the server's model, take the plan's steps, reply with weight·(old − new) in float64.

    ``watch`` names what is recorded of the visit, in the reply's ``extra``: "norms", "drift", "model".
    """

    round: int = 0
    watch: tuple[str, ...] = ()

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Train; in the first round, refuse methods that draw from global random generators."""
        with no_global_draws() if self.round == 1 else nullcontext():
            return self._train(side, shared, visit, key)

    def _train(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Train on the side's device.

        What follows training (the update, statistics, memories) is on the CPU, so that methods need not handle devices,
        and float64 is available on every machine.
        """
        algorithm = side.algorithm
        local = with_round_rate(algorithm.local, shared)
        batches = side.planned.pop(key, None) or plan(side.population.examples(visit.client), visit.take, local, key)
        memory = {} if side.memory is None else side.memory.recall(visit)
        before = side.start(shared)
        received, recalled = side.received(shared), tensors.on_device(memory, side.device)
        with seeded(key.fold("forward")) if side.outside else nullcontext():
            loss = descend(side, received, recalled, visit.client, batches.to(side.device), local)

        steps = len(batches.counts)
        factor = 1.0 if algorithm.scale is None else algorithm.scale(steps, local)
        numbers = (visit.weight, visit.weight / factor, loss, float(sum(batches.counts)), 1.0)
        update = pack_update(side, shared, before, factor, numbers)
        if not algorithm.statistics and algorithm.mechanism is None and side.memory is None and not self.watch:
            return Reply(update)
        sums, model = update.by_name(), tensors.on_device(side.weights, "cpu")
        counts, features = side.counts(visit.client), _features(side, batches)
        visited = Visited(visit, shared, memory, model, counts, steps, local, features, side.classifier)
        for statistic in algorithm.statistics:
            if statistic.measure is not None:
                sums |= tensors.prefixed(statistic.measure(visited), f"stat/{statistic.name}/")
        if algorithm.mechanism is not None:
            sums = algorithm.mechanism.clip_update(sums)
        keep = side.memory.format.values(visited) if side.memory is not None and visit.keep else None
        return Reply(sums, record(side, shared, self.watch) if visit.repeat == 0 else {}, keep=keep)


def plan_ahead(side: ClientSide, job: Job, shared: Tensors, visits: Sequence[Visit | TestPart], key: Key) -> None:
    """Draw the plans of the next training visits in one go.

    Plans do not depend on the order. Drawn between two trainings they take four times as long, because the code must be
    fetched from memory each time.
    """
    side.planned.clear()
    if not isinstance(job, Train) or len(visits) < 2:
        return
    local, clients = with_round_rate(side.algorithm.local, shared), side.population.clients
    for visit in visits:
        if isinstance(visit, Visit) and 0 <= visit.client < clients:  # others fail in their turn
            its_key = visit_key(key, visit)
            side.planned[its_key] = plan(side.population.examples(visit.client), visit.take, local, its_key)


def record(side: ClientSide, shared: Tensors, watch: Sequence[str]) -> Tensors:
    """The recordings of a client after its training; on the CPU."""
    recorded: Tensors = {}
    if "norms" in watch:
        recorded["norms"] = class_norms(side)  # [C]
    model = tensors.on_device(side.weights, "cpu")
    if "drift" in watch:
        recorded["drift"] = distances(model, shared)  # [L]
    if "model" in watch:
        recorded |= {f"model/{name}": value.detach().clone() for name, value in model.items()}
    return recorded


def class_norms(side: ClientSide) -> Tensor:
    """[C], the norm of each class's row of the classifier, transformed by the algorithm's head; on the CPU."""
    classifier, head = side.network.classifier, side.algorithm.head
    weight = classifier.weight if head is None else head(classifier.weight, classifier.bias)[0]
    norms: Tensor = weight.detach().cpu().double().norm(dim=1)
    return norms


def distances(model: Tensors, other: Tensors) -> Tensor:
    """[L], the Euclidean distance between two models' parameters, layer by layer."""
    return layer_norms({n: value.double() - other[n].double() for n, value in tensors.parameters(model).items()})


def layer_norms(model: Tensors) -> Tensor:
    """[L], the Euclidean norm of each layer's parameters."""
    parts = by_layer(tensors.parameters(model)).values()
    return torch.stack([tensors.flat({name: model[name] for name in names}).norm() for names in parts])


def _features(side: ClientSide, batches: Plan) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """The client's features of each example in the plan, without augmentation, in eval mode; on the CPU."""

    def features() -> Iterator[tuple[Tensor, Tensor]]:
        side.network.eval()
        for index in torch.unique(batches.index[batches.index >= 0]).split(IMAGES_AT_ONCE):
            images, labels = side.train.batch(index)
            with torch.no_grad():
                values = InParts(side.network.encoder)(images)
            yield values.cpu(), labels.cpu()

    return features
