"""Runs with release=true: nobody can repeat noise and participation, and nothing else tells about an example."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import unskew
from analysis.finished import done, metrics
from commands import flags
from unskew import methods
from unskew.calibration import federated
from unskew.calibration.protection import add_noise
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import Missing, UserError
from unskew.core.key import Key
from unskew.engines.loop import Loop
from unskew.privacy.noise import PrivateUpdates
from unskew.round import driver
from unskew.runs import execute
from unskew.runs.finished import FinishedRun
from unskew.runs.result import read_result

accounting = pytest.importorskip("dp_accounting")
pytest.importorskip("cryptography")

SMALL = {"data": "digits", "clients": 6, "epochs": 1, "engine": "loop", "rounds": 2}
UPDATES = "private-updates(noise=2, release=true)"
STATISTICS = "lda + private(epsilon=8, release=true)"
SECURE = "secure(updates=true)"


def run(out, **options):
    return unskew.run(out=out, **{**SMALL, **options})


# Who takes part, and what clients are sent


@pytest.fixture
def seen(monkeypatch):
    """The clients of every round, and the seed of every key that clients are sent."""
    drawn, seeds, visit = [], [], Loop.visit

    def drawing(*given):
        drawn.append(driver_draw(*given))
        return drawn[-1]

    def visiting(self, job, shared, visits, key):
        seeds.append(key.seed)
        return visit(self, job, shared, visits, key)

    driver_draw = driver.draw
    monkeypatch.setattr(driver, "draw", drawing)
    monkeypatch.setattr(Loop, "visit", visiting)
    return drawn, seeds


@pytest.mark.parametrize("sampling", ["poisson", pytest.param("fixed", marks=pytest.mark.heavy)])
def test_participation_does_not_follow_from_the_seed_and_clients_are_not_sent_the_seed(tmp_path, seen, sampling):
    """Eight rounds of three clients in twelve: the same draws twice have a chance below 10⁻⁹."""
    drawn, seeds = seen
    options = {"clients": 12, "per_round": 3, "rounds": 8}
    for name in ("a", "b"):
        run(tmp_path / name, method=f"private-updates(sampling={sampling}, release=true)", **options)
    who = [[visit.client for visit in each.visits] for each in drawn]
    assert who[:8] != who[8:]
    assert 0 not in seeds  # the run's own
    drawn.clear(), seeds.clear()
    for name in ("c", "d"):
        run(tmp_path / name, method=f"private-updates(sampling={sampling})", **options)
    who = [[visit.client for visit in each.visits] for each in drawn]
    assert who[:8] == who[8:]
    assert set(seeds) == {0}


# What stays in the run directory


def arrays(file, images, labels, tests):
    np.savez(file, x_train=images, y_train=labels, x_test=tests[0], y_test=tests[1])


@pytest.fixture
def neighbours(tmp_path):
    """A function that writes one data set, or the same with one example changed, to the same file."""
    random = Key(3).numpy()
    images, labels = random.integers(0, 256, (240, 8, 8), dtype=np.uint8), np.arange(240) % 4
    tests = random.integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 4

    def write(change):
        mine, classes = images.copy(), labels.copy()
        if change == "pixels":
            mine[17] = 255 - mine[17]
        if change == "label":
            classes[17] = (classes[17] + 1) % 4
        if change == "left out":
            mine, classes = np.delete(mine, 17, 0), np.delete(classes, 17)
        arrays(tmp_path / "data.npz", mine, classes, tests)
        return f"arrays:{tmp_path / 'data.npz'}"

    return write


@pytest.fixture
def noise_covers_all(monkeypatch):
    """Replace all that is released with noise by the same numbers every time: whatever differs then is not covered."""

    def noisy(self, sums, params, expected, key):
        zero = torch.zeros((), dtype=torch.float64)
        update = {f"delta/{name}": torch.full_like(value, 0.01, dtype=torch.float64) for name, value in params.items()}
        counted = {"metric/examples": zero, "metric/visits": zero}
        return {"weight": zero + expected, "scaled": zero + expected, **update, **counted}

    def release(statistics, radius, epsilon, delta, key):
        features = torch.randn(400, statistics.width, generator=Key(5).torch(), dtype=torch.float64)
        labels = torch.arange(400) % statistics.classes
        fixed = ClassStatistics.of_features(features, labels, classes=statistics.classes, form=statistics.form)
        return add_noise(fixed, 1e3, epsilon, delta, Key(1))

    monkeypatch.setattr(PrivateUpdates, "add_noise", noisy)
    monkeypatch.setattr(federated, "add_noise", release)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(execute, "time", type("Clock", (), {"monotonic": staticmethod(lambda: 0.0)}))


def everything(path):
    return {str(file.relative_to(path)): content(file) for file in sorted(path.rglob("*")) if file.is_file()}


def content(file):
    """A file's bytes; of safetensors, whose header is in any order, the header and the bytes behind it."""
    found = file.read_bytes()
    if file.suffix != ".safetensors":
        return found
    end = 8 + int.from_bytes(found[:8], "little")
    return json.loads(found[8:end]), found[end:]


