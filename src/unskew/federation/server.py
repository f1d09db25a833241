"""The server of a federation: run it, submit runs to it, ask for its status, stop it."""

import getpass
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unskew.core.child import Child, Log
from unskew.core.errors import UserError
from unskew.core.files import read_content, write_whole
from unskew.core.units import counted
from unskew.federation import flower, network
from unskew.federation.folder import (
    FEDERATION,
    NODE,
    RUN_CONFIG,
    FederationFolder,
    check_secret,
    forget,
    make_private,
    read_federation,
    read_node,
    refresh,
    renew_secrets,
    toml,
)
from unskew.federation.metrics import GONE_SECONDS, RunProgress, last_run, last_seen
from unskew.federation.node import PARTS, node_mark
from unskew.federation.processes import ProcessGroup, claim, end_all, marked

START_SECONDS = 300.0  # for a program to start listening
MAX_RESTARTS = 5  # of programs that ran for less than a minute

Say = Callable[[str], None]


def server_mark(federation: FederationFolder) -> str:
    """The mark of this server's processes."""
    return f"server:{federation.path}"


def serve(federation: FederationFolder, say: Say) -> None:
    """Run the server until it is interrupted."""
    _check(federation, say)
    mark = server_mark(federation)
    claim(mark, f"the server of {federation.path}", say)
    settings = federation.settings
    network.check_free(settings.listen, settings.port, f"port in {FEDERATION}")
    network.check_free("127.0.0.1", settings.control_port, f"control_port in {FEDERATION}")
    if settings.metrics_port:
        network.check_free("127.0.0.1", settings.metrics_port, f"metrics_port in {FEDERATION}")
    make_private(federation.path / "server", federation.authority.parent, federation.logs, federation.flower_home)
    forget(federation)
    renew_secrets(federation)
    refresh(federation)
    try:
        with ProcessGroup(mark, federation.logs, federation.path) as group:
            _Server(federation, group, say).run()
    finally:
        forget(federation)


class _Server:
    """The programs of a server, and the state of its nodes."""

    def __init__(self, federation: FederationFolder, group: ProcessGroup, say: Say) -> None:
        self._federation, self._group, self._say = federation, group, say
        self._keys: dict[str, float] = {}  # modification times of the registered key files, by node
        self._present: set[str] = set()
        self._restarts = 0

    def run(self) -> None:
        """Start the programs and supervise them; never returns."""
        starts = [self._start_link, self._start_exec, self._start_gateway]
        programs = [start() for start in starts[:2]]
        self._register()
        programs.append(starts[2]())
        settings = self._federation.settings
        self._say(f"ready: nodes connect to {settings.host}:{settings.port}; {self._describe_keys()}")
        while True:
            time.sleep(1.0)
            for number, start in enumerate(starts):
                if programs[number].code is not None:
                    self._count_restart(programs[number])
                    programs[number] = start()
            self._register()
            self._report_nodes()

    def _start_link(self) -> Child:
        federation = self._federation
        child = self._group.start("superlink", flower.superlink(federation), flower.server_environment(federation))
        self._wait(child, federation.settings.control_port, federation.local_authority)
        flower.check_locked(federation)
        return child

    def _start_exec(self) -> Child:
        federation = self._federation
        command = flower.superexec(federation.settings.control_port, federation.secret, federation.local_authority)
        return self._group.start("superexec", command, flower.server_environment(federation))

    def _start_gateway(self) -> Child:
        federation = self._federation
        command = flower.python("unskew.federation.gateway", str(federation.path))
        child = self._group.start("gateway", command, flower.environment(federation.flower_home), self._say)
        self._wait(child, federation.settings.port, federation.authority)
        return child

    def _wait(self, child: Child, port: int, authority: Path) -> None:
        """Wait until the program listens."""
        end = time.monotonic() + START_SECONDS
        while True:
            if child.code is not None:
                raise UserError(f"{child.name} ended while starting; {child.log.path} ends with:\n{child.log_end()}")
            try:
                network.greet(f"127.0.0.1:{port}", authority)
            except network.NotReached:
                if time.monotonic() > end:
                    raise UserError(
                        f"{child.name} is still not listening after {START_SECONDS:.0f} s; see {child.log.path}"
                    ) from None
                time.sleep(0.2)
            else:
                return

    def _count_restart(self, child: Child) -> None:
        self._restarts = 1 if time.monotonic() - child.began > 60 else self._restarts + 1
        if self._restarts > MAX_RESTARTS:
            raise UserError(f"{child.name} keeps exiting; {child.log.path} ends with:\n{child.log_end()}")
        self._say(
            f"{child.name} ended with {child.exit_reason()}; restarting it; if a run stops because of this, resume it"
        )

    def _register(self) -> None:
        """Register the keys in the folder with Flower whenever one is new or changed."""
        current = {}
        for name, file in self._federation.public_keys().items():
            with suppress(OSError):  # removed just now
                current[name] = file.stat().st_mtime
        if not {name for name, written in current.items() if self._keys.get(name) != written}:
            self._keys = current
            return
        for name, trouble in flower.register_keys(self._federation).items():
            self._say(f"node {name} cannot join: {trouble}" if name else trouble)
        self._keys = current

    def _report_nodes(self) -> None:
        now = {name for name, when in last_seen(self._federation).items() if time.time() - when < GONE_SECONDS}
        for name in sorted(now - self._present):
            self._say(f"node {name} is online ({len(now)} of {len(self._federation.public_keys())})")
        for name in sorted(self._present - now):
            self._say(f"node {name} has not been heard from for {GONE_SECONDS:.0f} s")
        self._present = now

    def _describe_keys(self) -> str:
        count = len(self._keys)
        return f"{counted(count, 'key')} registered" if count else "no keys are registered: every node will be refused"


