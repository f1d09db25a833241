"""Seals over tensors: a hash of their names, types, shapes and bytes and of the words beside them in the file."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from unskew.core.types import Tensors

UNREADABLE = (  # all that safetensors was seen to raise for files with a few bytes changed
    OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, MemoryError,
)  # fmt: skip


def seal(entries: Tensors, about: Mapping[str, str]) -> str:
    """SHA-256 over the words, and over the tensors in the order of their names: name, type, shape and bytes of each."""
    names = sorted(entries)
    kinds = [[name, str(entries[name].dtype), list(entries[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps([sorted(about.items()), kinds]).encode())
    for name in names:
        digest.update(entries[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(file: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a safetensors file and the words beside them. Raises one of ``UNREADABLE``."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there")
    with safe_open(file, framework="pt") as content:
        about = dict(content.metadata() or {})
        return {name: content.get_tensor(name) for name in content.keys()}, about  # noqa: SIM118
