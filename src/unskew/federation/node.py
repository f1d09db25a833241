"""A node of a federation: its service, which has the data, and Flower's SuperNode, which has the connection."""

import base64
import datetime
import hashlib
import http.client
import os
import re
import ssl
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unskew.core.child import Child
from unskew.core.errors import UserError
from unskew.core.files import read_content, write_again
from unskew.core.plugins import require_extra
from unskew.federation import flower, network
from unskew.federation.folder import Node
from unskew.federation.gateway import CLOCK, NOT_REGISTERED
from unskew.federation.network import SECONDS, host_and_port
from unskew.federation.processes import Group, claim

_PATH = "/v1/fleet/deactivate-node"
_TYPE = "application/protobuf"


def remember(node: Node, number: str) -> None:
    """Write down the number under which the server knows this node."""
    write_again(_file(node), number.encode())


def say_farewell(node: Node) -> bool:
    """Tell the server that the life with the remembered number is over; whether there was one, and it has heard it."""
    content = read_content(_file(node), 100) or b""
    if not content.isdigit():
        return False
    number = int(content)
    _file(node).unlink(missing_ok=True)
    try:
        return _post(node, _varint_field(1, number)) == 200
    except (OSError, http.client.HTTPException, ValueError):
        return False


def _post(node: Node, body: bytes) -> int:
    host, port = host_and_port(node.settings.server)
    trusted = ssl.create_default_context(cafile=str(node.authority))
    connection = http.client.HTTPSConnection(host, port, timeout=SECONDS, context=trusted)
    try:
        connection.request("POST", _PATH, body, {"content-type": _TYPE, "accept": _TYPE, **_signed(node)})
        return connection.getresponse().status
    finally:
        connection.close()


