"""Flower's programs: their command lines and environment, hardened where they start.

The SuperLink's port requires our token, the SuperNode runs only our app, and the SuperExec keeps tokens off the command
line, which every user can read.
"""

import hmac
import http.client
import io
import json
import os
import shutil
import ssl
import subprocess
import sys
import tomllib
import traceback
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from unskew.core.errors import UserError
from unskew.federation import folder as folders
from unskew.federation import network
from unskew.federation.folder import FederationFolder, NodeFolder

# no telemetry, no look-ups, no installation at run time
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
APP_SECONDS = 180.0  # for an app to start; Flower gives up after 30, too soon on a busy machine
DATABASE_SECONDS = 60  # to wait for Flower's database; Flower gives up after 5, too soon on a busy machine
SERVER_LINES = {"COLUMNS": "150"}  # the length of the server's lines, and of those of the runs it starts
COMMAND_LINES = {"NO_COLOR": "1", "COLUMNS": "1000"}  # for the command ``flwr``, whose output we read
NODE_POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}  # seconds between a node's own polls; Flower's default is 1


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of Flower's programs: ours, offline, with Flower's own files in ``home``."""
    programs = str(Path(sys.executable).parent)  # Flower starts its own programs by name
    path = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    return {**os.environ, **OFFLINE, "FLWR_HOME": str(home), "PATH": path, "PYTHONUNBUFFERED": "1", **more}


_SECRET = "--superexec-auth-secret-file"


def python(module: str, *words: str) -> list[str]:
    """The command for one of our modules; the working folder, where others may put files, is not on its path."""
    return [sys.executable, "-P", "-m", module, *words]


def _hardened(name: str, *words: str) -> list[str]:
    """The command for one of Flower's programs, run by ``run_program``."""
    program(name)
    return python("unskew.federation.flower", name, *words)


