"""Secure sums through an engine: whoever drops out when, the sum is that of those who stayed, or there is none."""

import os
from dataclasses import replace

import msgspec
import pytest
import torch

from federation import federation, largest_difference, same, total
from unskew import engines
from unskew.calibration.federated import secure_statistics
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.jobs import Moments
from unskew.calibration.protection import Layout
from unskew.calibration.statistics import from_sums
from unskew.core import tensors
from unskew.core.errors import ClientFailure, UserError
from unskew.core.key import Key
from unskew.core.types import Failure, Visit
from unskew.engines.blueprint import build
from unskew.engines.loop import Loop
from unskew.privacy.secure_sum import (
    MOST_MEMBERS,
    Masked,
    MaskKeys,
    MaskOpenings,
    MaskShares,
    Rounded,
    RoundedUpdates,
    SecureUpdates,
    add_securely,
)
from unskew.privacy.sessions import Sessions
from unskew.round import driver
from unskew.round.client import Survey, Train

SIZES = (12, 9, 1, 7, 5, 6)
STEPS = [MaskKeys, MaskShares, Masked, MaskOpenings]
ALL = [Visit(client, float(size)) for client, size in enumerate(SIZES)]


class Losing:
    """An engine around another that loses clients: by the type of a job, who does not answer it."""

    def __init__(self, engine, lost):
        self._engine, self._lost, self.roster, self.memory = engine, lost, engine.roster, engine.memory
        self.close, self.asked = engine.close, []

    def visit(self, job, shared, visits, key):
        self.asked.append((job, shared, visits, key))
        lost = self._lost.get(type(job), ())
        staying = [visit for visit in visits if visit.client not in lost]
        replies = self._engine.visit(job, shared, staying, key)
        for visit in visits:
            yield Failure(visit.client, "gone", visit.repeat) if visit.client in lost else next(replies)


@pytest.fixture
def small():
    return federation("fedavg", sizes=SIZES, dtype="float32", epochs=1)


def losing(small, lost):
    setup = engines.EngineSetup(small.blueprint, small.data, 1)
    return Losing(engines.open_engine("loop", setup), lost)


@pytest.fixture
def done(small):
    """An engine after a secure sum, with all its questions."""
    engine = losing(small, {})
    SecureUpdates(0.66)(engine, Train(1), small.state().tensors, ALL, Key(3))
    yield engine
    engine.close()


def check_same(outcome, plain):
    assert outcome.sums.keys() == plain.sums.keys()
    assert all(torch.equal(outcome.sums[name], plain.sums[name]) for name in plain.sums)


def trained(small, exchange, visits=ALL, lost=None):
    engine = losing(small, lost or {})
    outcome = exchange(engine, Train(1), small.state().tensors, visits, Key(3))
    engine.close()
    return outcome, engine


@pytest.mark.parametrize("step", STEPS[:3])
def test_a_client_lost_before_its_answer_is_left_out_and_named(small, step):
    """The sum is that of the five others, bit for bit: rounded, without masks."""
    outcome, _ = trained(small, SecureUpdates(0.66), lost={step: [3]})
    staying = [visit for visit in ALL if visit.client != 3]
    plain, _ = trained(small, RoundedUpdates(), staying)
    check_same(outcome, plain)
    assert outcome.failures == (Failure(3, "gone"),)
    assert not outcome.void


def test_a_client_lost_after_its_answer_is_in_the_sum(small):
    outcome, _ = trained(small, SecureUpdates(0.66), lost={MaskOpenings: [0, 5]})
    plain, _ = trained(small, RoundedUpdates())
    check_same(outcome, plain)
    assert outcome.failures == ()


def test_clients_lost_at_every_step_at_once(small):
    lost = {MaskKeys: [0], Masked: [4], MaskOpenings: []}
    outcome, _ = trained(small, SecureUpdates(0.6), lost=lost)
    plain, _ = trained(small, RoundedUpdates(), [visit for visit in ALL if visit.client not in (0, 4)])
    check_same(outcome, plain)
    assert [failure.client for failure in outcome.failures] == [0, 4]


