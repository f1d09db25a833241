"""The folders of a federation and its nodes: their contents, how they are created and read."""

import base64
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError, brief
from unskew.core.files import read_content, toml_record, wipe, write_whole
from unskew.federation import network

FEDERATION = "federation.toml"
NODE = "node.toml"
ROSTER = "roster.txt"
CONNECTION = "unskew"  # the name of the server in Flower's own settings
GATEWAY_HEADER = "x-unskew-gateway"  # identifies the gateway to Flower's server

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


@dataclass(frozen=True)
class FederationSettings:
    """The content of ``federation.toml``."""

    host: str  # the server's name or address for the nodes
    port: int  # for the nodes
    listen: str  # the local address on which it is opened
    control_port: int  # Flower's own port, on 127.0.0.1 only
    max_message: int  # bytes of the largest message from a node
    metrics_port: int = 0  # health and metrics, on 127.0.0.1 only; 0 for none


class FederationFolder:
    """The folder that ``unskew federation init`` made."""

    def __init__(self, path: Path, settings: FederationSettings) -> None:
        self.path, self.settings = path, settings
        self.app = path / "app"  # the Flower app
        self.authority, self.authority_key = path / "ca" / "ca.crt", path / "ca" / "ca.key"
        server = path / "server"
        self.certificate, self.key = server / "server.crt", server / "server.key"
        self.database = server / "state.db"  # Flower's nodes and runs; removed when the server starts and stops
        self.flower_home = server / "flower"  # instead of ~/.flwr
        self.logs = server / "logs"
        self.run_config = server / "run-config.toml"  # of the last run
        self.seen = server / "seen.json"  # when each node was last heard from, written by the gateway
        # for Flower's own port on this machine, renewed whenever the server starts
        local = server / "local"
        self.local_authority, self.secret = local / "ca.crt", local / "secret"
        self.local_certificate, self.local_key = local / "link.crt", local / "link.key"

    def token(self, purpose: str) -> str:
        """The token for Flower's server: one for the gateway, another for the operator's commands."""
        secret = read_content(self.secret, 1000)
        if secret is None:
            raise UserError(f"{self.secret} is missing; start the server with: unskew federation server {self.path}")
        return token(secret, purpose)

    def public_keys(self) -> dict[str, Path]:
        """The keys that may join, by node name; a node whose file is removed is refused."""
        return {file.stem: file for file in sorted((self.path / "nodes").glob("*.pub"))}

    def node(self, name: str) -> Path:
        """The folder to copy to that node."""
        return self.path / "nodes" / name


def token(secret: bytes, purpose: str) -> str:
    """A token derived from the secret, for one purpose."""
    return hmac.new(secret, purpose.encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class NodeSettings:
    """The content of ``node.toml``."""

    name: str
    server: str  # host:port
    socket: str = ""  # connects the node's two parts; empty for service.sock in its folder


class NodeFolder:
    """A node's folder."""

    def __init__(self, path: Path, settings: NodeSettings) -> None:
        self.path, self.settings = path, settings
        self.authority, self.key = path / "ca.crt", path / "node.key"
        self.flower_home = path / "flower"  # instead of ~/.flwr
        self.secret = path / "flower" / "secret"  # shared by Flower's two programs, renewed whenever they start
        self.logs = path / "logs"
        self.state = path / "state"  # client memories, secrets, audit log
        self.service_settings = path / "service.toml"
        self.session = path / "last-session"  # the server's number for this node


def read_federation(path: Path) -> FederationFolder:
    """The federation in that folder."""
    path = path.absolute()
    if (path / NODE).exists() and not (path / FEDERATION).exists():
        raise UserError(f"{path} is a node's folder; give the folder of the server's machine")
    wanted = f"{path} is not a federation's folder; unskew federation init DIR makes one"
    return FederationFolder(path, toml_record(path / FEDERATION, FederationSettings, wanted))


def read_node(path: Path) -> NodeFolder:
    """The node whose folder this is."""
    path = path.absolute()
    if (path / FEDERATION).exists() and not (path / NODE).exists():
        names = ", ".join(folder.name for folder in sorted((path / "nodes").glob("*/")))
        raise UserError(f"{path} is the server's folder; give a node's folder, such as {path / 'nodes'}/NAME ({names})")
    wanted = f"{path} is not a node's folder; unskew federation init DIR makes one for each node, in DIR/nodes"
    return NodeFolder(path, toml_record(path / NODE, NodeSettings, wanted))


def write_settings(path: Path, settings: FederationSettings | NodeSettings) -> None:
    """Write settings as TOML."""
    values = {name: value for name, value in vars(settings).items() if value != ""}
    write_whole(path, toml(values, MADE).encode())


def toml(values: dict[str, Any], header: str) -> str:
    """Strings, numbers, booleans and lists of them as TOML; their JSON is the same."""
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items() if value is not None)
    return "\n".join([f"# {header}", *lines]) + "\n"


