"""Devices by name: what there is, and one clear message for what there is not."""

import os
import subprocess
import sys

import pytest
import torch

from unskew.core import machine
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import neutral


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
    assert machine.resolve_device("auto") == torch.device(wanted)


def test_a_device_that_is_there_is_taken(devices):
    devices(cuda=2, mps=True)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1", "mps"):
        assert machine.resolve_device(name) == torch.device(name)


@pytest.mark.parametrize(
    ("name", "cuda", "message"),
    [
        ("cuda", 0, "--device cuda: PyTorch found no CUDA device; use auto or cpu"),
        ("cuda:0", 0, "no CUDA device 0"),
        ("cuda:2", 2, "no CUDA device 2"),
        ("mps", 2, "no MPS device"),
        ("gpu", 0, "give auto, cpu, cuda, cuda:N or mps"),
        ("cuda:x", 2, "--device cuda:x: give auto, cpu, cuda, cuda:N or mps"),
        ("cuda:-1", 2, "give auto, cpu"),
        ("", 0, "give auto, cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused(devices, name, cuda, message):
    devices(cuda=cuda)
    with pytest.raises(UserError, match=message):
        machine.resolve_device(name)


def test_a_pool_has_a_worker_for_each_gpu_or_for_each_core(devices):
    devices(cuda=3)
    assert (
        machine.device_count(torch.device("cuda"))
        == machine.default_workers("cuda")
        == machine.default_workers("auto")
        == 3
    )
    assert machine.device_count(torch.device("cuda:2")) == machine.default_workers("cuda:2") == 1
    assert machine.default_workers("cpu") == machine.cores()
    devices(mps=True)
    assert machine.default_workers("auto") == 1
    devices()
    assert machine.default_workers("auto") == machine.cores()


def test_cublas_is_told_to_repeat_itself_where_cuda_is_used(devices, monkeypatch):
    name, value = machine.CUBLAS
    monkeypatch.setenv(name, "")  # so that it is restored
    monkeypatch.delenv(name)
    devices(cuda=1)
    machine.ready_device("cpu")
    assert name not in os.environ
    machine.ready_device("auto")
    assert os.environ[name] == value
    os.environ[name] = ":16:8"
    machine.ready_device("cuda:0")
    assert os.environ[name] == ":16:8"


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_cuda_is_deterministic_inside_and_as_it_was_outside(before):
    def settings():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        for name in ("cpu", "mps"):
            with machine.deterministic(torch.device(name)):
                assert settings() == before
        torch.backends.cudnn.benchmark = True
        with machine.deterministic(torch.device("cuda:0")):
            assert settings() == (True, False)
            assert not torch.backends.cudnn.benchmark
        with pytest.raises(KeyError), machine.deterministic(torch.device("cuda")):
            raise KeyError
        assert settings() == before
        assert torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


def test_an_operation_that_cannot_be_repeated_is_named():
    words = "does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'."
    message, there = r"^put_ is not deterministic on cuda:0.*--device cpu$", torch.device("cuda:0")
    with pytest.raises(RuntimeError, match=message), machine.deterministic(there):
        raise RuntimeError(f"put_ {words}")
    with pytest.raises(RuntimeError, match=r"^out of memory$"), machine.deterministic(there):
        raise RuntimeError("out of memory")


def test_nothing_is_imported_that_only_linux_has():
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(('fcntl', 'resource', 'termios', 'pwd', 'grp'))\n"  # None: cannot be imported
        "import importlib, pkgutil, unskew.core, unskew.federation, unskew.console.main\n"
        "for package in (unskew.core, unskew.federation):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "from unskew.core.machine import files_left\n"
        "assert files_left() > 1000\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def product():
    square = torch.randn(300, 300, generator=Key(0).torch(), device="cpu", dtype=torch.float32)
    return square @ square


def test_small_numbers_are_numbers_inside():
    tiny = torch.tensor(sys.float_info.min, dtype=torch.float64)
    torch.set_flush_denormal(True)
    try:
        with neutral():
            assert float(tiny / 2) == sys.float_info.min / 2 > 0
        assert float(tiny / 2) == 0
    finally:
        torch.set_flush_denormal(False)
    with neutral():
        pass
    assert sys.float_info.min / 2 > 0


@pytest.mark.parametrize("way", ["legacy", "new"])
def test_products_of_float32_are_float32_inside(way):
    plain = product()
    if way == "legacy":
        torch.set_float32_matmul_precision("medium")
    else:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with neutral():
            assert torch.equal(product(), plain)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def test_threads_are_one_inside_unless_they_are_kept():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with neutral():
            assert torch.get_num_threads() == 1
            with neutral(keep_threads=True):
                assert torch.get_num_threads() == 1
        with neutral(keep_threads=True):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_nested_contexts_restore_at_the_outermost_end_alone():
    torch.set_default_dtype(torch.float64)
    try:
        with neutral():
            with neutral():
                pass
            assert torch.get_default_dtype() == torch.float32
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
