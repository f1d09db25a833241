"""Checkpoints: everything that resuming needs, in one file that is replaced atomically, and the clients' memories."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from unskew.core.errors import UserError
from unskew.core.files import make_folder, parse_json, read_content, record_from, sync_folder, write_whole
from unskew.core.tensors import prefixed, under
from unskew.core.types import ServerState
from unskew.runs import folder as folders
from unskew.runs.journal import DURING, METRICS, Mark, check_beginning
from unskew.runs.result import Calibration

CHECKPOINT = Path("checkpoint") / "state.safetensors"
MEMORIES = Path("checkpoint") / "memories.bin"
BEGUN = Path("checkpoint") / "begun"  # how many rounds a release has begun
MAX_MEMORY_BYTES_KEPT = 64 * 2**20  # bytes of its clients' saved states that a finished run may keep


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint's metadata: its run, and how much of each growing file belongs to the state."""

    metrics_bytes: int
    seconds: float
    data_sha256: str
    partition_hash: str
    config_sha256: str
    metrics_sha256: str = ""  # of these bytes
    during_bytes: int | None = None  # None in a saved state, which no run continues from
    during_sha256: str = ""
    start: Calibration | None = None  # the calibration that made the initial classifier

    @property
    def run(self) -> tuple[str, str, str]:
        """The hashes that identify the run: data, partition and configuration."""
        return self.data_sha256, self.partition_hash, self.config_sha256

    @property
    def metrics(self) -> Mark:
        """The part of metrics.jsonl that belongs to the state."""
        return Mark(self.metrics_bytes, self.metrics_sha256)

    @property
    def during(self) -> Mark:
        """The part of during.jsonl that belongs to the state."""
        return Mark(self.during_bytes or 0, self.during_sha256)


def state_file(path: Path, number: int) -> Path:
    """The file for the server's state after that round."""
    return path / "states" / f"round-{number:06d}.safetensors"


def save_checkpoint(path: Path, state: ServerState, progress: CheckpointRecord) -> None:
    """Write everything that resuming needs."""
    save_state(path / CHECKPOINT, state, progress)


def earlier_checkpoints(path: Path) -> dict[int, Path]:
    """The files of the checkpoints that a federated run kept, by round."""
    return {int(file.stem[6:]): file for file in sorted((path / CHECKPOINT.parent).glob("round-*.safetensors"))}


def keep_checkpoint(path: Path, number: int) -> None:
    """Keep the checkpoint of this round, and those of about 1, 2, 4, 8, … rounds before it."""
    write_whole(path / CHECKPOINT.parent / f"round-{number:06d}.safetensors", (path / CHECKPOINT).read_bytes())
    ages: set[int] = set()
    for earlier, file in earlier_checkpoints(path).items():
        age = max(number - earlier, 0).bit_length()  # 0, 1, 2 to 3, 4 to 7, …: the oldest of each is kept
        if age in ages:
            file.unlink(missing_ok=True)
        ages.add(age)


def roll_back(path: Path, number: int, out: Path) -> None:
    """Make a new run directory that continues after that round."""
    earlier = earlier_checkpoints(path)
    if number not in earlier:
        rounds = ", ".join(map(str, earlier)) or "none; only federated runs keep earlier checkpoints"
        raise UserError(f"{path} has no checkpoint of round {number}; available: {rounds}")
    _, progress = load_state(earlier[number])
    sealed = {name: folders.read_sealed(path, name) for name in ("config.toml", "partition.npz", "federation.json")}
    folders.create_run_folder(out)
    with folders.locked_folder(out):
        folders.start_manifest(out, {name: content for name, content in sealed.items() if content is not None})
        for name, mark in ((METRICS, progress.metrics), (DURING, progress.during)):
            if mark.bytes:
                check_beginning(path / name, mark)
                write_whole(out / name, (path / name).read_bytes()[: mark.bytes])
        write_whole(out / CHECKPOINT, earlier[number].read_bytes())
        if (begun := read_content(path / BEGUN)) is not None:  # retrained rounds cost ε twice
            write_whole(out / BEGUN, begun)


def save_state(file: Path, state: ServerState, progress: CheckpointRecord) -> None:
    """Write the server's state to one file, atomically."""
    entries = prefixed(state.tensors, "model/") | prefixed(state.memory, "memory/") | prefixed(state.sent, "sent/")
    if state.clients:
        tickets = bytearray("\n".join(state.clients.values()).encode())
        entries["clients/numbers"] = torch.tensor(list(state.clients), dtype=torch.int64)
        entries["clients/tickets"] = torch.frombuffer(tickets, dtype=torch.uint8)
    about = {"unskew": json.dumps({"round": state.round, **asdict(progress)})}
    about["seal"] = folders.seal(entries, about)
    write_whole(file, save({name: value.contiguous() for name, value in entries.items()}, metadata=about))


def open_memories(path: Path) -> int:
    """Open or create the file of the clients' memories and return its descriptor."""
    file = path / MEMORIES
    try:
        make_folder(file.parent)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        sync_folder(file.parent)
        return descriptor
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from error


def load_checkpoint(path: Path) -> tuple[ServerState, CheckpointRecord] | None:
    """The last checkpoint; None before the first."""
    file = path / CHECKPOINT
    return load_state(file) if file.exists() else None


def load_state(
    file: Path, expected: tuple[int, tuple[str, str, str]] | None = None, instead: str = ", or delete it to train again"
) -> tuple[ServerState, CheckpointRecord]:
    """Read what ``save_state`` wrote; a changed bit is refused, and any but the ``expected`` round and run."""
    with folders.reading(file, instead):
        entries, about = folders.read_tensors(file)
        if about.pop("seal", None) != folders.seal(entries, about):
            raise ValueError("its content does not match its seal")
        values = parse_json(about["unskew"])
        number = values.pop("round")
        tickets: dict[int, str] = {}
        if "clients/numbers" in entries:
            texts = bytes(entries["clients/tickets"].tolist()).decode().split("\n")
            tickets = dict(zip(entries["clients/numbers"].tolist(), texts, strict=True))
        model, memory, sent = (under(entries, name) for name in ("model/", "memory/", "sent/"))
        progress = record_from(CheckpointRecord, values)
        if expected not in (None, (number, progress.run)):
            raise ValueError("it is from another round or run")
        return ServerState(number, model, memory, sent, clients=tickets), progress
