"""Law 10: what crosses the border is what the architecture's table names. These tests read what crosses.

Down: a job, shared tensors, visits (client, weight, take, an opaque ticket), a key. Up: sums, extras, tickets, failures
with reasons. Never: the number of an example, a label, a feature, a client's memory, or, under
``secure``, what one client sent without its masks.
"""

import re
from dataclasses import asdict, replace

import msgspec
import numpy as np
import pytest
import torch

from federation import federation
from unskew.calibration import parse_calibration
from unskew.calibration.federated import Calibrator, secure_statistics
from unskew.calibration.jobs import Moments
from unskew.calibration.protection import Layout
from unskew.core.child import JsonLines
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Failure, TestPart
from unskew.engines.blueprint import build
from unskew.methods import METHODS, parse_method
from unskew.privacy.masking import MIN_CLIENTS
from unskew.round import driver
from unskew.round.evaluation import evaluate
from unskew.round.jobs import add, encode_job

SIZES = (23, 17, 1, 11)  # 52 examples of 4 classes
DOWN = re.compile(r"(params|buffers|sent/\w+|calibrated)/|centres$|rate$")
METRICS = r"metric/(loss|examples|visits|right|total|confidence)$"
UP = re.compile(rf"weight$|scaled$|delta/(params|buffers)/|{METRICS}|stat/\w+/")
MASKED = re.compile(UP.pattern + r"|statistics$|check$")
EXTRA = {"mask-keys": {"keys"}, "mask-shares": {"shares"}, "mask-openings": {"opened"}}
VISIT = {"client", "weight", "take", "repeat", "ticket", "keep", "slot", "parcel", "start", "stop"}
TRAINING = [name for name in METHODS if not parse_method(name).finish or parse_method(name).statistics]


def named(job):
    """A job's name on the wire; of a masked one, with the work behind it."""
    fields, names = encode_job(job), []
    while fields:
        names.append(fields["type"])
        fields = fields.get("inner") if fields["type"] in ("masked", "rounded") else None
    return " ".join(names)


class Border:
    """An engine around another, and a list of all that crosses."""

    def __init__(self, engine):
        self._engine, self.roster, self.memory, self.close = engine, engine.roster, engine.memory, engine.close
        self.crossed, self.jobs = [], []  # (job, shared, visits, key, replies), the job by its name or itself

    def visit(self, job, shared, visits, key):
        replies = list(self._engine.visit(job, shared, visits, key))
        self.crossed.append((named(job), shared, visits, key, replies))
        self.jobs.append((job, shared, visits, key, replies))
        yield from replies

    @property
    def messages(self):
        """(the job's name, the visit, what this client sent), of each visit."""
        pairs = [(job, zip(visits, replies, strict=True)) for job, _, visits, _, replies in self.crossed]
        return [(job, visit, dict(reply.sums) | dict(reply.extra)) for job, both in pairs for visit, reply in both]


def border_of(small, rounds, finish=(), score=False):
    """The border after some rounds, an evaluation if asked for, and calibrations."""
    border, side, state = Border(small.open()), build(small.blueprint, small.data), small.state()
    clients = border.roster.clients
    for _ in range(rounds):
        state, _ = driver.run_round(
            small.algorithm, border, state, small.key, per_round=clients, rounds=rounds, skip_failures=True
        )
    if score:
        evaluate(border, state.tensors, len(small.data["test/labels"]), small.key, confidence=True)
    for source in finish:
        algorithm = parse_method(source, small.blueprint.local)
        calibrating = Calibrator(border, side, state.tensors, algorithm, Key(0), lambda event: None, {})
        calibrating.calibrate(algorithm.finish[0])
    border.close()
    return border


def crossed_in(method, rounds=3, finish=()):
    small = federation(method, sizes=SIZES, dtype="float32", epochs=1)
    return border_of(small, rounds, finish, score=True).crossed


def looked_at(crossed):
    """Every complaint about what crossed; empty: nothing crossed that the table does not name."""
    for job, shared, visits, key, replies in crossed:
        yield from (f"{job}: {name} goes down" for name in shared if not DOWN.match(name))
        masked = job.startswith("masked")
        for reply in replies:
            if isinstance(reply, Failure):
                continue
            yield from (f"{job}: {name} comes up" for name in reply.sums if not (MASKED if masked else UP).match(name))
            kind = torch.int64 if job.startswith(("masked", "rounded")) else torch.float64
            yield from (f"{job}: {name} is {v.dtype}" for name, v in reply.sums.items() if v.dtype != kind)
            yield from (f"{job}: {name} comes up" for name in reply.extra if name not in EXTRA.get(job, ()))
            if reply.ticket is not None and not re.fullmatch(r"\d+-[0-9a-f]{8}", reply.ticket):
                yield f"{job}: the ticket is {reply.ticket!r}"
            if reply.keep is not None:
                yield f"{job}: what the client keeps comes up"
        for visit in visits:
            if set(asdict(visit)) - VISIT or (getattr(visit, "parcel", b"") and job != "mask-openings"):
                yield f"{job}: the visit says more than it should: {visit}"
        if not isinstance(key, Key):
            yield f"{job}: {key!r} is not a key"