def _check(federation: FederationFolder, say: Say) -> None:
    """Report early, in one message, what would fail later."""
    flower.program("flower-superlink")
    for path in (federation.authority, federation.certificate, federation.key):
        if not path.exists():
            raise UserError(f"{path} is missing; make it with: unskew federation init {federation.path} --renew")
    for path in (federation.key, federation.authority_key):
        if path.exists():
            check_secret(path)
    left = network.days_left(read_content(federation.certificate) or b"", str(federation.certificate))
    if left < 0:
        raise UserError(f"{federation.certificate} has expired; run: unskew federation init {federation.path} --renew")
    if left < 30:
        say(f"the server's certificate expires in {left:.0f} days; renew it with: unskew federation init DIR --renew")


_STARTED = re.compile(r"Successfully started run ([0-9]+)")
_FLOWERS_OWN = re.compile(r"^(INFO|DEBUG|WARNING|ERROR) +:|^Using SuperLink|^Successfully (started|installed)")


def submit(
    federation: FederationFolder,
    recipe: Path,
    out: Path,
    say: Callable[[str], None],
    *,
    resume: bool = False,
    check: bool = False,
    deadline: float | None = None,
    min_replies: int | None = None,
    wait: float | None = None,
) -> None:
    """Submit a run and follow it; an interrupt stops it, and it can be resumed. ``check``: only ask the nodes."""
    check_running(federation)
    given = {"deadline": deadline, "min-replies": min_replies, "wait": wait}
    config = {
        **RUN_CONFIG,
        **{name: value for name, value in given.items() if value is not None},
        "recipe": str(recipe.absolute()),
        "out": str(out.absolute()),
        "resume": resume,
        "check": check,
        "submitter": _user(),
    }
    write_whole(federation.run_config, toml(config, "What the last run was submitted with.").encode())
    _check_end(federation, _follow(federation, federation.run_config, say), None if check else out)


def _user() -> str:
    """The user who submits a run."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def check_running(federation: FederationFolder) -> None:
    """Refuse to continue if this federation's server is not running on this machine."""
    try:
        network.greet(f"127.0.0.1:{federation.settings.control_port}", federation.local_authority)
    except (network.NotReached, UserError) as error:
        start = f"start it with: unskew federation server {federation.path}"
        raise UserError(f"the server of {federation.path} is not running on this machine; {start}") from error


class _Followed:
    """A run's output so far, and its number in Flower."""

    def __init__(self, log: Log, say: Callable[[str], None]) -> None:
        self.log, self.run, self.complaint = log, "", ""
        self._say = say

    def hear(self, line: str) -> None:
        """Show a line to the user; Flower's own lines go only to the log."""
        if started := _STARTED.search(line):
            self.run = started[1]
        if line.startswith("unskew: "):
            self.complaint = line.removeprefix("unskew: ")
        elif self.run and not self.complaint and not _FLOWERS_OWN.match(line):
            self._say(line)  # what follows a complaint is Flower's traceback for it


