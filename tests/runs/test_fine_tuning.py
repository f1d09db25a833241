"""Runs that start from a file and train the last layers alone: what is stored, what is sent, what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import unskew
from observers import stop_after
from unskew import models
from unskew.checks.laws import image_set
from unskew.core.errors import Missing, UserError
from unskew.engines import features
from unskew.runs import prepare
from unskew.runs.config import Config
from unskew.runs.execute import Stage
from unskew.runs.python_values import PythonValues

OPTIONS = {"data": "digits", "clients": 3, "rounds": 2, "epochs": 1, "batch": 64, "lr": 0.05, "engine": "loop"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A short run whose weights the others start from."""
    return unskew.run(**OPTIONS | {"rounds": 3, "partition": "iid"}, out=tmp_path_factory.mktemp("source") / "run").path


@pytest.fixture
def tuned(source, tmp_path):
    def run(name="run", observe=lambda event: None, **options):
        events = []
        given = {"pretrained": source / "model.safetensors", "train": "last(2)"}

        def watch(event):
            events.append(event)
            return observe(event)

        result = unskew.run(**OPTIONS | given | options, out=tmp_path / name, observe=watch)
        return result, [event for event in events if isinstance(event, Stage)]

    return run


def weights(result):
    return load_file(result.path / "model.safetensors")


def test_only_the_last_layers_are_trained_sent_and_counted(source, tuned):
    result, _ = tuned(method="fedavg + lda")
    before, after = load_file(source / "model.safetensors"), weights(result)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "encoder.fc1.weight", "encoder.fc1.bias", "classifier.weight", "classifier.bias",
    }  # fmt: skip
    count = sum(value.numel() for name, value in after.items() if "fc1" in name or "classifier" in name)
    assert result.bytes_down == 4 * count * 3 * 2  # three clients, two rounds
    assert result.bytes_up == result.bytes_down
    loaded = unskew.load(result.path)
    assert {name: value.shape for name, value in loaded.state_dict().items()} == {n: v.shape for n, v in after.items()}
    assert result.calibrations["lda"].accuracy > 0.8


def test_stored_output_trains_as_the_frozen_part_itself_does(tuned, monkeypatch):
    stored, _ = tuned("stored")
    assert not any("runs again at every step" in note for note in stored.notes)
    monkeypatch.setattr(prepare, "MEMORY_SHARE", 1e15)
    through, stages = tuned("through")
    assert not stages
    assert any("the frozen part runs again at every step" in note for note in through.notes)
    for name, value in weights(stored).items():
        torch.testing.assert_close(value, weights(through)[name], rtol=1e-4, atol=1e-5)


def test_loop_and_pool_and_a_repetition_from_its_own_config_give_the_same_bits(tuned, tmp_path):
    loop, _ = tuned("loop", resize=10)
    pool, stages = tuned("pool", resize=10, engine="pool", workers=1)
    again = unskew.run(loop.path / "config.toml", out=tmp_path / "again")
    assert loop.weights_sha256 == pool.weights_sha256 == again.weights_sha256
    assert not stages  # the second run found what the first had stored


def test_views_are_drawn_in_training_and_plain_images_elsewhere(tuned):
    plain, _ = tuned("plain", rounds=1)
    views, stages = tuned("views", views=2, rounds=1)
    assert stages[0].total == 1438 * 3 + 359
    assert views.weights_sha256 != plain.weights_sha256
    assert views.settings["augment"] is True
    _, stages = tuned("again", views=2, rounds=1, seed=1)
    assert not stages  # views are the same for every seed


def test_the_bits_do_not_depend_on_the_number_of_cores(tuned, monkeypatch, tmp_path):
    found = []
    for count in (1, 3):
        monkeypatch.setenv("UNSKEW_CACHE", str(tmp_path / str(count)))
        monkeypatch.setattr(features, "cores", lambda count=count: count)
        tuned(f"run{count}", rounds=1)
        blocks = sorted((tmp_path / str(count)).glob("features-*/*.safetensors"))
        found.append([(block.name, block.read_bytes()) for block in blocks])
    assert found[0] == found[1]
    assert [name for name, _ in found[0]] == [
        "test-000000000.safetensors", "train-000000000.safetensors", "train-000001024.safetensors",
    ]  # fmt: skip