PORT = 8000
MAX_MESSAGE = 1_000_000_000  # bytes
MADE = "Made by unskew federation init."

_RECIPE = """# What `unskew federation run` trains when it is given no other recipe.
# data = "nodes": the images are on the nodes, none on the server.
data = "nodes"
method = "fedavg + ccvr + secure"
rounds = 10
epochs = 2
batch = 32
lr = 0.02
seed = 0
"""


def initialise(
    path: Path,
    *,
    nodes: Sequence[str] = (),
    keys: Mapping[str, Path] | None = None,
    host: str | None = None,
    port: int | None = None,
    renew: bool = False,
    renew_authority: bool = False,
) -> FederationFolder:
    """Create a federation's folder, or add nodes to an existing one; no existing file is overwritten.

    ``host`` and ``port`` are where the nodes reach the server. ``renew`` issues a new server certificate and
    drops an authority that was replaced. ``renew_authority`` creates a new authority; both are trusted until the next
    ``renew``, so that every node can get the new ca.crt in the meantime.
    """
    path, keys = path.absolute(), dict(keys or {})
    new = not (path / FEDERATION).exists()
    if new:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists but is not a federation's folder; give one, or a new or empty folder")
        settings = _settings("127.0.0.1" if host is None else host, PORT if port is None else port)
        federation = FederationFolder(path, settings)
    else:
        federation = read_federation(path)
        settings = federation.settings
        if host not in (None, settings.host) or port not in (None, settings.port):
            raise UserError(
                f"--host and --port: this federation uses {settings.host}:{settings.port}; to change it, edit "
                f"{FEDERATION} and the nodes' {NODE}, then run unskew federation init DIR --renew"
            )
    names, known = [*nodes, *keys], federation.public_keys()
    for name in names:
        if not _NAME.fullmatch(name):  # it is a file name and appears in logs and messages
            raise UserError(f"node name {brief(name, 40)}: give at most 32 letters, digits, dots, dashes, underscores")
        if name in known or names.count(name) > 1:
            raise UserError(f"node {name} exists already; to give it a new key, remove nodes/{name}.pub first")
    for file in keys.values():
        network.public_pem(file)  # checked before anything is written
    if renew and renew_authority:
        raise UserError("give --renew-authority first, and --renew once every node has the new ca.crt")
    if new:
        make_private(*(path / name for name in ("ca", "server", "nodes")))
        _make_authority(federation, b"")
        refresh(federation)
        write_whole(path / "recipe.toml", _RECIPE.encode())
    if new or renew:
        _certify(federation)
    if new:
        write_settings(path / FEDERATION, federation.settings)  # last: it marks the folder as complete
    elif renew_authority:
        _make_authority(federation, network.first_certificate(federation.authority.read_bytes()))
    for name in names:
        _add_node(federation, name, keys[name].read_bytes() if name in keys else None)
    # every node gets all nodes' keys, which exposes members that the server invents; a node that made its own key signs
    # with it, unless signing.pub has another public key
    roster = {
        name: read_content(federation.node(name) / "signing.pub") or file.read_bytes()
        for name, file in federation.public_keys().items()
    }
    for file in (path / "nodes").glob(f"*/{NODE}"):
        write_roster(file.with_name(ROSTER), roster)
    return federation


