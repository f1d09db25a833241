"""``unskew federation status`` and ``stop``: what of a federation runs on this machine, and ending it."""

import time
from dataclasses import dataclass
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import read_content
from unskew.federation import certificates, flower, network
from unskew.federation.folder import FEDERATION, NODE, Federation, read_federation, read_node
from unskew.federation.node import PARTS, node_mark
from unskew.federation.processes import end_all, marked
from unskew.federation.server import GONE_SECONDS, last_seen, server_mark


@dataclass(frozen=True)
class NodeStatus:
    """A node as the server sees it."""

    name: str
    seconds: float | None  # since it was last heard of; None where it never was
    here: int  # processes of it on this machine

    @property
    def online(self) -> bool:
        """Whether it was heard of lately."""
        return self.seconds is not None and self.seconds < GONE_SECONDS


@dataclass(frozen=True)
class Status:
    """A federation as it is now."""

    processes: int  # of the server
    answers: bool
    certificate_days: float
    nodes: tuple[NodeStatus, ...]
    runs: tuple[tuple[str, str, float], ...]  # number, status, seconds


def status(federation: Federation) -> Status:
    """Ask the folder, the machine and, where it runs, the server."""
    answers = _answers(federation)
    seen, now = last_seen(federation) if answers else {}, time.time()
    nodes = tuple(
        NodeStatus(name, now - seen[name] if name in seen else None, _processes_of(federation.node(name)))
        for name in federation.public_keys()
    )
    content = read_content(federation.certificate) or b""
    return Status(
        processes=len(marked(server_mark(federation))),
        answers=answers,
        certificate_days=certificates.days_left(content, str(federation.certificate)),
        nodes=nodes,
        runs=tuple(_run(values) for values in flower.runs(federation)) if answers else (),
    )


def stop(path: Path) -> dict[str, int]:
    """End the server and the nodes whose folder this is; by name, how many processes were ended."""
    if not Path("/proc/self/environ").exists():
        raise UserError("stop finds processes in /proc, which this system lacks; end the commands with Ctrl-C")
    path = path.absolute()
    if (path / NODE).exists() and not (path / FEDERATION).exists():
        return _stop_node(path)
    federation = read_federation(path)
    ended: dict[str, int] = {}
    for folder in sorted((path / "nodes").glob("*/")):
        if (folder / NODE).exists():
            ended |= _stop_node(folder)
    if count := end_all(server_mark(federation), patience=20.0):
        ended["server"] = count
    return ended


def _stop_node(path: Path) -> dict[str, int]:
    node = read_node(path)
    count = sum(end_all(mark, patience=20.0) for mark in _marks(path))
    return {f"node {node.settings.name}": count} if count else {}


def _processes_of(folder: Path) -> int:
    return sum(len(marked(mark)) for mark in _marks(folder)) if (folder / NODE).exists() else 0


def _marks(folder: Path) -> list[str]:
    return [node_mark(read_node(folder), part) for part in PARTS]


def _answers(federation: Federation) -> bool:
    try:
        network.greet(f"127.0.0.1:{federation.settings.control_port}", federation.authority)
    except (network.NotReached, UserError):
        return False
    return True


def _run(values: dict[str, object]) -> tuple[str, str, float]:
    elapsed = values.get("elapsed", 0.0)
    seconds = float(elapsed) if isinstance(elapsed, int | float) else 0.0
    return str(values.get("run-id", "")), str(values.get("status", "")), seconds
