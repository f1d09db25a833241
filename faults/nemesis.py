"""A federation whose network and machines misbehave. The oracle: the weights are, to the bit, those of a simulation of
whoever answered, by the run's own log.

Messages, questions and replies alike, are delayed, doubled, dropped, reordered, replayed, cut short and changed in a
bit; nodes are killed, stopped for a while, cut off from the network; clocks jump; the server is killed and resumed.
Server and nodes are in this process and exchange real messages; ``processes`` does the same between processes.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from faults.processes import from_tests
from faults.trials import SAME, Trial

METHODS = ("fedavg", "scaffold", "fedavgm(0.9)", "moon")
ROUNDS, DEADLINE = 6, 60.0  # seconds, on a clock that pauses put forward
FAULTS = ("delay", "double", "drop", "replay", "cut", "bit", "kill", "stop", "partition", "clock")
HARMLESS = ("delay", "double", "clock")  # what happens to the first node: one reply at least comes in every round
MAX_RESUMES = 60


class Killed(Exception):
    """The server's process ends here."""


def nemesis_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """Each fault alone, then all of them together, for each method in turn."""
    sets = [*((fault,) for fault in FAULTS), FAULTS]
    for number in range(10_000):
        method, faults = METHODS[number % len(METHODS)], sets[number % len(sets)]
        words = faults[0] if len(faults) == 1 else "everything"
        draw = np.random.default_rng([seed, number])
        yield Trial(f"{words} {number}: {method}", partial(tried, folder / "federation", method, faults, draw))


@dataclass
class Network:
    """A transport in this process that does to messages and nodes what a seed decides."""

    answers: dict[int, Callable[[Any], Any]]
    restart: Callable[[int], Callable[[Any], Any]]
    faults: tuple[str, ...]
    draw: np.random.Generator
    chance: float = 0.15
    done: set[str] = field(default_factory=set)  # the faults that have happened
    _lives: dict[int, int] = field(default_factory=dict)
    _away: dict[int, float] = field(default_factory=dict)  # until when a node is cut off
    _stopped: dict[int, float] = field(default_factory=dict)
    _waiting: dict[str, tuple[float, Any]] = field(default_factory=dict)  # replies, and when they come
    _old: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # by node, an earlier question and its reply
    _begun: bool = False
    _count: int = 0
    _clock: float = 0.0

    def nodes(self) -> Mapping[int, Any]:
        from unskew.engines.flower.messages import Presence

        there = [node for node in self.answers if self._away.get(node, 0) <= self._clock]
        return {node: Presence(since=str(self._lives.get(node, 0))) for node in there}

    def send(self, node: int, message: Any) -> str | None:
        if node not in self.nodes():
            return None
        self._count += 1
        name = f"message-{self._count}"
        if (come := self._asked(node, message)) is not None:
            self._waiting[name] = come
        return name

    def receive(self, ids: Iterable[str]) -> dict[str, Any]:
        ready = [name for name in ids if name in self._waiting and self._waiting[name][0] <= self._clock]
        return {name: self._waiting.pop(name)[1] for name in self.draw.permutation(ready).tolist()}

    def now(self) -> float:
        return self._clock

    def pause(self, seconds: float) -> None:
        self._clock += seconds

    def _asked(self, node: int, question: Any) -> tuple[float, Any] | None:
        """What becomes of a question: when which reply comes, if any."""
        from unskew.engines.flower.messages import read_header

        self._begun = self._begun or read_header(question)["kind"] == "job"
        if not self._begun:  # whoever comes first is the first client: then the simulation would need other numbers
            return self._clock, self.answers[node](question)
        first = node == min(self.answers)
        faults = [each for each in self.faults if not first or each in HARMLESS]
        fault = str(self.draw.choice(faults)) if faults and self.draw.random() < self.chance else ""
        when = max(self._clock, self._stopped.get(node, 0))
        if fault:
            self.done.add(fault)
        if fault == "clock":
            self._clock += float(self.draw.uniform(0, DEADLINE / 4))
        elif fault == "delay":
            when += float(self.draw.uniform(0, DEADLINE / 3 if first else 2 * DEADLINE))
        elif fault == "partition":
            self._away[node] = self._clock + float(self.draw.uniform(0, DEADLINE))
            return None
        elif fault == "stop":
            self._stopped[node] = when = self._clock + float(self.draw.uniform(0, 2 * DEADLINE))
        elif fault == "double":
            self.answers[node](question)
        elif fault == "replay" and node in self._old:
            self.answers[node](self._old[node][0])
        elif fault in ("cut", "bit", "drop") and self.draw.random() < 0.5:  # on its way to the node
            if fault == "drop":
                return None
            question = self._spoil(question, fault)
        reply = self.answers[node](question)
        if fault == "kill":  # while it answered
            self._lives[node] = self._lives.get(node, 0) + 1
            self.answers[node] = self.restart(node)
            return None
        old, self._old[node] = self._old.get(node), (question, reply)
        if fault == "drop":
            return None
        if fault == "replay" and old is not None:
            reply = old[1]
        return when, self._spoil(reply, fault) if fault in ("cut", "bit") else reply

    def _spoil(self, envelope: Any, fault: str) -> Any:
        part = "body" if len(envelope.body) and self.draw.random() < 0.7 else "header"
        content = bytearray(getattr(envelope, part))
        place = int(self.draw.integers(len(content)))
        if fault == "cut":
            del content[place:]
        else:
            content[place] ^= 1 << int(self.draw.integers(8))
        return replace(envelope, **{part: bytes(content)})


def tried(folder: Path, method: str, faults: tuple[str, ...], draw: np.random.Generator) -> str:
    """One federated run under these faults, and the simulation of whoever answered."""
    tests, replay = from_tests("nodes"), from_tests("replay")
    from unskew.core.types import Local
    from unskew.engines.flower.engine import Rules

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    nodes = {number: node.answer for number, node in tests.make_nodes(folder).items()}
    network = Network(nodes, lambda node: tests.make_node(folder, node - 100).answer, faults, draw)

    def observe(event: Any) -> None:
        network.pause(5)
        if len(faults) > 1 and getattr(event, "round", ROUNDS) < ROUNDS and draw.random() < 0.1:
            raise Killed

    rules, result = Rules(deadline=DEADLINE, min_replies=1, wait=10 * DEADLINE), None
    options = {"method": method, "rounds": ROUNDS, "checkpoint_seconds": 0}
    for attempt in range(MAX_RESUMES):
        try:
            resume = attempt > 0 and (folder / "run" / "config.toml").exists()
            result = tests.federated(folder, network, resume=resume, rules=rules, observe=observe, **options)
            break
        except Killed:
            continue
    if result is None:
        return f"it did not end in {MAX_RESUMES} attempts"
    failed, local = replay.failed_by_round(folder / "run"), Local(epochs=1, batch=64, lr=0.05)
    again = replay.replayed(tests.loop_over(method=method), method, local, tests.OPTIONS["seed"], failed)
    return SAME if again == result.weights_sha256 else f"other weights than those who answered make: {failed}"