@pytest.mark.parametrize("method", TRAINING)
def test_training_sends_only_what_the_table_names(method):
    crossed = crossed_in("fedvc(8)" if method == "fedvc" else method)
    assert [job for job, *_ in crossed][-1] == "evaluate"
    assert not list(looked_at(crossed))
    held = sum(SIZES)
    for job, _, _, _, replies in crossed:  # nothing has a row for each example or each client's examples
        sums = [item for reply in replies for item in reply.sums.items()]
        assert not [name for name, value in sums if value.dim() and value.shape[0] in (held, *SIZES[:2])], job


def test_the_roster_is_all_that_the_server_knows_of_who_holds_what():
    small = federation("fedavg", sizes=SIZES)
    engine = small.open()
    assert engine.roster.sizes.tolist() == list(SIZES)
    assert [name for name in vars(engine.roster) if not name.startswith("_")] == ["sizes"]
    public = [name for name in dir(engine) if not name.startswith("_")]
    assert public == ["close", "memory", "roster", "visit"]
    engine.close()


def test_evaluation_speaks_of_parts_of_the_test_images_and_of_no_client():
    crossed = crossed_in("fedavg", rounds=1)
    job, _, visits, _, replies = crossed[-1]
    assert job == "evaluate"
    assert all(isinstance(visit, TestPart) for visit in visits)
    assert not any(reply.ticket for reply in replies)


def test_memories_stay_on_the_clients_side():
    crossed = crossed_in("moon + scaffold")
    trained = [(visits, replies) for job, _, visits, _, replies in crossed if job == "train"]
    (first, kept), (second, _), _ = trained
    assert all(visit.ticket is None for visit in first)
    assert [visit.ticket for visit in second] == [reply.ticket for reply in kept]
    assert not any("moon" in name for _, shared, _, _, _ in crossed for name in shared)


@pytest.mark.parametrize("source", ["ccvr(per_class=20)", "lda", "ridge", "ccvr(per_class=20, components=2)"])
def test_calibration_sends_statistics_and_no_feature(source):
    crossed = crossed_in("fedavg", rounds=1, finish=[f"{source} + withhold(1)"])
    assert not list(looked_at(crossed))
    assert "moments" in {job for job, *_ in crossed}


def sent_under(method, *finish):
    """One round, and a calibration: every client's messages, and what it would have sent in the clear, by client."""
    sizes = (23, 17, 9, 11)  # of one example the label counts are a one among zeros, which may be anything
    small = federation(method, sizes=sizes, dtype="float32", epochs=1)
    wire = border_of(small, 1, finish)
    plain, clear = small.open(), {client: {} for client in range(len(sizes))}
    for job, shared, visits, key, _ in wire.jobs:
        inner = getattr(job, "inner", None)
        if inner is None or named(job).startswith("mask-"):
            continue
        if hasattr(inner, "request"):
            inner = Moments(inner.request)
        inner = getattr(inner, "inner", inner)
        for visit in visits:
            sums = add(plain.visit(inner, shared, [visit], key), [visit]).sums
            clear[visit.client] |= {f"{named(job)}/{name}": value for name, value in sums.items()}
    plain.close()
    return small, wire, clear


def needles_of(small, clear):
    """What must not be found in any message, by name: bytes of images, features, label counts and clear sums."""
    side = build(small.blueprint, small.data)
    side.load(small.state().tensors, training=False)
    for client, sums in clear.items():
        examples = side.population.examples(client)
        yield f"label counts of client {client}", side.counts(client).double().numpy().tobytes()
        yield f"label counts of client {client}", side.counts(client).numpy().tobytes()
        yield f"an image of client {client}", small.data["train/images"][int(examples[0])].numpy().tobytes()[:16]
        with torch.no_grad():
            feature = side.network.encoder(side.train.batch(torch.tensor([int(examples[0])]))[0])[0]
        yield f"a feature of client {client}", feature[feature != 0][:4].numpy().tobytes()
        for name, value in sums.items():
            values = value[value != 0].flatten()[:4]
            for bits in (24, 32):
                yield f"{name} of client {client}", (values * 2.0**bits).round().long().numpy().tobytes()
            yield f"{name} of client {client}", values.numpy().tobytes()
            yield f"{name} of client {client}", values.float().numpy().tobytes()