@pytest.mark.parametrize(("step", "words"), [
    (MaskKeys, "sent keys"), (MaskShares, "distributed shares"), (Masked, "answered"),
    (MaskOpenings, "opened their shares"),
])  # fmt: skip
def test_below_the_threshold_there_is_no_sum_and_nothing_is_opened(small, step, words):
    outcome, engine = trained(small, SecureUpdates(0.66), lost={step: [1, 2, 3]})
    assert outcome.sums == {}
    assert outcome.void == f"3 of 6 visits {words}, but a secure sum needs 4"
    assert [failure.client for failure in outcome.failures] == [1, 2, 3]
    assert type(engine.asked[-1][0]) is step  # the exchange ends there


def test_two_clients_are_too_few_however_often_they_come(small):
    visits = [Visit(0, 1.0, take=4, repeat=repeat) for repeat in range(4)] + [Visit(1, 1.0, take=4)]
    outcome, engine = trained(small, SecureUpdates(0.66), visits)
    assert outcome.void == "2 clients take part, but a secure sum needs 3"
    assert not engine.asked


def test_a_client_that_comes_twice_is_added_twice(small):
    visits = [Visit(0, 1.0, take=4), Visit(0, 1.0, take=4, repeat=1), *ALL[1:4]]
    outcome, _ = trained(small, SecureUpdates(0.66), visits)
    plain, _ = trained(small, RoundedUpdates(), visits)
    check_same(outcome, plain)
    assert float(outcome.sums["metric/visits"]) == 5


def test_more_visits_than_a_table_of_shares_can_have_are_refused(small):
    with pytest.raises(UserError, match=r"a secure sum over 2,001 visits is refused; sample at most 2,000"):
        add_securely(None, Train(), {}, [ALL[0]] * (MOST_MEMBERS + 1), Key(0), threshold=0.66)


def test_a_round_below_the_threshold_has_not_happened(small):
    """The server's state and the clients' memories are those before it; the next round goes on from them."""
    fed = small.with_method("secure(updates=true) + scaffold")
    engine = losing(fed, {})
    state, first = driver.run_round(fed.algorithm, engine, fed.state(), fed.key, per_round=6, skip_failures=True)
    assert (first.clients, first.void) == (6, None)
    engine._lost = {MaskOpenings: [0, 1, 2]}
    after, metrics = driver.run_round(fed.algorithm, engine, state, fed.key, per_round=6, skip_failures=True)
    assert same(replace(after, round=state.round), state)
    assert metrics.clients == 0
    assert metrics.void == "3 of 6 visits opened their shares, but a secure sum needs 4"
    assert [failure.client for failure in metrics.failures] == [0, 1, 2]
    assert sorted(engine.memory._free) == list(range(6, 12))  # what the clients kept of it is given back
    engine._lost = {}
    last, metrics = driver.run_round(fed.algorithm, engine, after, fed.key, per_round=6, skip_failures=True)
    engine.close()
    assert metrics.clients == 6
    assert largest_difference(last.tensors, state.tensors) > 0


def test_without_skipping_a_lost_client_ends_the_run_by_name(small):
    fed = small.with_method("secure(updates=true)")
    engine = losing(fed, {Masked: [3]})
    with pytest.raises(ClientFailure, match="client 3, round 1, job train: gone"):
        driver.run_round(fed.algorithm, engine, fed.state(), fed.key, per_round=6)
    engine.close()


def test_a_client_whose_update_does_not_fit_is_left_out_by_name(small):
    visits = [*ALL[:5], replace(ALL[5], weight=1e12)]
    outcome, _ = trained(small, SecureUpdates(0.66), visits)
    (failure,) = outcome.failures
    assert failure.client == 5
    assert "client 5: weight reaches 1e+12, but a secure sum over 6 visits has room for 3.58e+08 each" in failure.reason


