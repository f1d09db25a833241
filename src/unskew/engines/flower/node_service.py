"""The node service: the process next to Flower's SuperNode with PyTorch, the data and the clients' memories.

``python -m unskew.engines.flower.node_service SETTINGS.toml`` serves in the foreground until SIGTERM, on a Unix socket
that only its owner can open.
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
from unskew.engines.flower.messages import MAX_BODY, MAX_HEADER, Envelope
from unskew.engines.flower.node import Node, read_node_data
from unskew.engines.flower.policy import MEGABYTE, POLICY, Policy, read_policy
from unskew.privacy.signing import ROSTER, Registered

LENGTH = 8  # bytes of the length in front of a part, as in client_app
CHUNK = 2**20
TIMEOUT = 60.0  # seconds that a connection may be silent in the middle of a message

Name = Annotated[str, Meta(min_length=1)]
Whole = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True)
class ServiceSettings:
    """A node service's settings; ``read_settings`` fills in empty paths."""

    name: Name
    data: Name
    folder: Name
    data_dir: str = ""
    partition: str = ""
    client: Whole | tuple[Whole, ...] = ()  # this node's clients in the partition
    clients: Whole | None = None  # the partition's number of clients
    seed: Whole = 0
    device: str = "cpu"
    plugins: tuple[str, ...] = ()
    socket: str = ""
    policy: str = ""
    key: str = ""  # signs its part in secure sums
    roster: str = ""  # the nodes whose signatures it accepts in secure sums


def read_settings(file: Path) -> ServiceSettings:
    """Read a settings file. Missing paths default to files next to it or in the node's folder."""
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
    """Answer messages, one at a time, until the process ends."""
    keep_freed_memory()
    ready_device(settings.device)
    policy = read_policy(Path(settings.policy)) if settings.policy else Policy()
    policy = replace(policy, plugins=dict.fromkeys(settings.plugins, "") | policy.plugins)
    data = read_node_data(
        settings.name, settings.data, data_dir=settings.data_dir or os.environ.get("UNSKEW_DATA"),
        partition=settings.partition or None, of=settings.clients, seed=settings.seed,
        clients=settings.client if isinstance(settings.client, tuple) else (settings.client,),
    )  # fmt: skip
    try:
        registered = Registered.read(Path(settings.key), Path(settings.roster))
    except UserError as error:
        registered = None
        say(f"secure sums are refused: {error}")
    node = Node(data, Path(settings.folder), device=settings.device, registered=registered, say=say, policy=policy)
    with listen(Path(settings.socket)) as listener:
        count = sum(len(client.train) for client in data.clients)
        held = f"{count:,} training images, {len(data.images.classes)} classes"
        say(f"ready: node {settings.name} with {held}, at {settings.socket}")
        while True:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError, TimeoutError):
                connection.settimeout(TIMEOUT)
                try:
                    answer_one(connection, node.answer, policy.max_message * MEGABYTE)
                except Oversized as error:
                    node.count_refusal(str(error))


class Oversized(ConnectionError):
    """A message announces more bytes than the policy allows. They are not read."""


def answer_one(connection: socket.socket, answer: Callable[[Envelope], Envelope], max_body: int = MAX_BODY) -> None:
    """Read one message from a connection and answer it."""
    parts = []
    for limit in (MAX_HEADER, max_body):
        size = int.from_bytes(_read_exactly(connection, LENGTH), "little")
        if size > limit:
            raise Oversized(f"oversized: it announces {size:,} bytes; the limit is {limit:,}")
        parts.append(_read_exactly(connection, size))
    reply = answer(Envelope(*parts))
    for part in (reply.header, reply.body):
        connection.sendall(len(part).to_bytes(LENGTH, "little"))
        if part:
            connection.sendall(part)


def listen(path: Path) -> socket.socket:
    """Listen on a Unix socket for its owner only, or for the group too if the folder is open to it.

    Replaces the socket of a killed service.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, suppress(OSError):
            other.connect(str(path))
            raise UserError(f"another node service answers at {path}; give each its own folder")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        if path.parent.stat().st_mode & 0o010:
            path.chmod(0o660)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot open a socket at {path}: {error.strerror or error}; give a shorter path") from error
    finally:
        os.umask(before)
    listener.listen()
    return listener


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray()  # grows as bytes arrive: an announced size allocates nothing
    while len(content) < size:
        piece = connection.recv(min(CHUNK, size - len(content)))
        if not piece:
            raise ConnectionError("the connection closed in the middle of a message")
        content += piece
    return bytes(content)


def _print_line(line: str) -> None:
    print(line if line.startswith("ready") else f"{datetime.now(UTC):%H:%M:%S} {line}", flush=True)  # noqa: T201


def _handle_signal(number: int, frame: Any) -> None:
    raise Ended(130 if number == signal.SIGINT else 0)


def main(arguments: list[str]) -> int:
    """Serve with the given settings file and return the exit code."""
    try:
        serve(read_settings(Path(arguments[0] if arguments else "service.toml")), _print_line)
    except Ended as ended:
        return ended.code
    except UserError as error:
        sys.stderr.write(f"unskew: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _handle_signal)
    signal.signal(signal.SIGINT, _handle_signal)
    sys.exit(main(sys.argv[1:]))
