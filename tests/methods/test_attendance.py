"""Clients that do not come: who is drawn, what the mean is over, what a round without anyone does."""

from dataclasses import replace

import numpy as np
import pytest

from federation import federation, largest_difference, same
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Roster, Visit
from unskew.methods import parse_method, parse_methods
from unskew.round import driver
from unskew.round.algorithm import Algorithm
from unskew.round.sampling import draw
from unskew.runs import train

EVEN = Roster(np.full(200, 10))


def drawn(method, number=1, roster=EVEN, per_round=100, seed=0):
    return draw(parse_method(method), Key(seed), number, roster, per_round)


def rounds_of(small, rounds, per_round=5):
    """Every state and every round's metrics."""
    engine = small.open()
    try:
        return list(driver.run(small.algorithm, engine, small.state(), small.key, rounds=rounds, per_round=per_round))
    finally:
        engine.close()


# Who comes


def test_each_drawn_client_stays_away_with_the_given_chance():
    away = [drawn("absent(0.3)", number).absent for number in range(1, 201)]
    assert np.mean(away) == pytest.approx(30, abs=1)  # 200 rounds of 100: the mean's deviation is 0.32
    assert np.std(away) == pytest.approx(np.sqrt(100 * 0.3 * 0.7), abs=0.8)


def test_those_that_come_are_some_of_those_that_were_drawn_and_others_each_round():
    plain = [visit.client for visit in drawn("fedavg").visits]
    came = [visit.client for visit in drawn("absent(0.5)").visits]
    assert came == [client for client in plain if client in came]
    everyone = [drawn("absent(0.5)", number, per_round=200).visits for number in (1, 2)]
    assert everyone[0] != everyone[1]
    assert drawn("absent(0.5)", 1, per_round=200, seed=1).visits != everyone[0]


def test_a_client_drawn_twice_stays_away_with_both_visits():
    few = Roster(np.array([5, 1000, 5]))
    for number in range(1, 40):
        round_ = drawn("fedvc(8) + absent(0.5)", number, few, 6)
        assert len(round_.visits) + round_.absent == 6
        before = drawn("fedvc(8)", number, few, 6).visits
        for client in {visit.client for visit in round_.visits}:
            assert [v for v in round_.visits if v.client == client] == [v for v in before if v.client == client]


def test_day_and_night_every_client_is_there_for_its_share_of_each_period():
    masks = np.array([_there("available(share=0.25, period=8)", number) for number in range(1, 17)])
    assert (masks.sum(0) == 4).all()  # 2 of 8 rounds, twice
    assert (masks[:8] == masks[8:]).all()
    assert all(np.abs(np.diff(np.r_[mask[-1], mask])).sum() == 2 for mask in masks[:8].T.astype(int))  # one stretch
    assert 30 < masks[0].sum() < 70  # about a quarter of 200 clients at any time
    assert not (masks[0] == _there("available(share=0.25, period=8)", 1, seed=1)).all()


def _there(method, number, seed=0, clients=200):
    return parse_method(method).available(Key(seed).fold("available"), number, Roster(np.full(clients, 10)))


@pytest.mark.parametrize("sampler", ["fedavg", "fedvc(4)"])
def test_a_sampler_draws_among_those_that_are_there(sampler, tmp_path):
    (tmp_path / "t.csv").write_text("round,client\n1,3\n1,5\n1,190\n2,7\n")
    method = f'{sampler} + available("{tmp_path}/t.csv")'
    first, second = drawn(method, 1), drawn(method, 2)
    assert {visit.client for visit in first.visits} == {3, 5, 190}
    assert {visit.client for visit in second.visits} == {7}
    assert (first.available, second.available) == (3, 1)
    assert drawn(method, 3).visits == drawn(method, 1).visits or sampler != "fedavg"  # the trace starts again


# What a round does with them


def test_the_mean_is_over_those_that_came():
    """A round of which some stay away is that round with the others as its only clients."""
    small = federation("absent(0.5)")
    state, metrics = rounds_of(small, 1)[0]
    came = draw(small.algorithm, small.key, 1, Roster(np.array([40, 30, 1, 20, 9])), 5)
    assert (
        (metrics.clients, metrics.absent) == (len(came.visits), came.absent) == (len(came.visits), 5 - metrics.clients)
    )
    assert 0 < metrics.clients < 5

    def those(key, roster, per_round):
        return [Visit(visit.client, float(roster.size(visit.client))) for visit in came.visits]

    only = replace(small, value=Algorithm(local=small.blueprint.local, sampler=those)).run(1)
    assert largest_difference(state.tensors, only.tensors) == 0


