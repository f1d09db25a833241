"""What this machine lets the process use: cores, memory, devices."""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from unskew.core.errors import UserError
from unskew.core.tensors import one_thread

ASSUMED_MEMORY = 16e9  # bytes, if the system does not report it
DEVICES = "auto, cpu, cuda, cuda:N or mps"
CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with it, cuBLAS adds in the same order every time


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def physical_memory() -> float:
    """The bytes that this process may use at most: the machine's, or its container's."""
    if not hasattr(os, "sysconf"):  # Windows
        return ASSUMED_MEMORY
    whole = float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return whole


def available_memory() -> float:
    """The bytes that other programs leave free now, where Linux reports them."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return float("inf") if found is None else 1024.0 * int(found[1])


def max_files() -> int:
    """How many files this process may have open at once; systems other than POSIX set no limit that matters here."""
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
    except OSError:  # no such folder, or not even one more can be opened
        return 0 if Path("/dev/fd").exists() else limit - 32


def too_many_files(wanted: str) -> str:
    """What to do where there are too few: a sentence."""
    limit = max_files()
    return f"{wanted}, but this process may open only {limit:,}; raise the limit with: ulimit -n {max(1024, 4 * limit)}"


def check_device_name(text: str) -> None:
    """Refuse a text that does not name a device, whatever this machine has."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", text):
        raise UserError(f"--device {text}: give {DEVICES}")


def resolve_device(text: str) -> torch.device:
    """The device of that name, if this machine has it; ``auto`` is CUDA where there is one, else MPS, else the CPU."""
    check_device_name(text)
    if text == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(kind)
    device = torch.device(text)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UserError(f"--device {text}: PyTorch finds no CUDA device here; give auto or cpu")
        if (device.index or 0) >= count:
            raise UserError(f"--device {text}: this machine has cuda:0 to cuda:{count - 1}; give one of them, or auto")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"--device {text}: PyTorch finds no MPS device here; give auto or cpu")
    return device


def ready_device(text: str) -> torch.device:
    """As ``resolve_device``, for a process that is about to use it: CUDA reads its settings when it first starts."""
    device = resolve_device(text)
    if device.type == "cuda":
        os.environ.setdefault(*CUBLAS)
    return device


def device_count(device: torch.device) -> int:
    """How many GPUs a device's name covers: all for ``cuda``, one where one is named, none for the CPU."""
    if device.type == "cuda" and device.index is None:
        return torch.cuda.device_count()
    return 0 if device.type == "cpu" else 1


def default_workers(text: str) -> int:
    """The worker processes of a pool where the user names no number: one for each GPU, or one for each core."""
    return device_count(resolve_device(text)) or cores()


def worker_device(device: torch.device, count: int, worker: int) -> str:
    """The device of a pool's worker: ``cuda`` without a number is spread over the ``count`` GPUs there are."""
    return f"cuda:{worker % count}" if device.type == "cuda" and device.index is None else str(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def deterministic(device: torch.device) -> AbstractContextManager[None]:
    """On CUDA only kernels that give the same bits every time inside, as before outside; elsewhere nothing changes."""
    return _deterministic(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        operation = str(error).partition(" ")[0]
        raise RuntimeError(
            f"{operation} is not deterministic on {device}; leave it out of the network or method, or give --device cpu"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


AUTOCAST = ("cpu", "cuda", "mps", "xpu")  # the kinds of devices that may be under autocast
PRODUCTS = (("mkldnn", "matmul"), ("mkldnn", "conv"), ("cuda", "matmul"))  # whose precision can be lowered
EXACT = ("none", "ieee")  # precisions of float32 products that are float32's own


@contextmanager
def neutral(*, keep_threads: bool = False) -> Iterator[None]:
    """Gradients on, inference mode and autocast off, float32 on the CPU by default, one thread; as before outside.

    Also a decorator: ``@neutral()``. Sums and decompositions depend on the number of threads; ``keep_threads`` is for
    work that does not, such as a large encoder's forward pass.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # gradients are on with it
        for kind in AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        stack.enter_context(_PROCESS.standard())
        stack.enter_context(_small_numbers())
        if not keep_threads:
            stack.enter_context(one_thread())
        yield


@contextmanager
def _small_numbers() -> Iterator[None]:
    """Compute with subnormal numbers in this thread, even if the caller set PyTorch to flush them to zero."""
    flushing = sys.float_info.min / 2 == 0.0
    if flushing:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)


class _Process:
    """Settings of the whole process: the first thread that comes changes them, the last that leaves restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._restore = ExitStack()

    @contextmanager
    def standard(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._change()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._restore.close()

    def _change(self) -> None:
        if (dtype := torch.get_default_dtype()) != torch.float32:
            torch.set_default_dtype(torch.float32)
            self._restore.callback(torch.set_default_dtype, dtype)
        if not torch._C._get_mkldnn_enabled():
            torch._C._set_mkldnn_enabled(True)
            self._restore.callback(torch._C._set_mkldnn_enabled, False)
        if not hasattr(torch.backends.mkldnn, "matmul"):  # before PyTorch 2.9 there was one setting for all products
            if (precision := torch.get_float32_matmul_precision()) != "highest":
                torch.set_float32_matmul_precision("highest")
                self._restore.callback(torch.set_float32_matmul_precision, precision)
            return
        for backend, name in PRODUCTS:
            kernels = getattr(getattr(torch.backends, backend), name)
            if (precision := kernels.fp32_precision) not in EXACT:
                kernels.fp32_precision = "ieee"
                self._restore.callback(setattr, kernels, "fp32_precision", precision)


_PROCESS = _Process()
