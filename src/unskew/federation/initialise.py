"""``unskew federation init``: the folder of a new federation, and more nodes for one that is there."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unskew.core.errors import UserError, brief
from unskew.core.files import read_content, write_whole
from unskew.federation import certificates
from unskew.federation.flower import write_app
from unskew.federation.folder import (
    CONNECTION,
    FEDERATION,
    NODE,
    Federation,
    NodeSettings,
    Settings,
    node_name,
    read_federation,
    toml,
    write_settings,
)

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


@dataclass(frozen=True)
class Made:
    """What ``initialise`` did."""

    federation: Federation
    new: bool
    nodes: tuple[str, ...]  # added now, with a folder to hand over
    keys: tuple[str, ...]  # added now, by a public key that the node made itself
    renewed: bool  # the server's certificate


def initialise(
    path: Path,
    *,
    nodes: Sequence[str] = (),
    keys: Mapping[str, Path] | None = None,
    host: str | None = None,
    port: int | None = None,
    renew: bool = False,
) -> Made:
    """Make a federation's folder, or add nodes to the one that is there; nothing that exists is overwritten.

    ``host`` and ``port`` are where the nodes reach the server. ``renew`` makes a new certificate for the server.
    """
    path, keys = path.absolute(), dict(keys or {})
    new = not (path / FEDERATION).exists()
    if new:
        _check_free(path)
        federation = Federation(path, _settings("127.0.0.1" if host is None else host, PORT if port is None else port))
    else:
        federation = read_federation(path)
        _check_same(federation.settings, host, port)
    _check_names(federation, [*nodes, *keys])
    pems = {name: certificates.public_pem(file) for name, file in keys.items()}  # checked before anything is written
    if new:
        _new(federation)
    if new or renew:
        _certify(federation)
    for name in nodes:
        _add_node(federation, name)
    for name in pems:
        write_whole(path / "nodes" / f"{name}.pub", keys[name].read_bytes())
        _hand_over(federation, name)
    return Made(federation, new, tuple(nodes), tuple(keys), renew and not new)


def write_flower_home(federation: Federation) -> None:
    """Flower's settings: where the server is, and the authority that signed its certificate."""
    connection = toml(
        {
            "address": f"127.0.0.1:{federation.settings.control_port}",
            "root-certificates": str(federation.authority),
        },
        "The server of this federation, on its own machine.",
    )
    content = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{connection}'
    write_whole(federation.flower_home / "config.toml", content.encode())


def refresh(federation: Federation) -> None:
    """Write again what follows from where the folder is and which versions are installed."""
    write_app(
        federation.app,
        home=federation.flower_home,
        connection=CONNECTION,
        recipe=federation.path / "recipe.toml",
        out=federation.path / "runs" / "first",
    )
    write_flower_home(federation)


def _new(federation: Federation) -> None:
    signer = certificates.authority(federation.settings.host)
    write_whole(federation.authority_key, signer.key, secret=True)
    write_whole(federation.authority, signer.certificate)
    refresh(federation)
    write_whole(federation.path / "recipe.toml", _RECIPE.encode())
    write_settings(federation.path / FEDERATION, federation.settings, MADE)  # last: with it, the folder is whole


def _certify(federation: Federation) -> None:
    key, certificate = read_content(federation.authority_key), read_content(federation.authority)
    if key is None or certificate is None:
        raise UserError(f"{federation.authority_key} is missing, and nothing else can sign a new certificate")
    hosts = [federation.settings.host, "localhost", "127.0.0.1"]
    pair = certificates.server_certificate(certificates.Pair(certificate, key), hosts)
    write_whole(federation.key, pair.key, secret=True)
    write_whole(federation.certificate, pair.certificate)


def _add_node(federation: Federation, name: str) -> None:
    key = certificates.node_key()
    write_whole(federation.node(name) / "node.key", key.private, secret=True)
    _hand_over(federation, name)
    write_whole(federation.path / "nodes" / f"{name}.pub", key.public)


def _hand_over(federation: Federation, name: str) -> None:
    """What a node needs besides its key."""
    settings, folder = federation.settings, federation.node(name)
    write_whole(folder / "ca.crt", federation.authority.read_bytes())
    server = f"[{settings.host}]" if ":" in settings.host else settings.host
    write_settings(folder / NODE, NodeSettings(name, f"{server}:{settings.port}"), MADE)


def _settings(host: str, port: int) -> Settings:
    if not 1 <= port <= 65534:
        raise UserError(
            f"--port {port}: give a number from 1 to 65534; the next one is used too, on this machine alone"
        )
    local = host == "localhost"
    try:
        local = local or ipaddress.ip_address(host).is_loopback
    except ValueError:
        if not host or len(host) > 253 or not all(part.replace("-", "").isalnum() for part in host.split(".")):
            raise UserError(f"--host {brief(host)}: give the name or address by which nodes reach the server") from None
    return Settings(host, port, "127.0.0.1" if local else "0.0.0.0", port + 1, MAX_MESSAGE)


def _check_free(path: Path) -> None:
    if (path / NODE).exists():
        raise UserError(f"{path} is a node's folder; give a folder that is new or empty")
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; give a folder that is new or empty")
    if path.exists() and any(path.iterdir()):
        raise UserError(f"{path} has files and no {FEDERATION}; give a folder that is new or empty")


def _check_same(settings: Settings, host: str | None, port: int | None) -> None:
    for name, given, there in (("host", host, settings.host), ("port", port, settings.port)):
        if given is not None and given != there:
            raise UserError(
                f"--{name} {given}: this federation has {there}, and its nodes know it; edit {FEDERATION} and the "
                f"nodes' {NODE}, then run unskew federation init DIR --renew"
            )


def _check_names(federation: Federation, names: Sequence[str]) -> None:
    there = federation.public_keys()
    for name in names:
        if node_name(name) in there:
            raise UserError(f"node {name} is there already; to give it a new key, remove {there[name]} first")
        if names.count(name) > 1:
            raise UserError(f"node {name} is named twice")
