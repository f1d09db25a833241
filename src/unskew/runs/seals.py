"""Check or renew the seals of a run directory: which files are unchanged, damaged or not sealed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import read_content, write_whole
from unskew.engines.flower.audit import AUDIT, read_audit
from unskew.runs.checkpoint import BEGUN, CHECKPOINT, MEMORIES, load_checkpoint, load_state
from unskew.runs.config import CONFIG, read_run
from unskew.runs.federated import FEDERATION, read_terms
from unskew.runs.folder import GROWING, LOCK, MANIFEST, MODEL, Manifest, read_manifest, require_sealed, seal_files
from unskew.runs.folder import MANIFEST_LOCK as MANIFEST_LOCK
from unskew.runs.journal import DURING, METRICS, check_beginning, read_during, read_metrics
from unskew.runs.result import CLIENTS, MODEL_INFO, RESULT, read_clients, read_model_info, read_result

UNCHANGED, DAMAGED, UNSEALED = "unchanged", "damaged", "not sealed"
SEALED_KINDS: tuple[str, ...] = (CONFIG, "partition.npz", FEDERATION, *GROWING, MODEL, MODEL_INFO, CLIENTS, RESULT)
SEALED_KINDS += ("calibration-*.safetensors", "figures/*.json")

_OWN = (LOCK, MANIFEST_LOCK, MANIFEST, str(BEGUN), str(MEMORIES))  # MEMORIES is checked slot by slot when it is read
_READERS: dict[str, Callable[[Path], object]] = {
    CONFIG: read_run,
    METRICS: read_metrics,
    DURING: read_during,
    RESULT: read_result,
    CLIENTS: read_clients,
    FEDERATION: read_terms,
    MODEL_INFO: read_model_info,
}


@dataclass(frozen=True)
class ExaminedFile:
    """One file of a run directory: its state, and the problem if it is damaged."""

    name: str
    state: str
    problem: str = ""


def examine(path: Path) -> list[ExaminedFile]:
    """Every file of a run directory; a damaged manifest is refused."""
    manifest = read_manifest(path)
    if manifest is None and not (path / CONFIG).exists():
        raise UserError(f"{path} is not a run directory: it has no {CONFIG}")
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    listed = () if manifest is None else (*manifest.files, *manifest.coming)
    return [_examine_file(path, name, manifest) for name in sorted(files.union(listed).difference(_OWN))]


def seal_folder(path: Path) -> list[str]:
    """Seal the files of a run directory as they are now, and return their names; damaged files are refused."""
    before = read_content(path / MANIFEST)
    (path / MANIFEST).unlink(missing_ok=True)
    try:
        if damaged := [file for file in examine(path) if file.state == DAMAGED]:
            raise UserError(f"{damaged[0].problem}; nothing was sealed")
    except UserError:
        if before is not None:
            write_whole(path / MANIFEST, before)
        raise
    files = [str(file.relative_to(path)) for kind in SEALED_KINDS for file in sorted(path.glob(kind))]
    names = [name for name in files if name not in GROWING or (path / RESULT).exists()]
    seal_files(path, names)
    return names


def unsealed_note(path: Path) -> str | None:
    """A note on a run directory that is not sealed; None if it is sealed, or not a run directory at all."""
    if not (path / CONFIG).exists() or (path / MANIFEST).exists():
        return None
    return f"{path} is not sealed: it has no {MANIFEST}, so changed files may go unnoticed"


def _examine_file(path: Path, name: str, manifest: Manifest | None) -> ExaminedFile:
    kept = name == str(CHECKPOINT) or name.startswith(("states/", "checkpoint/round-"))
    sealed = any(Path(name).match(pattern) for pattern in SEALED_KINDS)
    verified = kept or name == AUDIT or (sealed and manifest is not None)
    try:
        if kept:
            load_state(path / name)
        elif name == AUDIT:  # each line contains the hash of the line before
            read_audit(path / name)
        elif sealed:
            require_sealed(path, name)
        if name in _READERS and (path / name).exists():
            _READERS[name](path)
        if name in GROWING and not (path / RESULT).exists():
            checkpoint = load_checkpoint(path)
            verified = checkpoint is not None
            if checkpoint is not None:  # it has a hash of the beginning
                check_beginning(path / name, checkpoint[1].metrics if name == METRICS else checkpoint[1].during)
        return ExaminedFile(name, UNCHANGED if verified else UNSEALED)
    except UserError as error:
        return ExaminedFile(name, DAMAGED, str(error))
