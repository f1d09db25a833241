"""The machine's resources: cores, memory, open files, devices, and their settings."""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from unskew.core.errors import UserError
from unskew.core.tensors import one_thread

ASSUMED_MEMORY = 16e9  # bytes, if the system does not report it
DEVICES = "auto, cpu, cuda, cuda:N or mps"
CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS add in the same order every time


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def physical_memory() -> float:
    """The memory of the machine or its container, in bytes."""
    if not hasattr(os, "sysconf"):  # Windows
        return ASSUMED_MEMORY
    machine = float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return machine


def available_memory() -> float:
    """The bytes that other programs leave free now, where Linux reports them."""
    with suppress(OSError):
        if found := re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text()):
            return 1024.0 * int(found[1])
    return float("inf")


def max_files() -> int:
    """How many files this process may have open at once; only POSIX sets a limit that matters."""
    try:
        import resource
    except ImportError:
        return 2**31
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def files_left() -> int:
    """How many more files this process may open, pipes and sockets included."""
    limit = max_files()
    try:
        return limit - len(os.listdir("/dev/fd"))
    except OSError:  # no such folder, or no more files can be opened
        return 0 if Path("/dev/fd").exists() else limit - 32


def too_many_files(wanted: str) -> str:
    """The message for a process that may open too few files."""
    limit = max_files()
    return f"{wanted}, but this process may open only {limit:,}; raise the limit with: ulimit -n {max(1024, 4 * limit)}"


def check_device_name(text: str) -> None:
    """Reject an invalid device name, whether or not this machine has such a device."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", text):
        raise UserError(f"--device {text}: give {DEVICES}")


def resolve_device(text: str) -> torch.device:
    """The device of that name, if this machine has it; ``auto`` is CUDA if available, else MPS, else the CPU."""
    check_device_name(text)
    if text == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(kind)
    device = torch.device(text)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available = {"cpu": True, "cuda": 0 <= (device.index or 0) < count, "mps": torch.backends.mps.is_available()}
    if not available[device.type]:
        number = "" if device.index is None else f" {device.index}"
        raise UserError(f"--device {text}: PyTorch found no {device.type.upper()} device{number}; use auto or cpu")
    return device


def ready_device(text: str) -> torch.device:
    """``resolve_device`` for a process that will use the device: CUDA reads its settings once, at the start."""
    device = resolve_device(text)
    if device.type == "cuda":
        os.environ.setdefault(*CUBLAS)
    return device


def device_count(device: torch.device) -> int:
    """How many GPUs a device name covers: all for ``cuda``, one for ``cuda:1``, none for the CPU."""
    if device.type == "cuda" and device.index is None:
        return torch.cuda.device_count()
    return 0 if device.type == "cpu" else 1


def default_workers(text: str) -> int:
    """The default number of a pool's worker processes: one per GPU, or one per core."""
    return device_count(resolve_device(text)) or cores()


def worker_device(text: str, worker: int) -> str:
    """The device of a pool's worker: ``cuda`` without a number is spread over the GPUs."""
    device = resolve_device(text)
    everywhere = device.type == "cuda" and device.index is None
    return f"cuda:{worker % device_count(device)}" if everywhere else str(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On CUDA, use only deterministic kernels inside; on other devices, change nothing."""
    if device.type != "cuda":
        yield
        return
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        problem = f"{str(error).partition(' ')[0]} is not deterministic on {device}"
        raise RuntimeError(f"{problem}; leave it out of the network or method, or use --device cpu") from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.backends.cudnn.benchmark = benchmark


AUTOCAST = ("cpu", "cuda", "mps", "xpu")  # devices that support autocast
PRODUCTS = (("mkldnn", "matmul"), ("mkldnn", "conv"), ("cuda", "matmul"))  # their precision can be lowered
EXACT = ("none", "ieee")  # settings that keep float32's own precision


@contextmanager
def neutral(*, keep_threads: bool = False) -> Iterator[None]:
    """Default settings of PyTorch and NumPy inside, whatever the caller has set; also a decorator: ``@neutral()``.

    One thread, since sums depend on their number; ``keep_threads`` is for work that does not, such as a forward pass.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # this also enables gradients
        for kind in AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        stack.enter_context(_process_settings())
        if sys.float_info.min / 2 == 0.0:  # the caller flushes subnormal numbers to zero
            torch.set_flush_denormal(False)
            stack.callback(torch.set_flush_denormal, True)
        if not keep_threads:
            stack.enter_context(one_thread())
        yield


_lock = threading.Lock()
_inside = 0  # threads and nested calls
_restore = ExitStack()


@contextmanager
def _process_settings() -> Iterator[None]:
    """Process-wide settings: the first thread to enter changes them, the last to leave restores them."""
    global _inside
    with _lock:
        if not _inside:
            _change_settings()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _restore.close()


def _change_settings() -> None:
    if (dtype := torch.get_default_dtype()) != torch.float32:
        torch.set_default_dtype(torch.float32)
        _restore.callback(torch.set_default_dtype, dtype)
    if not torch._C._get_mkldnn_enabled():
        torch._C._set_mkldnn_enabled(True)
        _restore.callback(torch._C._set_mkldnn_enabled, False)
    if not hasattr(torch.backends.mkldnn, "matmul"):  # before PyTorch 2.9, one setting covers all products
        if (precision := torch.get_float32_matmul_precision()) != "highest":
            torch.set_float32_matmul_precision("highest")
            _restore.callback(torch.set_float32_matmul_precision, precision)
        return
    for backend, name in PRODUCTS:
        kernels = getattr(getattr(torch.backends, backend), name)
        if (precision := kernels.fp32_precision) not in EXACT:
            kernels.fp32_precision = "ieee"
            _restore.callback(setattr, kernels, "fp32_precision", precision)
