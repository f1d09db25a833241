"""A finished run as measures see it: local models made again are those that training made, and nothing is changed."""

import shutil

import pytest
import torch

from analysis.finished import EVERYTHING, content, copied, finished_run, recorded, undisturbed, unsealed
from unskew import analysis
from unskew.analysis import drift, norms
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.runs.checkpoint import CHECKPOINT, MEMORIES, state_file
from unskew.runs.finished import FinishedRun, Missing, load

METHODS = ["fedavg", "moon", "scaffold", "feddyn", "fedir", "fedvc(20)", "prototypes", "clsnorm", "centralised"]


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


def assert_as_recorded(run, numbers, record=None):
    with finished_run(run) as opened:
        rows = {row["round"]: row for row in recorded(record or run)}
        for number in numbers:
            for name, found in zip(("norms", "drift"), seen_again(opened, number), strict=True):
                seen = rows[number][name]
                assert seen["clients"] == list(found), (number, name)
                for client, row in zip(seen["clients"], seen["local"], strict=True):
                    assert found[client] == pytest.approx(row, rel=1e-12, abs=1e-15), (number, name, client)


def assert_same_state(left, right):
    assert left.round == right.round
    for one, other in ((left.tensors, right.tensors), (left.sent, right.sent)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


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
            assert one.state(number).round == number
            assert_same_state(one.state(number), other.state(number))


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
        assert_same_state(one.state(), other.state())


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
    assert_as_recorded(runs_of(method=method, rounds=3, per_round=3), (4,), longer)


@pytest.mark.parametrize("method", ["fedavg", "moon", "scaffold", "clsnorm"])
def test_no_analysis_changes_a_byte_of_the_run(runs_of, method, tmp_path):
    run = copied(runs_of(method=method, during="norms", per_round=3), tmp_path)
    before = content(run)
    with undisturbed():
        for source in ("cka", "cka(round=1)", "norms(round=0)", "drift", "separability", "confusion"):
            analysis.analyse(run, source)
    assert content(run) == before


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
            for name in opened.result.calibrations:
                assert torch.equal(outputs.predicted[name], load(finished, name)(images).argmax(1)), name
        assert torch.equal(outputs.labels, labels)
    assert list(outputs.predicted) == ["", *opened.result.calibrations]


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


def test_a_checkpoint_of_another_run_is_not_taken_for_this_one_s(run, runs_of):
    other = runs_of(seed=5)
    shutil.copy(other / CHECKPOINT, run / CHECKPOINT)
    with finished_run(run) as opened:
        assert tensors.sha256(opened.state().tensors) == opened.result.weights_sha256


@pytest.mark.parametrize("file", [CHECKPOINT, "states/round-000002.safetensors"])
def test_a_damaged_checkpoint_or_kept_state_is_named_and_can_be_deleted(run, finished, file):
    (run / file).write_bytes((run / file).read_bytes()[:3000])
    with finished_run(run) as opened, pytest.raises(UserError, match=r"is damaged .*or delete it to train again"):
        opened.state(None if file == CHECKPOINT else 2)
    (run / file).unlink()
    with finished_run(run) as opened, finished_run(finished) as whole:
        for number in (2, 3):
            assert tensors.sha256(opened.state(number).tensors) == tensors.sha256(whole.state(number).tensors)


def test_a_torn_last_line_of_the_metrics_is_left_out(run):
    with open(unsealed(run) / "metrics.jsonl", "ab") as file:
        file.write(b"{")
    assert len(FinishedRun(run).rows) == 3


@pytest.mark.parametrize("name", ["metrics.jsonl", "during.jsonl"])
@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b'{"round": "two"}\n', b"\xff\xfe\n"])
def test_damaged_lines_are_one_message(run, name, line):
    with open(unsealed(run) / name, "ab") as file:
        file.write(line)
    with pytest.raises(UserError, match=f"{name}.* damaged"):
        FinishedRun(run)
