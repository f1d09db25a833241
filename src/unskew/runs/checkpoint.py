"""Checkpoints: all that resuming needs, in one file that is replaced at once, and the file of client memories."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from unskew.core.errors import LostMemory, UserError
from unskew.core.files import parse_json, record_from, write_whole
from unskew.core.tensors import sha256, under
from unskew.core.types import ServerState, Tensors
from unskew.round.client_memory import ticket_of
from unskew.runs.folder import UNREADABLE, read_tensors, seal
from unskew.runs.journal import Mark
from unskew.runs.result import Calibration

CHECKPOINT = Path("checkpoint") / "state.safetensors"
MEMORIES = Path("checkpoint") / "memories.bin"
MAX_MEMORY_BYTES_KEPT = 64 * 2**20  # bytes of its clients' saved states that a finished run may keep


@dataclass(frozen=True)
class Progress:
    """What a checkpoint has beside the state: its parts of files that grow; which data, partition, configuration."""

    metrics_bytes: int
    seconds: float
    data_sha256: str
    partition_hash: str
    config_sha256: str
    metrics_sha256: str = ""  # of these bytes; empty in checkpoints of earlier versions
    during_bytes: int | None = None  # None: all rounds of during.jsonl up to the state's own
    during_sha256: str = ""
    start: Calibration | None = None  # the calibration that made the initial classifier

    @property
    def metrics(self) -> Mark:
        """The part of metrics.jsonl that belongs to the state."""
        return Mark(self.metrics_bytes, self.metrics_sha256)

    @property
    def during(self) -> Mark | None:
        """The part of during.jsonl that belongs to the state; None where an earlier version did not write it down."""
        return None if self.during_bytes is None else Mark(self.during_bytes, self.during_sha256)


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
    about = {"unskew": json.dumps({"round": state.round, **asdict(progress)})}
    about["seal"] = seal(entries, about)
    write_whole(file, save({name: value.contiguous() for name, value in entries.items()}, metadata=about))


def open_memories(path: Path) -> int:
    """The descriptor of the file of the clients' saved states; created if it is not there."""
    file = path / MEMORIES
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error


@contextmanager
def memories_named(path: Path) -> Iterator[None]:
    """Say which file it is, where a client's saved state is damaged or lost."""
    try:
        yield
    except LostMemory as error:
        raise LostMemory(f"{path / MEMORIES}: {error}") from error


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
    """What ``save_state`` wrote; any changed bit is refused."""
    try:
        entries, words = read_tensors(file)
        about = _checked_words(entries, words)
        number = about.pop("round", None)
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is not a round")
        start = about.pop("start", None)
        made = None if start is None else record_from(Calibration, start)
        progress = record_from(Progress, about, start=made)
        if progress.metrics_bytes < 0 or (progress.during_bytes or 0) < 0:
            raise ValueError("a length is negative")
        state = ServerState(
            number, under(entries, "model/"), under(entries, "memory/"), under(entries, "sent/"),
            clients=_tickets(entries),
        )  # fmt: skip
        return state, progress
    except UNREADABLE as error:
        after = "start the run from the beginning" if file.name == CHECKPOINT.name else "train up to that round again"
        raise UserError(
            f"the checkpoint {file} is damaged ({error}); restore it from a copy, or delete it to {after}"
        ) from error


def is_sealed(file: Path) -> bool:
    """Whether a checkpoint is of a version that seals all of it."""
    try:
        return "seal" in read_tensors(file)[1]
    except UNREADABLE:
        return False


def _checked_words(entries: Tensors, words: dict[str, str]) -> dict[str, Any]:
    """What a checkpoint says beside its tensors, if its seal fits; earlier versions hash the tensors alone."""
    about = parse_json(words["unskew"])
    if not isinstance(about, dict):
        raise ValueError("its metadata is not a JSON object")
    if "sha256" in about and "seal" not in words:
        if about.pop("sha256") != sha256(entries):
            raise ValueError("its content does not match its checksum")
    elif words.pop("seal", None) != seal(entries, words):
        raise ValueError("its content does not match its seal")
    return about


def _tickets(entries: Tensors) -> dict[int, str]:
    """The tickets for the clients' memories; checkpoints of earlier versions have slots and checksums instead."""
    if "clients" in entries:
        return {client: ticket_of(slot, checksum) for client, slot, checksum in entries["clients"].tolist()}
    if "clients/numbers" not in entries:
        return {}
    tickets = bytes(entries["clients/tickets"].tolist()).decode().split("\n")
    return dict(zip(entries["clients/numbers"].tolist(), tickets, strict=True))