def test_a_damaged_or_missing_block_is_made_again_and_the_others_are_kept(tuned, monkeypatch, tmp_path):
    monkeypatch.setenv("UNSKEW_CACHE", str(tmp_path / "cache"))
    first, _ = tuned("first", rounds=1)
    blocks = sorted((tmp_path / "cache").glob("features-*/*.safetensors"))
    whole = [block.read_bytes() for block in blocks]
    damaged = bytearray(whole[1])
    damaged[-5] ^= 1
    blocks[1].write_bytes(damaged)
    blocks[2].write_bytes(whole[2][: len(whole[2]) // 2])
    blocks[0].unlink()
    second, stages = tuned("second", rounds=1)
    assert [stage.done for stage in stages] == [0, 1024, 1438]
    assert [block.read_bytes() for block in blocks] == whole
    assert second.weights_sha256 == first.weights_sha256


def test_an_interrupt_while_features_are_computed_keeps_what_is_done(tuned, tmp_path, monkeypatch):
    monkeypatch.setenv("UNSKEW_CACHE", str(tmp_path / "cache"))

    def stop(event):
        if isinstance(event, Stage) and event.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(train="classifier", observe=stop)
    assert not (tmp_path / "run").exists()
    assert len(list((tmp_path / "cache").glob("features-*/*.safetensors"))) == 1


def test_other_data_weights_sizes_and_normalisations_do_not_share_features(source, tuned, tmp_path):
    tuned("first", rounds=1)
    other = {name: value + 0.01 for name, value in load_file(source / "model.safetensors").items()}
    save_file(other, tmp_path / "other.safetensors")
    for place, options in enumerate(
        ({"pretrained": tmp_path / "other.safetensors", "normalise": "data"}, {"resize": 9}, {"train": "last(3)"})
    ):
        assert tuned(f"run{place}", rounds=1, **options)[1], options


def test_a_killed_run_resumes_to_the_same_bits(tuned, tmp_path):
    whole, _ = tuned("whole", rounds=3, checkpoint_seconds=0.0)
    with pytest.raises(unskew.StopRun):
        tuned("cut", rounds=3, checkpoint_seconds=0.0, observe=stop_after(1))
    assert unskew.resume(tmp_path / "cut").weights_sha256 == whole.weights_sha256


def test_resuming_with_another_file_is_refused(source, tuned, tmp_path):
    file = tmp_path / "w.safetensors"
    state = load_file(source / "model.safetensors")
    save_file(state, file)
    with pytest.raises(unskew.StopRun):
        tuned("cut", pretrained=file, train="classifier", observe=stop_after(1))
    save_file({name: value * 2 for name, value in state.items()}, file)
    with pytest.raises(UserError, match="is not the file that the run was started with"):
        unskew.resume(tmp_path / "cut")


def test_a_finished_run_needs_its_file_no_more(source, tuned, tmp_path, monkeypatch):
    monkeypatch.setenv("UNSKEW_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "w.safetensors"
    save_file(load_file(source / "model.safetensors"), file)
    result, _ = tuned(pretrained=file)
    file.unlink()
    monkeypatch.setenv("UNSKEW_CACHE", str(tmp_path / "another"))  # the features are gone too
    assert unskew.calibrate_run(result.path, "lda").calibrations["lda"].accuracy > 0.8
    unskew.load(result.path, "lda")
    assert set(unskew.analyse(result.path, "norms", "confusion")) == {"norms", "confusion"}
    with pytest.raises(Missing, match="it needs training images"):
        unskew.analyse(result.path, "inversion")


def test_what_was_pretrained_is_in_the_result_and_in_the_configuration(source, tuned):
    result, _ = tuned(train="classifier")
    sha256 = json.loads((source / "result.json").read_text())["weights_sha256"][:16]
    config = (result.path / "config.toml").read_text()
    assert f'pretrained = "{source / "model.safetensors"}?sha256={sha256}"' in config
    notes = json.loads((result.path / "result.json").read_text())["notes"]
    assert any(note.startswith(f"starts from {source}") for note in notes)
    assert any("650 of 13,706 parameters are trained and sent" in note for note in notes)


def test_a_classifier_that_is_not_taken_is_said_with_the_reason(source, tuned, tmp_path):
    five = image_set(60)
    result, _ = tuned(data=five, train="classifier")
    assert any("initialized from the seed: classifier (10 classes in the file)" in note for note in result.notes)
    headless = {name: value for name, value in weights(result).items() if "classifier" not in name}
    torch.save(headless, tmp_path / "headless.pth")
    result, _ = tuned("headless", pretrained=tmp_path / "headless.pth")
    assert any("initialized from the seed: classifier" in note for note in result.notes)


def test_grey_images_become_colour_for_a_network_that_takes_it(tmp_path):
    colour = unskew.run(data=image_set(60, channels=3), clients=2, rounds=1, epochs=1, out=tmp_path / "colour")
    grey = image_set(60)
    result = unskew.run(
        data=grey, clients=2, rounds=1, epochs=1, out=tmp_path / "grey", train="last(2)",
        pretrained=colour.path / "model.safetensors",
    )  # fmt: skip
    assert any("repeated in three channels" in note for note in result.notes)
    assert weights(result)["encoder.conv1.weight"].shape[1] == 3
    unskew.calibrate_run(result.path, "lda", data=grey)


def test_the_first_convolution_is_found_wherever_it_is_in_the_file(tmp_path):
    grey, shape = image_set(20), (3, 8, 8)
    network = models.build("resnet-18(norm=group)", shape, 4)
    torch.save(dict(reversed(network.state_dict().items())), tmp_path / "backwards.pth")  # conv1 comes after layer1's
    config = Config(model="resnet-18(norm=group)", pretrained=str(tmp_path / "backwards.pth"), partition="iid")
    assert prepare.prepare(config, values=PythonValues(data=grey)).blueprint.shape == shape


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"views": 3}, "add --train"),
        ({"views": 3, "train": "classifier", "augment": False}, "and leave out --no-augment"),
        ({"train": "last(99)"}, "give fewer, or --train all"),
        ({"pretrained": "none.pth"}, "does not exist"),
        ({"pretrained": "imagenet"}, "these weights are for efficientnet-lite0"),
        ({"resize": 0}, "1 or more"),
        ({"resize": 10**6}, "the limit is 4,096"),
        ({"normalise": "imagenet"}, "for color images"),
        ({"train": "classifier", "method": "moon"}, "moon has no effect with --train classifier: it acts on the feat"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(options, words, tmp_path):
    with pytest.raises(UserError, match=words):
        unskew.run(**OPTIONS | options, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_disk_without_room_is_said(tuned, monkeypatch, tmp_path):
    monkeypatch.setenv("UNSKEW_CACHE", str(tmp_path / "small"))
    usage = features.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(UserError, match="set --cache-dir or UNSKEW_CACHE to a folder on another disk"):
        tuned()
