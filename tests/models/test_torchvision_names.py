"""Checkpoints as torchvision publishes them: every name and shape written down here, independently of our networks."""

import pytest
import torch

import unskew
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.units import counted
from unskew.models import build
from unskew.models.pretrained import fit

PHOTOGRAPH = (3, 64, 64)  # the smallest images for which the first layers are as for ImageNet


def norm(name, channels):
    counter = {f"{name}.num_batches_tracked": ()}
    return {f"{name}.{part}": (channels,) for part in ("weight", "bias", "running_mean", "running_var")} | counter


def mobilenet_v2():
    """features.0 and 18: convolution and norm; between them inverted residuals; classifier.1 after a dropout."""
    shapes = {"features.0.0.weight": (32, 3, 3, 3)} | norm("features.0.1", 32)
    settings = [(1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)]
    inputs, index = 32, 1
    for expansion, outputs, count in settings:
        for _ in range(count):
            block, wide, part = f"features.{index}.conv", inputs * expansion, 0
            if expansion > 1:
                shapes |= {f"{block}.0.0.weight": (wide, inputs, 1, 1)} | norm(f"{block}.0.1", wide)
                part = 1
            shapes |= {f"{block}.{part}.0.weight": (wide, 1, 3, 3)} | norm(f"{block}.{part}.1", wide)
            shapes |= {f"{block}.{part + 1}.weight": (outputs, wide, 1, 1)} | norm(f"{block}.{part + 2}", outputs)
            inputs, index = outputs, index + 1
    shapes |= {"features.18.0.weight": (1280, 320, 1, 1)} | norm("features.18.1", 1280)
    return shapes | {"classifier.1.weight": (1000, 1280), "classifier.1.bias": (1000,)}


def resnet(depths, expansion):
    """conv1, bn1, layer1 to layer4 of basic blocks (expansion 1) or bottlenecks (expansion 4), fc."""
    shapes, inputs = {"conv1.weight": (64, 3, 7, 7)} | norm("bn1", 64), 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        outputs = width * expansion
        for index in range(depth):
            block = f"layer{stage + 1}.{index}"
            sizes = [(inputs, width, 3), (width, width, 3)]
            if expansion == 4:
                sizes = [(inputs, width, 1), (width, width, 3), (width, outputs, 1)]
            for number, (before, after, kernel) in enumerate(sizes, 1):
                shapes |= {f"{block}.conv{number}.weight": (after, before, kernel, kernel)}
                shapes |= norm(f"{block}.bn{number}", after)
            if index == 0 and inputs != outputs:
                shapes |= {f"{block}.downsample.0.weight": (outputs, inputs, 1, 1)}
                shapes |= norm(f"{block}.downsample.1", outputs)
            inputs = outputs
    return shapes | {"fc.weight": (1000, inputs), "fc.bias": (1000,)}


LAYOUTS = {
    "mobilenet-v2": (mobilenet_v2, 314, 52),  # tensors in the file, BatchNorm layers
    "resnet-18": (lambda: resnet((2, 2, 2, 2), 1), 122, 20),
    "resnet-50": (lambda: resnet((3, 4, 6, 3), 4), 320, 53),
}


def checkpoint(name):
    """Finite numbers in torchvision's names and shapes."""
    return {
        key: torch.tensor(9) if not shape else torch.full(shape, 0.01 * (number % 7 + 1))
        for number, (key, shape) in enumerate(LAYOUTS[name][0]().items())
    }


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_published_checkpoint_fits_whatever_the_norm(name, norm):
    file, (_, count, norms) = checkpoint(name), LAYOUTS[name]
    assert len(file) == count
    network = build(f"{name}(norm={norm})", PHOTOGRAPH, 10)
    found = fit(network, file, "w.pth", name)
    head = ["classifier.1"] if name == "mobilenet-v2" else ["fc"]
    assert list(found.left_out) == head
    assert found.classes == 1000
    assert found.norms == (norms if norm == "group" else 0)
    tensors.overwrite_some(network, found.values)
    own = network.state_dict()
    wanted = [key for key in file if not key.startswith(head[0]) and (norm == "batch" or "_" not in key.split(".")[-1])]
    assert all(torch.equal(own[key], file[key]) for key in wanted)
    assert len(wanted) + 2 == len(own)


def test_running_statistics_of_a_layer_that_is_not_there_are_refused():
    file = checkpoint("resnet-18") | {"bn9.running_mean": torch.zeros(64)}
    with pytest.raises(UserError, match=r"bn9.running_mean \[64\] is unknown"):
        fit(build("resnet-18(norm=group)", PHOTOGRAPH, 10), file, "w.pth", "resnet-18")


def test_a_run_reports_what_it_leaves_out(tmp_path):
    torch.save(checkpoint("mobilenet-v2"), tmp_path / "w.pth")
    seen = []
    unskew.run(
        data="digits",
        model="mobilenet-v2(norm=group)",
        pretrained=tmp_path / "w.pth",
        rounds=0,
        clients=2,
        train="classifier",
        engine="loop",
        out=tmp_path / "run",
        cache_dir=tmp_path / "cache",
        observe=lambda event: seen.extend(getattr(event, "model_notes", ())),
    )
    notes = " ".join(seen)
    assert f"running statistics of {counted(52, 'BatchNorm layer')} are ignored" in notes
    assert "initialized from the seed: classifier.1 (1,000 classes in the file)" in notes


def test_a_checkpoint_that_does_not_fit_is_one_message_and_writes_nothing(tmp_path):
    torch.save(checkpoint("resnet-18"), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"does not fit resnet-18: conv1.weight is \[64, 3, 7, 7\] float32 and must be"):
        unskew.run(data="digits", model="resnet-18", pretrained=tmp_path / "w.pth", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
