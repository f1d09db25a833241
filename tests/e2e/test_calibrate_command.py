"""Calibration as a user has it: in a run or after it, alone or side by side, and the run itself stays as it was."""

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import unskew
from analysis import finished
from analysis.finished import done, metrics, refused, result, unsealed
from commands import started
from unskew.calibration import parse_calibration
from unskew.calibration.calibrate import calibrate
from unskew.calibration.classifier import Lift
from unskew.calibration.covariances import parse_form, statistics_bytes
from unskew.calibration.federated import real_features
from unskew.calibration.jobs import PASSES, by_part, find_centres
from unskew.calibration.protection import Layout, add_noise, clip_features, drop_small_classes
from unskew.calibration.statistics import ClassStatistics
from unskew.console.main import main
from unskew.core.key import Key
from unskew.engines.blueprint import build, dataset
from unskew.models.cut import cut
from unskew.round.client import IMAGES_AT_ONCE
from unskew.runs import config as configs
from unskew.runs.folder import calibration_file
from unskew.runs.prepare import prepare
from unskew.runs.result import read_result

FAST = ["--rounds", "2", "--epochs", "1", "--lr", "0.05", "--engine", "loop"]
QUICK = "ccvr(per_class=40, epochs=2)"
ENDLESS = "ccvr(per_class=1000, epochs=100000)"


def rows(run: Path):
    return {row["name"]: row for row in result(run)["calibrations"]}


def without_seconds(row):
    return {key: value for key, value in row.items() if key != "seconds"}