def superlink(federation: FederationFolder) -> list[str]:
    """The server, on loopback only."""
    return _hardened(
        "flower-superlink",
        *("--host", "127.0.0.1", "--port", str(federation.settings.control_port)),
        *("--ssl-certfile", str(federation.local_certificate), "--ssl-keyfile", str(federation.local_key)),
        *("--ssl-ca-certfile", str(federation.local_authority)),
        *("--database", str(federation.database)),
        *("--isolation", "process", _SECRET, str(federation.secret)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    )


def supernode(node: NodeFolder, *, port: int, socket: Path) -> list[str]:
    """The part of a node that connects to the server; ``port`` is for its own programs, on loopback."""
    return _hardened(
        "flower-supernode",
        *("--superlink", node.settings.server, "--root-certificates", str(node.authority)),
        *("--auth-supernode-private-key", str(node.key)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--isolation", "process", _SECRET, str(node.secret)),
        *("--node-config", f"name={json.dumps(node.settings.name)} socket={json.dumps(str(socket))}"),
    )


def superexec(port: int, secret: Path, authority: Path | None) -> list[str]:
    """The program that starts the apps of a server, or of a node, which has no authority."""
    trust = ["--insecure"] if authority is None else ["--root-certificates", str(authority)]
    return _hardened(
        "flower-superexec",
        *("--runtime-api-address", f"127.0.0.1:{port}", *trust),
        *(_SECRET, str(secret), "--parent-pid", str(os.getpid())),
    )


def run_program(words: list[str]) -> None:
    """Run one of the three programs, and exit when it raises or returns: threads would keep an idle process alive."""
    sys.argv = words
    try:
        _PROGRAMS[words[0]]()
    except Exception:  # noqa: BLE001  the process must exit in any case
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def give_apps_time(state: Any) -> None:
    """Give apps ``APP_SECONDS`` to start before Flower hands their task to another process, which is just as late."""
    claim = state.claim_task
    known = {**claim.__globals__, "HEARTBEAT_DEFAULT_INTERVAL": APP_SECONDS}
    state.claim_task = FunctionType(claim.__code__, known, claim.__name__, claim.__defaults__, claim.__closure__)


def retry_handshakes(connection: Any) -> None:
    """Let a node retry after a connection that broke off in the TLS handshake, where Flower gives up for good.

    For a wrong certificate it still gives up.
    """
    import httpx

    make = connection.make_simple_http_retry_invoker

    def make_patient() -> Any:
        invoker = make()
        gives_up = invoker.should_giveup
        invoker.should_giveup = lambda error: (
            gives_up(error) and (not isinstance(error, httpx.TransportError) or "certificate" in str(error).lower())
        )
        return invoker

    connection.make_simple_http_retry_invoker = make_patient


def keep_heartbeats(connection: Any) -> None:
    """Let a node's heartbeats outlive an error of the server; where they cannot go on, the process ends.

    Without them, after one answer of 500, the server would take the node for gone and send it nothing.
    """
    import httpx

    make = connection.HeartbeatSender

    def make_lasting(beat: Callable[[], bool]) -> Any:
        def beat_on() -> bool:
            try:
                return beat()
            except Exception as error:  # noqa: BLE001  whatever it is, a node without heartbeats is lost
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code >= 500:
                    return False  # it is tried again
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)  # its watcher starts it again

        return make(beat_on)

    connection.HeartbeatSender = make_lasting


def answer_for_oneself(handlers: Any) -> None:
    """Refuse a reply in another node's name: Flower checks whose request it is, not whose message is in it."""
    from fastapi import HTTPException

    push = handlers.push_messages

    def push_own(request: Any, state: Any) -> Any:
        if any(message.metadata.src_node_id != request.node.node_id for message in request.messages_list):
            raise HTTPException(status_code=403, detail="this request contains another node's message")
        return push(request=request, state=state)

    handlers.push_messages = push_own


def _run_superlink() -> None:
    from flwr.superlink.cli.flower_superlink import flower_superlink

    main: Any = import_module("flwr.superlink.main")
    database: Any = import_module("flwr.supercore.sql_mixin")
    secret = Path(sys.argv[sys.argv.index(_SECRET) + 1]).read_bytes()
    create = main.create_app

    def create_guarded(*given: Any, **more: Any) -> Any:
        app = create(*given, **more)
        app.add_middleware(Guard, secret=secret)
        return app

    main.create_app = create_guarded
    give_apps_time(import_module("flwr.supercore.corestate.sql_corestate").SqlCoreState)
    answer_for_oneself(import_module("flwr.superlink.servicer.fleet.fleet_handlers"))
    pragmas = {**dict(database.SQLITE_PRAGMAS), "secure_delete": "ON", "busy_timeout": str(DATABASE_SECONDS * 1000)}
    database.SQLITE_PRAGMAS = tuple(pragmas.items())
    flower_superlink()


def _run_supernode() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    client: Any = import_module("flwr.supernode.start_client_internal")
    fuse, pull = client.get_fused_config_from_fab, client._pull_and_store_message

    def fuse_checked(content: Any, run: Any) -> Any:  # the first use that a SuperNode makes of an app
        check_app(content)
        return fuse(content, run)

    def pull_checked(*, receive: Any, **more: Any) -> int | None:
        received: list[Any] = []

        def receive_once() -> Any:
            received.append(receive())
            return received[0]

        try:
            number: int | None = pull(receive=receive_once, **more)
        except WrongApp as refused:
            message = received[0][0]
            client.log(client.ERROR, "%s", refused)
            reply = client.Message(client.Error(client.FAB_VERIFICATION_ERROR.code, str(refused)), reply_to=message)
            client._insert_message(reply, more["state"], more["object_store"])
            number = message.metadata.run_id
        return number

    client.get_fused_config_from_fab, client._pull_and_store_message = fuse_checked, pull_checked
    give_apps_time(import_module("flwr.supercore.corestate.in_memory_corestate").InMemoryCoreState)
    connection = import_module("flwr.supernode.fleet_http_connection")
    retry_handshakes(connection)
    keep_heartbeats(connection)
    flower_supernode()


def _run_superexec() -> None:
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.plugin.base_exec_plugin import AutoExecPlugin

    kind = TaskType.CLIENT_APP if "--insecure" in sys.argv else TaskType.SERVER_APP
    AutoExecPlugin.supported_task_types = frozenset({kind})
    import_module("flwr.supercore.superexec.executor.subprocess_executor").SubprocessExecutor.launch = _launch
    flower_superexec()


def _launch(executor: Any, spec: Any) -> Any:
    """Start a task as Flower does, with its token in an anonymous file instead of on the command line."""
    from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TASK_TYPE_TO_COMMAND
    from flwr.supercore.superexec.executor.types import LaunchResult

    trust = [] if spec.root_certificates_path is None else ["--root-certificates", spec.root_certificates_path]
    trust = ["--insecure"] if spec.insecure else trust
    output = subprocess.DEVNULL if spec.suppress_output else None
    with os.fdopen(os.memfd_create("token"), "wb", buffering=0) as file:
        file.write(spec.token.encode())
        command = [program(TASK_TYPE_TO_COMMAND[spec.task_type])]
        command += [TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type], spec.runtime_api_address]
        command += ["--token-file", f"/proc/self/fd/{file.fileno()}", *trust]
        command += [] if spec.parent_pid is None else ["--parent-pid", str(spec.parent_pid)]
        subprocess.Popen(command, pass_fds=[file.fileno()], stdout=output, stderr=output)
    return LaunchResult.accepted()


