"""Odd calling contexts: every function of the package gives the same bits in them as outside them."""

import asyncio
import contextlib
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from faults.trials import SAME, Trial, digest, shuffled

DIGITS = {"data": "digits", "clients": 3, "rounds": 2, "epochs": 1, "lr": 0.05, "augment": False}


@contextlib.contextmanager
def setting(get: Callable[[], Any], change: Callable[[Any], None], value: Any) -> Iterator[None]:
    """Something that the process has only one of, changed for a while."""
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


default_dtype = partial(setting, torch.get_default_dtype, torch.set_default_dtype)
threads = partial(setting, torch.get_num_threads, torch.set_num_threads)
deterministic = partial(setting, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms)

CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad in inference_mode": lambda: _both(torch.inference_mode(), torch.enable_grad()),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
    "default device cpu": lambda: torch.device("cpu"),
    "deterministic algorithms": lambda: deterministic(True),
    "one thread": lambda: threads(1),
    "three threads": lambda: threads(3),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "warnings are errors": strict_warnings,
    "numpy raises": lambda: np.errstate(all="raise"),
    "another working folder": lambda: setting(os.getcwd, os.chdir, "/"),
}


@contextlib.contextmanager
def _both(*managers: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


def context_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """Every function in every context, in a thread, and in a running event loop."""
    _prepare(folder)
    expected = cache(lambda name: _twice(name, partial(FUNCTIONS[name], folder)))
    ways = {name: partial(_within, make) for name, make in CONTEXTS.items()}
    ways |= {"a thread": _in_a_thread, "a running event loop": _in_a_loop}
    pairs = [(name, way) for name in FUNCTIONS for way in ways]
    for name, way in shuffled(pairs, seed):
        work = partial(_tried, partial(FUNCTIONS[name], folder), ways[way], partial(expected, name))
        yield Trial(f"{name} in {way}", work)


def _twice(name: str, function: Callable[[], str]) -> str:
    """What the function gives in no odd context; it must be the same a second time."""
    first = function()
    if function() != first:
        raise AssertionError(f"{name} does not give the same result twice")
    return first


def _tried(function: Callable[[], str], way: Callable[[Callable[[], str]], str], expected: Callable[[], str]) -> str:
    usual, state = expected(), _state()
    got = way(function)
    if _state() != state:
        return f"the caller's settings were changed: {state} to {_state()}"
    return SAME if got == usual else f"another result: {got}" if len(got) > 16 else "another result"


def _state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.is_autocast_enabled("cpu"), torch.get_default_device(), torch.random.initial_seed(),
        torch.are_deterministic_algorithms_enabled(), os.getcwd(),
    )  # fmt: skip


def _within(make: Callable[[], contextlib.AbstractContextManager[object]], function: Callable[[], str]) -> str:
    with make():
        inside = _state()
        got = function()
        if _state() != inside:
            return f"the caller's settings were changed: {inside} to {_state()}"
    return got


def _in_a_thread(function: Callable[[], str]) -> str:
    results: list[str] = []
    worker = threading.Thread(target=lambda: results.append(function()))
    worker.start()
    worker.join()
    return results[0]


def _in_a_loop(function: Callable[[], str]) -> str:
    async def inside() -> str:
        return function()

    return asyncio.run(inside())


# The functions: each gives a digest of its result


def _prepare(folder: Path) -> None:
    import unskew

    unskew.run(out=folder / "whole", method="fedavg + lda", engine="loop", **DIGITS)
    with contextlib.suppress(unskew.StopRun):
        unskew.run(
            out=folder / "half", method="moon", engine="loop", checkpoint_seconds=0, **DIGITS,
            observe=lambda event: unskew.STOP if getattr(event, "round", 0) == 1 else None,
        )  # fmt: skip


def _run(engine: str, folder: Path) -> str:
    import unskew

    shutil.rmtree(folder / "run", ignore_errors=True)
    result = unskew.run(out=folder / "run", method="fedavg + ccvr", engine=engine, workers=2, **DIGITS)
    return digest(result.weights_sha256, result.accuracy, result.loss, result.calibrations["ccvr"].accuracy)


def _copied(folder: Path, name: str) -> Path:
    """A copy of a run that may be changed."""
    shutil.rmtree(folder / "tried", ignore_errors=True)
    return shutil.copytree(folder / name, folder / "tried")


def _resume(folder: Path) -> str:
    import unskew

    return digest(unskew.resume(_copied(folder, "half")).weights_sha256)


def _calibrate_run(folder: Path) -> str:
    import unskew

    result = unskew.calibrate_run(_copied(folder, "whole"), "ccvr", "oracle")
    return digest([(each.name, each.accuracy, each.loss) for each in result.calibrations.values()])


def _analyse(folder: Path) -> str:
    import unskew

    run = _copied(folder, "whole")
    unskew.analyse(run, "norms", "cka", "confusion")
    return digest(*(file.read_bytes() for file in sorted((run / "figures").glob("*.json"))))


def _load(folder: Path) -> str:
    import unskew

    model = unskew.load(folder / "whole", "lda")
    return digest(*(value.float().numpy().tobytes() for value in model.state_dict().values()))


def _calibrate(method: str, folder: Path) -> str:
    """From a user's own model and batches, made outside the odd context as a trained model is."""
    import unskew

    encoder, classifier, images, labels = _own()
    statistics = unskew.ClassStatistics.measure(encoder, [(images, labels)], classes=np.int64(3))
    made = unskew.calibrate(classifier, statistics, method)
    return digest(*(value.detach().numpy().tobytes() for value in made.state_dict().values()))


def _own() -> tuple[nn.Module, nn.Linear, torch.Tensor, torch.Tensor]:
    """A small model and its data, from numpy: no setting of PyTorch changes them."""
    draw = np.random.default_rng(0)

    def given(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw.standard_normal(shape).astype(np.float32))

    encoder, classifier = (
        nn.Linear(20, 8, device="cpu", dtype=torch.float32),
        nn.Linear(8, 3, device="cpu", dtype=torch.float32),
    )
    for layer in (encoder, classifier):
        for value in layer.parameters():
            value.data = given(*value.shape)
    images, labels = given(90, 20), torch.from_numpy(np.arange(90) % 3).to(torch.uint8)
    return nn.Sequential(encoder, nn.ReLU()), classifier, images, labels


FUNCTIONS: dict[str, Callable[[Path], str]] = {
    "run": partial(_run, "loop"),
    "run on a pool": partial(_run, "pool"),
    "resume": _resume,
    "calibrate_run": _calibrate_run,
    "analyse": _analyse,
    "load": _load,
    "calibrate by ccvr": partial(_calibrate, "ccvr"),
    "calibrate by lda": partial(_calibrate, "lda"),
    "calibrate by uscc": partial(_calibrate, "uscc"),
}
