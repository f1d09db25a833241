"""The laws, one function each: it returns None if a method obeys the law, otherwise what happened in which round."""

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew import engines, methods, models
from unskew.core import tensors, types
from unskew.core.errors import MissingExtra, UserError, a_kind
from unskew.core.key import Key, global_generators
from unskew.data.population import Partition, Population
from unskew.engines.blueprint import Blueprint, build, dataset
from unskew.round import driver
from unskew.round.algorithm import AFTER_TRAINING, SHARED_SLOTS, Algorithm, Named, claimed_slots, compose
from unskew.round.client_memory import ClientMemory
from unskew.runs.checkpoint import MEMORIES, CheckpointRecord, load_checkpoint, open_memories, save_checkpoint
from unskew.runs.python_values import import_name

Source = str | Algorithm | Callable[..., Any]


@dataclass(frozen=True)
class Candidate:
    """Methods to be composed, in order, and their text; None if another process cannot parse it."""

    methods: tuple[Named, ...]
    text: str | None

    def __add__(self, other: "Candidate") -> "Candidate":
        text = None if self.text is None or other.text is None else f"{self.text} + {other.text}"
        return Candidate(self.methods + other.methods, text)

    @property
    def name(self) -> str:
        """The methods' texts, for messages."""
        return " + ".join(named.name for named in self.methods)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its methods, without knobs."""
        return tuple(named.name.partition("(")[0] for named in self.methods)

    def algorithm(self, local: types.Local | None = None) -> Algorithm:
        """The composed algorithm, on top of FedAvg with these local settings."""
        return compose(self.methods, Algorithm(local=local or types.Local()))

    def trains(self) -> bool:
        """Whether it changes anything that a round uses."""
        base = Algorithm()
        return not set(claimed_slots(base, compose(self.methods, base))) <= {*AFTER_TRAINING}


def candidate(source: Source) -> Candidate:
    """Make a candidate from a text, a function from Algorithm to Algorithm, one that returns it, or an Algorithm."""
    if isinstance(source, str):
        return Candidate(tuple(methods.parse_methods(source)), source)
    if isinstance(source, Algorithm):
        plain = Algorithm()
        slots = {slot: getattr(source, slot) for slot in claimed_slots(plain, source)}
        slots = {name: slot for name, slot in slots.items() if name != "local" or slot != plain.local}

        def method(algorithm: Algorithm) -> Algorithm:
            more = {name: (*getattr(algorithm, name), *slot) for name, slot in slots.items() if name in SHARED_SLOTS}
            return replace(algorithm, **(slots | more), claims=source.claims)

        return Candidate((Named("the algorithm", method),), None)
    if not callable(source):
        raise UserError(f"{a_kind(source)} is not a method; give its text, a function of an Algorithm, or an Algorithm")
    name = getattr(source, "__name__", type(source).__name__)
    if methods.required_parameters(source):  # this is the Algorithm, since knobs have defaults
        return Candidate((Named(name, source),), None)
    text = import_name(source)
    return Candidate((Named(text or name, source()),), text)


Report = Callable[[str], None]


def watching_arguments(algorithm: Algorithm, report: Report) -> Algorithm:
    """Instrument an algorithm to report functions that modify a tensor of their arguments in place."""

    def watch(function: Any, what: str) -> Any:
        def call(*arguments: Any) -> Any:
            before = [(name, value, value.detach().clone()) for name, value in _tensors("", arguments)]
            result = function(*arguments)
            for name, value, original in before:
                if not torch.equal(value, original):
                    report(f"the {what} modifies {name} in place")
            return result

        return None if function is None else call

    return replace(
        algorithm,
        margin=tuple(watch(margin, "margin") for margin in algorithm.margin),
        terms=tuple(watch(term, "term") for term in algorithm.terms),
        server=types.ServerOptimizer(algorithm.server.init, watch(algorithm.server.update, "server update")),
        statistics=tuple(
            replace(s, measure=watch(s.measure, f"measure of {s.name}"), fold=watch(s.fold, f"fold of {s.name}"))
            for s in algorithm.statistics
        ),
        remember=tuple(replace(m, keep=watch(m.keep, f"keep of {m.name}")) for m in algorithm.remember),
        **{
            slot: watch(getattr(algorithm, slot), slot)
            for slot in ("blend", "head", "perturbation", "correction", "aggregate")
        },
    )


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside a value, named by its path."""
    if isinstance(value, Tensor):
        yield name or "its argument", value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(f"{name}[{key!r}]", inner)
    elif isinstance(value, tuple):
        for inner in value:
            yield from _tensors(name, inner)
    elif is_dataclass(value):
        for part in fields(value):
            yield from _tensors(f"{type(value).__name__.lower()}.{part.name}", getattr(value, part.name))


