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
from unskew.core.types import ServerState

CHECKPOINT = Path("checkpoint") / "state.safetensors"
MEMORIES = Path("checkpoint") / "memories.bin"
KEPT_MEMORIES = 64 * 2**20  # bytes that a finished run may keep of what its clients remember


@dataclass(frozen=True)
class Progress:
    """What a checkpoint knows beside the state: how much of metrics.jsonl belongs to it, what it stands on."""

    metrics_bytes: int
    seconds: float
    data_sha256: str
    partition_hash: str
    config_sha256: str


def kept_state(path: Path, number: int) -> Path:
    """Where the server's state after that round lies, if it was kept."""
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
        places = [(client, *place) for client, place in state.clients.items()]
        entries["clients"] = torch.tensor(places, dtype=torch.int64)  # client, slot, checksum
    about = {"unskew": json.dumps({"round": state.round, "sha256": sha256(entries), **asdict(progress)})}
    content = save({name: value.contiguous() for name, value in entries.items()}, metadata=about)
    write_whole(file, content)


def open_memories(path: Path) -> int:
    """The descriptor of the file that holds what clients remember; made where it is not there."""
    file = path / MEMORIES
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error


def drop_memories(path: Path) -> None:
    """A finished run keeps them for measures of its local models, unless they would be most of what it weighs."""
    file = path / MEMORIES
    if file.exists() and file.stat().st_size > KEPT_MEMORIES:
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
        places = entries.pop("clients").tolist() if "clients" in entries else []
        state = ServerState(
            about.pop("round"),
            under(entries, "model/"),
            under(entries, "memory/"),
            under(entries, "sent/"),
            clients={client: (slot, checksum) for client, slot, checksum in places},
        )
        return state, Progress(**about)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the checkpoint {file} is damaged ({error}); delete it to start the run anew") from error
