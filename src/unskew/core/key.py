"""Randomness as a value: ``Key(seed).fold("round", 7).fold("client", 3)`` names one stream of draws.

The same path gives the same draws in every process, on every worker and after a resume. Draws do not affect each
other, since there is no shared generator.
"""

import hashlib
import os
import random  # noqa: TID251  only its state is compared
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import numpy.typing as npt
import torch
from numpy.random.bit_generator import ISeedSequence

from unskew.core.errors import UserError

INTEGERS = (int, Integral)  # int is an Integral too, but isinstance is ten times as fast for it
PARTS = (str, *INTEGERS)


@dataclass(frozen=True)
class Key:
    """A seed and the path folded into it."""

    seed: int
    path: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        parts = self.path if isinstance(self.path, tuple) else (None,)
        if not isinstance(self.seed, INTEGERS) or not all(isinstance(part, PARTS) for part in parts):
            raise UserError(f"a key needs an integer seed, and a path of strings and integers, not {self!r}")

    def fold(self, *parts: str | int) -> "Key":
        """The key one or more steps further down the path."""
        return Key(self.seed, self.path + parts)

    def number(self) -> int:
        """128 bits that depend on the seed and the path; ("a", "b") and ("ab",) differ, and so do 1 and "1"."""
        text = repr((int(self.seed), *(str(p) if isinstance(p, str) else int(p) for p in self.path)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")

    def numpy(self) -> np.random.Generator:
        """A fresh NumPy generator at the start of this key's stream."""
        return np.random.Generator(np.random.Philox(_Number(self.number())))  # type: ignore[arg-type]  # any ISeedSequence works

    def torch(self) -> torch.Generator:
        """A fresh CPU torch generator at the start of this key's stream."""
        return torch.Generator().manual_seed(self.number() % 2**63)


def system_key() -> Key:
    """A key from the operating system's randomness: nobody knows it, and its draws cannot be repeated."""
    return Key(int.from_bytes(os.urandom(32), "little"))


class _Number(ISeedSequence):
    """A Philox generator's key; ``Philox(key=…)`` gives the same draws but is slow, since it reads system entropy."""

    def __init__(self, number: int) -> None:
        self.key = np.frombuffer(number.to_bytes(16, "little"), "<u8")

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> npt.NDArray[np.uint64]:
        return self.key


@contextmanager
def seeded(key: Key) -> Iterator[None]:
    """Seed torch's global generators for third-party code, such as dropout, and restore them afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(key.number() % 2**63)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(key.number() % 2**63)
        yield


def global_generators() -> dict[str, bytes]:
    """The states of the process-wide random generators."""
    numpy_state = np.random.get_state()  # noqa: NPY002  only its state is compared
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": repr([np.asarray(part).tobytes() for part in numpy_state]).encode(),
    }
    if not any(name in sys.modules for name in ("flwr", "mlflow", "wandb")):  # their threads draw from it
        states["random"] = repr(random.getstate()).encode()
    return states


@contextmanager
def no_global_draws() -> Iterator[None]:
    """Raise a UserError if the code inside used a process-wide generator."""
    before = global_generators()
    yield
    after = global_generators()
    if used := [name for name, state in before.items() if state != after[name]]:
        raise UserError(
            f"the method draws from the global random generator of {' and '.join(used)}, so two runs with the same "
            "seed would differ; draw from a Key, or from a private generator with a fixed seed"
        )
