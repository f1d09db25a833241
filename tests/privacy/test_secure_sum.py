"""Secure sums through an engine: whoever drops out when, the sum is that of those who stayed, or there is none."""

import json
import os
from dataclasses import replace

import pytest
import torch

from federation import federation, largest_difference, same
from unskew import engines
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.protection import Layout
from unskew.calibration.statistics import ClassStatistics
from unskew.core import tensors
from unskew.core.errors import ClientFailure, UserError
from unskew.core.key import Key
from unskew.core.types import Failure, Outcome, Visit
from unskew.engines.blueprint import build
from unskew.engines.loop import Loop
from unskew.privacy.questions import MOST_MEMBERS
from unskew.privacy.secure_statistics import secure_statistics
from unskew.privacy.secure_sum import secure_words
from unskew.privacy.secure_updates import RoundedUpdates, SecureUpdates
from unskew.privacy.sessions import Sessions
from unskew.round import driver

pytest.importorskip("cryptography")

SIZES = (12, 9, 1, 7, 5, 6)
STEPS = ["mask-keys", "mask-shares", "masked-", "mask-openings"]
ALL = [Visit(client, float(size)) for client, size in enumerate(SIZES)]


class Losing:
    """An engine around another that loses clients: by the beginning of a job's text, who does not answer it."""

    def __init__(self, engine, lost):
        self._engine, self._lost, self.roster, self.progress = engine, lost, engine.roster, None
        self.sync, self.pin, self.close = engine.sync, engine.pin, engine.close
        self.jobs, self.accepted = [], []

    def map_sum(self, job, shared, visits, key, *, round=0):
        self.jobs.append(job.partition(" ")[0])
        lost = {client for begin, clients in self._lost.items() if job.startswith(begin) for client in clients}
        staying = [visit for visit in visits if visit.client not in lost]
        outcome = self._engine.map_sum(job, shared, staying, key, round=round) if staying else Outcome({})
        failures = [Failure(visit.client, "gone", visit.repeat) for visit in visits if visit.client in lost]
        return replace(outcome, failures=(*failures, *outcome.failures))

    def accept(self, superseded):
        tickets = list(superseded)
        self.accepted += tickets
        self._engine.accept(tickets)


@pytest.fixture
def small():
    return federation("fedavg", sizes=SIZES, dtype="float32", epochs=1)


def losing(small, lost):
    setup = engines.EngineSetup(small.blueprint, small.data, 1)
    return Losing(engines.open_engine("loop", setup), lost)


def trained(small, exchange, visits=ALL, lost=None):
    engine = losing(small, lost or {})
    outcome = exchange(engine, "train", small.state().tensors, visits, Key(3), round=1)
    engine.close()
    return outcome, engine


@pytest.mark.parametrize("step", STEPS[:3])
def test_a_client_lost_before_its_answer_is_left_out_and_named(small, step):
    """The sum is that of the five others, bit for bit: rounded, without masks."""
    outcome, _ = trained(small, SecureUpdates(0.66), lost={step: [3]})
    staying = [visit for visit in ALL if visit.client != 3]
    plain, _ = trained(small, RoundedUpdates(), staying)
    assert outcome.sums.keys() == plain.sums.keys()
    assert all(torch.equal(outcome.sums[name], plain.sums[name]) for name in plain.sums)
    assert outcome.failures == (Failure(3, "gone"),)
    assert not outcome.void


def test_a_client_lost_after_its_answer_is_in_the_sum(small):
    outcome, _ = trained(small, SecureUpdates(0.66), lost={"mask-openings": [0, 5]})
    plain, _ = trained(small, RoundedUpdates())
    assert all(torch.equal(outcome.sums[name], plain.sums[name]) for name in plain.sums)
    assert outcome.failures == ()