def _signed(node: Node) -> dict[str, str]:
    """The headers by which Flower knows a node: its key, the time, the time signed."""
    s: Any = require_extra("cryptography.hazmat.primitives.serialization", "flower")
    ec: Any = require_extra("cryptography.hazmat.primitives.asymmetric.ec", "flower")
    hashes: Any = require_extra("cryptography.hazmat.primitives.hashes", "flower")
    key = s.load_ssh_private_key(node.key.read_bytes(), None)
    public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    now = datetime.datetime.now(datetime.UTC).isoformat()
    signature = key.sign(now.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    return {
        "flwr-public-key": base64.b64encode(public).decode(),
        "flwr-timestamp": now,
        "flwr-signature": base64.b64encode(signature).decode(),
    }


def _varint_field(place: int, value: int) -> bytes:
    """A whole number as protobuf writes it."""
    parts = [place << 3]
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _file(node: Node) -> Path:
    return node.path / "last-life"


SERVICE = "unskew.engines.flower.node_service"
READY_SECONDS = 600.0  # that reading the data may take
TAKEN_SECONDS = 120.0  # that Flower may hold the place of a node that was killed, its own limit is 60
MOST_RESTARTS = 5
_RAISED = '/flower-supernode", line '  # in a traceback: of Flower's part itself, not of an app
_NUMBER = re.compile(r"SuperNode ID: ([0-9]{1,20})$")
PARTS = ("both", "service", "supernode")

Say = Callable[[str], None]


def node_mark(node: Node, part: str = "both") -> str:
    """By which the processes of this node are known, or of one part that runs by itself."""
    return f"node:{node.path}" if part == "both" else f"node:{node.path}:{part}"


def socket_path(node: Node) -> Path:
    """Where the two parts meet: in the node's folder, or in a private one below /tmp where that path is too long."""
    inside = node.path / "service.sock"
    if len(os.fsencode(inside)) <= 100:  # systems allow 103 to 107 bytes
        return inside
    short = hashlib.sha256(os.fsencode(node.path)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"unskew-{os.getuid()}-{short}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise UserError(f"{folder} is not this user's alone; remove it, or move {node.path} to a shorter path")
    return folder / "service.sock"


def attend(node: Node, say: Say, part: str = "both") -> None:
    """Run a node, or one of its two parts, until an interrupt comes."""
    if part != "service":
        _check_key(node)
    mark = node_mark(node, part)
    claim(mark, f"node {node.settings.name} of {node.path}", say)
    with Group(mark, node.logs, node.path) as group:
        _Node(node, group, say).run(part)


class _Node:
    """The programs of a node."""

    def __init__(self, node: Node, group: Group, say: Say) -> None:
        self._node, self._group, self._say = node, group, say
        self._service: Child | None = None
        self._link: Child | None = None
        self._ready = self._connected = False
        self._broken = False  # whether Flower's part has raised: its process stays, and does nothing any more
        self._doubt = self._lost = False  # whether the server may be gone, whether it is and that has been said
        self._restarts = 0
        self._refused_since: float | None = None

    def run(self, part: str) -> None:
        """Start, then watch; returns never."""
        if part != "supernode":
            self._start_service()
        if part != "service":
            self._reach()
            self._start_link()
        while True:
            time.sleep(0.5)
            if self._doubt:
                self._look_at_server()
            if self._service is not None and self._service.code is not None:
                self._count_restart(self._service)
                self._start_service()
            if self._link is not None and (self._broken or self._link.code is not None):
                self._link.terminate()
                self._link.end()
                self._after(self._link)
                self._reach()
                self._start_link()

    def _start_service(self) -> None:
        node = self._node
        if not node.service_settings.exists():
            raise UserError(
                f"{node.service_settings} is missing; give the node its data: unskew federation node --data …"
            )
        self._ready = False
        command = [sys.executable, "-m", SERVICE, str(node.service_settings)]
        child = self._group.start("service", command, flower.environment(node.flower_home), self._heard_service)
        self._service = child
        end = time.monotonic() + READY_SECONDS
        while not self._ready:
            if child.code is not None:
                raise UserError(_reason(child, "the node service ended while it started"))
            if time.monotonic() > end:
                raise UserError(f"the node service is not ready after {READY_SECONDS:.0f} s; see {child.log.path}")
            time.sleep(0.1)

    def _heard_service(self, line: str) -> None:
        if line.startswith("ready"):
            self._ready = True
        self._say(line)

    def _reach(self) -> None:
        """Until the server answers with the right certificate."""
        said = False
        while True:
            try:
                network.greet(self._node.settings.server, self._node.authority)
            except network.NotReached as error:
                if not said:
                    self._say(f"{self._node.settings.server} does not answer ({error}); trying until it does")
                said = True
                time.sleep(2.0)
            else:
                return

    def _start_link(self) -> None:
        node, self._connected, self._broken = self._node, False, False
        say_farewell(node)
        command = flower.supernode(node, port=network.free_port(), socket=socket_path(node))
        self._link = self._group.start(
            "supernode", command, flower.node_environment(node.flower_home), self._heard_link
        )

    def _heard_link(self, line: str) -> None:
        if (found := _NUMBER.search(line)) and not self._connected:
            self._connected, self._refused_since = True, None
            remember(self._node, found[1])
            self._say(f"connected to {self._node.settings.server} as {self._node.settings.name}")
        elif _RAISED in line:
            self._broken = True
        elif "Connection attempt failed" in line:  # to the server, or between the programs of the node
            self._doubt = True

    def _look_at_server(self) -> None:
        """Flower's part tries by itself until the server is back; we say that it does."""
        try:
            network.greet(self._node.settings.server, self._node.authority)
        except network.NotReached as error:
            if not self._lost:
                self._say(f"the server does not answer ({error}); trying until it does")
            self._lost = True
            time.sleep(2.0)
            return
        if self._lost:
            self._say("the server answers again")
        self._doubt = self._lost = False

    def _after(self, link: Child) -> None:
        """What to do when Flower's part has ended: try again, or say what a person has to do."""
        words = link.log_end(40)
        if NOT_REGISTERED in words:
            name = self._node.settings.name
            raise UserError(
                f"the server refuses this node: {NOT_REGISTERED}; on the server: unskew federation init DIR --key "
                f"{name}={name}.pub, or hand over the folder DIR/nodes/{name} anew"
            )
        if "version mismatch" in words:
            raise UserError(f"server and node have different versions of Flower:\n{link.log_end()}")
        if "Failed to activate" in words:
            self._wait_for_place()
            return
        if CLOCK in words:
            self._say(next(line for line in words.splitlines() if CLOCK in line) + "; set it; trying again")
            time.sleep(20.0)
            return
        self._count_restart(link)

    def _wait_for_place(self) -> None:
        """Flower lets nobody take the place of a node that ended without a word until its heartbeat has run out."""
        now = time.monotonic()
        if self._refused_since is None:
            self._refused_since = now
            self._say("the server still waits for this node's last life, for a minute at most; trying until then")
        elif now - self._refused_since > TAKEN_SECONDS:
            raise UserError("the server has another node with this key; give every machine a key of its own")
        time.sleep(3.0)

    def _count_restart(self, child: Child) -> None:
        if time.monotonic() - child.began > 60:
            self._restarts = 0
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise UserError(_reason(child, f"{child.name} ends again and again"))
        self._say(f"{child.name} ended with code {child.code} and is started again; see {child.log.path}")
        time.sleep(min(2.0**self._restarts, 20.0) - 1.0)


def _reason(child: Child, what: str) -> str:
    """A user's mistake is passed on as the program said it; anything else with the end of its log."""
    words = child.log_end()
    if child.code == 2 and "unskew: " in words:
        return words[words.rindex("unskew: ") + len("unskew: ") :]
    return f"{what}, with code {child.code}; {child.log.path} ends with:\n{words}"


def _check_key(node: Node) -> None:
    for path, remedy in (
        (node.key, "make it with: ssh-keygen -t ecdsa -b 384 -N '' -f node.key, and hand in node.key.pub"),
        (node.authority, "it comes from the server's machine, in DIR/nodes/NAME"),
    ):
        if not path.exists():
            raise UserError(f"{path} is missing; {remedy}")
    network.host_and_port(node.settings.server)
    socket_path(node)
    flower.program("flower-supernode")
