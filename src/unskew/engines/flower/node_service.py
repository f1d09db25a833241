"""The node service: a process beside Flower's SuperNode that has PyTorch, the data and the clients' memories.

``python -m unskew.engines.flower.node_service SETTINGS.toml`` serves in the foreground until SIGTERM. It listens on a
Unix socket that only its owner can open.
"""

import os
import signal
import socket
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unskew.core.errors import Ended, UserError
from unskew.core.files import read_content
from unskew.core.machine import ready_device
from unskew.engines.blueprint import keep_freed_memory
from unskew.engines.codec import MAX_BODY, MAX_HEADER, Envelope
from unskew.engines.flower.node import Node, NodeSource, read_node_data
from unskew.engines.flower.policy import MEGABYTE, POLICY, Policy, read_policy
from unskew.privacy.signing import ROSTER, Registered

LENGTH = 8  # bytes of a length in front of a part, as in client_app
CHUNK = 2**20
PATIENCE = 60.0  # seconds that a line may be silent while a message is coming

TEXTS = ("name", "data", "data_dir", "partition", "device", "folder", "socket", "policy", "key", "roster")
NAMES = (*TEXTS, "client", "clients", "seed", "plugins")


@dataclass(frozen=True)
class NodeSettings:
    """What a node's settings file says."""

    name: str
    source: NodeSource
    folder: Path
    socket: Path
    device: str = "cpu"
    plugins: tuple[str, ...] = ()
    policy: Path | None = None  # None: policy.toml beside the folder, where there is one
    key: Path = Path("node.key")  # with which it signs its part in secure sums
    roster: Path = Path(ROSTER)  # the nodes whose signatures it accepts there


def read_settings(file: Path) -> NodeSettings:
    """The settings in a TOML file."""
    content = read_content(file, 2**20)
    if content is None:
        raise UserError(f"there is no settings file {file}")
    try:
        values = tomllib.loads(content.decode())
    except ValueError as error:
        raise UserError(f"{file} is not TOML: {error}") from error
    if odd := [name for name in values if name not in NAMES]:
        raise UserError(f"{file}: there is no setting {odd[0]!r}; there are: {', '.join(NAMES)}")
    for name in TEXTS:
        if not isinstance(values.get(name, ""), str) or (name in ("name", "data", "folder") and not values.get(name)):
            raise UserError(f"{file}: {name} must be a text")
    folder = Path(values["folder"])
    source = NodeSource(
        values["data"], values.get("data_dir") or os.environ.get("UNSKEW_DATA"), values.get("partition") or None,
        _whole(file, "client", values.get("client", [])), next(iter(_whole(file, "clients", values.get("clients", [])))
        , None) if values.get("clients") is not None else None,
        next(iter(_whole(file, "seed", values.get("seed", 0)))),
    )  # fmt: skip
    plugins = values.get("plugins", [])
    if not isinstance(plugins, list) or not all(isinstance(each, str) for each in plugins):
        raise UserError(f"{file}: plugins must be a list of texts")
    place = Path(values.get("socket") or folder / "node.sock")
    policy = Path(values["policy"]) if values.get("policy") else None
    separate = file.parent / "signing.key"
    own = separate if separate.exists() else file.parent / "node.key"
    return NodeSettings(
        values["name"], source, folder, place, values.get("device") or "cpu", tuple(plugins), policy,
        Path(values.get("key") or own), Path(values.get("roster") or file.parent / ROSTER),
    )  # fmt: skip


def own_policy(settings: NodeSettings) -> Policy:
    """The policy that the owner wrote; the default where there is none."""
    beside = settings.folder.absolute().parent / POLICY
    if settings.policy is None and not beside.exists():
        return Policy()
    return read_policy(settings.policy or beside)


def serve(settings: NodeSettings, say: Callable[[str], None]) -> None:
    """Answer one message after another until the process is ended."""
    keep_freed_memory()
    ready_device(settings.device)
    policy = own_policy(settings)
    data = read_node_data(settings.name, settings.source)
    try:
        registered = Registered.read(settings.key, settings.roster)
    except UserError as error:
        registered = None
        say(f"secure sums are refused: {error}")
    node = Node(
        data, settings.folder, device=settings.device, plugins=settings.plugins, registered=registered, say=say,
        policy=policy,
    )  # fmt: skip
    with listening(settings.socket) as line:
        facts = data.describe()
        say(
            f"ready: node {settings.name} with {sum(each.examples for each in facts.clients):,} training images, "
            f"{len(facts.classes)} classes, at {settings.socket}"
        )
        while True:
            connection, _ = line.accept()
            with connection, suppress(ConnectionError, TimeoutError):
                connection.settimeout(PATIENCE)
                try:
                    answer_one(connection, node.answer, policy.max_message * MEGABYTE)
                except Oversized as error:
                    node.refusals.count(str(error))


class Oversized(ConnectionError):
    """A message that announces more bytes than the policy allows; none of them is read."""


def answer_one(connection: socket.socket, answer: Callable[[Envelope], Envelope], most: int = MAX_BODY) -> None:
    """One message and its answer over a connection; too large a message is cut off."""
    parts = []
    for limit in (MAX_HEADER, most):
        size = int.from_bytes(_exactly(connection, LENGTH), "little")
        if size > limit:
            raise Oversized(f"oversized: it announces {size:,} bytes, {limit:,} are the most")
        parts.append(_exactly(connection, size))
    reply = answer(Envelope(*parts))
    for part in (reply.header, reply.body):
        connection.sendall(len(part).to_bytes(LENGTH, "little"))
        if part:
            connection.sendall(part)


def listening(place: Path) -> socket.socket:
    """A socket at this place that only its owner can open, and the group of a folder that is open to its group.

    One that a killed service left is replaced.
    """
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, suppress(OSError):
            other.connect(str(place))
            raise UserError(f"another node service answers at {place}; give each its own folder")
        place.unlink()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        line.bind(str(place))
        if place.parent.stat().st_mode & 0o010:
            place.chmod(0o660)
    except OSError as error:
        line.close()
        raise UserError(f"{place} cannot be a socket: {error.strerror or error}; give a shorter path") from error
    finally:
        os.umask(before)
    line.listen()
    return line


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray()  # grows with what arrives: an announced size allocates nothing
    while len(content) < size:
        piece = connection.recv(min(CHUNK, size - len(content)))
        if not piece:
            raise ConnectionError("the line was closed in the middle of a message")
        content += piece
    return bytes(content)


def _whole(file: Path, name: str, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(type(each) is int and each >= 0 for each in values):
        raise UserError(f"{file}: {name} must be a whole number, or a list of them")
    return tuple(values)


def _tell(line: str) -> None:
    sys.stdout.write(line if line.startswith("ready") else f"{datetime.now(UTC):%H:%M:%S} {line}")
    sys.stdout.write("\n")
    sys.stdout.flush()


def _end(number: int, frame: Any) -> None:
    raise Ended(130 if number == signal.SIGINT else 0)


def main(arguments: list[str]) -> int:
    """Serve with the settings file that is named; the exit code."""
    try:
        if len(arguments) != 1:
            raise UserError("give the settings file: python -m unskew.engines.flower.node_service SETTINGS.toml")
        serve(read_settings(Path(arguments[0])), _tell)
    except Ended as ended:
        return ended.code
    except UserError as error:
        sys.stderr.write(f"unskew: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    sys.exit(main(sys.argv[1:]))