def test_a_round_in_which_nobody_comes_leaves_everything_as_it_is(tmp_path):
    (tmp_path / "t.csv").write_text("client,from,to\n0,1,1\n1,3,3\n")
    small = federation(f'fedavgm(0.9) + moon + scaffold + available("{tmp_path}/t.csv")', dtype="float32")
    (one, first), (two, second), (three, third) = rounds_of(small, 3)
    assert same(replace(one, round=2), two)
    assert not same(replace(two, round=3), three)
    assert (second.clients, second.examples, second.train_loss, second.available) == (0, 0, None, 0)
    assert (second.bytes_up, second.bytes_down, second.batches_max) == (0, 0, 0)
    assert (first.available, third.available) == (1, 1)


def test_nobody_in_the_first_round_still_has_the_survey(tmp_path):
    """fedir asks every client before it; then the round waits."""
    (tmp_path / "t.csv").write_text("round,client\n2,0\n")
    (_, first), (_, second) = rounds_of(federation(f'fedir + available("{tmp_path}/t.csv")'), 2)
    assert first.clients == 0
    assert first.bytes_up > 0
    assert second.clients == 1


def test_plain_rounds_do_not_speak_of_absence():
    (_, metrics), = rounds_of(federation(), 1)  # fmt: skip
    assert (metrics.available, metrics.absent, metrics.lr) == (None, None, None)
    (_, metrics), = rounds_of(federation("centralised"), 1)  # fmt: skip
    assert (metrics.available, metrics.absent) == (None, None)


# What is refused


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("absent(1)", "share, a probability, must be"),
        ("available(share=1.5)", "give a share above 0"),
        ("available(period=0)", "a period of at least 1 round"),
        ("available(missing.csv)", "the trace"),
        ("centralised + absent", "centralised and absent both claim the arrive slot"),
        ("available + centralised", "available and centralised both claim the available slot"),
        ("absent + absent(0.1)", "absent is given twice"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(method, message):
    with pytest.raises(UserError, match=message):
        parse_method(method)


# A trace that a run was started with


def test_a_runs_text_has_the_whole_path_and_the_hash_and_needs_the_file_only_to_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my trace.csv").write_text("round,client\n1,0\n")
    (named,) = parse_methods("available('my trace.csv')")
    assert named.name.startswith(f'available("{tmp_path}/my trace.csv", sha256="')
    monkeypatch.chdir("/")
    (again,) = parse_methods(named.name)
    assert again.name == named.name
    (tmp_path / "my trace.csv").unlink()
    algorithm = parse_method(named.name)  # a finished run is read without it
    with pytest.raises(UserError, match="the trace"):
        algorithm.available(Key(0), 1, EVEN)
    (tmp_path / "my trace.csv").write_text("round,client\n1,1\n")
    with pytest.raises(UserError, match="has changed since the run began"):
        parse_method(named.name).available(Key(0), 1, EVEN)


def test_a_run_with_a_trace_of_other_clients_is_refused_before_its_folder_is_made(tmp_path):
    (tmp_path / "t.csv").write_text("round,client\n1,99\n")
    with pytest.raises(UserError, match="lists client 99, but clients are numbered from 0 to 3"):
        train.run(method=f"available('{tmp_path}/t.csv')", clients=4, partition="iid", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_of_clients_that_come_and_go_resumes_calibrates_and_is_looked_at(tmp_path):
    (tmp_path / "t.csv").write_text("client,from,to\n0,1,1\n1,1,1\n2,3,4\n3,4,4\n")
    options = {"clients": 4, "partition": "iid", "rounds": 4, "epochs": 1, "checkpoint_seconds": 0, "lr": 0.05}
    method = f"fedavg + available('{tmp_path}/t.csv') + absent(0.2) + lda"
    whole = train.run(method=method, out=tmp_path / "whole", **options)
    assert [row["clients"] for row in whole.history][1] == 0
    assert "train_loss" not in whole.history[1]
    assert whole.calibrations["lda"].accuracy > whole.accuracy

    def stop(event):
        return train.STOP if getattr(event, "round", 0) == 2 else None

    with pytest.raises(train.StopRun):
        train.run(method=method, out=tmp_path / "cut", observe=stop, **options)
    resumed = train.resume(tmp_path / "cut")
    assert resumed.weights_sha256 == whole.weights_sha256
    drop = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in drop} for row in resumed.history] == [
        {k: v for k, v in row.items() if k not in drop} for row in whole.history
    ]
