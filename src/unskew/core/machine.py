"""What this machine lets the process use: cores and memory."""

import os
from pathlib import Path


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
