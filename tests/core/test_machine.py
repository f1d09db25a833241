"""Devices by name: what there is, and one clear message for what there is not."""

import pytest
import torch

from unskew.core.errors import UserError
from unskew.core.machine import resolve_device


@pytest.fixture
def devices(monkeypatch):
    def have(cuda=0, mps=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return have


@pytest.mark.parametrize(
    ("cuda", "mps", "wanted"), [(0, False, "cpu"), (0, True, "mps"), (1, True, "cuda"), (4, False, "cuda")]
)
def test_auto_takes_cuda_then_mps_then_the_cpu(devices, cuda, mps, wanted):
    devices(cuda, mps)
    assert resolve_device("auto") == torch.device(wanted)


def test_a_device_that_is_there_is_taken(devices):
    devices(cuda=2, mps=True)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1", "mps"):
        assert resolve_device(name) == torch.device(name)


@pytest.mark.parametrize(
    ("name", "cuda", "message"),
    [
        ("cuda", 0, "--device cuda: PyTorch finds no CUDA device here; give auto or cpu"),
        ("cuda:0", 0, "no CUDA device"),
        ("cuda:2", 2, "this machine has cuda:0 to cuda:1"),
        ("mps", 2, "no MPS device"),
        ("gpu", 0, "give auto, cpu, cuda, cuda:N or mps"),
    ],
)
def test_a_device_that_is_not_there_is_refused(devices, name, cuda, message):
    devices(cuda=cuda)
    with pytest.raises(UserError, match=message):
        resolve_device(name)