def published(tmp_path, data, method, **options):
    out = tmp_path / "run"
    chosen = {**SMALL, "data": data, "partition": "dirichlet(0.5)", **options}
    unskew.run(out=out, method=method, **chosen)
    unskew.write_report(out)
    found = everything(out)
    out.rename(tmp_path / f"run-{len(list(tmp_path.iterdir()))}")
    return found


@pytest.mark.parametrize("method", [UPDATES, f"{UPDATES} + {STATISTICS}", f"{UPDATES} + moon"])
@pytest.mark.parametrize("change", ["pixels", pytest.param("label", marks=pytest.mark.heavy), "left out"])
def test_data_that_differ_in_one_example_leave_the_same_files_but_for_noise(
    tmp_path, neighbours, noise_covers_all, method, change
):
    options = {"during": "model(every=1)", "patience": 5}
    one = published(tmp_path, neighbours(""), method, **options)
    other = published(tmp_path, neighbours(change), method, **options)
    assert list(one) == list(other)
    assert {name: content for name, content in one.items() if content != other[name]} == {}
    assert not {"partition.npz", "clients.npz", "checkpoint/state.safetensors", "checkpoint/memories.bin"} & one.keys()
    rows = [json.loads(line) for line in one["metrics.jsonl"].splitlines()]
    assert {key for row in rows for key in row} == {"round", "accuracy", "loss", "epsilon", "delta", "unit", "released"}
    result = json.loads(one["result.json"])
    exact = {"emd", "examples", "bytes_up", "failures", "data_sha256", "partition_hash", "clients_accuracy"}
    assert not exact & result.keys()
    assert result["released"] is True


def test_the_same_without_release_can_be_told_apart(tmp_path, neighbours, noise_covers_all):
    """The comparison above finds what it looks for."""
    method = "private-updates(noise=2) + lda + private(epsilon=8)"
    one, other = (published(tmp_path, neighbours(change), method) for change in ("", "left out"))
    differing = {name for name, content in one.items() if content != other.get(name)}
    assert {"result.json", "metrics.jsonl", "partition.npz", "clients.npz"} <= differing


def test_a_calibration_of_an_untrained_network_leaves_the_same_files_but_for_noise(
    tmp_path, neighbours, noise_covers_all
):
    one, other = (published(tmp_path, neighbours(c), STATISTICS, rounds=0) for c in ("", "left out"))
    assert {name for name, content in one.items() if content != other[name]} == set()
    assert "notes" not in json.loads(one["result.json"])


def test_a_released_run_is_read_reported_and_calibrated_like_any_other(tmp_path, capsys):
    result = run(tmp_path / "a", method=f"{UPDATES} + {STATISTICS}")
    again = read_result(result.path)
    assert {again.examples, again.bytes_up, again.data_sha256, again.emd} == {None}
    assert again.released
    assert "EMD" not in str(again)
    assert unskew.load(result.path)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    unskew.write_report(result.path)
    page = (result.path / "report.html").read_text()
    assert "for every example" in page
    assert "this would reveal more than (ε, δ) covers" in page  # skew, fairness, inversion, …
    with FinishedRun(result.path) as study:
        for measure in (lambda: study.holdings, lambda: study.local_models()):
            with pytest.raises(Missing, match=r"a release \(release=true\)"):
                measure()
    with pytest.raises(UserError, match=r"give ccvr\(per_class=10\) \+ private\(release=true\)"):
        unskew.calibrate_run(result.path, "ccvr(per_class=10)")
    more = unskew.calibrate_run(result.path, "lda + private(epsilon=4, release=true)")
    assert len(more.privacy.releases) == 2
    assert not (result.path / "clients.npz").exists()
    with pytest.raises(UserError, match="is finished"):
        unskew.resume(result.path)
    assert "private-updates" in done(capsys, "compare", result.path, run(tmp_path / "b", method="fedavg").path)


