"""Private updates: clipped on the client, noise on the sum, ε by an accountant, nothing sent that is not covered."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from federation import federation, largest_difference
from unskew import engines
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Roster, Visit
from unskew.methods import parse_method
from unskew.privacy.noise import PrivateUpdates
from unskew.privacy.secure_sum import as_steps
from unskew.round import driver

accounting = pytest.importorskip("dp_accounting")

PLAIN = PrivateUpdates(clip=2.0, noise=0.0, delta=1e-5, poisson=False)


def sums_of(*values, weight=1.0):
    numbers = {"weight": weight, "scaled": weight, "metric/loss": 3.0, "metric/examples": 7.0, "metric/visits": 1.0}
    update = {f"delta/params/{place}": torch.tensor(value, dtype=torch.float64) for place, value in enumerate(values)}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()} | update


def length(sums):
    return float(tensors.flat({name: value for name, value in sums.items() if name.startswith("delta/")}).norm())


def test_an_update_is_cut_to_length_over_all_parameters_together():
    clipped = PLAIN.clip_update(sums_of([3.0, 0.0], [[4.0]]))
    assert 2.0 * (1 - 1e-6) < length(clipped) <= 2.0
    ratio = clipped["delta/params/1"].item() / clipped["delta/params/0"][0].item()
    assert ratio == pytest.approx(4 / 3, rel=1e-12)


@pytest.mark.parametrize("value", [[0.0, 0.0], [1.0, -1.0]])
def test_a_short_update_stays_as_it_is_and_its_loss_stays_with_the_client(value):
    clipped = PLAIN.clip_update(sums_of(value))
    assert clipped["delta/params/0"].tolist() == value
    assert "metric/loss" not in clipped
    assert clipped.keys() == {"weight", "scaled", "metric/examples", "metric/visits", "delta/params/0"}


def test_rounding_for_a_secure_sum_does_not_make_it_longer_than_promised():
    update = torch.rand(20_000, generator=Key(0).torch(), dtype=torch.float64) - 0.5
    clipped = replace(PLAIN, clip=0.001).clip_update(sums_of(update.tolist()))
    steps = as_steps(clipped, 3, "test")["delta/params/0"]
    assert float(steps.double().norm()) * 2.0**-32 <= 0.001
    with pytest.raises(UserError, match="too small for steps"):
        replace(PLAIN, clip=1e-8).clip_update(sums_of(update.tolist()))


@pytest.mark.parametrize(("name", "words"), [
    ("delta/buffers/mean", "would be sent with the update"), ("stat/scaffold/x", "would be sent with the update"),
])  # fmt: skip
def test_what_noise_does_not_cover_is_refused_on_the_client(name, words):
    with pytest.raises(UserError, match=words):
        PLAIN.clip_update(sums_of([1.0]) | {name: torch.zeros(1, dtype=torch.float64)})
    with pytest.raises(UserError, match="every visit must have weight 1, not 5"):
        PLAIN.clip_update(sums_of([1.0], weight=5.0))


def test_noise_has_the_promised_size_and_the_sum_is_divided_by_those_who_were_to_come():
    """Deviation z·S on every parameter: 1.5·2 = 3, to 4 standard errors of 40,000 draws."""
    mechanism = replace(PLAIN, noise=1.5)
    params = {"params/0": torch.zeros(200, 200)}
    noisy = mechanism.add_noise(sums_of([[1.0] * 200] * 200), params, 10, Key(0))
    drawn = noisy["delta/params/0"] - 1.0
    assert float(drawn.std()) == pytest.approx(3.0, rel=4 / math.sqrt(2 * 40_000))
    assert abs(float(drawn.mean())) < 4 * 3 / 200
    assert float(noisy["weight"]) == 10
    assert float(noisy["metric/visits"]) == 1


def test_of_nobody_there_is_noise_alone():
    noisy = replace(PLAIN, noise=1.0).add_noise({}, {"params/0": torch.zeros(50)}, 4, Key(0))
    assert int((noisy["delta/params/0"] != 0).sum()) == 50
    assert float(noisy["metric/visits"]) == 0


def test_two_releases_that_differ_in_anything_share_no_noise():
    params, one = {"params/0": torch.zeros(20)}, sums_of([0.0] * 20)
    mechanism = replace(PLAIN, noise=1.0)
    first = mechanism.add_noise(one, params, 4, Key(0))["delta/params/0"]
    assert torch.equal(first, mechanism.add_noise(one, params, 4, Key(0))["delta/params/0"])
    others = [
        mechanism.add_noise(sums_of([1e-9] * 20), params, 4, Key(0)), mechanism.add_noise(one, params, 4, Key(1)),
        replace(mechanism, noise=2.0).add_noise(one, params, 4, Key(0)),
    ]  # fmt: skip
    for other in others:
        assert not bool(torch.isclose(other["delta/params/0"], first, rtol=0.1).all())
    released = replace(mechanism, release=True)
    assert released.release
    twice = [released.add_noise(one, params, 4, Key(0))["delta/params/0"] for _ in range(2)]
    assert not torch.equal(*twice)


def test_with_equal_clients_no_noise_and_no_limit_it_is_fedavg_to_the_last_bit():
    """Eight examples each, a power of two: weights 8·Δ/Σ8 and 1·Δ/K round alike."""
    fed = federation("fedavg", sizes=(8, 8, 8), dtype="float32", epochs=1)
    private = fed.with_method("private-updates(clip=1e6, noise=0, sampling=fixed)")
    assert largest_difference(fed.run(3).tensors, private.run(3).tensors) == 0


@pytest.mark.parametrize("method", ["scaffold", "prototypes", "fedir", "fedeccr"])
def test_methods_that_send_more_than_updates_are_refused_by_name_in_either_order(method):
    for text in (f"private-updates + {method}", f"{method} + private-updates"):
        with pytest.raises(UserError, match=f"private-updates and {method}: clients would send .* no noise covers it"):
            parse_method(text)
    parse_method("private-updates + fedir(target=uniform)")  # sends nothing


@pytest.mark.parametrize("method", ["fedvc", "feddyn", "fednova", "centralised", "available"])
def test_methods_that_decide_who_comes_or_how_updates_become_one_are_refused_by_name(method):
    with pytest.raises(UserError, match=rf"private-updates and {method} both claim the \w+ slot"):
        parse_method(f"private-updates + {method}")


def test_poisson_draws_each_client_on_its_own_and_fixed_always_as_many():
    roster = Roster(np.array([5, 0, 3, 8, 1, 2]))
    poisson, fixed = (parse_method(f"private-updates(sampling={each})").sampler for each in ("poisson", "fixed"))
    drawn = [[visit.client for visit in poisson(Key(seed), roster, 2)] for seed in range(600)]
    assert {len(each) for each in drawn} >= {0, 1, 2, 3, 4}
    for client in (0, 2, 3, 4, 5):  # the chance is 2/5; 600 draws, 4 standard errors
        assert np.mean([client in each for each in drawn]) == pytest.approx(0.4, abs=4 * math.sqrt(0.24 / 600))
    assert all(1 not in each for each in drawn)
    assert fixed(Key(0), roster, 5) == [Visit(client, 1.0) for client in (0, 2, 3, 4, 5)]
    assert {len(fixed(Key(seed), roster, 2)) for seed in range(20)} == {2}
    assert [visit.client for visit in poisson(Key(0), roster, 6)] == [0, 2, 3, 4, 5]


def test_a_round_to_which_nobody_comes_adds_noise_all_the_same():
    fed = federation("private-updates", sizes=(8, 7, 6), dtype="float32", epochs=1)
    engine = engines.open_engine("loop", engines.EngineSetup(fed.blueprint, fed.data, 1))
    empty = replace(fed.algorithm, sampler=lambda key, roster, per_round: [])
    state, metrics = driver.run_round(empty, engine, fed.state(), fed.key, per_round=1)
    engine.close()
    assert (metrics.clients, metrics.examples, metrics.train_loss, metrics.batches_max) == (0, 0, None, 0)
    assert metrics.epsilon is not None
    assert largest_difference(state.tensors, fed.state().tensors) > 0


def test_metrics_say_epsilon_of_all_rounds_so_far():
    fed = federation("private-updates(noise=2)", sizes=(8, 7, 6), dtype="float32", epochs=1)
    engine = engines.open_engine("loop", engines.EngineSetup(fed.blueprint, fed.data, 1))
    rounds = driver.run(fed.algorithm, engine, fed.state(), fed.key, rounds=3, per_round=3)
    seen = [metrics for _, metrics in rounds]
    engine.close()
    expected = [accounting.get_epsilon_gaussian(2 / math.sqrt(count), 1e-5) for count in (1, 2, 3)]
    assert [row.epsilon for row in seen] == pytest.approx(expected)
    assert {row.delta for row in seen} == {1e-5}
    assert {row.train_loss for row in seen} == {None}


def test_under_secure_updates_it_gives_the_bits_of_the_rounded_sums():
    text = "private-updates(noise=0.5, sampling=fixed)"
    fed = federation(f"rounded + {text}", sizes=(8, 7, 6, 5), dtype="float32", epochs=1)
    secure = fed.with_method(f"secure(updates=true) + {text}")
    assert largest_difference(fed.run(3).tensors, secure.run(3).tensors) == 0


@pytest.mark.parametrize("knobs", ["clip=0", "clip=-1", "noise=-1", "delta=0", "delta=1", "sampling=some"])
def test_a_knob_that_cannot_be_is_refused(knobs):
    with pytest.raises(UserError, match=r"private-updates\("):
        parse_method(f"private-updates({knobs})")