_PROGRAMS = {"flower-superlink": _run_superlink, "flower-supernode": _run_supernode, "flower-superexec": _run_superexec}


class Guard:
    """Middleware of Flower's server: only the gateway uses the routes for nodes, only our commands those for operators.

    Flower itself checks its own programs: handing out a task needs its secret, everything else a task's token.
    """

    def __init__(self, app: Any, secret: bytes) -> None:
        self._app = app
        gateway, operator = folders.token(secret, "gateway"), f"Bearer {folders.token(secret, 'operator')}"
        self._shown = {
            "/v1/fleet/": (folders.GATEWAY_HEADER.encode(), gateway.encode()),
            "/v1/control/": (b"authorization", operator.encode()),
        }

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass on what is allowed."""
        status, detail = 401, "this port is for the programs of the server itself"
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._may_pass(scope)):
            try:
                return await self._app(scope, receive, send)  # type: ignore[no-any-return]
            except Exception as error:
                if type(error).__name__ != "OperationalError" or "locked" not in str(error):
                    raise
                status, detail = 503, "the database is busy; try again"  # Flower's programs exit after a 500
        if scope["type"] == "http":
            from starlette.responses import JSONResponse

            content, headers = {"code": status, "detail": detail}, {"connection": "close"}
            await JSONResponse(content, status, headers)(scope, receive, send)
        return None

    def _may_pass(self, scope: dict[str, Any]) -> bool:
        path, headers = scope["path"], scope["headers"]
        for prefix, (name, wanted) in self._shown.items():
            if path.startswith(prefix):
                shown = [value for header, value in headers if header == name]
                return len(shown) == 1 and hmac.compare_digest(shown[0], wanted)
        return bool(path == "/health" or path.startswith("/v1/runtime/"))


def check_locked(federation: FederationFolder) -> None:
    """Try Flower's port without a token; raises UserError if a route is open."""
    trust = ssl.create_default_context(cafile=str(federation.local_authority))
    for path in ("/v1/control/list-runs", "/v1/fleet/pull-messages", "/v1/runtime/acquire-task", "/docs"):
        line = http.client.HTTPSConnection("127.0.0.1", federation.settings.control_port, timeout=20, context=trust)
        try:
            line.request("POST", path, b"", {"content-type": "application/protobuf"})
            status = line.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"Flower's server does not answer on its own port: {error}") from error
        finally:
            line.close()
        if status not in (401, 403):
            raise UserError(f"Flower's server answers {path} with {status} without a token; the server is not started")


class WrongApp(Exception):
    """The server sent an app that this node does not run."""


_APP_FILES = {"pyproject.toml", "LICENSE", ".info/CONTENT", "unskew_node/server_app.py"}
_MOST_APP = 2**20  # bytes of a file in the app


def check_app(content: bytes) -> None:
    """Refuse an app whose code for nodes differs from this version's."""
    own = {"unskew_node/__init__.py": folders.APP_PACKAGE, "unskew_node/client_app.py": folders.client_app_source()}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files, names = archive.infolist(), set(archive.namelist())
            large = any(file.file_size > _MOST_APP for file in files)
            if large or len(names) != len(files) or names - own.keys() - _APP_FILES:
                raise ValueError("it has other files, or too large ones")
            project = tomllib.loads(archive.read("pyproject.toml").decode())
            entry = project["tool"]["flwr"]["app"]["components"]["clientapp"]
            if entry != folders.CLIENT_APP or any(archive.read(name) != code for name, code in own.items()):
                raise ValueError("its code differs; server and nodes need the same version of unskew")
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise WrongApp(f"the app that the server sent was refused: {error}") from error


