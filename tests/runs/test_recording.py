"""What is written down while training: what was asked for, when it was asked for, and without changing a bit."""

import re

import pytest
import torch

from analysis.finished import finished, finished_run, metrics, recorded, result, runs_of
from federation import federation, total
from unskew import engines
from unskew.core.errors import UserError
from unskew.core.types import Visit
from unskew.engines.blueprint import build
from unskew.round import driver
from unskew.round.client import Train
from unskew.runs import recording
from unskew.runs.folder import read_model
from unskew.runs.recording import Recorded, Recorder, parse_recording, silhouette_of, some_features

__all__ = ["finished", "runs_of"]

METHODS = ["fedavg", "moon", "scaffold", "feddyn", "fedir", "fedvc(20)", "prototypes", "clsnorm", "centralised"]


# What is asked for


def test_a_text_says_what_and_when():
    assert parse_recording("silhouette(every=5) + norms(first=3)+drift + model") == (
        Recorded("silhouette", 5, 0), Recorded("norms", 1, 3), Recorded("drift", 1, 0), Recorded("model", 10, 0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message", "column"),
    [
        ("drift + silouette", "'silouette' cannot be recorded, or is given twice; did you mean 'silhouette'?", 8),
        ("norms + norms(every=2)", "'norms' cannot be recorded, or is given twice; did you mean 'norms'?", 8),
        ("norms(every=0)", "every=0, first=0: give every=1 or more, first=0 or more", 0),
    ],
)
def test_what_cannot_be_read_is_pointed_at(source, message, column):
    pointed = f"{message}\n  {source}\n  {' ' * column}^"
    with pytest.raises(UserError, match=f"^{re.escape(pointed)}$"):
        parse_recording(source)


@pytest.mark.parametrize(
    ("every", "first", "rounds", "wanted"),
    [(1, 0, 4, [1, 2, 3, 4]), (3, 0, 8, [3, 6, 8]), (3, 2, 8, [1, 2, 3, 6, 8]), (100, 0, 5, [5])],
)
def test_it_is_due_at_every_so_many_rounds_in_the_first_and_in_the_last(every, first, rounds, wanted):
    asked = Recorded("norms", every, first)
    assert [number for number in range(1, rounds + 1) if asked.due(number, rounds)] == wanted


# In a run


def test_lines_stand_there_at_the_rounds_that_were_asked_for_and_states_too(runs_of):
    run = runs_of(rounds=5, during="norms(every=2) + silhouette(first=1, every=4) + model(every=2)")
    rows = recorded(run)
    assert [(row["round"], sorted(set(row) - {"round"})) for row in rows] == [
        (1, ["silhouette"]), (2, ["norms"]), (4, ["norms", "silhouette"]), (5, ["norms", "silhouette"]),
    ]  # fmt: skip
    assert sorted(file.name for file in (run / "states").iterdir()) == [
        "round-000002.safetensors", "round-000004.safetensors", "round-000005.safetensors",
    ]  # fmt: skip


def test_the_last_line_tells_of_the_model_that_the_run_ends_with(finished):
    """Its norms are those of the weights that are written, its silhouette that of their features."""
    last = recorded(finished)[-1]
    weights, _ = read_model(finished)
    assert last["norms"]["server"] == pytest.approx(weights["classifier.weight"].double().norm(dim=1).tolist())
    with finished_run(finished) as opened:
        side = opened.side
        side.load(opened.model, training=False)
        assert last["silhouette"] == silhouette_of(*some_features(side, opened.key))


@pytest.mark.parametrize("method", METHODS)
def test_recording_changes_no_bit(runs_of, method):
    watched, alone = runs_of(method=method, during="norms + drift", per_round=3), runs_of(method=method, per_round=3)
    assert result(watched)["weights_sha256"] == result(alone)["weights_sha256"]
    assert metrics(watched) == metrics(alone)
    assert (watched / "checkpoint" / "memories.bin").exists() == (alone / "checkpoint" / "memories.bin").exists()


@pytest.mark.parametrize(
    "method", ["moon", *(pytest.param(each, marks=pytest.mark.heavy) for each in METHODS if each != "moon")]
)
def test_a_pool_writes_down_what_the_loop_does_and_changes_no_bit(runs_of, method):
    loop = runs_of(method=method, during="norms + drift", per_round=3)
    pool = runs_of(method=method, during="norms + drift", per_round=3, engine="pool", workers=1)
    assert result(pool)["weights_sha256"] == result(loop)["weights_sha256"]
    assert metrics(pool) == metrics(loop)
    assert (pool / "during.jsonl").read_bytes() == (loop / "during.jsonl").read_bytes()


def test_clients_that_fail_and_are_skipped_have_no_row(tmp_path, runs_of):
    """The client whose batch holds one example raises: of sizes 31 to 62 in batches of 8, those with remainder 1."""
    options = {"method": "outside_methods:raises(1)", "on_failure": "skip"}
    watched, alone = runs_of(during="norms + drift", **options), runs_of(**options)
    rows = recorded(watched)
    failed = {failure["client"] for row in metrics(watched) for failure in row.get("failures", ())}
    assert failed
    for row in rows:
        assert row["norms"]["clients"] == row["drift"]["clients"] == [c for c in range(5) if c not in failed]
        assert len(row["norms"]["local"]) == len(row["norms"]["clients"])
    assert result(watched)["weights_sha256"] == result(alone)["weights_sha256"]
    assert metrics(watched) == metrics(alone)


# What the visits of a round record


def test_of_many_clients_the_first_hundred_are_recorded():
    small = federation(sizes=(1,) * 105, model="outside_models:linear", epochs=1)
    setup = engines.EngineSetup(small.blueprint, small.data, 1)
    engine = engines.open_engine("loop", setup)
    recorder = Recorder(parse_recording("norms"), 1, setup.client_side(), small.key)
    state, _ = driver.run_round(
        small.algorithm, engine, small.state(), small.key, per_round=105, watch=["norms"], record=recorder.record
    )
    assert recorder.line(state)["norms"]["clients"] == list(range(100))
    engine.close()


def test_of_a_client_that_is_visited_twice_the_first_visit_is_recorded():
    small = federation(sizes=(9, 4), epochs=1)
    engine = engines.open_engine("loop", engines.EngineSetup(small.blueprint, small.data, 1))
    shared, key = small.state().tensors, small.key.fold("round", 1)
    first = total(engine, Train(1, ("norms", "drift")), shared, [Visit(0, 1.0, take=5)], key).extra
    visits = [Visit(0, 1.0, take=5), Visit(1, 1.0), Visit(0, 1.0, take=5, repeat=1)]
    both = total(engine, Train(1, ("norms", "drift")), shared, visits, key).extra
    assert list(both) == [0, 1]
    assert all(torch.equal(both[0][name], first[0][name]) for name in ("norms", "drift"))
    engine.close()


# The silhouette


def plain_silhouette(features, labels):
    """Rousseeuw 1987 by its words: a mean distance to the own class, b to the nearest other; 0 for one alone."""
    points, found = features.double(), []
    for i, label in enumerate(labels.tolist()):
        far = {}
        for j, other in enumerate(labels.tolist()):
            if i != j:
                far.setdefault(other, []).append(float((points[i] - points[j]).norm()))
        if label not in far:
            found.append(0.0)
            continue
        a = sum(far[label]) / len(far[label])
        b = min(sum(each) / len(each) for other, each in far.items() if other != label)
        found.append((b - a) / max(a, b))
    return sum(found) / len(found)


@pytest.mark.parametrize("seed", range(4))
def test_the_silhouette_is_its_plain_twin(seed):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (30,), generator=draw)
    labels[0] = 9  # a class of one
    features = torch.randn(30, 3, generator=draw) + labels[:, None]
    assert silhouette_of(features, labels) == pytest.approx(plain_silhouette(features, labels), abs=1e-6)


def test_there_is_no_silhouette_of_one_class_of_all_classes_or_of_nan():
    features = torch.eye(4)
    assert silhouette_of(features, torch.tensor([1, 1, 1, 1])) is None
    assert silhouette_of(features, torch.tensor([0, 1, 2, 3])) is None
    features[0, 0] = float("nan")
    assert silhouette_of(features, torch.tensor([0, 0, 1, 1])) is None


def test_of_many_images_the_same_ones_are_taken_for_a_seed():
    small = federation(dtype="float32")
    side = build(small.blueprint, small.data)
    count = len(side.test.labels)
    whole, labels = some_features(side, small.key)
    assert len(whole) == count
    first, second = some_features(side, small.key, 10), some_features(side, small.key, 10)
    assert torch.equal(first[0], second[0])
    assert len(first[0]) == 10
    assert all(any(torch.allclose(row, each, atol=1e-6) for each in whole) for row in first[0])
    other = some_features(side, recording.Key(99), 10)
    assert not torch.equal(other[1], first[1]) or not torch.equal(other[0], first[0])
    assert len(labels) == count
