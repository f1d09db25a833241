"""Runs with secure or private updates: refused where a protection cannot hold, and what their folder says of it."""

import math

import numpy as np
import pytest

import unskew
from analysis.finished import done, metrics
from observers import stop_after
from unskew.core.errors import Missing, UserError
from unskew.core.key import Key
from unskew.core.types import Roster
from unskew.methods import parse_method
from unskew.runs.finished import FinishedRun
from unskew.runs.result import read_result

accounting = pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")

SMALL = {"data": "digits", "clients": 6, "epochs": 1, "engine": "loop", "rounds": 2}
SECURE, PRIVATE = "secure(updates=true)", "private-updates(noise=2)"


def run(out, **options):
    return unskew.run(out=out, **{**SMALL, **options})


def test_secure_updates_give_the_rounded_result_to_the_last_bit_and_send_words_of_8_bytes(tmp_path):
    masked, rounded = run(tmp_path / "a", method=f"{SECURE} + lda"), run(tmp_path / "b", method="rounded + lda")
    assert masked.weights_sha256 == rounded.weights_sha256
    one, other = (metrics(each.path)[1] for each in (masked, rounded))
    same = ("clients", "examples", "train_loss", "accuracy", "loss")
    assert [one[name] for name in same] == [other[name] for name in same]
    words = other["bytes_up"] // 4 + 6 * 6  # the model's values; weight, scaled, three metrics and the check
    shares = 6 * (64 + 5 * 50 + 6 * 17)  # keys, a box for each other, a share of each opened
    assert one["bytes_up"] == 8 * words + shares
    assert list(masked.calibrations) == ["lda + secure"]
    assert masked.privacy is None


def test_prototypes_over_sampled_clients_warn_before_the_first_round(tmp_path):
    with pytest.warns(UserWarning, match=r"secure\(updates=true\) and prototypes: .* sums over different clients"):
        run(tmp_path / "a", method=f"prototypes + {SECURE}", per_round=4, rounds=1)


@pytest.mark.parametrize(("options", "words"), [
    ({"method": SECURE, "per_round": 2}, r"secure\(updates=true\): 2 of 6 clients take part .*give --per-round 3 to"),
    ({"method": SECURE, "during": "norms"}, "--during norms records single clients, which the method hides"),
    ({"method": PRIVATE, "during": "silhouette + drift"}, "--during drift records single clients"),
    ({"method": PRIVATE, "start": "lda"}, "guarantee does not cover --start"),
    ({"method": f"{SECURE} + {PRIVATE}", "per_round": 4}, "would show who was drawn; give sampling=fixed"),
    ({"method": PRIVATE, "model": "outside_models:batch_norm"}, "running statistics .* GroupNorm"),
    ({"method": "secure"}, "there is no calibration whose statistics"),
])  # fmt: skip
def test_what_a_protection_cannot_cover_is_refused_before_a_folder_is_made(tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        run(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_a_run_says_what_its_updates_promise_by_round_and_in_its_result(tmp_path, capsys):
    result = run(tmp_path / "a", method=f"{PRIVATE} + lda")
    expected = [accounting.get_epsilon_gaussian(2 / math.sqrt(count), 1e-5) for count in (1, 2)]
    assert [row["epsilon"] for row in metrics(result.path)] == pytest.approx(expected)
    assert [row["delta"] for row in metrics(result.path)] == [1e-5, 1e-5]
    assert "train_loss" not in metrics(result.path)[0]
    spent = read_result(result.path).privacy
    assert (spent.epsilon, spent.delta) == pytest.approx((expected[1], 1e-5))
    assert (spent.updates.rounds, spent.updates.sampling, spent.updates.replaced) == (2, "everyone", False)
    assert spent.updates.example_epsilon > spent.epsilon
    assert spent.describe() == f"ε {expected[1]:.4g} at δ 1e-05 for every client, over 2 rounds of updates"
    assert result.notes == ["lda: its statistics have no noise, so (ε, δ) does not cover it"]
    said = " ".join(done(capsys, "calibrate", result.path, "lda + private(epsilon=50, clip=3)").split())
    both = 50 + spent.updates.example_epsilon
    assert f"ε {both:.4g} at δ 2e-05 for every example, over one release of statistics and all updates" in said
    assert f"the updates alone: ε {expected[1]:.4g} at δ 1e-05 for every client" in said


def test_a_private_run_that_was_stopped_and_resumed_equals_one_that_was_not(tmp_path):
    method = "private-updates(sampling=fixed) + secure(updates=true)"
    whole = run(tmp_path / "a", method=method, per_round=4, rounds=3)
    with pytest.raises(unskew.StopRun):
        run(tmp_path / "b", method=method, per_round=4, rounds=3, observe=stop_after(2))
    assert unskew.resume(tmp_path / "b").weights_sha256 == whole.weights_sha256
    assert whole.privacy.updates.replaced
    assert "for every client whose data are replaced, over 3 rounds" in whole.privacy.describe()


def test_a_round_whose_noise_is_not_repeatable_is_not_trained_again(tmp_path):
    result = run(tmp_path / "a", method="private-updates(release=true)", during="model(every=1)")
    again = run(tmp_path / "b", method="private-updates(release=true)", during="model(every=1)")
    assert result.weights_sha256 != again.weights_sha256
    with FinishedRun(result.path) as study:
        assert study.state(1).round == 1  # kept
    without = run(tmp_path / "c", method="private-updates(release=true)")
    with FinishedRun(without.path) as study, pytest.raises(Missing, match="round 1 cannot be retrained"):
        study.state(1)


def test_a_run_whose_first_round_draws_nobody_runs(tmp_path):
    sampler, roster = parse_method("private-updates").sampler, Roster(np.ones(6, dtype=np.int64))
    seed = next(s for s in range(100) if not sampler(Key(s).fold("round", 1, "sample"), roster, 1))
    result = run(tmp_path / "a", method="private-updates", per_round=1, rounds=1, seed=seed, engine="auto")
    assert (metrics(result.path)[0]["clients"], result.privacy.updates.sampling) == (0, "poisson")