def watching_loss(algorithm: Algorithm, report: Report) -> Algorithm:
    """Instrument an algorithm to report margins, blends and terms that do the work of another slot."""

    def check_margin(margin: types.Margin, step: types.Step) -> Tensor:
        added, shape = margin(step), step.logits.shape
        if added.shape not in (shape, shape[1:]):
            fit = f"does not fit logits of shape {list(shape)}"
            report(f"a margin of shape {list(added.shape)} {fit}; return [B, C] or [C]")
        return added

    def check_blend(blend: types.Blend, entropy: Tensor, step: types.Step) -> Tensor:
        blended = blend(entropy, step)
        if blended.shape != entropy.shape:
            given = f"shape {list(blended.shape)} for {len(entropy)} examples"
            report(f"the blend returns {given}; return one loss per example")
        return blended

    def check_term(term: types.Term, loss: types.Loss, step: types.Step) -> types.Loss:
        """Compare the term alone with the term on a loss that already has weights and a penalty."""
        alone = term(types.Loss(loss.example), step)
        weight = torch.arange(1, len(loss.example) + 1).to(loss.example)
        penalty = loss.example.new_tensor(0.75)
        after = term(types.Loss(loss.example, weight, penalty), step)
        if not (torch.equal(after.example, loss.example) and torch.equal(alone.example, loss.example)):
            report("a term changes the loss of each example; claim the blend slot for that")
        if not _close(after.weight, weight if alone.weight is None else weight * alone.weight):
            report("a term drops or replaces the existing weights; multiply them by its own")
        if not _close(after.penalty, penalty if alone.penalty is None else penalty + alone.penalty):
            report("a term drops or replaces the existing penalty; add its own with loss.plus(…)")
        return term(loss, step)

    return replace(
        algorithm,
        margin=tuple(partial(check_margin, margin) for margin in algorithm.margin),
        blend=algorithm.blend and partial(check_blend, algorithm.blend),
        terms=tuple(partial(check_term, term) for term in algorithm.terms),
    )


def _close(value: Tensor | None, expected: Tensor) -> bool:
    return value is not None and torch.allclose(value, expected, rtol=1e-9, atol=1e-9)