def test_under_secure_updates_no_message_of_a_client_has_anything_of_its_own_in_the_clear():
    """Update, statistics of methods, label counts, losses, statistics of a calibration: as sums, words or raw bytes."""
    method = "secure(updates=true) + scaffold + prototypes + fedir"
    small, wire, clear = sent_under(method, "ccvr(per_class=20) + secure")
    jobs = list(dict.fromkeys(job for job, *_ in wire.messages))
    assert jobs == [
        "mask-keys", "mask-shares", "masked rounded survey", "mask-openings", "masked rounded train",
        "masked fixed-point-moments",
    ]  # fmt: skip
    assert not list(looked_at(wire.crossed))
    assert {name.split("/")[0] for sums in clear.values() for name in sums} == {
        "masked rounded survey", "masked rounded train", "masked fixed-point-moments",
    }  # fmt: skip
    content = b"\0\0".join(value.numpy().tobytes() for _, _, sums in wire.messages for value in sums.values())
    needles = [(name, needle) for name, needle in needles_of(small, clear) if len(needle) >= 12]
    assert len(needles) > 300
    assert [name for name, needle in needles if needle in content] == []
    for job, visit, sums in wire.messages:
        if job.startswith("masked"):
            words = {name: value.numpy().ravel() for name, value in sums.items()}
            alone = np.concatenate(list(words.values())).view(np.uint64)
            assert len(alone) < 30 or 0.4 < (alone >> np.uint64(63)).mean() < 0.6  # as good as random bits
            assert same_words(job, words, clear[visit.client]) == 0


def same_words(job, words, clear):
    """How many of a client's words, masked or not, are what it would have sent in the clear."""
    known = {name: np.round(value.numpy().ravel() * 2.0**32).astype(np.int64) for name, value in clear.items()}
    named = {name: known[f"{job}/{name}"] for name in words if f"{job}/{name}" in known}
    return sum(np.count_nonzero((words[name] == value) & (value != 0)) for name, value in named.items())


def test_the_look_at_the_wire_finds_an_update_that_is_rounded_and_not_masked():
    """The check itself: without masks all of it is there."""
    small, wire, clear = sent_under("rounded + scaffold + prototypes + fedir")
    (job, visit, sums), *_ = [message for message in wire.messages if message[0] == "rounded train"]
    words = {name: value.numpy().ravel() for name, value in sums.items()}
    assert same_words(job, words, clear[visit.client]) > 1000
    clear_bytes = b"".join(value.tobytes() for value in words.values())
    assert any(needle in clear_bytes for name, needle in needles_of(small, clear) if len(needle) >= 12)


def test_fewer_clients_than_a_secure_sum_needs_are_refused():
    small = federation("fedavg", sizes=SIZES[: MIN_CLIENTS - 1], dtype="float32")
    engine = small.open()
    needs = parse_calibration("lda").needs
    with pytest.raises(UserError, match=f"2 clients take part, but a secure sum needs {MIN_CLIENTS}"):
        secure_statistics(engine, small.state().tensors, needs, Layout.of(4, 64, needs.form), Key(0), 0.66)
    engine.close()


def test_to_a_worker_process_go_numbers_texts_and_places_of_tensors(monkeypatch):
    """The pool's own wire, read byte by byte: JSON lines, and nothing that names an example."""
    lines, send = [], JsonLines.send
    plain = msgspec.to_builtins
    monkeypatch.setattr(JsonLines, "send", lambda self, message: (lines.append(plain(message)), send(self, message)))
    small = federation("moon + fedvc(8)", sizes=SIZES, dtype="float32", epochs=1)
    small.run(2, "pool", 1)
    kinds = {message["type"]: set(message) - {"type"} for message in lines}
    assert kinds == {
        "hello": {"blueprint", "data", "number", "secret"},
        "begin": {"number", "job", "weights", "seed", "key"},
        "group": {"slot", "visits"},
    }
    visits = [visit for message in lines for _, visit in message.get("visits", ())]
    assert visits
    assert all(set(visit) <= VISIT for visit in visits)


def test_the_look_at_the_border_finds_what_should_not_cross():
    """The check itself: a label count that a job adds to its reply is seen."""
    crossed = crossed_in("fedavg", rounds=1)
    job, shared, visits, key, replies = crossed[0]
    labels = torch.zeros(4, dtype=torch.float64)
    for bad in (replace(replies[0], sums={"labels": labels}), replace(replies[0], extra={"labels": labels})):
        assert list(looked_at([(job, shared, visits, key, [bad])])) == ["train: labels comes up"]
    shared["examples"] = torch.zeros(4)
    assert "train: examples goes down" in list(looked_at(crossed))
