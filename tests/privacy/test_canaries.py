"""An audit of ε with a canary: what an attacker measures must not exceed what is promised.

One client, the canary, sends an update of full length, all others send none, which is the worst case. The attacker sees
every round's noisy sum and guesses whether the canary was there. A lower bound on ε follows from how often the guess is
right (Jagielski, Ullman, Oprea, "Auditing Differentially Private Machine Learning", NeurIPS 2020): with a confidence of
95 %, ε ≥ log((TPR − δ)/FPR) with Clopper and Pearson's bounds on both rates.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import beta

from unskew.core.key import Key
from unskew.core.types import Roster
from unskew.methods import parse_method
from unskew.methods.protections import SAMPLERS
from unskew.round.sampling import draw

accounting = pytest.importorskip("dp_accounting")

ROUNDS, CLIENTS, PER_ROUND, DELTA, TRIALS, SEED = 20, 100, 10, 1e-5, 60_000, 0
ROSTER = Roster(np.ones(CLIENTS, dtype=np.int64))
RELEASE = parse_method(f"private-updates(clip=1, noise=1, delta={DELTA}, sampling=poisson, release=true)")
SEEDED = replace(RELEASE, sampler=SAMPLERS["poisson"])  # as it was: noise from the system, participation from the seed


def who_comes(algorithm, number):
    return {visit.client for visit in draw(algorithm, Key(SEED), number, ROSTER, PER_ROUND).visits}


def predict():
    """The client that comes most often if participation follows from the seed, and its rounds [ROUNDS]."""
    rounds = np.array(
        [[client in who_comes(SEEDED, number) for client in range(CLIENTS)] for number in range(1, ROUNDS + 1)]
    )
    canary = int(rounds.sum(0).argmax())
    return canary, rounds[:, canary]


def observe(algorithm, canary):
    """[TRIALS, ROUNDS], the noisy sum of every round along the canary's update; without it where ``canary`` is None."""
    seen = np.empty((TRIALS, ROUNDS))
    update = algorithm.mechanism.clip_update(_sums(1.0))["delta/params/a"]
    follows = algorithm.sampler is SAMPLERS["poisson"]
    for number in range(1, ROUNDS + 1):
        came = np.zeros(TRIALS)
        if canary is not None and follows:
            came[:] = canary in who_comes(algorithm, number)
        elif canary is not None:
            came[:] = [canary in who_comes(algorithm, number) for _ in range(TRIALS)]
        sums = {"delta/params/a": torch.from_numpy(came) * float(update)}
        noisy = algorithm.mechanism.add_noise(
            sums, {"params/a": torch.zeros(TRIALS)}, PER_ROUND, Key(SEED).fold("round", number)
        )
        seen[:, number - 1] = noisy["delta/params/a"].numpy()
    return seen


def _sums(value):
    numbers = {"weight": 1.0, "scaled": 1.0, "metric/loss": 3.0, "metric/examples": 7.0, "metric/visits": 1.0}
    return {
        name: torch.tensor(each, dtype=torch.float64) for name, each in {**numbers, "delta/params/a": value}.items()
    }


def lower_bound(with_canary, without, delta=DELTA):
    """ε is at least this, at 95 %: the threshold is chosen on one half of the trials and judged on the other."""
    half = len(with_canary) // 2
    best, chosen = 0.0, 0.0
    for threshold in np.quantile(np.concatenate([with_canary[:half], without[:half]]), np.linspace(0.5, 0.99999, 400)):
        found = _bound((with_canary[:half] > threshold).sum(), (without[:half] > threshold).sum(), half, delta)
        best, chosen = max((best, chosen), (found, threshold))
    return _bound((with_canary[half:] > chosen).sum(), (without[half:] > chosen).sum(), half, delta)


def _bound(hits, alarms, count, delta):
    least = beta.ppf(0.025, hits, count - hits + 1) if hits else 0.0
    most = beta.ppf(0.975, alarms + 1, count - alarms) if alarms < count else 1.0
    return math.log((least - delta) / most) if least > delta else 0.0


def audit(algorithm):
    """The best lower bound of an attacker who knows the seed, and of one who only knows how the draw is made."""
    canary, expected = predict()
    present, absent = observe(algorithm, canary), observe(algorithm, None)
    share = PER_ROUND / CLIENTS

    def scores(seen):
        return seen[:, expected].sum(1), np.log1p(share * np.expm1(seen - 0.5)).sum(1)

    return max(lower_bound(one, other) for one, other in zip(scores(present), scores(absent), strict=True))


@pytest.mark.heavy
def test_an_attacker_who_knows_the_seed_measures_no_more_than_the_promise():
    """20 rounds, a tenth of 100 clients, z = 1: ε 3.59 at δ = 1e-5. Participation from the seed breaks the promise."""
    promised = RELEASE.mechanism.epsilon(ROUNDS, PER_ROUND, CLIENTS)
    assert promised == pytest.approx(3.59, abs=0.01)
    seeded, released = audit(SEEDED), audit(RELEASE)
    print(f"promised {promised:.2f}; measured with seeded participation {seeded:.2f}, with release=true {released:.2f}")
    assert seeded > promised + 0.5  # the audit finds what it is for
    assert 0.5 < released <= promised