def test_clients_lost_at_every_step_at_once(small):
    lost = {"mask-keys": [0], "masked-": [4], "mask-openings": []}
    outcome, _ = trained(small, SecureUpdates(0.6), lost=lost)
    plain, _ = trained(small, RoundedUpdates(), [visit for visit in ALL if visit.client not in (0, 4)])
    assert all(torch.equal(outcome.sums[name], plain.sums[name]) for name in plain.sums)
    assert [failure.client for failure in outcome.failures] == [0, 4]


@pytest.mark.parametrize(("step", "words"), [
    ("mask-keys", "gave keys"), ("mask-shares", "handed out shares"), ("masked-", "answered"),
    ("mask-openings", "opened their shares"),
])  # fmt: skip
def test_below_the_threshold_there_is_no_sum_and_nothing_is_opened(small, step, words):
    outcome, engine = trained(small, SecureUpdates(0.66), lost={step: [1, 2, 3]})
    assert outcome.sums == {}
    assert outcome.void == f"3 of 6 visits {words}, and 4 must for a secure sum"
    assert [failure.client for failure in outcome.failures] == [1, 2, 3]
    assert engine.jobs[-1].startswith(step)  # the exchange ends there


def test_two_clients_are_too_few_however_often_they_come(small):
    visits = [Visit(0, 1.0, take=4, repeat=repeat) for repeat in range(4)] + [Visit(1, 1.0, take=4)]
    outcome, engine = trained(small, SecureUpdates(0.66), visits)
    assert outcome.void == "2 clients take part, and a secure sum needs 3"
    assert not engine.jobs


def test_a_client_that_comes_twice_is_added_twice(small):
    visits = [Visit(0, 1.0, take=4), Visit(0, 1.0, take=4, repeat=1), *ALL[1:4]]
    outcome, _ = trained(small, SecureUpdates(0.66), visits)
    plain, _ = trained(small, RoundedUpdates(), visits)
    assert all(torch.equal(outcome.sums[name], plain.sums[name]) for name in plain.sums)
    assert float(outcome.sums["metric/visits"]) == 5


def test_more_visits_than_a_table_of_shares_can_have_are_refused(small):
    with pytest.raises(UserError, match=r"a secure sum over 2,001 visits is refused; at most 2,000"):
        secure_words(None, "masked-train", "", {}, [ALL[0]] * (MOST_MEMBERS + 1), Key(0), threshold=0.66)


def test_a_round_below_the_threshold_has_not_happened(small):
    """The server's state and the clients' memories are those before it; the next round goes on from them."""
    fed = small.with_method("secure(updates=true) + scaffold")
    engine = losing(fed, {})
    state, first = driver.run_round(fed.algorithm, engine, fed.state(), fed.key, per_round=6, skip_failures=True)
    assert (first.clients, first.void) == (6, None)
    engine._lost = {"mask-openings": [0, 1, 2]}
    after, metrics = driver.run_round(fed.algorithm, engine, state, fed.key, per_round=6, skip_failures=True)
    assert same(replace(after, round=state.round), state)
    assert metrics.clients == 0
    assert metrics.void == "3 of 6 visits opened their shares, and 4 must for a secure sum"
    assert [failure.client for failure in metrics.failures] == [0, 1, 2]
    assert len(engine.accepted) == 6  # what the clients kept of that round is given back
    engine._lost = {}
    last, metrics = driver.run_round(fed.algorithm, engine, after, fed.key, per_round=6, skip_failures=True)
    engine.close()
    assert metrics.clients == 6
    assert largest_difference(last.tensors, state.tensors) > 0


def test_without_skipping_a_lost_client_ends_the_run_by_name(small):
    fed = small.with_method("secure(updates=true)")
    engine = losing(fed, {"masked-": [3]})
    with pytest.raises(ClientFailure, match="client 3, round 1, job train: gone"):
        driver.run_round(fed.algorithm, engine, fed.state(), fed.key, per_round=6)
    engine.close()