@dataclass(frozen=True)
class SmallFederation:
    """What a few rounds need. ``value`` is an algorithm to use instead of the blueprint's method, in the loop only."""

    blueprint: Blueprint
    data: types.Tensors
    key: Key
    value: Algorithm | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the rounds."""
        return self.value or methods.parse_method(self.blueprint.method, self.blueprint.local)

    def state(self) -> types.ServerState:
        """The state before the first round."""
        side = build(self.blueprint, self.data)
        models.initialise(side.network, self.key.fold("model"))
        return driver.start(self.algorithm, tensors.of_module(side.network), side.network.classifier_names)

    def states(
        self,
        rounds: int = 2,
        engine: str = "loop",
        workers: int = 2,
        *,
        per_round: int | None = None,
        state: types.ServerState | None = None,
        folder: Path | None = None,
        rounds_planned: int | None = None,
        skip_failures: bool = False,
    ) -> Iterator[types.ServerState]:
        """The state after each round up to ``rounds``, continuing ``state`` or from the start.

        Clients' memories are stored in ``folder``, if given; a state that refers to them needs it. ``rounds_planned``
        is the planned total, if these rounds are a part of it.
        """
        algorithm, last = self.algorithm, state or self.state()
        opened = self.open(engine, workers, folder)
        if opened.memory is not None:
            opened.memory.pin(last.clients.values())
        per_round, planned = per_round or opened.roster.clients, rounds_planned or rounds
        try:
            while last.round < rounds:
                last, _ = driver.run_round(
                    algorithm, opened, last, self.key, per_round=per_round, rounds=planned, skip_failures=skip_failures
                )
                yield last
        finally:
            opened.close()

    def open(self, engine: str = "loop", workers: int = 2, folder: Path | None = None) -> types.Engine:
        """An engine of that name for this federation."""
        memories = open_memories(folder) if folder and self.algorithm.remember else None
        built = None if self.value is None else replace(build(self.blueprint, self.data), algorithm=self.value)
        setup = engines.EngineSetup(self.blueprint, self.data, workers, memories, built)
        return engines.open_engine(engine, setup)

    def run(self, *values: Any, state: types.ServerState | None = None, **more: Any) -> types.ServerState:
        """The last of ``states``; ``state``, or the first one, if no round is left."""
        first = state or self.state()
        return [first, *self.states(*values, state=first, **more)][-1]

    def with_method(self, method: str) -> "SmallFederation":
        """The same federation with another method."""
        return replace(self, blueprint=replace(self.blueprint, method=method), value=None)

    def with_candidate(self, method: Candidate) -> "SmallFederation":
        """The same federation with a candidate, by its text if it has one."""
        if method.text is not None:
            return self.with_method(method.text)
        return replace(self, value=method.algorithm(self.blueprint.local))


def federation(
    method: str = "fedavg",
    sizes: Sequence[int] = (40, 30, 1, 20, 9),
    images: types.ImageSet | None = None,
    model: str = "tiny-cnn",
    dtype: str = "float64",
    seed: int = 0,
    local: types.Local | None = None,
) -> SmallFederation:
    """A federation with clients of these sizes, by default one of them with a single example."""
    images = images or image_set(sum(sizes))
    settings = local or types.Local(epochs=2, batch=16, lr=0.05)
    blueprint = Blueprint(method, model, images.shape, len(images.classes), settings, dtype)
    population = Population.from_partition(partition_of(sizes, len(images.train)))
    return SmallFederation(blueprint, dataset(images, population), Key(seed))


def image_set(examples: int = 120, classes: int = 4, side: int = 8, channels: int = 1, seed: int = 0) -> types.ImageSet:
    """Random images whose brightness follows the class, so that there is something to learn."""
    draw = Key(seed).fold("images").numpy()
    labels = np.arange(examples) % classes
    noise = draw.integers(0, 128, (examples, channels, side, side))
    images = (noise + (labels * 30)[:, None, None, None]).clip(0, 255).astype(np.uint8)
    test = types.Split(images[::3].copy(), labels[::3].copy())
    names = tuple(f"class {c}" for c in range(classes))
    return types.ImageSet("random", names, types.Split(images, labels), test, (0.4,) * channels, (0.2,) * channels)


def partition_of(sizes: Sequence[int], examples: int | None = None, seed: int = 0) -> Partition:
    """A partition with clients of these sizes; other examples belong to no client."""
    examples = examples or sum(sizes)
    client = np.full(examples, -1, np.int32)
    order = Key(seed).fold("who").numpy().permutation(examples)
    client[order[: sum(sizes)]] = np.repeat(np.arange(len(sizes)), sizes)
    return Partition(client, len(sizes), "test", seed)


def largest_difference(left: types.Tensors, right: types.Tensors) -> float:
    """The largest absolute difference between corresponding entries."""
    if left.keys() != right.keys():
        return float("inf")
    return max((float((left[name].double() - right[name].double()).abs().max()) for name in left), default=0.0)


def same(left: types.ServerState, right: types.ServerState) -> bool:
    """Whether two states agree bit for bit; clients' memories are compared by the checksum in their tickets."""
    memories = [{client: t.partition("-")[2] for client, t in state.clients.items()} for state in (left, right)]
    if left.round != right.round or memories[0] != memories[1]:
        return False
    pairs = [(left.tensors, right.tensors), (left.memory, right.memory), (left.sent, right.sent)]
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