@pytest.mark.parametrize(("options", "words"), [
    ({"method": f"{UPDATES} + lda"}, r"lda with release=true would .* noise; leave it out, or add private\(rel"),
    ({"method": f"{UPDATES} + oracle + private(release=true)"}, "oracle"),
    ({"method": UPDATES, "validation": 0.1}, "--validation with release=true would .* noise; leave it out$"),
    ({"method": UPDATES, "normalise": "data"}, "--normalise data with release=true"),
    ({"method": STATISTICS, "during": "norms"}, "--during norms records single clients"),
])  # fmt: skip
def test_what_would_be_published_without_noise_is_refused(tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        run(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


# Its price


def test_a_round_that_is_trained_again_after_a_crash_is_counted_twice(tmp_path, monkeypatch):
    """Killed in round 3, after which no checkpoint was written: the round is drawn anew, and four rounds were begun."""
    broken = []

    def failing(self, job, shared, visits, key):
        if getattr(job, "round", 0) == 3 and not broken:
            broken.append(job)
            raise KeyboardInterrupt
        return visit(self, job, shared, visits, key)

    visit = Loop.visit
    monkeypatch.setattr(Loop, "visit", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", method=UPDATES, rounds=3)
    assert (tmp_path / "a" / "partition.npz").exists()  # until it is finished
    result = unskew.resume(tmp_path / "a")
    mechanism = methods.parse_method(UPDATES).mechanism
    expected = [mechanism.epsilon(count, 6, 6) for count in (1, 2, 4)]
    assert [row["epsilon"] for row in metrics(result.path)] == pytest.approx(expected)
    assert (result.privacy.epsilon, result.privacy.updates.rounds) == (pytest.approx(expected[2]), 4)
    assert not (result.path / "checkpoint" / "begun").exists()


def test_noise_inside_masks_reaches_the_model_and_its_price_is_reported(tmp_path):
    result = run(
        tmp_path / "a", method=f"{SECURE} + private-updates(noise=2, sampling=fixed, release=true)", per_round=4
    )
    updates = result.privacy.updates
    mechanism = methods.parse_method(f"{SECURE} + {UPDATES}").mechanism
    assert updates.in_masks
    assert updates.released
    assert (updates.unit, updates.replaced) == ("client", False)
    assert result.privacy.epsilon == pytest.approx(mechanism.epsilon(2, 4, 6))
    assert result.privacy.epsilon > accounting.get_epsilon_gaussian(2 / 2**0.5, 1e-5)
    assert replace(mechanism, noise=0.0).epsilon(2, 4, 6) is None


def test_with_masks_the_server_never_has_the_sum_without_noise(tmp_path, monkeypatch):
    """What the server unmasks has noise of z·S or more on every parameter: far more than any update of length S."""
    unmasked = []

    def listening(self, engine, job, shared, visits, key):
        outcome = exchange(self, engine, job, shared, visits, key)
        unmasked.append(torch.cat([v.flatten() for n, v in outcome.sums.items() if n.startswith("delta/params/")]))
        return outcome

    kind = type(methods.parse_method(SECURE).exchange)
    exchange = kind.__call__
    monkeypatch.setattr(kind, "__call__", listening)
    run(tmp_path / "a", method=f"{SECURE} + private-updates(clip=0.01, noise=5, release=true)", rounds=1)
    deviation = float(next(each for each in unmasked if len(each)).std())
    assert 0.05 * 0.99 < deviation < 0.05 * 1.5  # six of six clients answered, four would have been enough: √(6/4)


def test_the_unit_is_stated_wherever_epsilon_is_shown(tmp_path, capsys):
    options = {**SMALL, "rounds": 1}
    method = "private-updates(noise=2) + lda + private"
    said = " ".join(done(capsys, "run", *flags(**options, method=method, out=tmp_path / "a")).split())
    assert "for every client" in said
    assert "for every example" in said
    assert "the noise follows from the seed: ε holds only against those who do not know it" in said
    assert metrics(tmp_path / "a")[0]["unit"] == "client"
    privacy = json.loads((tmp_path / "a" / "result.json").read_text())["privacy"]
    assert privacy["updates"]["unit"] == "client"
    assert privacy["unit"] == privacy["releases"][0]["unit"] == "example"
    said = done(capsys, "run", *flags(**options, method=UPDATES, out=tmp_path / "b"))
    assert "follows from the seed" not in " ".join(said.split())


@pytest.mark.parametrize(("given", "made"), [
    ("private-updates", "private-updates(release=true)"),
    ("fedavgm(0.9) + private-updates(1, 2) + lda + private(epsilon=2)",
     "fedavgm(0.9) + private-updates(1, 2, release=true) + lda + private(epsilon=2, release=true)"),
    ("private-updates(release=false)", "private-updates(release=false)"),
])  # fmt: skip
def test_in_a_federation_release_is_the_default(given, made):
    assert methods.with_release(given) == made
