"""Checkpoints: all that resuming needs, in one file that is replaced at once, and the file of client memories."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.tensors import sha256, under
from unskew.core.types import ServerState, Tensors
from unskew.round.client_memory import ticket_of

CHECKPOINT = Path("checkpoint") / "state.safetensors"
MEMORIES = Path("checkpoint") / "memories.bin"
MAX_MEMORY_BYTES_KEPT = 64 * 2**20  # bytes of its clients' saved states that a finished run may keep


@dataclass(frozen=True)
class Progress:
    """What a checkpoint has beside the state: its part of metrics.jsonl; which data, partition and configuration."""

    metrics_bytes: int
    seconds: float
    data_sha256: str
    partition_hash: str
    config_sha256: str


def kept_state(path: Path, number: int) -> Path:
    """The file of the server's state after that round, if it was kept."""
    return path / "states" / f"round-{number:06d}.safetensors"


def save_checkpoint(path: Path, state: ServerState, progress: Progress) -> None:
    """All that resuming needs, in one file that is replaced at once."""
    save_state(path / CHECKPOINT, state, progress)


def save_state(file: Path, state: ServerState, progress: Progress) -> None:
    """The server's state in one file that is replaced at once."""
    entries = {f"model/{name}": value for name, value in state.tensors.items()}
    entries |= {f"memory/{name}": value for name, value in state.memory.items()}
    entries |= {f"sent/{name}": value for name, value in state.sent.items()}
    if state.clients:
        entries["clients/numbers"] = torch.tensor(list(state.clients), dtype=torch.int64)
        entries["clients/tickets"] = torch.frombuffer(
            bytearray("\n".join(state.clients.values()).encode()), dtype=torch.uint8
        )
    about = {"unskew": json.dumps({"round": state.round, "sha256": sha256(entries), **asdict(progress)})}
    content = save({name: value.contiguous() for name, value in entries.items()}, metadata=about)
    write_whole(file, content)


def open_memories(path: Path) -> int:
    """The descriptor of the file of the clients' saved states; created if it is not there."""
    file = path / MEMORIES
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error


def drop_memories(path: Path) -> None:
    """A finished run keeps them for measures of its local models, unless they are large."""
    file = path / MEMORIES
    if file.exists() and file.stat().st_size > MAX_MEMORY_BYTES_KEPT:
        file.unlink()


def load_checkpoint(path: Path) -> tuple[ServerState, Progress] | None:
    """The last checkpoint, or None where the run was stopped before its first."""
    file = path / CHECKPOINT
    return load_state(file) if file.exists() else None


def load_state(file: Path) -> tuple[ServerState, Progress]:
    """What ``save_state`` wrote."""
    try:
        with safe_open(file, framework="pt") as content:
            about = json.loads(content.metadata()["unskew"])
            entries = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        if about.pop("sha256") != sha256(entries):
            raise ValueError("its content does not match its checksum")
        state = ServerState(
            about.pop("round"),
            under(entries, "model/"),
            under(entries, "memory/"),
            under(entries, "sent/"),
            clients=_tickets(entries),
        )
        return state, Progress(**about)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the checkpoint {file} is damaged ({error}); delete it to start the run from the beginning"
        ) from error


def _tickets(entries: Tensors) -> dict[int, str]:
    """The tickets for the clients' memories; checkpoints of earlier versions have slots and checksums instead."""
    if "clients" in entries:
        return {client: ticket_of(slot, checksum) for client, slot, checksum in entries["clients"].tolist()}
    if "clients/numbers" not in entries:
        return {}
    tickets = bytes(entries["clients/tickets"].tolist()).decode().split("\n")
    return dict(zip(entries["clients/numbers"].tolist(), tickets, strict=True))
