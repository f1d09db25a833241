"""Flower's programs: their command lines, the environment that they get, what their command ``flwr`` says."""

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.federation.folder import CONNECTION, FederationFolder, NodeFolder, flower_version

# nothing is sent to Flower's makers, nothing is looked up or installed at run time
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
NODE_POLL = 0.2  # seconds between two looks for a message on the node itself; Flower's default is 1


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of Flower's programs: ours, offline, with Flower's own files in ``home``."""
    programs = str(Path(sys.executable).parent)  # Flower starts its own programs by name
    path = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    return {**os.environ, **OFFLINE, "FLWR_HOME": str(home), "PATH": path, "PYTHONUNBUFFERED": "1", **more}


def server_environment(federation: FederationFolder) -> dict[str, str]:
    """The environment of the server, and so of the runs that it starts: their lines are not cut at 80 letters."""
    return environment(federation.flower_home, COLUMNS="150")


def node_environment(home: Path) -> dict[str, str]:
    """The environment of a SuperNode."""
    return environment(home, FLWR_SUPEREXEC_TASK_POLL_INTERVAL=str(NODE_POLL))


def superlink(federation: FederationFolder) -> list[str]:
    """The server: on loopback alone, since Flower lets everyone who reaches this port submit code and register keys."""
    return [
        program("flower-superlink"),
        *("--host", "127.0.0.1", "--port", str(federation.settings.control_port)),
        *("--ssl-certfile", str(federation.certificate), "--ssl-keyfile", str(federation.key)),
        *("--ssl-ca-certfile", str(federation.authority)),
        *("--database", str(federation.database)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


def supernode(node: NodeFolder, *, port: int, socket: Path) -> list[str]:
    """The part of a node that talks to the server; ``port`` is for its own programs, on loopback."""
    return [
        *(sys.executable, "-m", "unskew.federation.flower", "flower-supernode"),
        *("--superlink", node.settings.server, "--root-certificates", str(node.authority)),
        *("--auth-supernode-private-key", str(node.key)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--node-config", f"name={json.dumps(node.settings.name)} socket={json.dumps(str(socket))}"),
    ]


def run_supernode() -> None:
    """Flower's program ``flower-supernode``, in a process that ends when it raises.

    In Flower's own, other threads would keep the process alive, doing nothing.
    """
    from flwr.supernode.cli.flower_supernode import flower_supernode

    sys.argv = sys.argv[1:]
    try:
        flower_supernode()
    except Exception:  # noqa: BLE001  whatever it is, the process must end
        traceback.print_exc()
        os._exit(1)


def deactivate(node: NodeFolder, number: int) -> bool:
    """Tell the server that the node's session with this number is over; whether it knew the session."""
    try:
        import httpx
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
    except ImportError as error:
        raise UserError('flwr is not installed; pip install "unskew[flower]"') from error

    key: Any = load_ssh_private_key(node.key.read_bytes(), None)
    signer = NodeAuthHttpInterceptor(key, key.public_key())
    try:
        with FleetHttpClient.from_server_address(
            node.settings.server, False, node.authority.read_bytes(), interceptors=[signer]
        ) as client:
            client.DeactivateNode(DeactivateNodeRequest(node_id=number))
    except (httpx.HTTPError, OSError, RuntimeError, ValueError):
        return False
    return True


def program(name: str) -> str:
    """A program of Flower's: beside our interpreter, or on the path."""
    flower_version()
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UserError(
            f'{name} is not found, though flwr is installed; pip install --force-reinstall "unskew[flower]"'
        )
    return found


def flwr(federation: FederationFolder, *words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run Flower's command on the server's machine."""
    try:
        return subprocess.run(
            [program("flwr"), *words],
            env=environment(federation.flower_home, NO_COLOR="1", COLUMNS="1000"),
            cwd=federation.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"flwr {words[0]} did not end within {timeout:.0f} s; is the server well?") from error


def register(federation: FederationFolder, name: str, key: Path) -> str:
    """Make the server know a node's key, under the node's name; an empty text, or what went wrong."""
    ended = flwr(federation, "supernode", "register", str(key), CONNECTION, "--name", name)
    said = ended.stdout + ended.stderr
    if ended.returncode == 0 or "already in use" in said:
        return ""
    return _in_words(said)


def runs(federation: FederationFolder, run: str | None = None) -> list[dict[str, Any]]:
    """What the server says about its runs, or about one."""
    which = ("--run-id", run) if run else ("--limit", "5")
    ended = flwr(federation, "list", CONNECTION, *which, "--format", "json")
    try:
        answer = json.loads(ended.stdout[ended.stdout.index("{") :])
        return list(answer["runs"])
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"the server did not say what runs there are: {_in_words(ended.stdout + ended.stderr)}"
        ) from None


def stop_run(federation: FederationFolder, run: str) -> None:
    """Stop a run."""
    flwr(federation, "stop", run, CONNECTION)


def run_command(federation: FederationFolder, config: Path) -> Sequence[str]:
    """Submit the app with this configuration, and print what it prints until it has ended."""
    return [program("flwr"), "run", str(federation.app), CONNECTION, "--stream", "--run-config", str(config)]


def _in_words(said: str) -> str:
    """What Flower printed, without the frames that it draws."""
    lines = ("".join(c for c in line if not "\u2500" <= c <= "\u257f").strip() for line in said.splitlines())
    return " ".join(line for line in lines if line and line != "Error") or "nothing"


if __name__ == "__main__":
    run_supernode()