ROUNDS = 3  # in the first, momentum, memories, prototypes and control variates are still empty
PLANNED = 4  # rounds in a schedule, so that no tested round is the last
SIZES = (10, 7, 1, 5)  # examples of each client
PER_ROUND = 3  # so some clients are sampled for the first time in a later round
SETTINGS = types.Local(epochs=1, batch=8, lr=0.05)
TOLERANCE = 1e-12  # rounding differences between two orders of methods, in float64


def small(method: Candidate, *, dtype: str = "float64", seed: int = 0) -> SmallFederation:
    """The federation on which the laws are tested."""
    return federation("fedavg", SIZES, dtype=dtype, seed=seed, local=SETTINGS).with_candidate(method)


def finite(method: Candidate) -> str | None:
    """Results are finite, even with clients of one example or one class."""
    for state in small(method).states(ROUNDS, per_round=PER_ROUND, rounds_planned=PLANNED):
        if not tensors.finite(state.tensors | state.memory | state.sent):
            return f"round {state.round} produces NaN or infinity"
    return None


def seeded(method: Candidate) -> str | None:
    """Everything random follows from the seed."""
    first, again, other = (list(small(method, seed=seed).states(ROUNDS, rounds_planned=PLANNED)) for seed in (0, 0, 1))
    for left, right in zip(first, again, strict=True):
        if not same(left, right):
            return f"two runs with the same seed differ from round {left.round} on"
    return "two seeds give the same result" if same(first[-1], other[-1]) else None


def engines_agree(method: Candidate) -> str | None:
    """One process and two workers produce the same bits; only for what another process can import."""
    fed = small(method, dtype="float32")
    loops, pools = (fed.states(ROUNDS, engine, rounds_planned=PLANNED) for engine in ("loop", "pool"))
    for loop, pool in zip(loops, pools, strict=True):
        if not same(loop, pool):
            apart = largest_difference(loop.tensors, pool.tensors)
            what = f"the models differ by {apart:g}" if apart else "the messages or saved states differ"
            return f"{what} after round {loop.round}"
    return None


