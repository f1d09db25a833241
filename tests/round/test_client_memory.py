"""What clients remember between visits: nobody's is lost, mixed up or quietly wrong, whatever fails and whenever."""

import errno
import gc
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from federation import federation, image_set, remembered, same
from unskew.core import tensors
from unskew.core.errors import ClientFailure, LostMemory, StorageFailure, UserError
from unskew.core.key import Key
from unskew.core.types import Local, Memory, Statistic, Visit, Visited
from unskew.round import driver
from unskew.round.client_memory import ClientMemory, anonymous_file, whole_model, with_tickets
from unskew.runs.checkpoint import MEMORIES, CheckpointRecord, load_checkpoint, save_checkpoint

ODD = {
    "params/weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "params/wide": torch.tensor([float("nan"), -0.0, 5e-324, 1e308], dtype=torch.float64),
    "buffers/count": torch.tensor(2**62 + 1),  # BatchNorm's: no dimension, and no float64 holds it
    "buffers/empty": torch.zeros(0, 3),
    "buffers/mask": torch.tensor([True, False, True]),
    "buffers/bytes": torch.tensor([0, 255, 7], dtype=torch.uint8),
    "buffers/half": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "params/turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
}
NOTE = {"params/note": torch.zeros(3, dtype=torch.int64)}  # client, round, repeat: tells whose memory it is


# Methods that fail where it matters; engines find them as "test_client_memory:name"


def fails(how: str = "raises", on: int = 1):
    """The client of ``on`` examples fails when it comes again: by an error, or by a NaN that is found after keeping."""

    def term(loss, step):
        if not step.memory or int(step.counts.sum()) != on:
            return loss
        if how == "raises":
            raise RuntimeError("the second time is once too often")
        return loss.plus(torch.tensor(float("nan")))

    return lambda algorithm: replace(algorithm, terms=(*algorithm.terms, term))


def one_fails(keeps: bool = True):
    """Of the visits to a client that comes again, the one that would keep fails, or else all others do."""

    def measure(visited):
        if visited.memory and visited.visit.keep == keeps:
            raise RuntimeError("the last one to leave the house lost the key")
        return {"one": torch.ones((), dtype=torch.float64)}

    gate = Statistic("gate", measure=measure)
    return lambda algorithm: replace(algorithm, statistics=(*algorithm.statistics, gate))


