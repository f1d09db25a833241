"""What this machine lets the process use: cores, memory, devices."""

import os
import re
from pathlib import Path

import torch

from unskew.core.errors import UserError

DEVICES = "auto, cpu, cuda, cuda:N or mps"


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def physical_memory() -> float:
    """The bytes that this process may use at most: the machine's, or its container's."""
    whole = float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return whole


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