def deactivate(node: NodeFolder, number: int) -> None:
    """Tell the server that the node's session with this number is over; nothing happens if it cannot be reached."""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key: Any = load_ssh_private_key(node.key.read_bytes(), None)
    server, signer = node.settings.server, NodeAuthHttpInterceptor(key, key.public_key())
    with (
        suppress(httpx.HTTPError, OSError, RuntimeError, ValueError),
        FleetHttpClient.from_server_address(server, False, node.authority.read_bytes(), [signer]) as client,
    ):
        client.DeactivateNode(DeactivateNodeRequest(node_id=number))


def program(name: str) -> str:
    """A program of Flower's: next to our interpreter, or on the path."""
    folders.flower_version()
    own = Path(sys.executable).parent / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise UserError(f'{name} is not found; pip install --force-reinstall "unskew[flower]"')
    return found


def _run(command: Sequence[str], federation: FederationFolder, timeout: float = 300.0) -> str:
    """A command's output on the server's machine, without the frames that Flower draws."""
    try:
        ended = subprocess.run(
            command, env=environment(federation.flower_home, **COMMAND_LINES), cwd=federation.path,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the server did not answer within {timeout:.0f} s; check its logs") from error
    output = "".join(c for c in ended.stdout + ended.stderr if not "\u2500" <= c <= "\u257f")
    return "\n".join(line.strip() for line in output.splitlines() if line.strip() not in ("", "Error"))


def _json_in(output: str) -> Any:
    try:
        return json.JSONDecoder().raw_decode(output[output.index("{") :])[0]
    except ValueError:
        raise UserError(f"the server's answer cannot be read: {output}") from None


def register_keys(federation: FederationFolder) -> dict[str, str]:
    """Register the keys in the folder with the server, in a separate process; returns the problems by node."""
    try:
        output = _run(python("unskew.federation.flower", "register", str(federation.path)), federation, 120.0)
        return dict(_json_in(output))
    except UserError as error:
        return {"": str(error)}


def _register(federation: FederationFolder) -> dict[str, str]:
    """Register each new key under its node's name, and unregister the key that it replaces."""
    from flwr.proto import control_pb2 as control
    from flwr.supercore.control import ControlHttpClient

    class Operator:
        def intercept(self, context: Any, call_next: Any) -> Any:
            context.request.headers["authorization"] = f"Bearer {federation.token('operator')}"
            return call_next(context)

    trouble: dict[str, str] = {}
    keys: dict[bytes, str] = {}
    for name, file in federation.public_keys().items():
        try:
            keys.setdefault(network.public_pem(file), name)
        except UserError as error:
            trouble[name] = str(error)
    address, authority = f"127.0.0.1:{federation.settings.control_port}", federation.local_authority.read_bytes()
    with ControlHttpClient.from_server_address(address, False, authority, [Operator()]) as client:
        known = list(client.ListNodes(control.ListNodesRequest()).nodes_info)
        for node in known:
            replaced = node.name in keys.values() and keys.get(node.public_key) != node.name
            if replaced and node.status != "unregistered":
                client.UnregisterNode(control.UnregisterNodeRequest(node_id=node.node_id))
        status = {node.public_key: node.status for node in known}
        for pem, name in keys.items():
            if status.get(pem) == "unregistered":
                trouble[name] = "this key was replaced earlier; restart the server to accept it again"
            elif pem not in status:
                client.RegisterNode(control.RegisterNodeRequest(public_key=pem, name=name))
    return trouble


def runs(federation: FederationFolder, run: str | None = None) -> list[dict[str, Any]]:
    """The server's runs, or one of them."""
    which = ("--run-id", run) if run else ("--limit", "5")
    output = _run([program("flwr"), "list", folders.CONNECTION, *which, "--format", "json"], federation)
    try:
        return list(_json_in(output)["runs"])
    except KeyError:  # an error, which is JSON too
        raise UserError(f"the server's answer cannot be read: {output}") from None


def stop_run(federation: FederationFolder, run: str) -> None:
    """Stop a run."""
    _run([program("flwr"), "stop", run, folders.CONNECTION], federation)


if __name__ == "__main__":
    if sys.argv[1] == "register":
        print(json.dumps(_register(folders.read_federation(Path(sys.argv[2])))))  # noqa: T201  for register_keys
    else:
        run_program(sys.argv[1:])
