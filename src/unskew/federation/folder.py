"""A federation's folder on the server's machine, and a node's folder on its own: which file is where."""

import json
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from unskew.core.errors import UserError, brief, nearest
from unskew.core.files import read_content, write_whole

FEDERATION = "federation.toml"
NODE = "node.toml"
CONNECTION = "unskew"  # the name of the server in Flower's own settings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_Settings = TypeVar("_Settings")


@dataclass(frozen=True)
class Settings:
    """What ``federation.toml`` says."""

    host: str  # by which the nodes reach the server
    port: int  # to which the nodes connect
    listen: str  # the address of this machine on which that port is opened
    control_port: int  # Flower's own port, opened on 127.0.0.1 alone
    max_message: int  # bytes; a larger request of a node is refused


@dataclass(frozen=True)
class Federation:
    """The folder that ``unskew federation init`` made."""

    path: Path
    settings: Settings

    @property
    def authority(self) -> Path:
        """The authority's certificate, which every node needs."""
        return self.path / "ca" / "ca.crt"

    @property
    def authority_key(self) -> Path:
        """The authority's private key: it signs the server's certificate."""
        return self.path / "ca" / "ca.key"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.path / "server" / "server.crt"

    @property
    def key(self) -> Path:
        """The private key of the server's certificate."""
        return self.path / "server" / "server.key"

    @property
    def database(self) -> Path:
        """Where Flower keeps nodes and runs."""
        return self.path / "server" / "state.db"

    @property
    def flower_home(self) -> Path:
        """Flower's own settings and installed apps, in place of ~/.flwr."""
        return self.path / "server" / "flower"

    @property
    def logs(self) -> Path:
        """What the server's processes print."""
        return self.path / "server" / "logs"

    @property
    def seen(self) -> Path:
        """When each node was last heard of, written by the gateway."""
        return self.path / "server" / "seen.json"

    @property
    def app(self) -> Path:
        """The Flower app."""
        return self.path / "app"

    def public_keys(self) -> dict[str, Path]:
        """The keys that may join, by node name: a file taken away is a node refused."""
        return {file.stem: file for file in sorted((self.path / "nodes").glob("*.pub"))}

    def node(self, name: str) -> Path:
        """The folder to hand over to that node."""
        return self.path / "nodes" / name


@dataclass(frozen=True)
class NodeSettings:
    """What ``node.toml`` says."""

    name: str
    server: str  # host:port


@dataclass(frozen=True)
class Node:
    """A node's folder, wherever it has been carried."""

    path: Path
    settings: NodeSettings

    @property
    def authority(self) -> Path:
        """The certificate of the federation's authority."""
        return self.path / "ca.crt"

    @property
    def key(self) -> Path:
        """The node's private key."""
        return self.path / "node.key"

    @property
    def flower_home(self) -> Path:
        """Flower's own settings and installed apps, in place of ~/.flwr."""
        return self.path / "flower"

    @property
    def logs(self) -> Path:
        """What the node's processes print."""
        return self.path / "logs"

    @property
    def state(self) -> Path:
        """What the node keeps between rounds: its clients' memories and its secret."""
        return self.path / "state"

    @property
    def service_settings(self) -> Path:
        """What the node service was started with."""
        return self.path / "service.toml"


def read_federation(path: Path) -> Federation:
    """The federation in that folder."""
    path = path.absolute()
    if (path / NODE).exists() and not (path / FEDERATION).exists():
        raise UserError(f"{path} is a node's folder; give the folder of the server's machine")
    made = "unskew federation init DIR makes one"
    return Federation(path, _read(path / FEDERATION, Settings, f"{path} is not a federation's folder; {made}"))


def read_node(path: Path) -> Node:
    """The node whose folder this is."""
    path = path.absolute()
    if (path / FEDERATION).exists() and not (path / NODE).exists():
        names = ", ".join(folder.name for folder in sorted((path / "nodes").glob("*/")))
        raise UserError(f"{path} is the server's folder; give a node's folder, such as {path / 'nodes'}/NAME ({names})")
    wanted = f"{path} is not a node's folder; unskew federation init DIR makes one for each node, in DIR/nodes"
    return Node(path, _read(path / NODE, NodeSettings, wanted))


def write_settings(path: Path, settings: Settings | NodeSettings, header: str) -> None:
    """Settings as TOML."""
    write_whole(path, toml({field.name: getattr(settings, field.name) for field in fields(settings)}, header).encode())


def toml(values: dict[str, Any], header: str) -> str:
    """Texts, numbers, truth values and lists of them as TOML; JSON spells these the same way."""
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items() if value is not None)
    return "\n".join([f"# {header}", *lines]) + "\n"


def node_name(name: str) -> str:
    """A node's name, checked: it is a file's name, and it appears in logs and messages."""
    if not _NAME.fullmatch(name):
        wanted = "at most 32 letters, digits, dots, dashes and underscores, beginning with a letter or digit"
        raise UserError(f"node name {brief(name, 40)}: give {wanted}")
    return name


def _read(path: Path, kind: type[_Settings], missing: str) -> _Settings:
    content = read_content(path)
    if content is None:
        raise UserError(missing)
    try:
        values = tomllib.loads(content.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path} cannot be read: it is not TOML: {error}") from error
    known = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{path}: {name!r} is not known; {nearest(name, known)}")
        if type(value) is not known[name]:
            raise UserError(f"{path}: {name} = {brief(value)} is not {_KINDS[known[name]]}")
    if absent := [name for name in known if name not in values]:
        raise UserError(f"{path}: {', '.join(absent)} is missing; unskew federation init writes the file")
    return kind(**values)


_KINDS: dict[Any, str] = {str: "a text in quotes", int: "a whole number"}
