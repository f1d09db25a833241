"""Seals over tensors: names, types, shapes, bytes and the words beside them all count, in checkpoints and in models."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from analysis.finished import SMALL, command, finished, images, refused, run, runs_of, unsealed
from federation import same
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import ServerState
from unskew.round.driver import Metrics
from unskew.runs import train
from unskew.runs.checkpoint import CHECKPOINT, CheckpointRecord, load_checkpoint, save_checkpoint
from unskew.runs.finished import load
from unskew.runs.folder import seal
from unskew.runs.result import read_result

__all__ = ["finished", "run", "runs_of"]

PROGRESS = CheckpointRecord(
    metrics_bytes=123, seconds=4.5, data_sha256="d" * 64, partition_hash="p" * 64, config_sha256="c" * 64,
    metrics_sha256="m" * 64, during_bytes=7, during_sha256="e" * 64,
)  # fmt: skip


def small_state():
    draw = Key(0).torch()
    model = {"params/weight": torch.randn(2, 3, generator=draw), "buffers/count": torch.tensor(5)}
    memory = {"velocity": torch.randn(2, 3, generator=draw, dtype=torch.float64)}
    return ServerState(17, model, memory, clients={3: "0-00000000", 5: "1-0000ffff"})


def header(content):
    """Where a safetensors file's header ends."""
    return 8 + struct.unpack("<Q", content[:8])[0]


def with_header(content, old, new):
    """The file with this text of its header replaced by another, of any length."""
    end = header(content)
    text = content[8:end]
    assert old in text
    text = text.replace(old, new, 1)
    return struct.pack("<Q", len(text)) + text + content[end:]


def test_a_seal_counts_names_types_shapes_bytes_and_words():
    entries = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.zeros(0, 2)}
    others = [
        *(
            {**entries, "a": other}
            for other in (entries["a"].view(torch.int32), entries["a"].view(3, 2), entries["a"] + 1)
        ),
        {"c" if name == "a" else name: value for name, value in entries.items()},
        {"a": entries["a"]},
        {**entries, "b": torch.zeros(2, 0)},
    ]
    seals = [*(seal(entries, about) for about in ({}, {"x": "y"}, {"x": "z"})), *(seal(each, {}) for each in others)]
    assert len(set(seals)) == len(seals)
    assert seal(dict(reversed(entries.items())), {}) == seals[0]
    assert seal({"a": entries["a"].t().contiguous().t(), "b": entries["b"]}, {}) == seals[0]
    for dtype in (torch.bfloat16, torch.bool, torch.int64, torch.float64):
        assert len(seal({"a": torch.ones(3, dtype=dtype), "b": torch.tensor(1, dtype=dtype)}, {})) == 64


# Checkpoints


def test_every_bit_of_a_checkpoint_counts(tmp_path):
    save_checkpoint(tmp_path, small_state(), PROGRESS)
    file = tmp_path / CHECKPOINT
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"state\.safetensors is damaged .* restore it from a copy, or delete it"):
            load_checkpoint(tmp_path)
    file.write_bytes(whole)
    assert same(load_checkpoint(tmp_path)[0], small_state())
    assert load_checkpoint(tmp_path)[1] == PROGRESS


@pytest.fixture
def stopped(runs_of, tmp_path):
    """A run that was interrupted in its third round, and the run that it should become."""
    options = {"during": "norms", "checkpoint_seconds": 0.0}
    whole = runs_of(**options)

    def interrupt(event):
        if isinstance(event, Metrics) and event.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.run(
            out=tmp_path / "run", observe=interrupt, data=f"arrays:{images(whole.parent)}", **{**SMALL, **options}
        )
    return tmp_path / "run", whole


def test_an_unsealed_run_is_resumed_with_a_note(stopped, capsys):
    run, whole = stopped
    unsealed(run)
    with open(run / "during.jsonl", "ab") as file:  # of a round after the checkpoint
        file.write(b'{"round": 3, "silhouette": 0.5}\n')
    code, _, error = command(capsys, "resume", run)
    assert code == 0
    assert "is not sealed" in error
    assert read_result(run).weights_sha256 == read_result(whole).weights_sha256
    assert (run / "during.jsonl").read_bytes() == (whole / "during.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["metrics.jsonl", "during.jsonl"])
def test_lines_before_the_checkpoint_are_vouched_for_by_it(stopped, capsys, name):
    run, _ = stopped
    file = run / name
    whole = file.read_bytes()
    at = whole.index(b".") + 1
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    message = refused(capsys, "resume", run)
    assert f"{file} was changed since the checkpoint was written" in message
    assert f"delete {run / 'checkpoint'}" in message
    assert str(file) in refused(capsys, "check", run)
    file.write_bytes(whole.splitlines(keepends=True)[0])
    assert f"{file} was changed since the checkpoint was written" in refused(capsys, "resume", run)


# Models, in folders without a manifest


MODELS = {
    "integers for floats": (b'"F32"', b'"I32"'),
    "transposed": (b'"shape":[10,', b'"shape":[1,10,'),
    "renamed": (b'"classifier.weight"', b'"classifier.wieght"'),
    "another classifier": (b"{", b'{"__metadata__":{"classifier":"[\\"conv1.weight\\"]"},'),
}


@pytest.mark.parametrize("change", MODELS)
def test_a_model_with_another_header_is_refused(run, capsys, change):
    unsealed(run)
    file = run / "model.safetensors"
    file.write_bytes(with_header(file.read_bytes(), *MODELS[change]))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load(run)
    for words in (["calibrate", run, "lda"], ["analyse", run, "norms"]):
        assert str(file) in refused_with_note(capsys, *words)


def refused_with_note(capsys, *words):
    code, _, error = command(capsys, *words)
    note, message = error.splitlines()
    assert (code, note[:5], message[:8]) == (2, "note:", "unskew: ")
    return message


def test_a_calibration_copied_over_another_is_noticed_by_its_name(run):
    unsealed(run)
    (run / "calibration-lda.safetensors").write_bytes((run / "calibration-lda-layers-2.safetensors").read_bytes())
    with pytest.raises(
        UserError, match=r"calibration-lda\.safetensors .*it contains another calibration, 'lda\(layers=2\)'"
    ):
        load(run, "lda")


@pytest.mark.parametrize("change", ["steps", "head.bias"])
def test_a_calibration_that_does_not_fit_is_one_message(run, change):
    unsealed(run)
    file = run / "calibration-lda.safetensors"
    values = load_file(file)
    about = {"unskew": json.dumps({"method": "lda"})}
    save_file(
        {name: value.flatten()[1:].clone() if name == change else value for name, value in values.items()}, file, about
    )
    with pytest.raises(UserError, match=r"calibration-lda\.safetensors is damaged or missing"):
        load(run, "lda")