def content(run: Path):
    return finished.content(run, but=(".lock", ".manifest.lock"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run without calibration."""
    out = tmp_path_factory.mktemp("plain") / "run"
    unskew.run(method="fedavg", rounds=2, epochs=1, lr=0.05, engine="loop", out=out)
    return out


@pytest.fixture
def run(plain, tmp_path):
    """The finished run, to be calibrated or tampered with."""
    shutil.copytree(plain, tmp_path / "run")
    return tmp_path / "run"


# in a run and after it


def test_a_run_with_a_calibration_is_the_run_and_the_calibration(capsys, plain, run, tmp_path):
    """In the run or afterwards: the same classifier, to the last bit of its file."""
    inside = tmp_path / "inside"
    said = done(capsys, "run", *FAST, "--method", "fedavg + ccvr", "--out", inside)
    assert result(inside)["weights_sha256"] == result(plain)["weights_sha256"]
    assert (inside / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert metrics(inside) == metrics(plain)
    assert list(rows(inside)) == ["ccvr"]
    assert set(rows(inside)["ccvr"]) == {
        "name", "accuracy", "loss", "bytes_up", "seconds", "clients_accuracy", "ece", "ece_scaled", "temperature",
    }  # fmt: skip
    assert rows(inside)["ccvr"]["accuracy"] > result(inside)["accuracy"]
    assert (inside / "calibration-ccvr.safetensors").exists()
    assert "ccvr: 10 clients send" in said
    assert "mean sliced Wasserstein distance" in said
    assert f"after ccvr  {rows(inside)['ccvr']['accuracy']:.2%}" in said

    done(capsys, "calibrate", run, "ccvr")
    assert without_seconds(rows(run)["ccvr"]) == without_seconds(rows(inside)["ccvr"])
    assert calibration_file(run, "ccvr").read_bytes() == calibration_file(inside, "ccvr").read_bytes()


def test_calibrating_adds_to_a_run_and_changes_nothing_else_in_it(capsys, plain, run):
    before = content(plain)
    done(capsys, "calibrate", run, QUICK)
    after = content(run)
    assert set(after) - set(before) == {"calibration-ccvr-per_class-40-epochs-2.safetensors"}
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"manifest.json", "clients.npz", "model.json", "result.json"}
    assert result(run) | {"calibrations": []} == result(plain)


def test_several_stand_side_by_side_in_the_order_they_were_made_and_one_made_again_takes_its_place(capsys, run):
    first = done(capsys, "calibrate", run, "lda", "ccvr(epochs=2, per_class=40)", "oracle(per_class=9, epochs=2)")
    names = ["lda", QUICK, "oracle(per_class=9, epochs=2)"]
    assert list(rows(run)) == sorted(names, key=lambda name: first.index(f"{name}: accuracy")) == names
    assert rows(run)["oracle(per_class=9, epochs=2)"]["bytes_up"] == 0
    before = content(run)
    done(capsys, "calibrate", run, "uscc(per_class=40, epochs=2, lr=0.001)", QUICK)
    assert list(rows(run)) == [*names, "uscc(per_class=40, epochs=2, lr=0.001)"]
    assert {name for name in before if before[name] != content(run)[name]} == {
        "manifest.json", "clients.npz", "model.json", "result.json",
    }  # fmt: skip
    one, other = (load_file(calibration_file(run, name)) for name in (QUICK, "uscc(per_class=40, epochs=2, lr=0.001)"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_same_statistics_are_gathered_once(capsys, run):
    said = done(capsys, "calibrate", run, QUICK, "ccvr(per_class=10, epochs=1)", "lda")
    assert said.count("clients send") == 2  # full for both, shared for lda
    assert rows(run)[QUICK]["bytes_up"] == rows(run)["ccvr(per_class=10, epochs=1)"]["bytes_up"]


def test_every_engine_gives_the_same_classifiers_bit_for_bit(capsys, plain, tmp_path):
    methods = [
        QUICK, "ccvr(per_class=20, epochs=1, components=2)", "lda(expand=16)", "ccvr(per_class=20, epochs=1, layers=2)",
        "lda + withhold(5)", "oracle(per_class=5, epochs=1)",
    ]  # fmt: skip
    found = []
    for words in (["loop"], ["pool", "--workers", "2"]):
        shutil.copytree(plain, tmp_path / words[0])
        done(capsys, "calibrate", tmp_path / words[0], *methods, "--engine", *words)
        made = {name: value for name, value in content(tmp_path / words[0]).items() if name.startswith("calibration")}
        found.append((made, [without_seconds(row) for row in rows(tmp_path / words[0]).values()]))
    assert len(found[0][0]) == len(methods)
    assert found[0] == found[1]


# what clients send, measured apart from the jobs


@pytest.fixture(scope="module")
def side(plain):
    """What a process of the run works on, with the run's own weights."""
    prepared = prepare(configs.read(plain / "config.toml"), f"file:{plain / 'partition.npz'}")
    made = build(prepared.blueprint, dataset(prepared.images, prepared.population))
    made.network.load_state_dict(unskew.load(plain).state_dict())
    return replace(made, network=made.network.eval())


@pytest.fixture(scope="module")
def clients(plain, side):
    """The run's seed, its network, and each client's (images, labels) in batches."""
    held = [
        [side.train.batch(some) for some in torch.tensor(side.population.examples(client)).long().split(IMAGES_AT_ONCE)]
        for client in side.population.roster.inhabited
    ]
    return result(plain)["seed"], unskew.load(plain), held


def told(clients, *, layers=1, form="full", expand=0, clip=0.0, relabel=None, classes=10):
    """Each client's statistics."""
    _, network, held = clients
    first, _ = cut(network, layers)

    def encoder(images):
        features = first(images)
        features = Lift.of(features.shape[1], expand)(features) if expand else features
        return clip_features(features, clip) if clip else features

    found = []
    for batches in held:
        with torch.no_grad():
            features = torch.cat([encoder(images) for images, _ in batches])
        labels = torch.cat([labels for _, labels in batches])
        labels = labels if relabel is None else relabel(features, labels)
        found.append(ClassStatistics.of_features(features, labels, classes, form))
    return found


def weight_of(statistics):
    """The bytes of all tensors that a client would send."""
    return sum(value.numel() * value.element_size() for value in statistics.tensors().values())


def assert_made_of(statistics, run, clients, method, name=None, clip=0.0):
    """The classifier in the run's folder is the one that the method makes of these statistics."""
    seed, network, _ = clients
    made = calibrate(cut(network, parse_calibration(method).needs.layers)[1], statistics, method, seed)
    made.clip = clip
    found, wanted = load_file(calibration_file(run, name or method)), made.tensors()
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize(
    ("method", "asked"),
    [
        (QUICK, {}),
        ("ccvr(per_class=40, epochs=2, covariance=diagonal)", {"form": "diagonal"}),
        ('ccvr(per_class=40, epochs=2, covariance="low-rank(3)")', {"form": "low-rank(3)"}),
        ("ccvr(per_class=40, epochs=2, layers=2)", {"layers": 2}),
        ("lda", {"form": "shared"}),
        ("lda(layers=2, expand=20)", {"form": "shared", "layers": 2, "expand": 20}),
    ],
)
def test_a_classifier_is_made_of_the_sum_of_what_clients_tell_and_bytes_are_what_that_weighs(
    capsys, run, clients, method, asked
):
    done(capsys, "calibrate", run, method)
    parts = told(clients, **asked)
    assert_made_of(ClassStatistics.merged(parts), run, clients, method)
    assert rows(run)[method]["bytes_up"] == sum(map(weight_of, parts))


def test_several_gaussians_a_class_cost_what_all_questions_together_cost(capsys, run, clients):
    """Once the whole, then the parts under moved centres so many times, then the parts at last."""
    method = "ccvr(per_class=40, epochs=2, components=2)"
    done(capsys, "calibrate", run, method)
    first, sent = told(clients), []

    def ask(centres, form="diagonal"):
        parts = told(clients, form=form, relabel=by_part(centres), classes=20)
        sent.append(sum(map(weight_of, parts)))
        return ClassStatistics.merged(parts)

    centres = find_centres(ClassStatistics.merged(first), 2, ask, Key(clients[0]))
    assert_made_of(ask(centres, "full"), run, clients, method)
    assert len(sent) == PASSES + 1

    def at_most(form):
        """Said beforehand: as if every client had examples of every part of its classes."""
        return sum(statistics_bytes(parse_form(form), 2 * len(part.held), part.width) for part in first)

    assert rows(run)[method]["bytes_up"] == sum(map(weight_of, first)) + PASSES * at_most("diagonal") + at_most("full")
    assert 0.8 * rows(run)[method]["bytes_up"] < sum(map(weight_of, first)) + sum(sent) <= rows(run)[method]["bytes_up"]


def test_masked_statistics_give_the_classifier_of_the_fixed_point_sum_bit_for_bit(capsys, run, clients):
    method = f"{QUICK} + secure"
    done(capsys, "calibrate", run, method, "lda + secure")
    for source, form in ((QUICK, "full"), ("lda", "shared")):
        parts = told(clients, form=form)
        layout = Layout.of(10, parts[0].width, form)
        vectors = [layout.quantise(part, len(parts), "a client") for part in parts]
        total = layout.statistics(torch.stack(vectors).sum(0), "the sum in the clear")
        assert_made_of(total, run, clients, source, f"{source} + secure")
        assert rows(run)[f"{source} + secure"]["bytes_up"] == sum(8 * len(vector) for vector in vectors)


def test_what_is_withheld_is_not_in_the_sum_and_not_in_the_bytes(capsys, run, clients):
    done(capsys, "calibrate", run, f"{QUICK} + withhold(20)")
    kept = [drop_small_classes(part, 20)[0] for part in told(clients)]
    assert sum(map(weight_of, kept)) < sum(map(weight_of, told(clients)))
    name = f"{QUICK} + withhold(20)"
    assert_made_of(ClassStatistics.merged(kept), run, clients, QUICK, name)
    assert rows(run)[name]["bytes_up"] == sum(map(weight_of, kept))


def test_a_class_that_everybody_withholds_keeps_its_row_and_that_is_said(capsys, run, clients):
    """The largest heap alone is sent: nine classes keep the trained classifier's rows, to the last bit."""
    counts = torch.stack([part.counts for part in told(clients)])
    most, label = int(counts.max()), int(counts.max(0).values.argmax())
    name = f"{QUICK} + withhold({most})"
    said = done(capsys, "calibrate", run, name)
    others = [other for other in range(10) if other != label]
    assert (
        f"{name}: note: no client has class {', '.join(map(str, others))}: it keeps its row of the classifier" in said
    )
    made, own = load_file(calibration_file(run, name)), clients[1].classifier
    assert torch.equal(made["head.weight"][others], own.weight[others])
    assert torch.equal(made["head.bias"][others], own.bias[others])
    assert not torch.equal(made["head.weight"][label], own.weight[label])


def test_private_noise_follows_from_the_runs_seed(capsys, run, clients):
    method = "lda + private(epsilon=50, clip=3)"
    name = "lda + private(epsilon=50, delta=1e-05, clip=3)"
    done(capsys, "calibrate", run, method, "lda")
    first = calibration_file(run, name).read_bytes()
    done(capsys, "calibrate", run, method)
    assert calibration_file(run, name).read_bytes() == first
    parts = told(clients, form="shared", clip=3.0)
    total = add_noise(ClassStatistics.merged(parts), 3.0, 50.0, 1e-5, Key(clients[0]).fold("private"))
    assert_made_of(total, run, clients, "lda", name, clip=3.0)
    assert rows(run)[name]["accuracy"] != rows(run)["lda"]["accuracy"]
    assert accuracy_of(unskew.load(run, name), run) == rows(run)[name]["accuracy"]


def test_private_releases_of_a_run_add_up_and_the_same_one_counts_once(capsys, run):
    one, other = "lda + private(epsilon=50, clip=3)", "lda + private(epsilon=20, clip=3)"
    done(capsys, "calibrate", run, one, one.replace("lda", "lda(ridge=1.0)"))
    spent = unskew.calibrate_run(run, one).privacy
    assert (spent.epsilon, spent.delta, len(spent.releases)) == (50.0, 1e-5, 1)
    said = " ".join(done(capsys, "calibrate", run, other).split())
    spent = read_result(run).privacy
    assert 50 < spent.epsilon < 70
    assert f"ε {spent.epsilon:.4g} at δ 1e-05 for every example, over 2 releases" in said
    fresh = [unskew.calibrate_run(run, one.replace("3)", "3, release=true)")).privacy for _ in range(2)]
    assert [len(each.releases) for each in fresh] == [3, 4]  # another draw each time


def test_the_oracle_sees_all_real_features_or_so_many_of_each_class_drawn_by_the_key(side):
    features, labels = real_features(side, parse_calibration("oracle").needs, Key(0))
    with torch.no_grad():
        assert torch.allclose(features, side.network.encoder(side.train.batch(torch.arange(len(labels)))[0]), atol=1e-6)
    assert torch.equal(labels, side.train.labels)
    some = [real_features(side, parse_calibration("oracle(7)").needs, Key(seed)) for seed in (0, 0, 1)]
    assert torch.bincount(some[0][1]).tolist() == [7] * 10
    assert torch.equal(some[0][0], some[1][0])
    assert not torch.equal(some[0][0], some[2][0])
    place = {row.tobytes(): at for at, row in enumerate(features.numpy())}
    drawn = [place[row.tobytes()] for row in some[0][0].numpy()]  # every one is somebody's own
    assert drawn == sorted(drawn)
    assert max(drawn) > len(labels) / 2  # not merely the first ones
    many, _ = real_features(side, parse_calibration("oracle(100000)").needs, Key(0))
    assert torch.equal(many, features)


# what can be done with it afterwards


def accuracy_of(module, run):
    """On the test images, normalised as the run's overview says: (x/255 − mean) / std."""
    images = prepare(configs.read(run / "config.toml"), f"file:{run / 'partition.npz'}").images
    mean, std = (np.reshape(value, (1, -1, 1, 1)) for value in (images.mean, images.std))
    normal = torch.from_numpy((images.test.images / 255 - mean) / std).float()
    assert not any(part.training for part in module.modules())
    with torch.no_grad():
        return float((module(normal).argmax(1).numpy() == images.test.labels).mean())


def test_a_model_is_loaded_with_its_own_classifier_or_a_calibrated_one(capsys, run):
    names = [QUICK, "lda(expand=16)", "ccvr(per_class=40, epochs=2, layers=2, relu=true, tukey=0.5)"]
    done(capsys, "calibrate", run, *names)
    assert accuracy_of(unskew.load(run), run) == result(run)["accuracy"]
    for name in rows(run):
        assert accuracy_of(unskew.load(run, name), run) == rows(run)[name]["accuracy"]
    with pytest.raises(
        unskew.UserError, match=r"has no calibration 'ccvr'; available: ccvr\(per_class=40, epochs=2\), l"
    ):
        unskew.load(run, "ccvr")


def test_parts_that_work_otherwise_in_training_rest_wherever_the_network_is_cut(capsys, tmp_path):
    """BatchNorm and Dropout, with several layers made anew and an oracle after them."""
    run = tmp_path / "run"
    method = "fedavg + ccvr(per_class=40, epochs=2, layers=2) + oracle(per_class=9, epochs=2, layers=2)"
    done(capsys, "run", *FAST, "--model", "outside_models:norm_and_dropout", "--method", method, "--out", run)
    for name in rows(run):
        assert accuracy_of(unskew.load(run, name), run) == rows(run)[name]["accuracy"]
    inside = {name: calibration_file(run, name).read_bytes() for name in rows(run)}
    done(capsys, "calibrate", run, *reversed(rows(run)))
    assert {name: calibration_file(run, name).read_bytes() for name in rows(run)} == inside


# what cannot be


def tampered(run, name, change):
    """The run with a file's bytes changed."""
    (run / name).write_bytes(change((run / name).read_bytes()))


def another_partition(run):
    folder = run.parent / "other"
    with pytest.raises(SystemExit):
        main(["partition", "--seed", "9", "--out", str(folder / "partition.npz")])
    shutil.copy(folder / "partition.npz", run / "partition.npz")


def flipped(data):
    """One bit of the last number."""
    return data[:-1] + bytes([data[-1] ^ 1])


WRONG = {
    "an unknown calibration": ("ccvx", None, "no method is called 'ccvx'; did you mean 'ccvr'?"),
    "an impossible knob": ("ccvr(per_class=0)", None, "ccvr(per_class=0): give a number above 0"),
    "a training method": ("fedprox", None, "'fedprox': give only calibrations"),
    "no name": ("", None, "method is empty; give a name"),
    "a protection alone": ("secure", None, "'secure': give only calibrations (ccvr, uscc, lda, ridge, qda, oracle)"),
    "an oracle and a protection": ("oracle + secure", None, "which secure does not protect; leave out secure"),
    "too many layers": ("ccvr(layers=3)", None, "layers=3: this network ends in 2 linear layers; give 1 to 2"),
    "everything withheld": (f"{QUICK} + withhold(500)", None, "no client has more than"),
    "a mixture in private": ("ccvr(components=2) + private", None, "private covers one Gaussian per class"),
    "too much noise": (f"{QUICK} + private(epsilon=0.01)", None, "no class is left after this much noise"),
    "a rate that blows up": ("ccvr(per_class=40, lr=1e30)", None, "retraining with lr=1e+30 diverged to NaN or inf"),
    "too many features to sum": ("lda(expand=20000)", None, "GB per client, more than 2.1 GB; use covariance=diagonal"),
    "an unfinished run": (QUICK, lambda run: (run / "result.json").unlink(), "finish it with: unskew resume"),
    "another partition": (QUICK, another_partition, "or its partition changed after"),
    "no model": (QUICK, lambda run: (run / "model.safetensors").unlink(), "model.safetensors is damaged or missing"),
    "a bit of the model": (QUICK, lambda run: tampered(run, "model.safetensors", flipped), "does not match the hash"),
    "another network": (
        QUICK,
        lambda run: tampered(run, "config.toml", lambda data: data.replace(b"tiny-cnn", b"lenet-64")),
        "does not fit the network",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_calibrated_is_one_message_and_the_run_stays_as_it_was(capsys, run, case):
    method, tamper, words = WRONG[case]
    if tamper:
        tamper(unsealed(run))
    before = content(run)
    assert words in refused(capsys, "calibrate", run, method)
    assert content(run) == before


def test_one_mistake_among_many_stops_all_of_them_before_anything_is_made(capsys, run):
    before = content(run)
    assert "layers=9" in refused(capsys, "calibrate", run, "lda", "ccvr(layers=9)")
    assert content(run) == before


@pytest.mark.parametrize(
    ("method", "words", "said"),
    [
        ("fedavg + oracle + private", [], "does not protect; leave"),
        ("fedavg + lda + secure", ["--clients", "2"], "a sum over 2 clients would"),
    ],
)
def test_what_could_not_be_calibrated_is_not_trained(capsys, tmp_path, method, words, said):
    assert said in refused(capsys, "run", *FAST, *words, "--method", method, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_calibration_that_fails_after_the_training_does_not_cost_the_training(capsys, plain, tmp_path):
    """The run is finished without it, with what was calibrated before; it would fail again if it were resumed."""
    run = tmp_path / "run"
    method = "fedavg + lda + ccvr(per_class=40, lr=1e30) + oracle(per_class=9, epochs=1)"
    said = refused(capsys, "run", *FAST, "--method", method, "--out", run)
    assert "retraining with lr=1e+30 diverged to NaN or infinity; give a smaller lr; the run finished without" in said
    assert "resume" not in said
    assert result(run)["weights_sha256"] == result(plain)["weights_sha256"]
    assert list(rows(run)) == ["lda"]
    done(capsys, "calibrate", run, QUICK)
    assert list(rows(run)) == ["lda", QUICK]


# interrupted, killed, run twice at once


def test_an_interrupt_keeps_what_was_made_before_it_and_meanwhile_nobody_else_may_calibrate(capsys, run):
    process = started("calibrate", "run", "lda", ENDLESS, until=lambda: rows(run), cwd=run.parent)
    try:
        said = refused(capsys, "calibrate", run, "lda")
        assert said == f"{run} is in use by another process; wait for it or stop it\n"
        assert list(rows(run)) == ["lda"]
    finally:
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "unskew: interrupted\n"
    assert f"{ENDLESS}: accuracy" not in said
    assert list(rows(run)) == ["lda"]
    assert not list(run.glob("*.part"))
    done(capsys, "calibrate", run, QUICK)
    assert list(rows(run)) == ["lda", QUICK]


KILLED = """
import os, sys
from unskew.console.main import main
replace = os.replace
os.replace = lambda old, new: os._exit(9) if str(new).endswith("result.json") else replace(old, new)
main(sys.argv[1:])
"""


def test_a_run_killed_in_its_calibration_is_resumed_to_the_same_end(capsys, run):
    """With all written but the result."""
    done(capsys, "calibrate", run, QUICK)
    killed = run.parent / "killed"
    words = ["run", *FAST, "--method", f"fedavg + {QUICK}", "--out", str(killed)]
    ended = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True, timeout=300)
    assert ended.returncode == 9, ended.stderr
    assert not (killed / "result.json").exists()
    said = refused(capsys, "calibrate", killed, QUICK)
    assert said.endswith(f"has no result.json; finish it with: unskew resume {killed}\n")
    done(capsys, "resume", killed)
    assert result(killed)["weights_sha256"] == result(run)["weights_sha256"]
    assert metrics(killed) == metrics(run)
    assert without_seconds(rows(killed)[QUICK]) == without_seconds(rows(run)[QUICK])
    assert calibration_file(killed, QUICK).read_bytes() == calibration_file(run, QUICK).read_bytes()
