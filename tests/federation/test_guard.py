"""Flower's own port and Flower's apps: what the server opens to whom, and which code a node runs."""

import asyncio
import importlib
import io
import os
import re
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.routing import iter_route_contexts
from flwr.cli.build import build_fab_from_disk
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.superlink.main import create_app
from sqlalchemy.exc import OperationalError

from unskew.core.errors import UserError
from unskew.federation import flower
from unskew.federation.flower import (
    APP_SECONDS,
    Guard,
    WrongApp,
    answer_for_oneself,
    check_app,
    give_apps_time,
    keep_heartbeats,
    retry_handshakes,
)
from unskew.federation.folder import GATEWAY_HEADER, initialise, renew_secrets, token

SECRET = b"s" * 32


@pytest.fixture(scope="module")
def link():
    """Flower's complete server, guarded as ours is."""
    app = create_app()
    app.state.superexec_auth_secret = SECRET
    app.add_middleware(Guard, secret=SECRET)
    return app


def ask(app, requests):
    """The status of each (method, path, headers)."""

    async def run():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="https://127.0.0.1") as client:
            given = {"content-type": "application/protobuf", "accept": "application/protobuf"}
            return [
                (await client.request(method, path, headers={**given, **headers})).status_code
                for method, path, headers in requests
            ]

    return asyncio.run(run())


def routes_of(app):
    return sorted(
        {(method, each.route.path) for each in iter_route_contexts(app.routes) for method in each.route.methods or ()}
    )


def test_without_a_token_every_route_of_flowers_is_closed_but_health(link):
    routes = routes_of(link)
    assert ("POST", "/v1/control/start-run") in routes
    assert len(routes) > 70
    answers = ask(link, [(method, path, {}) for method, path in routes])
    opened = {route: status for route, status in zip(routes, answers, strict=True) if status not in (401, 403)}
    assert opened == {("GET", "/health"): 200, ("HEAD", "/health"): 200}


@pytest.mark.parametrize(("words", "status"), [("database is locked", 503), ("disk I/O error", 500)])
def test_a_database_that_is_busy_is_a_503_after_which_flowers_programs_try_again(words, status):
    """After a 500 the program that starts apps ends, and with it the run: so once did the demo under load."""
    app = FastAPI()

    @app.post("/v1/runtime/acquire-task")
    def acquire():
        raise OperationalError("BEGIN", {}, Exception(words))

    app.add_middleware(Guard, secret=SECRET)
    assert ask(app, [("POST", "/v1/runtime/acquire-task", {})]) == [status]


def test_each_token_opens_its_own_routes_alone(link):
    operator = {"authorization": f"Bearer {token(SECRET, 'operator')}"}
    gateway = {GATEWAY_HEADER: token(SECRET, "gateway")}
    control, fleet = "/v1/control/list-nodes", "/v1/fleet/pull-messages"
    shown = [operator, gateway, {"authorization": "Bearer "}, {"authorization": f"Bearer {SECRET.decode()}"}]
    assert ask(link, [("POST", control, headers) for headers in shown]) == [200, 401, 401, 401]
    assert ask(link, [("POST", fleet, headers) for headers in (operator, {GATEWAY_HEADER: ""})]) == [401, 401]
    twice = httpx.Headers([("authorization", operator["authorization"])] * 2)
    assert ask(link, [("POST", control, twice)]) == [401]


@pytest.mark.parametrize("path", [
    "/v1/fleet/../control/list-nodes", "/v1/fleet/..%2fcontrol/list-nodes", "/v1//control/list-nodes",
    "//v1/control/list-nodes", "/V1/control/list-nodes", "/v1/%63ontrol/list-nodes", "/v1/control/list-nodes/",
    "/openapi.json", "/docs",
])  # fmt: skip
def test_the_gateways_token_opens_no_operators_route_in_any_spelling(link, path):
    async def run():
        answers = []

        async def send(message):
            answers.append(message)

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        headers = [(GATEWAY_HEADER.encode(), token(SECRET, "gateway").encode())]
        scope = {
            "type": "http", "method": "POST", "path": unquote(path), "raw_path": path.encode(), "headers": headers,
            "query_string": b"", "scheme": "https", "server": ("127.0.0.1", 1),
        }  # fmt: skip
        await link(scope, receive, send)
        return answers[0]["status"]

    assert asyncio.run(run()) in (401, 404)


@pytest.fixture
def app(tmp_path):
    return initialise(tmp_path / "fed").app


