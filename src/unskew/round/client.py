"""3. Local training: a client's jobs before and during a round, and all that a process needs to do them."""

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
from unskew.models import from_outside
from unskew.models.networks import Network, by_layer
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
HEAD = ALIGN // DOUBLE  # of the vector: the numbers, then zeros


def new_room(count: int) -> Tensor:
    """Room for a vector of so many numbers, wherever there is some."""
    return torch.empty(count, dtype=torch.float64)


def pack_update(
    side: "ClientSide", shared: Tensors, before: Tensor, factor: float, numbers: tuple[float, ...]
) -> PackedSums:
    """The update of a visit; ``before`` is the server's model as packed, in float64, ``numbers`` are as named above.

    float64 carries float32's differences exactly, so that one client's round is plain SGD to the last bit.
    """
    weight, vector = numbers[0], side.room(HEAD + len(before))
    vector[:HEAD] = torch.tensor((*numbers, *(0.0,) * (HEAD - len(numbers))), dtype=torch.float64)
    moved = vector[HEAD:]
    moved.copy_(side.packed.vector)
    torch.sub(before, moved, out=moved).mul_(weight)
    whole = PackedSums(side.update_layout, vector)
    if factor == 1 and not side.packed.others:
        return whole
    sums = _with_others(side, shared, whole.by_name(), weight) if side.packed.others else whole.by_name()
    if factor != 1:  # of parameters alone: buffers are averaged plainly
        torch._foreach_mul_([value for name, value in sums.items() if name.startswith("delta/params/")], factor)
    return PackedSums.of(sums) if side.packed.others else whole


def _with_others(side: "ClientSide", shared: Tensors, sums: Sums, weight: float) -> Sums:
    """With the tensors that are not in the packed vector, all in the network's order."""
    for name in side.packed.others:
        sums[f"delta/{name}"] = (shared[name].double() - side.weights[name].cpu().double()).mul_(weight)
    names = (*NUMBERS[:2], *(f"delta/{name}" for name in side.weights), *NUMBERS[2:])
    return {name: sums[name] for name in names}


def descend(side: "ClientSide", shared: Tensors, memory: Tensors, client: int, batches: Plan, local: Local) -> float:
    """Steps along the plan, in place; the sum of the loss over all examples seen. All of it is on the side's device."""
    losses = list[Tensor]()
    update = make_optimizer(side.trained, local, len(batches.counts))
    by_hand = side.passes if side.plain else None
    gradients_of = _by_autograd(side, shared, memory, client) if by_hand is None else by_hand.gradients
    if side.algorithm.perturbation is not None:
        gradients_of = _perturbed(side, side.algorithm.perturbation(shared, memory), gradients_of)
    correction = _correction(side, shared, memory)
    for step, count in enumerate(batches.counts):
        loss, gradients = gradients_of(*side.train.batch(*_row(batches, step, count)))
        if local.clip:  # before a correction is added, so that scaffold's control variates are means of what is clipped
            gradients = clip_gradients(gradients, local.clip)
        update(gradients if correction is None else torch._foreach_add(list(gradients), correction))
        losses.append(loss)  # read after the last step: reading one waits for the device
    return _total(losses, batches.counts)


Gradients = Callable[[Tensor, Tensor], tuple[Tensor, Sequence[Tensor]]]  # images, labels -> loss, its gradients


