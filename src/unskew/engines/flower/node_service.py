"""The node service: a process next to Flower's SuperNode that has PyTorch, the data and the clients' memories.

``python -m unskew.engines.flower.node_service SETTINGS.toml`` serves in the foreground until SIGTERM. It listens on a
Unix socket that only its owner can open.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from unskew.core.errors import Ended, UserError
from unskew.core.files import toml_record
from unskew.core.machine import ready_device
from unskew.engines.blueprint import keep_freed_memory
from unskew.engines.codec import MAX_BODY, MAX_HEADER, Envelope
from unskew.engines.flower.node import Node, NodeSource, read_node_data
from unskew.engines.flower.policy import MEGABYTE, POLICY, Policy, read_policy
from unskew.privacy.signing import ROSTER, Registered

LENGTH = 8  # bytes of a length in front of a part, as in client_app
CHUNK = 2**20
PATIENCE = 60.0  # seconds that a line may be silent while a message is coming

Name = Annotated[str, Meta(min_length=1)]
Whole = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class ServiceSettings:
    """What a node's service is started with; relative defaults are next to the settings file."""

    name: Name
    data: Name
    folder: Name
    data_dir: str = ""
    partition: str = ""
    client: Whole | tuple[Whole, ...] = ()  # this node's clients of the partition
    clients: Whole | None = None  # how many the partition has
    seed: Whole = 0
    device: str = "cpu"
    plugins: tuple[str, ...] = ()
    socket: str = ""
    policy: str = ""
    key: str = ""  # with which it signs its part in secure sums
    roster: str = ""  # the nodes whose signatures it accepts there

    @property
    def source(self) -> NodeSource:
        """Where the data come from."""
        clients = self.client if isinstance(self.client, tuple) else (self.client,)
        data_dir = self.data_dir or os.environ.get("UNSKEW_DATA")
        return NodeSource(self.data, data_dir, self.partition or None, clients, self.clients, self.seed)


def read_settings(file: Path) -> ServiceSettings:
    """The settings in a TOML file."""
    settings = toml_record(file, ServiceSettings, f"there is no settings file {file}")
    separate = file.parent / "signing.key"
    key = separate if separate.exists() else file.parent / "node.key"
    policy = Path(settings.folder).absolute().parent / POLICY
    return replace(
        settings,
        socket=settings.socket or str(Path(settings.folder) / "node.sock"),
        policy=settings.policy or (str(policy) if policy.exists() else ""),
        key=settings.key or str(key),
        roster=settings.roster or str(file.parent / ROSTER),
    )


def serve(settings: ServiceSettings, say: Callable[[str], None]) -> None:
    """Answer one message after another until the process is ended."""
    keep_freed_memory()
    ready_device(settings.device)
    policy = read_policy(Path(settings.policy)) if settings.policy else Policy()
    data = read_node_data(settings.name, settings.source)
    try:
        registered = Registered.read(Path(settings.key), Path(settings.roster))
    except UserError as error:
        registered = None
        say(f"secure sums are refused: {error}")
    node = Node(
        data, Path(settings.folder), device=settings.device, plugins=settings.plugins, registered=registered, say=say,
        policy=policy,
    )  # fmt: skip
    with listen(Path(settings.socket)) as line:
        facts = data.describe()
        say(
            f"ready: node {settings.name} with {sum(client.examples for client in facts.clients):,} training images, "
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


def listen(path: Path) -> socket.socket:
    """A socket at this path that only its owner can open, and the group of a folder that is open to its group.

    One that a killed service left is replaced.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, suppress(OSError):
            other.connect(str(path))
            raise UserError(f"another node service answers at {path}; give each its own folder")
        path.unlink()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        line.bind(str(path))
        if path.parent.stat().st_mode & 0o010:
            path.chmod(0o660)
    except OSError as error:
        line.close()
        raise UserError(f"{path} cannot be a socket: {error.strerror or error}; give a shorter path") from error
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