def test_statistics_survive_a_client_that_drops_out_and_name_it(small):
    request, layout = StatisticsRequest(), Layout.of(4, 64)
    shared = small.state().tensors
    engine = losing(small, {Masked: [2, 4]})
    with pytest.warns(UserWarning, match="client . dropped out of the secure sum and is not in the statistics: gone"):
        found = secure_statistics(engine, shared, request, layout, Key(0), 0.66)
    engine._lost = {}
    clear = [gathered_of(engine, shared, request, client) for client in (0, 1, 3, 5)]
    plain = sum(layout.quantise(each, 6, "test") for each in clear)
    assert torch.equal(layout.quantise(found, 1, "test"), plain)
    engine._lost = {MaskShares: [1, 2, 3]}
    with pytest.raises(UserError, match="client 1, class statistics: gone; 3 of 6 visits distributed shares"):
        secure_statistics(engine, shared, request, layout, Key(0), 0.66)
    engine.close()


def gathered_of(engine, shared, request, client):
    sums = total(engine, Moments(request.to_plain()), shared, [Visit(client, 1.0)], Key(0)).sums
    return from_sums(tensors.under(sums, "stat/moments/"), request.form)


def test_a_client_does_not_answer_a_question_twice(done):
    """A server that asks again for a masked answer, or to open for others, is refused by every client."""
    *_, masked, opened = done.asked
    again = total(done, *masked)
    assert len(again.failures) == 6
    assert all("has already answered this visit" in failure.reason for failure in again.failures)
    assert not total(done, *opened).failures  # the same question has the same answer
    job, shared, visits, key = opened
    others = msgspec.structs.replace(job, answered=(*job.answered[:5], False))
    refused = total(done, others, shared, visits[:5], key)
    assert all("with both a client could be unmasked" in failure.reason for failure in refused.failures)
    assert len(refused.failures) == 5


@pytest.mark.parametrize("change", [
    {"inner": Rounded(Survey(), 6)}, {"inner": Rounded(Train(1), 5)}, {"threshold": 5},
], ids=["another job", "other members", "another threshold"])  # fmt: skip
def test_a_client_refuses_to_answer_what_was_not_agreed_on(small, change):
    engine = losing(small, {})
    real = engine.visit

    def swapping(job, *given):
        return real(msgspec.structs.replace(job, **change) if isinstance(job, Masked) else job, *given)

    engine.visit = swapping
    outcome = SecureUpdates(0.66)(engine, Train(1), small.state().tensors, ALL, Key(3))
    assert len(outcome.failures) == 6
    assert "refuses: it takes part in another agreement of this session" in outcome.failures[0].reason
    engine.close()


@pytest.mark.parametrize(("change", "wrong"), [
    ({"members": ()}, "members of the secure sum are not valid"),
    ({"members": ((0, 0), (0, 0), (2, 0), (3, 0), (4, 0), (5, 0))}, "members of the secure sum are not valid"),
    ({"members": ((-1, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0))}, "members of the secure sum are not valid"),
    ({"members": ((9, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0))}, "members of the secure sum are not valid"),
    ({"session": b"short"}, "members of the secure sum are not valid"),
    ({"threshold": 0}, "members of the secure sum are not valid"),
    ({"keys": ()}, "sent 0 entries for the 6 members"),
    ({"keys": (b"x" * 63,) * 6}, "a public key does not belong to its member"),
    ({"sharing": (True,)}, "sent 1 entries for the 6 members"),
])  # fmt: skip
def test_a_question_that_is_none_is_refused(done, change, wrong):
    job, shared, visits, key = next(asked for asked in done.asked if isinstance(asked[0], Masked))
    outcome = total(done, msgspec.structs.replace(job, **change), shared, visits[:1], key)
    assert wrong in outcome.failures[0].reason


def test_a_parcel_of_another_size_is_refused(done):
    job, shared, visits, key = done.asked[-1]
    outcome = total(done, job, shared, [replace(visits[0], parcel=visits[0].parcel[:-1])], key)
    assert "did not forward the shares that the other members sealed" in outcome.failures[0].reason


def test_an_engine_without_a_secret_or_a_record_is_refused(small):
    side = build(small.blueprint, small.data)
    for broken in (side, replace(side, secret=os.urandom(32)), replace(side, sessions=Sessions.temporary())):
        engine = Loop(broken)
        job = MaskKeys(bytes(32), 1, Train(), ((0, 0),))
        (failure,) = engine.visit(job, {}, ALL[:1], Key(0))
        assert "this engine gave ClientSide no session record" in failure.reason
        if broken.sessions is not None:
            broken.sessions.close()
