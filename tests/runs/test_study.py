"""A finished run as measures see it: local models made again are those that training made, and nothing is changed."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from analysis.finished import (
    EVERYTHING,
    content,
    copied,
    finished_run,
    measured,
    recorded,
    undisturbed,
    unsealed,
)
from unskew import analysis
from unskew.analysis import drift, norms
from unskew.calibration.classifier import load_calibrated
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.models.cut import cut
from unskew.runs.checkpoint import CHECKPOINT, MEMORIES, state_file
from unskew.runs.finished import FinishedRun, Missing

METHODS = [
    "fedavg", "fedavgm(0.9)", "fedprox(mu=0.1)", "moon", "scaffold", "feddyn", "fedir", "fedvc(20)", "prototypes",
    "clsnorm", "centralised",
]  # fmt: skip


def seen_again(opened, number):
    """Norms and Euclidean distances of the clients' models in that round, made from the state before it."""
    models, sent = opened.local_models(number - 1), opened.state(number - 1).tensors
    layers = drift.by_layer(tensors.parameters(opened.side.weights)).values()  # in the order of the network
    far = {
        client: [
            float(tensors.flat({name: model[name].double() - sent[name].double() for name in names}).norm())
            for names in layers
        ]
        for client, model in models.items()
    }
    return {client: norms._rows(opened, model) for client, model in models.items()}, far


def assert_as_recorded(run, numbers):
    with finished_run(run) as opened:
        rows = {row["round"]: row for row in recorded(run)}
        for number in numbers:
            lengths, far = seen_again(opened, number)
            for name, found in (("norms", lengths), ("drift", far)):
                seen = rows[number][name]
                assert seen["clients"] == list(found), (number, name)
                for client, row in zip(seen["clients"], seen["local"], strict=True):
                    assert found[client] == pytest.approx(row, rel=1e-12, abs=1e-15), (number, name, client)


@pytest.mark.parametrize("method", METHODS)
def test_local_models_made_again_are_those_seen_in_training(runs_of, method):
    """In every round: from the very beginning, from states that are made again by training, and from none but these."""
    assert_as_recorded(runs_of(method=method, during="norms + drift", per_round=3), (1, 2, 3))


@pytest.mark.parametrize("method", ["fedavg", "fedir", "prototypes", "clsnorm", "moon"])
def test_a_kept_state_is_the_one_that_training_again_gives(runs_of, method, tmp_path):
    kept = runs_of(method=method, during=EVERYTHING, per_round=3)
    bare = copied(kept, tmp_path)
    shutil.rmtree(bare / "states")
    with finished_run(kept) as one, finished_run(bare) as other:
        for number in (1, 2, 3):
            left, right = one.state(number), other.state(number)
            assert left.round == right.round == number
            assert left.tensors.keys() == right.tensors.keys()
            assert all(torch.equal(left.tensors[name], right.tensors[name]) for name in left.tensors)
            assert left.sent.keys() == right.sent.keys()
            assert all(torch.equal(left.sent[name], right.sent[name]) for name in left.sent)


def test_training_again_goes_on_from_the_nearest_kept_state(run):
    state_file(run, 2).unlink()
    told = []
    with finished_run(run, say=lambda *words: told.append(words)) as opened:
        opened.state(2)
    assert [words[1:] for words in told if "retraining" in words[0]] == [(1, 1)]


@pytest.mark.parametrize("method", ["fedavg", "prototypes", "clsnorm", "scaffold"])
def test_the_last_state_is_made_again_where_no_checkpoint_is_left(runs_of, method, tmp_path):
    whole = runs_of(method=method, per_round=3)
    bare = copied(whole, tmp_path)
    shutil.rmtree(bare / "checkpoint")
    with finished_run(whole) as one, finished_run(bare) as other:
        left, right = one.state(), other.state()
        assert all(torch.equal(left.tensors[name], right.tensors[name]) for name in left.tensors)
        assert left.sent.keys() == right.sent.keys()
        assert all(torch.equal(left.sent[name], right.sent[name]) for name in left.sent)


def test_what_clients_remember_is_used_after_the_last_round_and_said_to_be_missing_where_it_is(runs_of, tmp_path):
    """moon pulls away from the client's own last model: without it the local models are others."""
    whole = runs_of(method="moon(mu=5)", per_round=5)
    bare = copied(whole, tmp_path)
    (bare / MEMORIES).unlink()
    with finished_run(whole) as one, finished_run(bare) as other:
        left, right = one.local_models(), other.local_models()
        assert one.notes == []
        assert other.notes == [
            "local models were trained as on a first visit, because the clients' states of that round were not saved"
        ]
        assert any(not torch.equal(left[0][name], right[0][name]) for name in left[0])


