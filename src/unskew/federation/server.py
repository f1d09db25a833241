"""The server of a federation: run it, submit runs to it, ask for its status, stop it."""

import getpass
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from unskew.core.child import Child, Log
from unskew.core.errors import UserError
from unskew.core.files import read_content, write_whole
from unskew.core.units import counted
from unskew.federation import flower, network
from unskew.federation import folder as folders
from unskew.federation.folder import FederationFolder
from unskew.federation.metrics import GONE_SECONDS, last_run, last_seen
from unskew.federation.node import PARTS, node_mark
from unskew.federation.processes import ProcessGroup, Say, claim, end_all, marked

START_SECONDS = 300.0  # for a program to start listening


def server_mark(federation: FederationFolder) -> str:
    """The mark of this server's processes."""
    return f"server:{federation.path}"


def serve(federation: FederationFolder, say: Say) -> None:
    """Run the server until it is interrupted."""
    flower.program("flower-superlink")
    for path in (federation.authority, federation.certificate, federation.key):
        if not path.exists():
            raise UserError(f"{path} is missing; make it with: unskew federation init {federation.path} --renew")
    for path in (federation.key, federation.authority_key):
        if path.exists():
            folders.check_secret(path)
    left = network.days_left(read_content(federation.certificate) or b"", str(federation.certificate))
    if left < 0:
        raise UserError(f"{federation.certificate} has expired; run: unskew federation init {federation.path} --renew")
    if left < 30:
        say(f"the server's certificate expires in {left:.0f} days; renew it with: unskew federation init DIR --renew")
    claim(server_mark(federation), f"the server of {federation.path}", say)
    settings = federation.settings
    network.check_free(settings.listen, settings.port, f"port in {folders.FEDERATION}")
    for name in ("control_port", "metrics_port"):
        network.check_free("127.0.0.1", getattr(settings, name), f"{name} in {folders.FEDERATION}")
    folders.make_private(
        federation.path / "server", federation.authority.parent, federation.logs, federation.flower_home
    )
    folders.forget(federation)
    folders.renew_secrets(federation)
    folders.refresh(federation)
    try:
        with ProcessGroup(server_mark(federation), federation.logs, federation.path) as group:
            _Server(federation, group, say).run()
    finally:
        folders.forget(federation)


class _Server:
    """The programs of a server, and the state of its nodes."""

    def __init__(self, federation: FederationFolder, group: ProcessGroup, say: Say) -> None:
        self._federation, self._group, self._say = federation, group, say
        self._environment = flower.environment(federation.flower_home, **flower.SERVER_LINES)
        self._keys: dict[str, float] = {}  # modification times of the registered key files, by node
        self._present: set[str] = set()

    def run(self) -> None:
        """Start the programs and supervise them; never returns."""
        programs = {name: self._start(name) for name in ("superlink", "superexec")}
        self._register()
        programs["gateway"] = self._start("gateway")
        settings, count = self._federation.settings, counted(len(self._keys), "key")
        keys = f"{count} registered" if self._keys else "no keys are registered: every node will be refused"
        self._say(f"ready: nodes connect to {settings.host}:{settings.port}; {keys}")
        while True:
            time.sleep(1.0)
            for name, child in programs.items():
                if child.code is not None:
                    self._group.count_restart(child, self._say)
                    programs[name] = self._start(name)
            self._register()
            self._report_nodes()

    def _start(self, name: str) -> Child:
        federation, settings = self._federation, self._federation.settings
        if name == "gateway":
            command = flower.python("unskew.federation.gateway", str(federation.path))
            child = self._group.start(name, command, flower.environment(federation.flower_home), self._say)
            self._wait(child, settings.port, federation.authority)
        elif name == "superlink":
            child = self._group.start(name, flower.superlink(federation), self._environment)
            self._wait(child, settings.control_port, federation.local_authority)
            flower.check_locked(federation)
        else:
            command = flower.superexec(settings.control_port, federation.secret, federation.local_authority)
            child = self._group.start(name, command, self._environment)
        return child

    def _wait(self, child: Child, port: int, authority: Path) -> None:
        """Wait until the program listens."""
        end = time.monotonic() + START_SECONDS
        while not _answers(port, authority):
            if child.code is not None or time.monotonic() > end:
                log = "\n".join(child.log.last(6))
                raise UserError(f"{child.name} does not start; {child.log.path} ends with:\n{log}")
            time.sleep(0.2)

    def _register(self) -> None:
        """Register the keys in the folder with Flower whenever one is new or changed."""
        current = {}
        for name, file in self._federation.public_keys().items():
            with suppress(OSError):  # removed just now
                current[name] = file.stat().st_mtime
        if current.items() - self._keys.items():
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


_STARTED = re.compile(r"Successfully started run ([0-9]+)")
_FLOWERS_OWN = re.compile(r"^(INFO|DEBUG|WARNING|ERROR) +:|^Using SuperLink|^Successfully (started|installed)")


