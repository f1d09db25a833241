"""A node of a federation: its service, which has the data, and Flower's SuperNode, which has the connection."""

import hashlib
import os
import re
import secrets
import stat
import tempfile
import time
from pathlib import Path

from unskew.core.child import Child
from unskew.core.errors import UserError
from unskew.core.files import read_content, write_again, write_whole
from unskew.federation import flower, network
from unskew.federation.folder import NodeFolder, check_secret, make_private
from unskew.federation.gateway import CLOCK, NOT_REGISTERED
from unskew.federation.processes import PATIENCE, ProcessGroup, Say, claim, describe_end

SERVICE = "unskew.engines.flower.node_service"
READY_SECONDS = 600.0  # that reading the data may take
TAKEN_SECONDS = 120.0  # that the server may keep the session of a killed node open; Flower's own limit is 60
_NODE_ID = re.compile(r"SuperNode ID: ([0-9]{1,20})$")
PARTS = ("both", "service", "supernode")


def node_mark(node: NodeFolder, part: str = "both") -> str:
    """The mark of this node's processes, or of those of one part that runs by itself."""
    return f"node:{node.path}" if part == "both" else f"node:{node.path}:{part}"


def socket_path(node: NodeFolder) -> Path:
    """Where the two parts meet: by node.toml, in the node's folder, or where that path is too long below /tmp."""
    if node.settings.socket:
        return Path(node.settings.socket)
    inside = node.path / "service.sock"
    if len(os.fsencode(inside)) <= 100:  # systems allow 103 to 107 bytes
        return inside
    short = hashlib.sha256(os.fsencode(node.path)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"unskew-{os.getuid()}-{short}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise UserError(f"{folder} must belong to this user alone; remove it, or move {node.path} to a shorter path")
    return folder / "service.sock"


def attend(node: NodeFolder, say: Say, part: str = "both") -> None:
    """Run a node, or one of its two parts, until an interrupt comes."""
    if part != "service":
        for path in (node.key, node.authority):
            if not path.exists():
                advice = "copy DIR/nodes/NAME from the server's machine, or see --key of init"
                raise UserError(f"{path} is missing; {advice}")
        check_secret(node.key)
        network.host_and_port(node.settings.server)
        socket_path(node)
        flower.program("flower-supernode")
    make_private(node.logs, *([node.flower_home] if part != "service" else [node.state]))
    mark = node_mark(node, part)
    claim(mark, f"node {node.settings.name} of {node.path}", say)
    with ProcessGroup(mark, node.logs, node.path) as group:
        _Node(node, group, say).run(part)


class _Node:
    """The programs of a node."""

    def __init__(self, node: NodeFolder, group: ProcessGroup, say: Say) -> None:
        self._node, self._group, self._say = node, group, say
        self._environment = flower.environment(node.flower_home, **flower.NODE_POLL)
        self._service: Child | None = None
        self._supernode: Child | None = None
        self._superexec: Child | None = None
        self._given: tuple[float, ...] = ()  # when the files that the SuperNode was started with were written
        self._ready = self._connected = False
        self._doubt = self._lost = False  # whether the server may be unreachable; whether it is, and that was reported
        self._refused_since: float | None = None

    def run(self, part: str) -> None:
        """Start, then watch; never returns."""
        if part != "supernode":
            self._start_service()
        if part != "service":
            self._start_supernode()
        while True:
            time.sleep(0.5)
            if self._doubt:
                self._doubt = not self._reach_server("lost the server")
            for child, start in ((self._service, self._start_service), (self._superexec, self._start_superexec)):
                if child is not None and child.code is not None:
                    self._group.count_restart(child, self._say)
                    start()
            if self._supernode is None:
                continue
            if self._supernode.code is not None:
                self._handle_end(self._supernode)
                self._start_supernode()
            elif self._files() != self._given:
                self._say("this node's key or ca.crt has changed; reconnecting")
                self._start_supernode()

    def _files(self) -> tuple[float, ...]:
        try:
            return tuple(path.stat().st_mtime for path in (self._node.key, self._node.authority))
        except OSError:  # one of them is being written
            return self._given

    def _start_service(self) -> None:
        node = self._node
        if not node.service_settings.exists():
            raise UserError(f"{node.service_settings} is missing; give the node data: unskew federation node --data …")
        self._ready = False
        command = flower.python(SERVICE, str(node.service_settings))
        child = self._group.start("service", command, flower.environment(node.flower_home), self._hear_service)
        self._service = child
        end = time.monotonic() + READY_SECONDS
        while not self._ready:
            if child.code is not None:
                raise UserError(describe_end(child, "the node service ended while starting"))
            if time.monotonic() > end:
                raise UserError(f"the node service is not ready after {READY_SECONDS:.0f} s; see {child.log.path}")
            time.sleep(0.1)

    def _hear_service(self, line: str) -> None:
        self._ready = self._ready or line.startswith("ready")
        self._say(line)

    def _reach_server(self, problem: str) -> bool:
        """Whether the server answers with the right certificate; pauses if it does not, and reports it once."""
        try:
            network.greet(self._node.settings.server, self._node.authority)
        except network.NotReached as error:
            if not self._lost:
                self._say(f"{problem} ({error}); retrying until it answers")
            self._lost = True
            time.sleep(2.0)
            return False
        if self._lost:
            self._say("the server answers")
        self._lost = False
        return True

    def _start_supernode(self) -> None:
        node, self._connected = self._node, False
        for child in (self._superexec, self._supernode):
            if child is not None:
                child.terminate()
                child.end(PATIENCE)
        while not self._reach_server(f"cannot reach {node.settings.server}"):
            pass
        close_last_session(node)
        write_whole(node.secret, secrets.token_bytes(32), secret=True)
        self._given, self._port = self._files(), network.free_port()
        command = flower.supernode(node, port=self._port, socket=socket_path(node))
        self._supernode = self._group.start("supernode", command, self._environment, self._hear_supernode)
        self._start_superexec()

    def _start_superexec(self) -> None:
        """What starts a ClientApp for each message; it retries until the SuperNode listens."""
        command = flower.superexec(self._port, self._node.secret, None)
        self._superexec = self._group.start("superexec", command, self._environment)

    def _hear_supernode(self, line: str) -> None:
        if (found := _NODE_ID.search(line)) and not self._connected:
            self._connected, self._refused_since = True, None
            write_again(self._node.session, found[1].encode())
            self._say(f"connected to {self._node.settings.server} as {self._node.settings.name}")
        elif "Connection attempt failed" in line:  # to the server, or between the programs of the node
            self._doubt = True

    def _handle_end(self, supernode: Child) -> None:
        """Flower's part has ended: pause and retry, or tell the operator what to do."""
        output = supernode.log_end(40)
        if NOT_REGISTERED in output:
            name = self._node.settings.name
            raise UserError(
                f"the server refuses this node: {NOT_REGISTERED}; on the server, run: unskew federation init DIR --key "
                f"{name}={name}.pub, or copy the folder DIR/nodes/{name} to this machine again"
            )
        if "version mismatch" in output:
            raise UserError(f"server and node have different versions of Flower:\n{supernode.log_end()}")
        if CLOCK in output:
            self._say(next(line for line in output.splitlines() if CLOCK in line) + "; set the clock; retrying")
            time.sleep(20.0)
        elif "Failed to activate" not in output:
            self._group.count_restart(supernode, self._say)
        elif self._refused_since is None:
            # Flower keeps the session of a killed node open until its heartbeat runs out, and admits no second one
            self._refused_since = time.monotonic()
            session = "the server still has an open session from this node's previous process"
            self._say(f"{session}; retrying for up to a minute")
            time.sleep(3.0)
        elif time.monotonic() - self._refused_since > TAKEN_SECONDS:
            raise UserError("another machine is connected with this node's key; give each machine its own node")
        else:
            time.sleep(3.0)


def close_last_session(node: NodeFolder) -> None:
    """Close the session that a killed process of this node left open; if this fails, the node waits for a minute."""
    content = read_content(node.session, 100) or b""
    node.session.unlink(missing_ok=True)
    if content.isdigit():
        flower.deactivate(node, int(content))