@pytest.mark.parametrize("method", ["moon", "scaffold"])
def test_the_next_round_of_a_longer_run_makes_the_models_of_clients_that_remember(runs_of, method, tmp_path):
    """A run of four rounds recorded in its last: the run of three makes these models again from what is kept."""
    longer = runs_of(method=method, rounds=4, per_round=3, during="norms(every=4) + drift(every=4)")
    shorter = runs_of(method=method, rounds=3, per_round=3)
    row = next(row for row in recorded(longer) if row["round"] == 4)
    with finished_run(shorter) as opened:
        lengths, far = seen_again(opened, 4)
    for name, found in (("norms", lengths), ("drift", far)):
        assert row[name]["clients"] == list(found)
        for client, seen in zip(row[name]["clients"], row[name]["local"], strict=True):
            assert found[client] == pytest.approx(seen, rel=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "moon", "scaffold", "clsnorm"])
def test_no_analysis_changes_a_byte_of_the_run(runs_of, method, tmp_path):
    run = copied(runs_of(method=method, during="norms", per_round=3), tmp_path)
    before = content(run)
    with undisturbed():
        for source in ("cka", "cka(round=1)", "norms(round=0)", "drift", "separability", "confusion"):
            analysis.analyse(run, source)
    assert content(run) == before


def test_all_measures_leave_the_draws_and_threads_of_others_alone(run):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with undisturbed():
            analysis.analyse(run, "projection(images=20)", "inversion(steps=3)", "separability", "confusion", "cka")
    finally:
        torch.set_num_threads(threads)


def test_predictions_are_those_of_the_model_that_anybody_may_load(finished):
    with finished_run(finished) as opened, undisturbed():
        outputs = opened.outputs
        side = opened.side
        side.load(opened.model, training=False)
        images, labels = side.test.batch(torch.arange(120))
        with torch.no_grad():
            features = side.network.encoder(images)
            assert torch.equal(outputs.features, features)
            assert torch.equal(outputs.predicted[""], side.network.classifier(features).argmax(1))
            for name, values in opened.calibrated.items():
                encoder, classifier = load_calibrated(values, lambda layers: cut(side.network, layers))
                assert torch.equal(outputs.predicted[name], classifier(encoder(images)).argmax(1)), name
        assert torch.equal(outputs.labels, labels)
    assert list(outputs.predicted) == ["", *opened.result.calibrations]


def test_chunks_do_not_change_predictions(finished, monkeypatch):
    monkeypatch.setattr("unskew.runs.finished.IMAGES_AT_ONCE", 7)
    with finished_run(finished) as few:
        small = few.outputs
    monkeypatch.setattr("unskew.runs.finished.IMAGES_AT_ONCE", 500)
    with finished_run(finished) as many:
        large = many.outputs
    assert torch.allclose(small.features, large.features, atol=1e-5)
    assert all(torch.equal(small.predicted[name], large.predicted[name]) for name in large.predicted)


@pytest.mark.parametrize("number", [-2, -1, 4, 99])
def test_a_round_that_never_was_is_refused(finished, number):
    with finished_run(finished) as opened, pytest.raises(UserError, match=f"round {number}: the run has rounds 1 to 3"):
        opened.state(number)


def test_the_state_before_the_first_round_is_the_network_as_the_key_draws_it(finished, runs_of):
    """Two runs with one seed begin alike, and one with another seed elsewhere."""
    with (
        finished_run(finished) as one,
        finished_run(runs_of(rounds=1)) as other,
        finished_run(runs_of(seed=5)) as third,
    ):
        first, second, unlike = (tensors.sha256(each.state(0).tensors) for each in (one, other, third))
    assert first == second != unlike


def test_local_models_are_made_once(finished, monkeypatch):
    with finished_run(finished) as opened:
        first = opened.local_models()
        monkeypatch.setattr("unskew.runs.finished._train_locally", None)
        assert opened.local_models() is first
        assert opened.local_models(3) is first


def test_too_many_local_models_for_the_memory_are_refused_with_how_many_would_fit(finished, monkeypatch):
    size = 8 * sum(value.numel() for value in load_file(finished / "model.safetensors").values())
    monkeypatch.setattr("unskew.runs.finished.MAX_BYTES", 3 * size + 5)
    with finished_run(finished) as opened, pytest.raises(Missing, match="give clients=3"):
        opened.local_models()


def test_a_client_that_fails_is_named(run):
    changed_text = (unsealed(run) / "config.toml").read_text().replace("lr = 0.05", "lr = 1e30")
    (run / "config.toml").write_text(changed_text)
    with finished_run(run) as opened, pytest.raises(Missing, match="failed while its local model was retrained"):
        opened.local_models()


# Folders that are not what they should be


