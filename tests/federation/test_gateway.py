"""The port that nodes connect to, tried request by request before a stand-in for Flower's server."""

import asyncio
import base64
import datetime
import json
import time

import httpx
import pytest

from unskew.federation import gateway as module
from unskew.federation.folder import initialise
from unskew.federation.gateway import Gateway
from unskew.federation.network import make_node_key, public_pem

ASK, PUSH, JOIN = "/v1/fleet/pull-messages", "/v1/fleet/push-object", "/v1/fleet/activate-node"


@pytest.fixture
def federation(tmp_path):
    return initialise(tmp_path, nodes=["a", "b"]).federation


class Flower:
    """A server that counts what reaches it and answers with what it is told."""

    def __init__(self):
        self.requests, self.answers, self.trouble = [], [], None

    async def __call__(self, request):
        content = await request.aread()
        if self.trouble:
            raise self.trouble
        self.requests.append((request.url.path, dict(request.headers), content))
        body = self.answers.pop(0) if self.answers else b""

        async def stream():
            yield body

        return httpx.Response(200, content=stream(), headers={"content-type": "application/x-protobuf", "server": "x"})


@pytest.fixture
def flower():
    return Flower()


@pytest.fixture
def call(federation, flower):
    gateway = Gateway(federation)
    gateway._server = httpx.AsyncClient(base_url="https://x", transport=httpx.MockTransport(flower))

    async def one(path=PUSH, node="a", *, method="POST", parts=(b"hello",), key=None, headers=(), leaves=None):
        coming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        coming.append({"type": "http.request", "body": b"", "more_body": False})
        sent = []

        async def receive():
            if coming:
                return coming.pop(0)
            await asyncio.sleep(leaves if leaves is not None else 60)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        if key is None and node:
            key = base64.b64encode(public_pem(federation.public_keys()[node]))
        given = [(b"content-type", b"application/x-protobuf"), (b"cookie", b"c"), (b"flwr-signature", b"s"), *headers]
        given += [(b"flwr-public-key", key)] if key else []
        scope = {"type": "http", "method": method, "path": path, "headers": given, "client": ("10.0.0.9", 1)}
        await gateway(scope, receive, send)
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:]), dict(sent[0]["headers"])

    return lambda *words, **more: asyncio.run(one(*words, **more))


def reason(answer):
    return json.loads(answer[1])["detail"]


def test_a_registered_nodes_request_is_passed_on_with_flowers_headers_alone(call, flower):
    flower.answers = [b"answer"]
    status, body, headers = call(parts=(b"he", b"llo"))
    assert (status, body) == (200, b"answer")
    path, sent, content = flower.requests[0]
    assert (path, content) == (PUSH, b"hello")
    assert (sent["flwr-signature"], "cookie" in sent) == ("s", False)
    assert b"server" not in headers


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/control/start-run", "POST"),
        ("/v1/control/register-node", "POST"),
        ("/v1/runtime/acquire-task", "POST"),
        ("/v1/fleet/pull-messages", "GET"),
        ("/v1/fleetx", "POST"),
        ("/", "GET"),
        ("/docs", "GET"),
    ],
)
def test_what_nodes_do_not_ask_never_reaches_flower(call, flower, path, method):
    answer = call(path, method=method)
    assert (answer[0], reason(answer)) == (404, "this port is for the nodes of a federation")
    assert flower.requests == []


def test_an_unknown_key_and_no_key_are_refused(call, flower, tmp_path):
    (tmp_path / "x.pub").write_bytes(make_node_key().public)
    stranger = base64.b64encode(public_pem(tmp_path / "x.pub"))
    for answer in (call(key=stranger), call(node=None), call(key=b"\xff\x00")):
        assert (answer[0], reason(answer)) == (401, module.NOT_REGISTERED)
    assert call(JOIN, key=stranger)[0] == 400  # with it, a node gives the reason before it ends
    assert flower.requests == []


