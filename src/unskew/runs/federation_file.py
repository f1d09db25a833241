"""federation.json: what a federation agreed on when its run began, its clients by name, how often it was started."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import json_object
from unskew.core.records import record_from
from unskew.engines.flower.members import Known
from unskew.runs.folder import json_bytes
from unskew.runs.manifest import read_sealed

FEDERATION = "federation.json"


@dataclass(frozen=True)
class Terms:
    """What was agreed: classes, images and normalisation of all nodes; ``clients`` by name."""

    run: str
    starts: int = 0
    classes: tuple[str, ...] = ()
    shape: tuple[int, int, int] = (0, 0, 0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: bool = False
    augmentation: str = "auto"
    clients: dict[str, Known] = field(default_factory=dict)


def terms_bytes(terms: Terms) -> bytes:
    """The file's content."""
    values = asdict(terms)
    values["clients"] = [asdict(known) for known in terms.clients.values()]
    return json_bytes(values)


def read_terms(path: Path) -> Terms:
    """What a run folder says of its federation."""
    content = read_sealed(path, FEDERATION)
    if content is None:
        raise UserError(f"{path} is not the folder of a federated run: it has no {FEDERATION}")
    values = json_object(content, path / FEDERATION)
    try:
        clients = [record_from(Known, each) for each in values.pop("clients", [])]
        lists: dict[str, Any] = {name: tuple(values.pop(name)) for name in ("classes", "shape", "mean", "std")}
        return record_from(Terms, values, **lists, clients={each.name: each for each in clients})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / FEDERATION} is damaged: {error}; restore it from a copy") from error