def test_a_data_set_that_has_moved_is_found_in_the_folder_that_is_named(run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "digits.npz").rename(elsewhere / "digits.npz")
    with finished_run(run) as opened:
        with pytest.raises(Missing, match=r"digits\.npz does not exist"):
            _ = opened.prepared
        assert opened.classes[:2] == ["zero", "one"]  # model.json has them
    with finished_run(run, data_dir=elsewhere) as opened:
        assert len(opened.images.test) == 120
        assert opened.classes[0] == "zero"


def test_a_damaged_model_is_one_message(run):
    file = unsealed(run) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with finished_run(run) as opened:
        for name in ("model", "weights"):
            with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
                getattr(opened, name)


def test_another_run_s_model_is_refused(run):
    weights = load_file(run / "model.safetensors")
    save_file({**weights, "classifier.bias": weights["classifier.bias"] + 1}, unsealed(run) / "model.safetensors")
    with finished_run(run) as opened, pytest.raises(UserError, match="does not match the hash in result"):
        _ = opened.model


def test_a_checkpoint_of_another_run_is_not_taken_for_this_one_s(run, runs_of):
    other = runs_of(seed=5)
    shutil.copy(other / CHECKPOINT, run / CHECKPOINT)
    with finished_run(run) as opened:
        assert tensors.sha256(opened.state().tensors) == opened.result.weights_sha256


@pytest.mark.parametrize("length", [0, 10, 3000])
def test_a_damaged_checkpoint_stands_in_nobody_s_way(run, length):
    file = run / CHECKPOINT
    file.write_bytes(file.read_bytes()[:length])
    with finished_run(run) as opened:
        assert tensors.sha256(opened.state().tensors) == opened.result.weights_sha256


@pytest.mark.parametrize("length", [0, 10, 3000])
def test_a_damaged_kept_state_is_made_again(run, finished, length):
    """All that it holds can be trained again; to start a finished run anew is no advice."""
    file = state_file(run, 2)
    file.write_bytes(file.read_bytes()[:length])
    with finished_run(run) as opened, finished_run(finished) as whole:
        assert tensors.sha256(opened.state(2).tensors) == tensors.sha256(whole.state(2).tensors)


def test_an_unfinished_run_says_how_to_finish_it(run):
    (unsealed(run) / "result.json").unlink()
    with pytest.raises(UserError, match="finish it with: unskew resume"):
        FinishedRun(run)


@pytest.mark.parametrize("line", [b"{", b"[]\n", b"nonsense\n", b'{"round": 1}\n', b"\xff\xfe\n"])
def test_damaged_metrics_are_one_message_and_a_torn_last_line_is_none(run, line):
    with open(unsealed(run) / "metrics.jsonl", "ab") as file:
        file.write(line)
    if line == b"{":
        assert len(FinishedRun(run).rows) == 3
    else:
        with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
            FinishedRun(run)


DAMAGED = [
    b"nonsense\n",
    b"[1]\n",
    b"{}\n",
    b'"words"\n',
    b"3\n",
    b"null\n",
    b"\xff\xfe\n",
    b'{"norms": {"clients": [0], "local": [[1]], "server": [1]}}\n',
    b'{"round": "two", "silhouette": 0.5}\n',
    b'{"round": 2, "silhouette": "much"}\n',
    b'{"round": 2, "norms": {"clients": [0, 1], "local": [[1]], "server": [1]}}\n',
    b'{"round": 2, "norms": {"clients": [0], "local": [[1, 2]], "server": [1]}}\n',
    b'{"round": 2, "norms": {"clients": [0], "local": 7, "server": [1]}}\n',
    b'{"round": 2, "norms": 5}\n',
    b'{"round": 2, "norms": {"clients": [999], "local": [[1,1,1,1,1,1,1,1,1,1]], "server": [1,1,1,1,1,1,1,1,1,1]}}\n',
    b'{"round": 2, "norms": {"clients": [0], "local": [[1, 1]], "server": [1, 1]}}\n',
    b'{"round": 2, "norms": {"clients": ["a"], "local": [[1,1,1,1,1,1,1,1,1,1]], "server": [1,1,1,1,1,1,1,1,1,1]}}\n',
    b'{"round": 2, "drift": {"clients": [0], "local": [[1, 1, 1, 1]], "server": [1, 1, 1, 1]}}\n',
]


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_records_are_one_message(run, line):
    """Whatever stands there: a UserError, at once or from the measure that needs it."""
    with open(unsealed(run) / "during.jsonl", "ab") as file:
        file.write(line)
    (run.parent / "digits.npz").unlink()
    with pytest.raises(UserError, match=r"during\.jsonl is damaged"):
        looked_at(run)


def looked_at(run):
    with finished_run(run) as opened:
        for source in ("norms", "drift", "separability"):
            taken = measured(opened, source)
            assert taken.charts is not None
            assert taken.findings is not None