def packed(app):
    """The app as Flower sends it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a library that Flower uses
        return build_fab_from_disk(app)


def test_a_node_runs_the_app_that_our_own_server_sends(app):
    check_app(packed(app))


def test_a_node_runs_no_other_app(app):
    client = (app / "unskew_node" / "client_app.py").read_text()
    project = (app / "pyproject.toml").read_text()
    attacks = [
        ("its code differs", "unskew_node/client_app.py", client + "\nimport os\n"),
        ("its code differs", "unskew_node/__init__.py", "import os\n"),
        ("other files", "unskew_node/socket.py", "import os\n"),
        ("its code differs", "pyproject.toml", project.replace("client_app:app", "server_app:app")),
    ]
    for words, name, content in attacks:
        before = (app / name).read_bytes() if (app / name).exists() else None
        (app / name).write_text(content)
        with pytest.raises(WrongApp, match=words):
            check_app(packed(app))
        (app / name).unlink() if before is None else (app / name).write_bytes(before)
    check_app(packed(app))


def test_an_app_that_is_no_archive_or_a_bomb_is_refused(app):
    with pytest.raises(WrongApp, match="refused"):
        check_app(b"PK\x03\x04 and then nothing")
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("LICENSE", b"\0" * 50_000_000)
    with pytest.raises(WrongApp, match="too large"):
        check_app(bomb.getvalue())
    twice = io.BytesIO(packed(app))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(twice, "a") as archive:
        archive.writestr("unskew_node/client_app.py", b"import os")
    with pytest.raises(WrongApp, match="other files"):
        check_app(twice.getvalue())


def test_what_flower_and_its_command_need_to_know_is_this_users_alone_and_differs_by_purpose_and_start(tmp_path):
    federation = initialise(tmp_path / "fed", nodes=["a"])
    tokens = set()
    for _ in range(2):
        renew_secrets(federation)
        tokens |= {federation.token("gateway"), federation.token("operator")}
    assert len(tokens) == 4
    for file in (federation.secret, federation.local_key, federation.flower_home / "credentials.yaml"):
        assert file.stat().st_mode & 0o077 == 0, file
    for folder in ("ca", "server", "server/local", "nodes", "nodes/a"):
        assert os.stat(federation.path / folder).st_mode & 0o077 == 0, folder


def test_every_attack_in_the_threat_model_has_its_test():
    root = Path(__file__).parents[2]
    rows = [line for line in (root / "SECURITY.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            assert f"def {name}(" in (root / "tests" / file).read_text(), name


@pytest.mark.parametrize(("module", "kind"), [
    ("flwr.supercore.corestate.sql_corestate", "SqlCoreState"),
    ("flwr.supercore.corestate.in_memory_corestate", "InMemoryCoreState"),
])  # fmt: skip
def test_an_app_that_starts_slowly_keeps_its_task(module, kind):
    """On a machine under load an app takes longer than Flower's 30 seconds; handing its task on would never end."""
    state = type("State", (getattr(importlib.import_module(module), kind),), {})
    assert "HEARTBEAT_DEFAULT_INTERVAL" in state.claim_task.__code__.co_names  # or Flower has another rule now
    before = state.claim_task.__globals__["HEARTBEAT_DEFAULT_INTERVAL"]
    give_apps_time(state)
    assert state.claim_task.__globals__["HEARTBEAT_DEFAULT_INTERVAL"] == APP_SECONDS > before
    assert before == importlib.import_module(module).HEARTBEAT_DEFAULT_INTERVAL  # heartbeats are as frequent as ever


def test_a_node_retries_after_a_broken_handshake_and_gives_up_on_a_wrong_certificate(monkeypatch):
    """A network that cuts connections cuts some in the handshake; after Flower's own rule that node is lost."""
    connection = importlib.import_module("flwr.supernode.fleet_http_connection")
    monkeypatch.setattr(connection, "make_simple_http_retry_invoker", make := connection.make_simple_http_retry_invoker)
    cut = httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)")
    wrong = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate")
    other = httpx.HTTPStatusError("", request=None, response=httpx.Response(413))
    assert [make().should_giveup(error) for error in (cut, wrong, other)] == [True, True, True]
    retry_handshakes(connection)
    patient = connection.make_simple_http_retry_invoker()
    assert [patient.should_giveup(error) for error in (cut, wrong, other)] == [False, True, True]


def test_heartbeats_outlive_an_error_of_the_server_and_a_node_that_cannot_send_any_ends(monkeypatch):
    """One answer of 500 would end them, and the server would take the node for gone, for good."""
    connection = importlib.import_module("flwr.supernode.fleet_http_connection")
    monkeypatch.setattr(connection, "HeartbeatSender", lambda beat: beat)
    keep_heartbeats(connection)

    def failing(error):
        def beat():
            raise error

        return connection.HeartbeatSender(beat)

    assert [connection.HeartbeatSender(lambda well=well: well)() for well in (True, False)] == [True, False]
    for status in (500, 507):
        assert failing(httpx.HTTPStatusError("", request=None, response=httpx.Response(status)))() is False
    monkeypatch.setattr(os, "_exit", sys.exit)
    for error in (RuntimeError("unknown"), httpx.HTTPStatusError("", request=None, response=httpx.Response(404))):
        with pytest.raises(SystemExit, match="1"):
            failing(error)()


def test_a_program_of_flowers_that_returns_ends_although_its_threads_go_on():
    """Its watcher starts it again; a SuperNode that only serves its own programs would be lost to the federation."""
    code = "import threading, time; from unskew.federation import flower; "
    code += "flower._PROGRAMS['x'] = threading.Thread(target=time.sleep, args=(600,)).start; flower.run_program(['x'])"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 1


def test_a_node_cannot_reply_in_another_node_s_name(monkeypatch):
    """Its request is its own, and well signed; the reply inside claims to come from somebody else."""
    handlers = importlib.import_module("flwr.superlink.servicer.fleet.fleet_handlers")
    router = importlib.import_module("flwr.superlink.routers.fleet.router")
    assert router.fleet_handlers is handlers  # it looks the function up at every call
    passed = []
    monkeypatch.setattr(handlers, "push_messages", lambda request, state: passed.append(request))
    answer_for_oneself(handlers)
    request = PushMessagesRequest(node=Node(node_id=7))
    request.messages_list.add().metadata.src_node_id = 7
    handlers.push_messages(request=request, state=None)
    assert passed == [request]
    request.messages_list.add().metadata.src_node_id = 8
    with pytest.raises(HTTPException) as refused:
        handlers.push_messages(request=request, state=None)
    assert refused.value.status_code == 403
    assert passed == [request]


def test_an_error_that_flower_reports_as_json_is_one_message(tmp_path, monkeypatch):
    """As after the server was killed: ``flwr list`` answers with JSON that has no runs."""
    monkeypatch.setattr(flower, "_run", lambda command, federation: '{"success": false, "error-message": "gone"}')
    with pytest.raises(UserError, match=r"the server's answer cannot be read: .*gone"):
        flower.runs(initialise(tmp_path / "fed"))
