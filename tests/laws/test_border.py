"""Law 10: what crosses the border is what the architecture's table names. These tests read what crosses.

Down: a job by its text, shared tensors, visits (client, weight, take, an opaque ticket), a key. Up: float64 sums,
receipts, failures with reasons. Never: the number of an example, a label, a feature, a client's memory, or, under
``secure``, the unmasked statistics of one client.
"""

import json
import re
from dataclasses import asdict

import numpy as np
import pytest
import torch

from federation import federation
from unskew import engines
from unskew.calibration import parse_calibration
from unskew.calibration.federated import Federation
from unskew.core.key import Key
from unskew.core.types import TestPart, Visit
from unskew.engines.blueprint import build
from unskew.engines.pool.shared import Line
from unskew.methods import METHODS, parse_method
from unskew.privacy.masking import MIN_CLIENTS
from unskew.round import driver
from unskew.round.evaluation import evaluate

SIZES = (23, 17, 1, 11)  # 52 examples of 4 classes
DOWN = re.compile(r"(params|buffers|sent/\w+|calibrated|secure)/|centres$|rate$")
UP = re.compile(r"weight$|scaled$|delta/(params|buffers)/|metric/(loss|examples|visits|right|total)$|stat/\w+/|"
                r"keys$|seeds$|low$|high$")  # fmt: skip
VISIT = {"client", "weight", "take", "repeat", "ticket", "keep", "slot", "start", "stop"}
TRAINING = [name for name in METHODS if not parse_method(name).finish or parse_method(name).statistics]


class Border:
    """An engine around another, and a list of all that crosses."""

    def __init__(self, engine):
        self._engine, self.roster, self.progress = engine, engine.roster, None
        self.accept, self.sync, self.pin, self.close = engine.accept, engine.sync, engine.pin, engine.close
        self.crossed = []  # (job, shared, visits, key, outcome)

    def map_sum(self, job, shared, visits, key, *, round=0):
        outcome = self._engine.map_sum(job, shared, visits, key, round=round)
        self.crossed.append((job, shared, visits, key, outcome))
        return outcome


def crossed_in(method, rounds=3, finish=()):
    small = federation(method, sizes=SIZES, dtype="float32", epochs=1)
    setup = engines.EngineSetup(small.blueprint, small.data, 1)
    border, side = Border(engines.open_engine("loop", setup)), build(small.blueprint, small.data)
    state = small.state()
    for _ in range(rounds):
        state, _ = driver.run_round(
            small.algorithm, border, state, small.key, per_round=len(SIZES), rounds=rounds, skip_failures=True
        )
    evaluate(border, state.tensors, len(small.data["test/labels"]), small.key)
    for source in finish:
        algorithm = parse_method(source, small.blueprint.local)
        calibrating = Federation(border, side, state.tensors, algorithm, Key(0), lambda event: None, {})
        calibrating.calibrated(algorithm.finish[0])
    border.close()
    return small, border.crossed


def looked_at(crossed):
    """Every complaint about what crossed; empty: nothing crossed that the table does not name."""
    for job, shared, visits, key, outcome in crossed:
        yield from (f"{job}: {name} goes down" for name in shared if not DOWN.match(name))
        yield from (f"{job}: {name} comes up" for name in outcome.sums if not UP.match(name))
        yield from (f"{job}: {name} is not float64" for name, v in outcome.sums.items() if v.dtype != torch.float64)
        for visit in visits:
            known = set(asdict(visit)) - {
                "client",
                "weight",
                "take",
                "repeat",
                "ticket",
                "keep",
                "slot",
                "start",
                "stop",
            }
            if known or getattr(visit, "slot", None) is not None:
                yield f"{job}: the visit says more than it should: {visit}"
        if not isinstance(key, Key):
            yield f"{job}: {key!r} is not a key"
        for client, receipt in outcome.receipts.items():
            if not re.fullmatch(r"\d+-[0-9a-f]{8}", receipt):
                yield f"{job}: client {client}'s receipt is {receipt!r}"


@pytest.mark.parametrize("method", TRAINING)
def test_training_sends_only_what_the_table_names(method):
    _, crossed = crossed_in("fedvc(8)" if method == "fedvc" else method)
    assert [job for job, *_ in crossed][-1] == "evaluate"
    assert not list(looked_at(crossed))
    held = sum(SIZES)
    for job, _, _, _, outcome in crossed:  # nothing has a row for each example or each client's examples
        odd = [n for n, v in outcome.sums.items() if v.dim() and v.shape[0] in (held, *SIZES[:2])]
        assert not odd, (job, odd)


def test_the_roster_is_all_that_the_server_knows_of_who_holds_what():
    small = federation("fedavg", sizes=SIZES)
    engine = engines.open_engine("loop", engines.EngineSetup(small.blueprint, small.data, 1))
    assert engine.roster.sizes.tolist() == list(SIZES)
    assert [name for name in vars(engine.roster) if not name.startswith("_")] == ["sizes"]
    public = [name for name in dir(engine) if not name.startswith("_")]
    assert public == ["accept", "close", "map_sum", "pin", "progress", "roster", "sync"]
    engine.close()