def torn(once: str):
    """The process is killed with half of a memory written; only the first time."""

    def half(descriptor, content, start):
        os.pwritev(descriptor, [content[: len(content) // 2]], start)
        os.kill(os.getpid(), signal.SIGKILL)

    def keep(visited):
        if not Path(once).exists():
            Path(once).touch()
            os.pwrite = half
        return {"x": torch.ones(1)}

    memory = Memory("torn", blank=lambda model: {"x": torch.zeros(1)}, keep=keep)
    return lambda algorithm: replace(algorithm, remember=(*algorithm.remember, memory))


def careless(what: str):
    """Keeps other things than it said it would."""
    given = {
        "shape": {"x": torch.ones(1)},
        "type": {"x": torch.ones(4, dtype=torch.float64)},
        "more": {"x": torch.ones(4), "y": torch.ones(1)},
        "less": {},
    }[what]
    memory = Memory("careless", blank=lambda model: {"x": torch.zeros(4)}, keep=lambda visited: given)
    return lambda algorithm: replace(algorithm, remember=(*algorithm.remember, memory))


# Helpers


class Store(ClientMemory):
    """The file and its free slots, as an engine has them."""

    def __init__(self, remember, model, file: Path):
        super().__init__(remember, model, os.open(file, os.O_RDWR | os.O_CREAT))

    def assign(self, visits, tickets):
        return super().assign(with_tickets(visits, tickets))

    def keep(self, visit, model):
        """The ticket, of a visit that keeps."""
        return None if visit.slot is None else self.write(visit.slot, self.format.values(visited(visit, model)))


def opened(file: Path, model=NOTE) -> Store:
    return Store([whole_model("own")], model, file)


def visited(visit: Visit, model) -> Visited:
    return Visited(visit, {}, {}, model, torch.zeros(1), 1, Local(), lambda: iter(()))


def note(*numbers):
    return {"params/note": torch.tensor(numbers)}


def visits_to(clients):
    seen = [(client, clients[:at].count(client)) for at, client in enumerate(clients)]
    return [Visit(client, 1.0, repeat=repeat) for client, repeat in seen]


def told(store, client, tickets):
    """What the client kept: (client, round, repeat)."""
    kept = store.recall(Visit(client, 1.0, ticket=tickets[client]))
    return tuple(kept["own/params/note"].tolist())


def on_from(small, engine, state, rounds, planned=9, **options):
    """So many rounds further."""
    options = {"per_round": 9, **options}
    for _ in range(rounds):
        state, _ = driver.run_round(small.algorithm, engine, state, small.key, rounds=planned, **options)
    return state


def slot_of(ticket):
    return int(ticket.partition("-")[0])


def checksum_of(state, client):
    return state.clients[client].partition("-")[2]


def alike(left, right):
    if left.keys() != right.keys():
        return False
    return all(list(left[c]) == list(right[c]) and tensors.sha256(left[c]) == tensors.sha256(right[c]) for c in left)


# What is kept comes back


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path):
    memories = opened(tmp_path / "m", ODD)
    (visit,) = memories.assign([Visit(0, 1.0)], {})
    (again,) = memories.assign([Visit(0, 1.0)], {0: memories.keep(visit, ODD)})
    found = memories.recall(again)
    assert list(found) == [f"own/{name}" for name in ODD]
    for name, want in ODD.items():
        got = found[f"own/{name}"]
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(
            got.contiguous().reshape(-1).view(torch.uint8), want.contiguous().reshape(-1).view(torch.uint8)
        )
    memories.close()


# Slots


@pytest.mark.parametrize("engine", ["loop", "pool"])
def test_visits_of_one_round_do_not_see_each_other_in_either_engine(tmp_path, engine):
    """Two clients, nine visits of each round among them: the pool does two at once, and the long ones first."""
    small = federation("fedvc(size=6) + moon + scaffold", sizes=(20, 3), dtype="float32")
    plain = small.run(3, per_round=9)
    assert set(plain.clients) == {0, 1}
    assert same(small.run(3, engine, per_round=9, folder=tmp_path), plain)


@pytest.mark.parametrize("seed", range(3))
def test_rounds_failures_checkpoints_and_crashes_in_any_order_lose_nothing(tmp_path, seed):
    """A plain dictionary is the twin: after every event all that the state and the checkpoint know is still there."""
    draw = Key(seed).numpy()
    clients, most = 12, 6
    file = tmp_path / "m"
    memories = opened(file)
    state, checkpoint = ({}, {}), ({}, {})  # places, and what should lie there
    abandoned = worst = 0  # visits of failed rounds keep their slots until the next checkpoint
    for number in range(250):
        event = draw.choice(["round", "round", "round", "failed round", "checkpoint", "crash"])
        if event == "checkpoint":
            checkpoint, abandoned = state, 0
            memories.pin(state[0].values())
        elif event == "crash":
            memories.close()
            memories = opened(file)
            state, abandoned = checkpoint, 0
            memories.pin(state[0].values())
        else:
            places, twin = state
            visits = memories.assign(visits_to(draw.integers(0, clients, draw.integers(1, most + 1)).tolist()), places)
            failed = set(np.flatnonzero(draw.random(len(visits)) < 0.2).tolist())
            receipts, news = {}, {}
            for at in draw.permutation(len(visits)).tolist():
                visit = visits[at]
                assert memories.recall(visit) == {} or told(memories, visit.client, places) == twin[visit.client]
                if at not in failed or draw.random() < 0.5:  # a visit may fail before it writes, or after
                    ticket = memories.keep(visit, note(visit.client, number, visit.repeat))
                    if at not in failed and ticket is not None:
                        receipts[visit.client], news[visit.client] = ticket, (visit.client, number, visit.repeat)
            memories.release(visits, receipts)
            abandoned += len(receipts) if event == "failed round" else 0
            worst = max(worst, abandoned)
            if event == "round":
                memories.supersede(places[client] for client in receipts if client in places)
                state = ({**places, **receipts}, {**twin, **news})
        for places, twin in (state, checkpoint):
            assert {client: told(memories, client, places) for client in places} == twin
    assert file.stat().st_size <= (2 * clients + most + worst) * memories.slot_bytes
    memories.close()


# Failed visits and failed rounds


@pytest.mark.parametrize(("engine", "how"), [("loop", "raises"), ("loop", "nan"), ("pool", "nan")])
def test_a_failed_visit_leaves_the_clients_memory_as_it_was(tmp_path, engine, how):
    """Client 2 holds one example and fails from its second visit on, once before and once after it has written."""
    small = federation(f'moon + scaffold + test_client_memory:fails(how="{how}")', dtype="float32")
    opened_engine = small.open(engine, 1, tmp_path)
    first = on_from(small, opened_engine, small.state(), 1)
    before = remembered(opened_engine, first)
    last = on_from(small, opened_engine, first, 3, skip_failures=True)
    after = remembered(opened_engine, last)
    assert last.clients[2] == first.clients[2]
    assert alike({2: after[2]}, {2: before[2]})
    assert all(checksum_of(last, client) != checksum_of(first, client) for client in (0, 1, 3, 4))
    opened_engine.close()


@pytest.mark.parametrize("keeps", [True, False])
def test_of_several_visits_it_is_the_failure_of_the_last_that_counts(tmp_path, keeps):
    """If it fails its client keeps what it had, whoever else reports; if others fail it keeps all the same. What
    SCAFFOLD's server adds and what its client keeps go together."""
    method = f"fedvc(size=4) + scaffold + test_client_memory:one_fails({str(keeps).lower()})"
    small = federation(method, sizes=(30, 20), dtype="float32")
    engine = small.open("loop", 1, tmp_path)
    first = on_from(small, engine, small.state(), 1, per_round=8)
    last, row = driver.run_round(
        small.algorithm, engine, first, small.key, per_round=8, rounds=9, skip_failures=True
    )  # fmt: skip
    assert len(row.failures) == (2 if keeps else 6)
    assert {failure.client for failure in row.failures} == {0, 1}
    assert row.clients == 8 - len(row.failures)
    changed = [checksum_of(last, client) != checksum_of(first, client) for client in (0, 1)]
    assert changed == ([False, False] if keeps else [True, True])
    assert all(torch.equal(last.sent[name], first.sent[name]) == keeps for name in first.sent)
    engine.close()


def test_a_worker_killed_with_half_a_memory_written_is_replaced_and_nothing_shows(tmp_path):
    mark = tmp_path / "died"
    small = federation(f'moon + test_client_memory:torn(once="{mark}")', dtype="float32")
    got = small.run(3, "pool", 1, folder=tmp_path)
    assert mark.exists()
    assert same(got, small.run(3))


# Checkpoints


@pytest.mark.parametrize("per_round", [3, 6])
@pytest.mark.parametrize("method", ["feddyn + moon", "fedvc(size=5) + scaffold"])
def test_rounds_after_a_checkpoint_leave_all_that_it_refers_to(tmp_path, method, per_round):
    small = federation(method, sizes=(12, 9, 1, 7, 5, 3), dtype="float32")
    engine = small.open("loop", 1, tmp_path)
    pinned = on_from(small, engine, small.state(), 2, per_round=per_round)
    engine.memory.pin(pinned.clients.values())
    before = remembered(engine, pinned)
    whole = on_from(small, engine, pinned, 6, per_round=per_round)
    assert alike(remembered(engine, pinned), before)
    engine.close()
    engine = small.open("loop", 1, tmp_path)  # another process, after a crash
    engine.memory.pin(pinned.clients.values())
    assert same(on_from(small, engine, pinned, 6, per_round=per_round), whole)
    engine.close()


def test_the_baseline_remembers_too(tmp_path):
    """EVERYONE is client -1."""
    small = federation("centralised + moon", dtype="float32")
    half = small.run(2, folder=tmp_path, rounds_planned=4)
    assert set(half.clients) == {-1}
    save_checkpoint(tmp_path, half, CheckpointRecord(0, 0.0, "", "", ""))
    kept, _ = load_checkpoint(tmp_path)
    assert kept.clients == half.clients
    assert same(small.run(4, state=kept, folder=tmp_path), small.run(4))


def test_an_engine_gives_the_file_back_and_one_without_a_name_is_gone_then(tmp_path):
    small = federation("moon")
    state = small.state()
    for name in ("loop", "pool"):
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        engine = small.open(name, 1)
        on_from(small, engine, state, 1)
        engine.close()
        del engine
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
    descriptor = anonymous_file()
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)


# What a disk may do


def test_every_damaged_byte_is_found_and_the_client_named(tmp_path):
    memories = opened(tmp_path / "m", ODD)
    (visit,) = memories.assign([Visit(41, 1.0)], {})
    places = {41: memories.keep(visit, ODD)}
    whole = (tmp_path / "m").read_bytes()
    assert len(whole) == memories.slot_bytes
    for at in range(len(whole)):
        with open(tmp_path / "m", "r+b") as file:
            file.write(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(UserError, match="client 41's saved state is damaged on disk; start a new run"):
            memories.recall(Visit(41, 1.0, ticket=places[41]))
    memories.close()


@pytest.mark.parametrize(("engine", "how"), [("loop", "damaged"), ("loop", "cut short"), ("pool", "damaged")])
def test_a_memory_lost_on_disk_stops_the_run_in_one_message_that_names_the_client(tmp_path, engine, how):
    small = federation("moon + scaffold", dtype="float32")
    opened_engine = small.open(engine, 1, tmp_path)
    state = on_from(small, opened_engine, small.state(), 1)
    file, slot = tmp_path / MEMORIES, slot_of(state.clients[4])
    if how == "damaged":
        with open(file, "r+b") as content:
            content.seek(slot * opened_engine.memory.slot_bytes + 77)
            content.write(b"\xff\x00\xff")
    else:
        os.truncate(file, slot * opened_engine.memory.slot_bytes + 77)
    wanted = "^client 4's saved state is (damaged on disk|missing: its file is truncated); start a new run$"
    with pytest.raises(LostMemory, match=wanted) as said:
        on_from(small, opened_engine, state, 1)
    assert "\n" not in str(said.value)
    opened_engine.close()


def test_short_writes_and_short_reads_are_gone_on_with(tmp_path, monkeypatch):
    pwrite, pread = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda fd, content, start: pwrite(fd, content[:1009], start))
    monkeypatch.setattr(os, "pread", lambda fd, size, start: pread(fd, min(size, 1013), start))
    small = federation("moon + scaffold", sizes=(9, 4), dtype="float32")
    got = small.run(3, folder=tmp_path)
    monkeypatch.undo()
    assert same(got, small.run(3))


def full_after(calls):
    """A disk that takes so many memories, half of the next, and nothing more."""
    pwrite, left = os.pwrite, [calls]

    def write(descriptor, content, start):
        left[0] -= 1
        if left[0] == -1:
            return pwrite(descriptor, content[: len(content) // 2], start)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, content, start)

    return write


@pytest.mark.parametrize("taken", [0, 3])
def test_a_full_disk_stops_the_run_and_nothing_is_lost(tmp_path, monkeypatch, taken):
    small = federation("moon + scaffold", dtype="float32")
    engine = small.open("loop", 1, tmp_path)
    state = on_from(small, engine, small.state(), 2, planned=4)
    before = remembered(engine, state)
    monkeypatch.setattr(os, "pwrite", full_after(taken))
    with pytest.raises(StorageFailure, match="the clients' state cannot be saved: No space left on device"):
        on_from(small, engine, state, 1, planned=4)
    monkeypatch.undo()
    assert alike(remembered(engine, state), before)
    assert same(on_from(small, engine, state, 2, planned=4), small.run(4))
    engine.close()


@pytest.mark.parametrize("engine", ["loop", "pool"])
def test_no_client_is_skipped_for_a_full_disk(tmp_path, engine):
    """The machine's failure and not the client's: going on would train on whoever came before the disk was full."""
    small = federation("moon + scaffold", dtype="float32")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    opened_engine = small.open(engine, 1, tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * opened_engine.memory.slot_bytes, hard))
    if engine == "pool":  # workers inherit the limit when they start
        opened_engine.close()
        opened_engine = small.open(engine, 1, tmp_path)
    try:
        with pytest.raises(StorageFailure, match="the clients' state cannot be saved: File too large"):
            on_from(small, opened_engine, small.state(), 1, skip_failures=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        opened_engine.close()


# Contributions


@pytest.mark.parametrize("what", ["shape", "type", "more", "less"])
def test_a_method_that_keeps_other_things_than_it_said_is_told_so(what):
    """Copying would stretch a wrong shape, round a wrong type and drop what it has no place for, without a word."""
    with pytest.raises(ClientFailure, match="careless"):
        federation(f'test_client_memory:careless(what="{what}")', sizes=(4,), images=image_set(12)).run(1)