def submit(
    federation: FederationFolder,
    recipe: Path,
    out: Path,
    say: Say,
    *,
    resume: bool = False,
    check: bool = False,
    **terms: float | None,
) -> None:
    """Submit a run and follow it; an interrupt stops it, and it can be resumed. ``check``: only ask the nodes.

    ``terms`` are deadline, min_replies and wait; None leaves them as in the recipe.
    """
    if not is_running(federation):
        start = f"start it with: unskew federation server {federation.path}"
        raise UserError(f"the server of {federation.path} is not running on this machine; {start}")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = str(os.getuid())
    config = {
        **folders.RUN_CONFIG,
        **{name.replace("_", "-"): value for name, value in terms.items() if value is not None},
        "recipe": str(recipe.absolute()),
        "out": str(out.absolute()),
        "resume": resume,
        "check": check,
        "submitter": f"{user}@{socket.gethostname()}",
    }
    write_whole(federation.run_config, folders.toml(config, "What the last run was submitted with.").encode())
    run = complaint = ""  # its number in Flower, and our own message if it fails

    def hear(line: str) -> None:
        """Show a line to the user; Flower's own lines go only to the log."""
        nonlocal run, complaint
        if started := _STARTED.search(line):
            run = started[1]
        if line.startswith("unskew: "):
            complaint = line.removeprefix("unskew: ")
        elif run and not complaint and not _FLOWERS_OWN.match(line):
            say(line)  # what follows a complaint is Flower's traceback for it

    log = Log(federation.logs / "run.log")
    app = ["run", str(federation.app), folders.CONNECTION]
    command = [flower.program("flwr"), *app, "--stream", "--run-config", str(federation.run_config)]
    environment = flower.environment(federation.flower_home, **flower.COMMAND_LINES)
    child = Child("flwr", command, environment=environment, folder=federation.path, log=log, heard=hear)
    try:
        child.wait()
    except BaseException:
        if run:
            with suppress(UserError):
                flower.stop_run(federation, run)
        raise
    finally:
        child.end(patience=0)
    if complaint:
        raise UserError(complaint)
    if not run:
        raise UserError(f"Flower did not accept the run; {log.path} ends with:\n" + "\n".join(log.last(8)))
    if not check and not (out / "result.json").exists():
        with suppress(UserError, IndexError):
            about = flower.runs(federation, run)[0]
            complaint = f" with status {about.get('status')}: {about.get('status-details') or ''}"
        raise UserError(f"the run ended{complaint}; its output is in {log.path}")


def status(federation: FederationFolder) -> dict[str, Any]:
    """Read the folder, this machine's processes and, if it is running, the server."""
    running, settings, now = is_running(federation), federation.settings, time.time()
    nodes, seen = [], last_seen(federation) if running else {}
    for name in federation.public_keys():
        seconds = now - seen[name] if name in seen else None
        processes = sum(len(marked(mark)) for mark in _marks(federation.node(name)))
        online = seconds is not None and seconds < GONE_SECONDS
        nodes.append({"name": name, "online": online, "seconds_since_heard": seconds, "processes": processes})
    content = read_content(federation.certificate) or b""
    runs = [
        {"id": run.get("run-id"), "status": run.get("status"), "seconds": float(run.get("elapsed") or 0.0)}
        for run in (flower.runs(federation) if running else ())
    ]
    return {
        "folder": str(federation.path),
        "address": f"{settings.host}:{settings.port}",
        "running": running,
        "processes": len(marked(server_mark(federation))),
        "certificate_days": round(network.days_left(content, str(federation.certificate)), 1),
        "nodes": nodes,
        "run": last_run(federation),
        "flower_runs": runs,
    }


def stop(path: Path) -> dict[str, int]:
    """End the server and the nodes of this folder; the number of ended processes by name."""
    if not Path("/proc/self/environ").exists():
        raise UserError("stop needs /proc to find processes, which this system lacks; end the commands with Ctrl-C")
    path = path.absolute()
    if (path / folders.NODE).exists() and not (path / folders.FEDERATION).exists():
        marks = {f"node {folders.read_node(path).settings.name}": _marks(path)}
    else:
        federation = folders.read_federation(path)
        marks = {f"node {folder.name}": _marks(folder) for folder in sorted((path / "nodes").glob("*/"))}
        marks["server"] = [server_mark(federation)]
    ended = {name: sum(end_all(mark, patience=20.0) for mark in group) for name, group in marks.items()}
    return {name: count for name, count in ended.items() if count}


def _marks(folder: Path) -> list[str]:
    return [node_mark(folders.read_node(folder), part) for part in PARTS] if (folder / folders.NODE).exists() else []


def is_running(federation: FederationFolder) -> bool:
    """Whether this federation's server is running on this machine."""
    with suppress(UserError):
        return _answers(federation.settings.control_port, federation.local_authority)
    return False


def _answers(port: int, authority: Path) -> bool:
    with suppress(network.NotReached):
        network.greet(f"127.0.0.1:{port}", authority)
        return True
    return False