def test_a_client_whose_update_does_not_fit_is_left_out_by_name(small):
    visits = [*ALL[:5], replace(ALL[5], weight=1e12)]
    outcome, _ = trained(small, SecureUpdates(0.66), visits)
    (failure,) = outcome.failures
    assert failure.client == 5
    assert (
        "client 5: weight reaches 1e+12, and in a sum over 6 visits there is room for 3.58e+08 each" in failure.reason
    )


def test_statistics_survive_a_client_that_drops_out_and_name_it(small):
    request, layout = StatisticsRequest(), Layout.of(4, 64)
    shared, everyone = small.state().tensors, [Visit(client, 1.0) for client in range(6)]
    engine = losing(small, {"masked-": [2, 4]})
    with pytest.warns(UserWarning, match="client . dropped out of the secure sum and is not in the statistics: gone"):
        found = secure_statistics(engine, shared, request, layout, everyone, Key(0), 0.66)
    engine._lost = {}
    clear = [gathered_of(engine, shared, request, client) for client in (0, 1, 3, 5)]
    plain = sum(layout.quantised(each, 6, "test") for each in clear)
    assert torch.equal(layout.quantised(found, 1, "test"), plain)
    engine._lost = {"mask-shares": [1, 2, 3]}
    with pytest.raises(UserError, match="client 1, class statistics: gone; 3 of 6 visits handed out shares"):
        secure_statistics(engine, shared, request, layout, everyone, Key(0), 0.66)
    engine.close()


def gathered_of(engine, shared, request, client):
    sums = engine.map_sum(f"moments {request.to_text()}", shared, [Visit(client, 1.0)], Key(0)).sums
    return ClassStatistics.gathered(tensors.under(sums, "stat/moments/"), request.form)


def test_a_client_does_not_answer_a_question_twice(small):
    """A server that asks again for a masked answer, or to open for others, is refused by every client."""
    engine = losing(small, {})
    asked, shares = [], engine._engine.map_sum

    def remembering(job, shared, visits, key, *, round=0):
        asked.append((job, shared, visits, key))
        return shares(job, shared, visits, key, round=round)

    engine._engine.map_sum = remembering
    SecureUpdates(0.66)(engine, "train", small.state().tensors, ALL, Key(3))
    *_, masked, opened = asked
    again = shares(*masked)
    assert len(again.failures) == 6
    assert all("refuses: a session is answered once" in failure.reason for failure in again.failures)
    assert not shares(*opened).failures  # the same question has the same answer
    job, shared, visits, key = opened
    others = shared | {"secure/answered": torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.uint8)}
    refused = shares(job, others, visits[:5], key)
    assert all("with both openings one would be unmasked" in failure.reason for failure in refused.failures)
    assert len(refused.failures) == 5
    engine.close()


def test_a_client_refuses_another_job_than_the_agreed_one(small):
    engine = losing(small, {})
    real = engine._engine.map_sum

    def swapping(job, shared, visits, key, *, round=0):
        return real(job.replace("masked-train", "masked-survey", 1), shared, visits, key, round=round)

    engine._engine.map_sum = swapping
    outcome = SecureUpdates(0.66)(engine, "train", small.state().tensors, ALL, Key(3))
    assert len(outcome.failures) == 6
    assert "refuses to answer masked-survey: agreed was masked-train" in outcome.failures[0].reason
    engine.close()


def test_an_engine_without_a_secret_or_a_record_is_refused(small):
    side = build(small.blueprint, small.data)
    for broken in (side, replace(side, secret=os.urandom(32)), replace(side, sessions=Sessions.temporary())):
        engine = Loop(broken)
        outcome = engine.map_sum("mask-keys " + json.dumps({"session": bytes(32).hex()}),
                                 {"secure/members": torch.tensor([[0, 0]])}, ALL[:1], Key(0))  # fmt: skip
        assert "this engine has no secret or no record of sessions" in outcome.failures[0].reason
        engine.close()