def renew_secrets(federation: FederationFolder) -> None:
    """Renew the secret of Flower's local port, and its certificate, which has an authority of its own.

    Flower's command reads its token from the place for account credentials.
    """
    make_private(federation.secret.parent)
    secret = secrets.token_bytes(32)
    write_whole(federation.secret, secret, secret=True)
    signer = network.make_authority("local")
    pair = network.make_server_certificate(signer, ["localhost", "127.0.0.1"])
    write_whole(federation.local_authority, signer.public)
    write_whole(federation.local_key, pair.private, secret=True)
    write_whole(federation.local_certificate, pair.public)
    account = f"flower.account-auth.127.0.0.1:{federation.settings.control_port}"
    shown = token(secret, "operator")
    values = {"authn-type": "oidc", "oidc-access-token": shown, "oidc-refresh-token": shown}
    encoded = {f"{account}.{name}": base64.b64encode(value.encode()).decode() for name, value in values.items()}
    content = json.dumps(encoded).encode()  # JSON is YAML
    write_whole(federation.flower_home / "credentials.yaml", content, secret=True)


def forget(federation: FederationFolder) -> None:
    """Wipe Flower's database and its write-ahead log, which contain models and updates."""
    for name in ("", "-wal", "-shm", "-journal"):
        wipe(federation.database.with_name(federation.database.name + name))


def make_private(*folders: Path) -> None:
    """Create folders that only this user can open."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o077:
                folder.chmod(0o700)
        except OSError as error:
            raise UserError(f"{folder} cannot be made private: {error.strerror or error}") from error


def check_secret(file: Path) -> None:
    """Make a private key readable by this user only; refuse another user's."""
    about = file.stat()
    if about.st_uid not in (os.getuid(), 0):
        raise UserError(f"{file} belongs to another user; change its owner to the user who runs this command")
    if about.st_mode & 0o077:
        file.chmod(0o600)


def _certify(federation: FederationFolder) -> None:
    """Make the server's certificate; an authority that was replaced is no longer trusted."""
    key, certificate = read_content(federation.authority_key), read_content(federation.authority)
    if key is None or certificate is None:
        raise UserError(f"{federation.authority_key} is missing, which signs certificates; restore it from a backup")
    signer = network.Pair(network.first_certificate(certificate), key)
    pair = network.make_server_certificate(signer, [federation.settings.host, "localhost", "127.0.0.1"])
    write_whole(federation.key, pair.private, secret=True)
    write_whole(federation.certificate, pair.public)
    if signer.public != certificate:
        _write_authority(federation, signer.public)


def _make_authority(federation: FederationFolder, before: bytes) -> None:
    """Create an authority for the next certificate, trusted in addition to the one before."""
    signer = network.make_authority(federation.settings.host)
    write_whole(federation.authority_key, signer.private, secret=True)
    _write_authority(federation, signer.public + before)


def _write_authority(federation: FederationFolder, content: bytes) -> None:
    write_whole(federation.authority, content)
    for name in federation.public_keys():
        write_whole(federation.node(name) / "ca.crt", content)


def _add_node(federation: FederationFolder, name: str, public: bytes | None) -> None:
    """Write a node's folder and register its public key; without one, make its keys here."""
    folder, settings = federation.node(name), federation.settings
    make_private(folder)
    if public is None:
        key, signing = network.make_node_key(), network.make_node_key()  # the one that connects does not sign sums
        write_whole(folder / "node.key", key.private, secret=True)
        write_whole(folder / "signing.key", signing.private, secret=True)
        write_whole(folder / "signing.pub", signing.public)
        public = key.public
    write_whole(folder / "ca.crt", federation.authority.read_bytes())
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    write_settings(folder / NODE, NodeSettings(name, f"{host}:{settings.port}"))
    write_whole(federation.path / "nodes" / f"{name}.pub", public)