def resumes(method: Candidate) -> str | None:
    """The checkpoint has everything that later rounds need."""
    fed = small(method, dtype="float32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        half = fed.run(2, rounds_planned=4, folder=folder)
        save_checkpoint(folder, half, CheckpointRecord(0, 0.0, "", "", ""))
        loaded = load_checkpoint(folder)
        if loaded is None or not same(half, loaded[0]):
            return "a checkpoint after round 2 does not restore the state"
        if not same(fed.run(4), fed.run(4, state=loaded[0], folder=folder)):
            return "four rounds differ from two rounds, a checkpoint and two more"
    return None


def bounded(method: Candidate) -> str | None:
    """Neither the server's state nor the clients' memories grow from round to round."""
    fed = federation(sizes=(8, 7, 6, 5, 1), local=types.Local(epochs=1, batch=8, lr=0.001)).with_candidate(method)
    with tempfile.TemporaryDirectory() as name:
        folder, sizes = Path(name), {}
        state: types.ServerState | None = None
        for rounds in (2, 4, 6, 8):  # each engine starts from a checkpoint of the one before
            state = fed.run(rounds, folder=folder, per_round=3, state=state, rounds_planned=8)
            sizes[rounds] = tensors.count_bytes(state.memory), tensors.count_bytes(state.sent)
        for what, early, late in zip(("the server's memory", "the tensors sent"), sizes[2], sizes[8], strict=True):
            if late > early:
                return f"{what} grew from {early:,} bytes in round 2 to {late:,} in round 8"
        if not fed.algorithm.remember:
            return None
        size = (folder / MEMORIES).stat().st_size
    slot = ClientMemory(fed.algorithm.remember, fed.state().tensors, -1).slot_bytes
    most = (2 * 5 + 3) * slot  # the checkpoint's and the latest of each client, and those of current visits
    return None if size <= most else f"after 8 rounds of 3 visits 5 clients store {size:,} bytes; the limit is {most:,}"


def leaves_arguments(method: Candidate) -> str | None:
    """Neither the state nor the data nor any argument of its functions is modified in place."""
    fed = small(method)
    data, state = tensors.copy(fed.data), fed.state()
    before = copy.deepcopy(state)

    def changed_data() -> str | None:
        return "the clients' data is modified in place" if largest_difference(fed.data, data) else None

    complaint = _watch(fed, watching_arguments, changed_data, state)
    return complaint or (None if same(state, before) else "the server's first state is modified in place")


def leaves_generators(method: Candidate) -> str | None:
    """It draws through keys, and neither uses nor seeds process-wide generators."""
    before: dict[str, bytes] = {}

    def noting(algorithm: Algorithm, report: Report) -> Algorithm:
        def sampler(key: Key, roster: types.Roster, per_round: int) -> list[types.Visit]:
            torch.empty(1).uniform_()  # a state that a method cannot restore by seeding
            before.update(global_generators())
            return algorithm.sampler(key, roster, per_round)

        return replace(algorithm, sampler=sampler)

    def used() -> str | None:
        now = global_generators()
        names = [name for name, state in before.items() if state != now[name]]
        return f"the global generator of {' and '.join(names)} was used; draw through a Key" if names else None

    return _watch(small(method), noting, used)


def keeps_to_its_slots(method: Candidate) -> str | None:
    """Margins fit the logits, a blend returns a loss per example, terms multiply weights and add penalties."""
    return _watch(small(method), watching_loss, lambda: None)


def commutes(one: Candidate, other: Candidate) -> str | None:
    """Both orders give the same result, round by round, or are rejected with both names."""
    refusals = [refusal(one + other), refusal(other + one)]
    if any(refusals):
        if all(any(name in message for name in method.names) for message in refusals for method in (one, other)):
            return None
        return f"only one order is rejected, or the error does not name both methods: {' / '.join(refusals)}"
    if not (one.trains() and other.trains()):
        return None
    forwards, backwards = (
        small(both).states(ROUNDS, per_round=PER_ROUND, rounds_planned=PLANNED) for both in (one + other, other + one)
    )
    for left, right in zip(forwards, backwards, strict=True):
        for part, name in (("model", "tensors"), ("server's memory", "memory"), ("statistics", "sent")):
            if (apart := largest_difference(getattr(left, name), getattr(right, name))) > TOLERANCE:
                return f"their order changes the {part} by {apart:.1g} in round {left.round}"
    return None


def is_fedavg(neutral: Candidate) -> str | None:
    """The method is FedAvg bit for bit, in float32."""
    plain = federation("fedavg", SIZES, dtype="float32", local=SETTINGS)
    states = zip(plain.states(ROUNDS), plain.with_candidate(neutral).states(ROUNDS), strict=True)
    for left, right in states:
        if largest_difference(left.tensors, right.tensors):
            return f"{neutral.name} differs from FedAvg in round {left.round}"
    return None


def _watch(
    fed: SmallFederation,
    instrument: Callable[[Algorithm, Report], Algorithm],
    after_round: Callable[[], str | None],
    state: types.ServerState | None = None,
) -> str | None:
    """Run the instrumented algorithm up to the first report."""
    reports: list[str] = []
    watched = replace(fed, value=instrument(fed.algorithm, reports.append))
    for now in watched.states(ROUNDS, per_round=PER_ROUND, rounds_planned=PLANNED, state=state):
        if complaint := next(iter(reports), None) or after_round():
            return f"{complaint} (round {now.round})"
    return None


def refusal(method: Candidate) -> str:
    """Why its methods cannot be composed; empty if they can."""
    try:
        method.algorithm()
    except MissingExtra:
        raise
    except UserError as error:
        return str(error)
    return ""
