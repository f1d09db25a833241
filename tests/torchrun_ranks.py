"""Ranks of the engine torchrun beside this process, which is rank 0 then."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from unskew.engines import torchrun

FOLLOW = "from unskew import engines; engines.serve_rank_zero('torchrun')"
PATHS = [str(Path(__file__).parent), *filter(None, sys.path)]  # ranks look for methods of these tests


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}


@contextmanager
def ranks_started(count: int):
    """So many ranks: the others as processes, and the variables with which this one is rank 0.

    The others must end well, and without a word, when it is over.
    """
    port, paths = free_port(), {"PYTHONPATH": os.pathsep.join(PATHS)}
    others = [
        subprocess.Popen(
            [sys.executable, "-c", FOLLOW], env={**os.environ, **paths, **variables(rank, count, port)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(1, count)
    ]  # fmt: skip
    try:
        own = variables(0, count, port)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in own.items():
                patch.setenv(name, value)
            torchrun.listen(launch := torchrun.launched())
        yield own
    finally:
        for rank in torchrun.gather(launch, processors=True):
            rank.close()
        torchrun.listen(launch)[0].close()
        said = [each.communicate(timeout=60) for each in others]
    assert [(each.returncode, *words) for each, words in zip(others, said, strict=True)] == [(0, "", "")] * len(others)