def write_roster(path: Path, keys: Mapping[str, bytes]) -> None:
    """Write each node's name and OpenSSH public key, one per line."""
    lines = [f"{name} {' '.join(key.decode().split()[:2])}" for name, key in sorted(keys.items())]
    about = "# The nodes of this federation. A secure sum with anyone else is refused."
    write_whole(path, "\n".join([about, *lines, ""]).encode())


def _settings(host: str, port: int) -> FederationSettings:
    if not 1 <= port <= 65533:
        raise UserError(f"--port {port}: give a number from 1 to 65533; the next two ports are used too")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        if not host or len(host) > 253 or not all(part.replace("-", "").isalnum() for part in host.split(".")):
            raise UserError(f"--host {brief(host)}: give the name or address by which nodes reach the server") from None
        local = False
    return FederationSettings(host, port, "127.0.0.1" if local else "0.0.0.0", port + 1, MAX_MESSAGE, port + 2)


SERVER_APP = "unskew_node.server_app:app"
CLIENT_APP = "unskew_node.client_app:app"
APP_PACKAGE = b'"""The app that Flower loads on the server and sends to the nodes."""\n'

# the keys of --run-config: Flower accepts no others; "" and -1 mean not given
RUN_CONFIG: dict[str, Any] = {"recipe": "", "out": "", "resume": False, "check": False}
RUN_CONFIG |= {"deadline": -1.0, "min-replies": -1, "wait": -1.0, "submitter": ""}

_LICENSE = b"Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0\n"

# flwr loads the app when a run is submitted; this module does not import PyTorch
_SERVER = b'''"""The server's app; its code is in the installed package."""

from unskew.console import federated

app = federated.app
'''

_PROJECT = """# Made by unskew federation init; rewritten whenever the server starts.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "unskew-federation"
version = "{own}"
description = "Federated training on skewed image data"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>={flower},<{next}"]

[tool.flwr.app]
publisher = "unskew"
fab-format-version = 1
flwr-version-target = "{flower}"

[tool.flwr.app.components]
serverapp = "{server}"
clientapp = "{client}"

[tool.flwr.app.config]
{config}
"""


def refresh(federation: FederationFolder) -> None:
    """Rewrite what depends on the folder's path and the installed versions: the app, and Flower's own settings."""
    path, installed = federation.path, flower_version()
    major, minor = installed.split(".")[:2]
    try:
        own = version("unskew")
    except PackageNotFoundError:  # run from its source
        own = "0.0.0"
    recipe, out = str(path / "recipe.toml"), str(path / "runs" / "first")  # what a plain ``flwr run`` uses
    settings = {**RUN_CONFIG, "recipe": recipe, "out": out}
    config = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    project = _PROJECT.format(
        own=own, flower=installed, next=f"{major}.{int(minor) + 1}", server=SERVER_APP, client=CLIENT_APP, config=config
    )
    address = f"127.0.0.1:{federation.settings.control_port}"
    connection = toml({"address": address, "root-certificates": str(federation.local_authority)}, "This server.")
    flower = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{connection}'
    write_whole(federation.flower_home / "config.toml", flower.encode())
    write_whole(federation.app / "pyproject.toml", project.encode())
    write_whole(federation.app / "LICENSE", _LICENSE)
    code = {"__init__.py": APP_PACKAGE, "server_app.py": _SERVER, "client_app.py": client_app_source()}
    for name, content in code.items():
        write_whole(federation.app / "unskew_node" / name, content)


def client_app_source() -> bytes:
    """The source of the nodes' app; not imported, because its package imports PyTorch."""
    return (Path(__file__).parent.parent / "engines" / "flower" / "client_app.py").read_bytes()


def flower_version() -> str:
    """The installed version of Flower."""
    try:
        return version("flwr")
    except PackageNotFoundError as error:
        raise UserError('flwr is not installed; pip install "unskew[flower]"') from error