def _follow(federation: FederationFolder, config: Path, say: Callable[[str], None]) -> _Followed:
    followed = _Followed(Log(federation.logs / "run.log"), say)
    child = Child(
        "flwr",
        flower.run_command(federation, config),
        environment=flower.environment(federation.flower_home, NO_COLOR="1", COLUMNS="1000"),
        folder=federation.path,
        log=followed.log,
        heard=followed.hear,
    )
    try:
        child.wait()
    except BaseException:
        if followed.run:
            with suppress(UserError):
                flower.stop_run(federation, followed.run)
        raise
    finally:
        child.end(patience=0)
    return followed


def _check_end(federation: FederationFolder, followed: _Followed, out: Path | None) -> None:
    """Report a failed run in one message, our own if there is one."""
    if not followed.run:
        raise UserError(
            f"Flower did not accept the run; {followed.log.path} ends with:\n" + "\n".join(followed.log.last(8))
        )
    if followed.complaint:
        raise UserError(followed.complaint)
    if out is None or (out / "result.json").exists():
        return
    try:
        about = flower.runs(federation, followed.run)
    except UserError:
        raise UserError(
            f"the server does not answer, and the run has not finished; its output is in {followed.log.path}"
        ) from None
    status, details = (str(about[0].get(key) or "") if about else "" for key in ("status", "status-details"))
    reason = f"{status or 'unknown'}{': ' + details if details else ''}"
    raise UserError(f"the run ended with status {reason}; its output is in {followed.log.path}")


@dataclass(frozen=True)
class NodeStatus:
    """A node's state as the server sees it."""

    name: str
    seconds: float | None  # since it was last heard from; None if it never was
    here: int  # its processes on this machine

    @property
    def online(self) -> bool:
        """Whether it was heard from recently."""
        return self.seconds is not None and self.seconds < GONE_SECONDS


@dataclass(frozen=True)
class Status:
    """The current state of a federation."""

    processes: int  # the server's
    answers: bool
    certificate_days: float
    nodes: tuple[NodeStatus, ...]
    runs: tuple[tuple[str, str, float], ...]  # number, status, seconds
    run: RunProgress | None  # the last submitted one, read from its directory


def status(federation: FederationFolder) -> Status:
    """Read the folder, this machine's processes and, if it is running, the server."""
    answers = _answers(federation)
    seen, now = last_seen(federation) if answers else {}, time.time()
    nodes = tuple(
        NodeStatus(name, now - seen[name] if name in seen else None, _processes_of(federation.node(name)))
        for name in federation.public_keys()
    )
    content = read_content(federation.certificate) or b""
    return Status(
        processes=len(marked(server_mark(federation))),
        answers=answers,
        certificate_days=network.days_left(content, str(federation.certificate)),
        nodes=nodes,
        runs=tuple(_parse_run(values) for values in flower.runs(federation)) if answers else (),
        run=last_run(federation),
    )


def stop(path: Path) -> dict[str, int]:
    """End the server and the nodes of this folder; the number of ended processes by name."""
    if not Path("/proc/self/environ").exists():
        raise UserError("stop needs /proc to find processes, which this system lacks; end the commands with Ctrl-C")
    path = path.absolute()
    if (path / NODE).exists() and not (path / FEDERATION).exists():
        return _stop_node(path)
    federation = read_federation(path)
    ended: dict[str, int] = {}
    for folder in sorted((path / "nodes").glob("*/")):
        if (folder / NODE).exists():
            ended |= _stop_node(folder)
    if count := end_all(server_mark(federation), patience=20.0):
        ended["server"] = count
    return ended


def _stop_node(path: Path) -> dict[str, int]:
    node = read_node(path)
    count = sum(end_all(mark, patience=20.0) for mark in _marks(path))
    return {f"node {node.settings.name}": count} if count else {}


def _processes_of(folder: Path) -> int:
    return sum(len(marked(mark)) for mark in _marks(folder)) if (folder / NODE).exists() else 0


def _marks(folder: Path) -> list[str]:
    return [node_mark(read_node(folder), part) for part in PARTS]


def _answers(federation: FederationFolder) -> bool:
    try:
        network.greet(f"127.0.0.1:{federation.settings.control_port}", federation.local_authority)
    except (network.NotReached, UserError):
        return False
    return True


def _parse_run(values: dict[str, object]) -> tuple[str, str, float]:
    elapsed = values.get("elapsed", 0.0)
    seconds = float(elapsed) if isinstance(elapsed, int | float) else 0.0
    return str(values.get("run-id", "")), str(values.get("status", "")), seconds