def _by_autograd(side: "ClientSide", shared: Tensors, memory: Tensors, client: int) -> Gradients:
    """From images and labels to the loss that the methods make and its gradients."""
    algorithm, counts = side.algorithm, side.counts(client).to(side.device)
    encoder = side.network.encoder if side.passes is None else side.passes.encode
    encode, predict = _references(side, shared, memory)

    def gradients_of(images: Tensor, labels: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        features = encoder(images)
        logits = side.logits(features)
        others = partial(encode, images), partial(predict, images)
        seen = Step(features, logits, labels, side.params, shared, memory, counts, *others, side.classifier)
        value = objective(algorithm, seen).value()
        gradients = torch.autograd.grad(value, side.trained, materialize_grads=True)  # zero for one that is not used
        return value.detach(), gradients

    return gradients_of


def _perturbed(side: "ClientSide", displacement: Displacement, gradients_of: Gradients) -> Gradients:
    """The same, taken at the model plus a displacement; the model itself does not move."""
    buffers = [value for name, value in side.weights.items() if name.startswith("buffers/")]

    def perturbed(images: Tensor, labels: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        def gradient() -> Tensors:
            before = [value.clone() for value in buffers]
            _, gradients = gradients_of(images, labels)
            if buffers:  # this pass is not a step: BatchNorm's running statistics must not see it
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


def _total(losses: list[Tensor], counts: Sequence[int]) -> float:
    if len(losses) == 1:
        return losses[0].item() * counts[0]
    total = 0.0
    for loss, count in zip(torch.stack(losses).flatten().tolist() if losses else [], counts, strict=True):
        total += loss * count
    return total


def accumulated(steps: int, momentum: float) -> float:
    """‖a‖₁: how many plain gradients these steps of SGD with momentum add up to.

    With gradients g₁ … g_τ the model moves by η·Σ a_t·g_t, a_t = (1 − m^(τ−t+1)) / (1 − m); without momentum ‖a‖₁ = τ.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


Reference = Callable[[Tensor, str], Tensor]  # images, the model's name -> what that model makes of them


def _references(side: "ClientSide", shared: Tensors, memory: Tensors) -> tuple[Reference, Reference]:
    """Features and logits under a model other than the client's own. A model is loaded at first use, once a visit."""
    loaded: dict[str, Network] = {}

    def network(name: str) -> Network:
        if name not in loaded:
            model = shared if name == "shared" else tensors.under(memory, f"{name}/")
            loaded[name] = side.reference(name, model)
        return loaded[name]

    def encode(images: Tensor, name: str) -> Tensor:
        with torch.no_grad():
            features: Tensor = network(name).encoder(images)
        return features

    def predict(images: Tensor, name: str) -> Tensor:
        with torch.no_grad():
            return side.logits(encode(images, name), network(name).classifier)

    return encode, predict


def _correction(side: "ClientSide", shared: Tensors, memory: Tensors) -> list[Tensor] | None:
    correct = side.algorithm.correction
    if correct is None:
        return None
    added = correct(shared, memory)
    return [added[name] for name in side.params] if added else None


def _row(batches: Plan, step: int, count: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if batches.shift is None or batches.flip is None:
        return batches.index[step, :count], None, None
    return batches.index[step, :count], batches.shift[step, :count], batches.flip[step, :count]


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
    signer: "Signer | None" = None  # of a federation's node, in sums that a lying server cannot undo
    own_tests: Mapping[int, Tensor] = field(default_factory=dict)  # by client, which of the test images are its own
    room: Callable[[int], Tensor] = new_room  # where an update of so many numbers is written
    planned: dict[Key, Plan] = field(init=False, default_factory=dict)  # drawn ahead, by the key of their visit
    _received: list[tuple[Tensors, Tensors]] = field(init=False, default_factory=list)
    _starts: list[tuple[Tensors, Tensor, Tensor]] = field(init=False, default_factory=list)
    _references: dict[str, tuple[Network, Tensors]] = field(init=False, default_factory=dict)

    @property
    def memory_file(self) -> ClientMemory | None:
        """The file of what clients keep between visits, where they keep it in one."""
        return self.memory if isinstance(self.memory, ClientMemory) else None

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
        """Where everything is in the vector of a visit's update: the numbers, then the tensors as in the network."""
        numbers: Layout = [(name, "float64", [], place * DOUBLE) for place, name in enumerate(NUMBERS)]
        deltas: Layout = [
            (f"delta/{name}", "float64", list(place.shape), (HEAD + place.start) * DOUBLE)
            for name, place in self.packed.positions.items()
        ]
        return [*numbers[:2], *deltas, *numbers[2:]]

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
        return None if self.outside else build_passes(self.network)

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
    def labels(self) -> npt.NDArray[np.int64]:
        """[N], the classes of the training examples; on the CPU."""
        return self.train.labels.cpu().numpy()

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

    def close(self) -> None:
        """Close the files of memories and sessions."""
        for file in (self.memory, self.sessions):
            if file is not None:
                file.close()

    def counts(self, client: int) -> Tensor:
        """[C], how many examples of each class the client holds; on the CPU."""
        labels = self.labels[self.population.examples(client)]
        return torch.from_numpy(np.bincount(labels, minlength=self.network.classifier.out_features))


@register
class Survey(msgspec.Struct, frozen=True, tag="survey"):
    """What the methods ask every client before the first round. There is no model yet."""

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """The statistics' answers."""
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

        What follows training (the update, statistics, memories) is on the CPU, so that a method's own functions need
        not know about devices, and float64 is available on every machine.
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
        keep = side.memory.values(visited) if side.memory is not None and visit.keep else None
        return Reply(sums, record(side, shared, self.watch) if visit.repeat == 0 else {}, keep=keep)


def plan_ahead(side: ClientSide, job: Job, shared: Tensors, visits: Sequence[Visit | TestPart], key: Key) -> None:
    """Draw the plans of the next visits that train, one after another.

    They are the same in any order. Between two trainings drawing takes four times as long: its code has to come back
    from memory each time.
    """
    side.planned.clear()
    if not isinstance(job, Train) or len(visits) < 2:
        return
    local, clients = with_round_rate(side.algorithm.local, shared), side.population.clients
    for visit in visits:
        if isinstance(visit, Visit) and 0 <= visit.client < clients:  # any other fails when its turn comes
            own = visit_key(key, visit)
            side.planned[own] = plan(side.population.examples(visit.client), visit.take, local, own)


def record(side: ClientSide, shared: Tensors, watch: Sequence[str]) -> Tensors:
    """What a recording looks at after a client's training; on the CPU."""
    seen: Tensors = {}
    if "norms" in watch:
        seen["norms"] = class_norms(side)  # [C]
    model = tensors.on_device(side.weights, "cpu")
    if "drift" in watch:
        seen["drift"] = distances(model, shared)  # [L]
    if "model" in watch:
        seen |= {f"model/{name}": value.detach().clone() for name, value in model.items()}
    return seen


def class_norms(side: ClientSide) -> Tensor:
    """[C], the length of each class's row in the classifier as the algorithm uses it; on the CPU."""
    classifier, head = side.network.classifier, side.algorithm.head
    weight = classifier.weight if head is None else head(classifier.weight, classifier.bias)[0]
    norms: Tensor = weight.detach().cpu().double().norm(dim=1)
    return norms


def distances(model: Tensors, other: Tensors) -> Tensor:
    """[L], the Euclidean distance between two models' parameters, layer by layer."""
    own = tensors.parameters(model)
    return layer_norms({name: value.double() - other[name].double() for name, value in own.items()})


def layer_norms(model: Tensors) -> Tensor:
    """[L], the Euclidean norm of each layer's parameters."""
    parts = by_layer(tensors.parameters(model)).values()
    return torch.stack([tensors.flat({name: model[name] for name in names}).norm() for names in parts])


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