def test_a_key_that_is_taken_away_is_refused_and_one_that_is_added_is_let_in(call, flower, federation, monkeypatch):
    monkeypatch.setattr("unskew.federation.gateway._LOOK_AGAIN", 0.0)
    key = base64.b64encode(public_pem(federation.public_keys()["a"]))
    assert call(key=key)[0] == 200
    content = federation.public_keys()["a"].read_bytes()
    federation.public_keys()["a"].unlink()
    assert call(key=key)[0] == 401
    (federation.path / "nodes" / "c.pub").write_bytes(content)
    assert call(key=key)[0] == 200
    assert set(json.loads(federation.seen.read_bytes())) == {"a", "c"}


def test_too_large_a_request_is_refused_by_its_length_and_by_its_bytes(federation, flower, call, capsys):
    gateway_most = federation.settings.max_message
    answer = call(headers=[(b"content-length", str(gateway_most + 1).encode())])
    assert (answer[0], reason(answer)) == (413, "the request is larger than 1.0 GB, the most that max_message allows")
    assert call(headers=[(b"content-length", b"many")])[0] == 400
    assert flower.requests == []
    assert capsys.readouterr().out.count("refused 10.0.0.9: the request is larger") == 1


def test_more_bytes_than_were_announced_are_refused_as_well(federation, flower):
    small = type(federation)(federation.path, type(federation.settings)("h", 1, "127.0.0.1", 2, 10))
    gateway = Gateway(small)
    gateway._server = httpx.AsyncClient(base_url="https://x", transport=httpx.MockTransport(flower))
    key = base64.b64encode(public_pem(federation.public_keys()["a"]))
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"x" * 6, "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PUSH, "headers": [(b"flwr-public-key", key)]}
    asyncio.run(gateway(scope, receive, send))
    assert sent[0]["status"] == 413
    assert flower.requests == []


def test_a_server_that_does_not_answer_is_a_503_after_which_nodes_try_again(call, flower):
    flower.trouble = httpx.ConnectError("no")
    assert call()[0] == 503
    assert call(ASK)[0] == 503


def test_without_a_run_a_question_without_a_message_is_answered_at_once(call, flower):
    began = time.monotonic()
    assert call(ASK)[:2] == (200, b"")
    assert time.monotonic() - began < 1
    assert len(flower.requests) == 1


def test_while_a_run_is_on_a_question_is_kept_open_until_there_is_a_message(call, flower):
    flower.answers = [b"first", b"", b"", b"second"]
    assert call(ASK)[1] == b"first"
    began = time.monotonic()
    assert call(ASK)[1] == b"second"
    assert 0.4 < time.monotonic() - began < 3
    assert len({content for _, _, content in flower.requests}) == 1


def test_a_node_that_leaves_gets_no_message(call, flower):
    flower.answers = [b"first", b"", b"", b"", b"lost"]
    call(ASK)
    call(ASK, leaves=0.1)
    assert flower.answers[-1:] == [b"lost"]


def test_a_question_is_given_back_after_a_while(call, flower, monkeypatch):
    monkeypatch.setattr(module, "_HOLD", 0.3)
    flower.answers = [b"first"]
    call(ASK)
    began = time.monotonic()
    assert call(ASK)[1] == b""
    assert 0.2 < time.monotonic() - began < 2


@pytest.mark.parametrize(("seconds", "words"), [(60, "60 s ahead of"), (-400, "400 s behind")])
def test_a_node_whose_clock_is_wrong_is_told_so_when_it_joins(call, flower, seconds, words):
    signed = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat().encode()
    answer = call(JOIN, headers=[(b"flwr-timestamp", signed)])
    assert (answer[0], reason(answer)) == (400, f"{module.CLOCK}: it is {words} the server's")
    assert flower.requests == []
    assert call(JOIN, headers=[(b"flwr-timestamp", b"now")])[0] == 200  # Flower itself refuses what it cannot read
