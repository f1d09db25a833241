"""A neutral context: PyTorch and NumPy as a new process has them, whatever the caller has set.

Results depend on the seed alone, so every public function works inside this context. The caller's settings are back
when it ends, also after an exception.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from unskew.core.tensors import one_thread

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
    """This thread computes with numbers below the normal range; PyTorch can be told to take them for zero."""
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
        """As a new process has them."""
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