def test_evaluation_speaks_of_parts_of_the_test_images_and_of_no_client():
    _, crossed = crossed_in("fedavg", rounds=1)
    job, _, visits, _, outcome = crossed[-1]
    assert job == "evaluate"
    assert all(isinstance(visit, TestPart) for visit in visits)
    assert not outcome.receipts


def test_memories_stay_on_the_clients_side():
    _, crossed = crossed_in("moon + scaffold")
    trained = [(visits, outcome) for job, _, visits, _, outcome in crossed if job == "train"]
    (first, kept), (second, _), _ = trained
    assert all(visit.ticket is None for visit in first)
    assert {visit.client: visit.ticket for visit in second} == kept.receipts
    assert not any("moon" in name for _, shared, _, _, _ in crossed for name in shared)


@pytest.mark.parametrize("source", ["ccvr(per_class=20)", "lda", "ridge", "ccvr(per_class=20, components=2)"])
def test_calibration_sends_statistics_and_no_feature(source):
    _, crossed = crossed_in("fedavg", rounds=1, finish=[f"{source} + withhold(1)"])
    assert not list(looked_at(crossed))
    assert "moments" in {job.partition(" ")[0] for job, *_ in crossed}


def test_under_secure_the_server_never_sees_the_clear_statistics_of_one_client():
    """Of every sum that comes up one client's part is taken alone: it must say nothing without the others."""
    small, crossed = crossed_in("fedavg", rounds=1, finish=["ccvr(per_class=20) + secure"])
    jobs = [job.partition(" ")[0] for job, *_ in crossed]
    assert jobs[-3:] == ["public-keys", "masked-statistics", "mask-seeds"]
    assert "moments" not in jobs
    assert not list(looked_at(crossed))
    job, shared, visits, key, _ = crossed[-2]
    setup = engines.EngineSetup(small.blueprint, small.data, 1)
    engine = engines.open_engine("loop", setup)
    clear = engine.map_sum(f"moments {json.loads(job.partition(' ')[2])['request']}", shared, visits[:1], key).sums
    alone = _masked_alone(engine, job, shared, visits, key)
    engine.close()
    words = np.concatenate([value.numpy().ravel() for value in clear.values()])
    assert np.count_nonzero(words) > 100
    assert np.count_nonzero(alone == np.round(words * 2.0**24)) < 3  # by chance
    assert 0.45 < (alone.astype(np.uint64) >> np.uint64(63)).mean() < 0.55  # as good as random bits


def _masked_alone(engine, job, shared, visits, key):
    """[W], what the first client sends: with keys of the engine's own secret, as every client has them."""
    question = json.loads(job.partition(" ")[2])
    keys = engine.map_sum(f"public-keys {json.dumps({'session': question['session']})}", shared, visits, key).sums[
        "keys"
    ]
    mine = shared | {"secure/keys": keys.to(torch.uint8)}
    sums = engine.map_sum(job, mine, visits[:1], key).sums
    low, high = (sums[name].numpy().astype(np.uint64) for name in ("low", "high"))
    return low + (high << np.uint64(32))


def test_fewer_clients_than_a_secure_sum_needs_are_refused():
    from unskew.core.errors import UserError
    from unskew.privacy.fixed_point import Layout
    from unskew.privacy.secure_sum import secure_statistics

    small = federation("fedavg", sizes=SIZES, dtype="float32")
    engine = engines.open_engine("loop", engines.EngineSetup(small.blueprint, small.data, 1))
    needs = parse_calibration("lda").needs
    visits = [Visit(client, 1.0) for client in range(MIN_CLIENTS - 1)]
    with pytest.raises(
        UserError, match=f"a secure sum over {MIN_CLIENTS - 1} clients is refused; at least {MIN_CLIENTS} are needed"
    ):
        secure_statistics(engine, small.state().tensors, needs, Layout.of(4, 64, needs.form), visits, Key(0))
    engine.close()


def test_to_a_worker_process_go_numbers_texts_and_places_of_tensors(monkeypatch):
    """The pool's own wire, read byte by byte: JSON lines, and nothing that names an example."""
    lines, send = [], Line.send
    monkeypatch.setattr(Line, "send", lambda self, message: (lines.append(json.dumps(message)), send(self, message)))
    small = federation("moon + fedvc(8)", sizes=SIZES, dtype="float32", epochs=1)
    small.run(2, "pool", 1)
    told = [json.loads(line) for line in lines]
    kinds = [set(message) for message in told]
    assert all(kind in ({"blueprint", "data", "path", "secret"}, {"begin", "weights", "seed", "key"},
                        {"slot", "visits"}) or "device" in kind for kind in kinds)  # fmt: skip
    visits = [visit for message in told for _, visit in message.get("visits", ())]
    assert visits
    assert all(set(visit) == {"client", "weight", "take", "repeat", "ticket", "keep", "slot"} for visit in visits)


def test_the_look_at_the_border_finds_what_should_not_cross():
    """The check itself: a label count that a job adds to its sums is seen."""
    _, crossed = crossed_in("fedavg", rounds=1)
    _, shared, _, _, outcome = crossed[0]
    outcome.sums["labels"] = torch.zeros(4, dtype=torch.float64)
    assert list(looked_at(crossed)) == ["train: labels comes up"]
    shared["examples"] = torch.zeros(4)
    assert "train: examples goes down" in list(looked_at(crossed))
