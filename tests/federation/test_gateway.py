"""The port that nodes connect to, attacked request by request: a real gateway before a stand-in for Flower's server."""

import base64
import json
import random
import socket
import time
from contextlib import ExitStack, closing

import httpx
import pytest
from door import ASK, JOIN, PUSH, Door, answer, reason

from unskew.federation import gateway as module
from unskew.federation.folder import initialise
from unskew.federation.gateway import ROUTES, Refused, read_head
from unskew.federation.network import make_node_key, public_pem

FIRST = f"POST {PUSH} HTTP/1.1"


@pytest.fixture
def make_door(tmp_path):
    with ExitStack() as made:
        yield lambda **limits: made.enter_context(closing(Door(tmp_path / "fed", **limits)))


@pytest.fixture
def door(make_door):
    return make_door()


def test_a_nodes_request_is_passed_on_with_flowers_headers_alone(door):
    door.flower.answers = [b"answer"]
    headers = {**door.signed(), "cookie": "c", "authorization": "Bearer x", "x-unskew-gateway": "mine"}
    assert door.call(headers=headers) == (200, b"answer")
    path, sent, content = door.flower.requests[0]
    assert (path, content) == (PUSH, b"hello")
    assert sent["flwr-signature"] == headers["flwr-signature"]
    assert not {"cookie", "authorization"} & set(sent)
    assert sent["x-unskew-gateway"] == door.federation.token("gateway")


def test_a_node_is_answered_even_if_the_server_cannot_write_when_it_was_heard_from(door):
    door.federation.seen.mkdir()
    assert door.call()[0] == 200


def test_two_requests_on_one_connection(door):
    with door.connect() as line:
        assert door.call(line=line)[0] == 200
        assert door.call("/v1/fleet/get-run", line=line)[0] == 200
    assert [path for path, _, _ in door.flower.requests] == [PUSH, "/v1/fleet/get-run"]


def test_of_flowers_complete_route_table_a_node_reaches_what_nodes_need_and_nothing_else(door, tmp_path):
    """Every route of Flower's own app, asked with a right signature."""
    from fastapi.routing import iter_route_contexts
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
    from flwr.superlink.main import create_app

    assert FLWR_IN_MEMORY_DB_NAME
    found = [context.route for context in iter_route_contexts(create_app().routes)]
    routes = {(method, route.path) for route in found for method in route.methods or ()}
    assert ("POST", "/v1/control/start-run") in routes
    assert len(routes) > 70
    reached = {(method, path) for method, path in routes if door.call(path, method=method)[0] == 200}
    assert reached == {("POST", path) for path in ROUTES}
    fleet = {path for _, path in routes if path.startswith("/v1/fleet/")}
    assert fleet - ROUTES.keys() == {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}  # the server's to do


ATTACKS = [
    "/v1/fleet/../control/start-run", "/v1/fleet/..%2fcontrol/start-run", "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/.%2E/control/start-run", "/v1/fleet/pull-messages/../../control/start-run",
    "/v1/fleet//pull-messages", "//v1/fleet/pull-messages", "/v1//fleet/pull-messages", "/V1/fleet/pull-messages",
    "/v1/Fleet/pull-messages", "/v1/fleet/PULL-MESSAGES", "/v1/fleet/pull%2dmessages", "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages?x=/v1/control/start-run", "/v1/fleet/pull-messages#x", "/v1/fleet/pull-messages;x",
    "/v1/fleet\\..\\control\\start-run", "/v1/fleet/..\\control/start-run", "/v1/fleet/\x00pull-messages",
    "/v1/fleet/pull-messages\t", "/v1/fleet/pull-messages\x7f", "https://127.0.0.1/v1/fleet/pull-messages",
    "http://127.0.0.1:8001/v1/control/start-run", "*", "v1/fleet/pull-messages",
    "/v1/fleet/%c0%ae%c0%ae/control/start-run", "/v1/fleet/\xc0\xae\xc0\xae/control/start-run",
    "/./v1/fleet/pull-messages", "/v1/fleet/./pull-messages", "/v1/fleet/%252e%252e/control/start-run",
    "/v1/fleet/pull-messages%2f..%2f..%2fcontrol/start-run", "/v1/fleet/..;/control/start-run",
    "/v1/fleet/.../control/start-run", "/v1/fleet/pull-messages/..", "/v1/fleet/pull-messages/.",
    "/v1/fleet/pull-messages//", "/v1/fleet/pull-messages%20", "/v1/fleet/pull-messages%00",
    "/v1/fleet/PuLl-MeSsAgEs", "/%76%31/fleet/pull-messages", "/v1%2ffleet%2fpull-messages", "/v1/control/start-run",
    "/v1/runtime/acquire-task", "/", "/docs",
]  # fmt: skip
METHODS = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "post", "PATCH"]


def test_no_other_spelling_of_a_path_and_no_other_method_reaches_flower(make_door):
    door = make_door(failures=1000)
    for path, method in [*((path, "POST") for path in ATTACKS), *((PUSH, method) for method in METHODS)]:
        assert door.told(path, method=method) == (404, "this port is for the nodes of a federation"), path
    assert door.flower.requests == []


LINES = [
    f"POST {PUSH} HTTP/1.0", f"POST {PUSH} HTTP/2.0", f"POST {PUSH} HTTP/1.1 ", f"POST {PUSH} http/1.1",
    f"POST {PUSH}", f"POST  {PUSH} HTTP/1.1", f" POST {PUSH} HTTP/1.1", f"POST\t{PUSH}\tHTTP/1.1",
    f"POST {PUSH} HTTP/1.1 HTTP/1.1", f"POST {PUSH} HTTP/1.1\nx: 1", f"\r\nPOST {PUSH} HTTP/1.1", "PRI * HTTP/2.0",
]  # fmt: skip


def test_no_other_spelling_of_a_request_line_reaches_flower(make_door):
    door = make_door(failures=1000)
    for line in LINES:
        answered = door.send(door.written(line) + b"hello")
        assert (answered[0], reason(answered)) == (404, "this port is for the nodes of a federation"), line
    assert door.flower.requests == []
    assert door.refused("path") == len(LINES)


AMBIGUOUS = [
    "content-length: 5\r\ncontent-length: 5", "content-length: 5\r\ncontent-length: 6",
    "content-length: 5\r\nContent-Length: 7", "content-length: 5\r\ntransfer-encoding: chunked",
    "transfer-encoding: chunked", "transfer-encoding: identity\r\ncontent-length: 5", "content-length: +5",
    "content-length: 05", "content-length: 5, 5", "content-length: 0x5", "content-length: -1", "content-length : 5",
    " content-length: 5", "content-length: 5\r\n folded: 1", "content-length: 5\nx: 1",
    "content-length: 5\r\nx: a\x00b", "content-length: 5\r\nx y: 1", "content-length: 5\r\n: 1",
    "content-length: 5\r\nflwr-public-key: x\r\nflwr-public-key: y", "x: 1",
]  # fmt: skip


def test_a_request_whose_length_or_headers_can_be_read_in_two_ways_is_refused(make_door):
    door = make_door(failures=1000)
    for fields in AMBIGUOUS:
        assert door.send(door.written(FIRST, fields) + b"hello")[0] == 400, fields
    assert door.flower.requests == []


def test_ten_thousand_mutated_heads_are_the_request_itself_or_refused():
    draw = random.Random(0)
    head = f"POST {ASK} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nflwr-timestamp: t\r\n\r\n".encode()
    bytes_in_doubt = b"\r\n\t \x00%./\\:;?#*AaZz09\x80\xff"
    passed = 0
    for _ in range(10_000):
        mutated = bytearray(head)
        for _ in range(draw.randint(1, 4)):
            where, what = draw.randrange(len(mutated) - 4), draw.choice(bytes_in_doubt)
            if draw.random() < 0.5:
                mutated[where] = what
            elif draw.random() < 0.5:
                mutated.insert(where, what)
            else:
                del mutated[where : where + draw.randint(1, 6)]
        try:
            request = read_head(bytes(mutated))
        except Refused:
            continue
        passed += 1
        assert request.path in ROUTES
        assert "transfer-encoding" not in request.headers
    assert 0 < passed < 10_000


def test_an_unknown_key_and_no_key_are_refused(door, tmp_path):
    (tmp_path / "x.pub").write_bytes(make_node_key().public)
    stranger = {**door.signed(), "flwr-public-key": base64.b64encode(public_pem(tmp_path / "x.pub")).decode()}
    for headers in (stranger, {}, {"flwr-public-key": "!"}):
        assert door.told(headers=headers) == (401, module.NOT_REGISTERED)
    assert door.call(JOIN, headers=stranger)[0] == 400  # with it, a node gives the reason before it ends
    assert door.flower.requests == []


def test_a_public_key_without_its_private_key_opens_nothing(door):
    right = door.signed()
    forged = [
        {**right, "flwr-signature": "AAAA"},
        {**right, "flwr-signature": ""},
        {**right, "flwr-signature": "not base64!"},
        {name: value for name, value in right.items() if name != "flwr-signature"},
        door.signed("a", signer=door.key("b")),
        {**right, "flwr-timestamp": door.signed()["flwr-timestamp"]},
    ]
    for headers in forged:
        assert door.told(headers=headers) == (401, "the signature does not match the node's key")
    unsigned = {name: value for name, value in right.items() if name != "flwr-timestamp"}
    assert door.told(headers=unsigned) == (401, "the request is not signed")
    assert door.flower.requests == []
    assert door.call(headers=right)[0] == 200


def test_nothing_of_a_body_is_read_before_the_signature_is_found_right(door):
    """A forged request announces a large body and sends none of it: the answer is there at once."""
    began = time.monotonic()
    headers = {**door.signed(), "flwr-signature": "AAAA"}
    assert door.call(headers=headers, body=b"", size=5_000_000)[0] == 401
    assert time.monotonic() - began < 10
    assert door.gateway._budget.taken.total() == 0


def test_a_signature_counts_once_and_on_no_other_path(door):
    headers = door.signed()
    assert door.call(headers=headers)[0] == 200
    for path in (PUSH, "/v1/fleet/get-fab"):
        assert door.told(path, headers=headers) == (503, "this request was sent before")
    assert len(door.flower.requests) == 1


def test_a_signature_from_before_the_gateways_start_is_refused(door):
    why = "the request was signed before the gateway started; sign it again"
    assert door.told(headers=door.signed(seconds=-30)) == (503, why)


def test_a_server_whose_clock_was_a_day_ahead_admits_its_nodes_once_it_is_set_right(door, monkeypatch):
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 86400)
    assert door.call(headers=door.signed(seconds=-86400))[0] == 200
    answered = door.call(headers=door.signed(seconds=-86430))  # before its start all the same
    assert "signed before the gateway started" in reason(answered)


@pytest.mark.parametrize(("seconds", "words"), [(60, "60 s ahead of"), (-400, "400 s behind")])
def test_a_node_whose_clock_is_wrong_is_told_so_when_it_joins(door, seconds, words):
    answered = door.call(JOIN, headers=door.signed(seconds=seconds))
    assert answered[0] == 400
    assert reason(answered) == f"{module.CLOCK}: it is {words} the server's"
    assert door.call(headers=door.signed(seconds=seconds))[0] == 401
    assert door.call(headers=door.signed(text="now"))[0] == 401
    assert door.flower.requests == []


def test_a_key_that_is_taken_away_replaced_or_added_counts_from_the_next_second_on(door, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_AGAIN", 0.0)
    file, old = door.federation.public_keys()["a"], door.key("a")
    assert door.call()[0] == 200
    new = make_node_key()
    file.write_bytes(new.public)
    (door.federation.node("a") / "node.key").write_bytes(new.private)
    assert door.call()[0] == 200
    assert door.call(headers=door.signed(signer=old))[0] == 401
    signed = door.signed()
    file.rename(file.with_name("c.pub"))
    assert door.call(headers=signed)[0] == 200
    file.with_name("c.pub").unlink()
    assert door.call(headers=signed)[0] == 401
    assert set(json.loads(door.federation.seen.read_bytes())) == {"a", "c"}


def test_each_question_has_a_largest_size(door):
    for path, size in ROUTES.items():
        answered = door.call(path, size=size + 1)
        assert (answered[0], "the limit for its path" in reason(answered)) == (413, True), path
    assert door.flower.requests == []


def test_a_node_sends_no_more_than_max_message_allows_until_it_gets_another_message(make_door):
    door = make_door(volumes=1)
    settings = door.federation.settings
    object.__setattr__(settings, "max_message", 10)
    assert [door.call(body=b"x" * 6)[0] for _ in range(2)] == [200, 413]
    door.flower.answers = [b"a message"]
    assert door.call(ASK, body=b"")[0] == 200
    assert door.call(body=b"x" * 6)[0] == 200


def test_bodies_of_one_node_and_of_all_nodes_have_a_limit_in_memory(make_door):
    door = make_door(in_flight=2000, in_flight_each=1000, queue_seconds=0.3)
    with door.connect() as first, door.connect() as second:
        for line, node in ((first, "a"), (second, "b")):
            line.sendall(door.written(FIRST, "content-length: 1000", door.signed(node)) + b"x" * 999)
        while door.gateway._budget.taken.total() < 2000:
            time.sleep(0.01)
        assert door.told() == (503, "the gateway is busy; try again")
        first.sendall(b"x")
        assert answer(first)[0] == 200
        assert door.call()[0] == 200
    assert len(door.flower.requests) == 2


def test_who_sends_a_body_or_a_head_slowly_is_cut_off(make_door):
    door = make_door(head_seconds=0.5, body_seconds=0.3, slowest=1e6)
    with door.connect() as silent, door.connect() as dripping, door.connect() as slow:
        dripping.sendall(f"POST {PUSH} HT".encode())
        slow.sendall(door.written(FIRST, "content-length: 100") + b"x")
        began = time.monotonic()
        assert [answer(line) for line in (silent, dripping, slow)] == [(0, b"")] * 3
        assert time.monotonic() - began < 10
    assert door.gateway._budget.taken.total() == 0
    assert door.call()[0] == 200


def test_who_never_finishes_the_handshake_is_cut_off(make_door):
    door = make_door(head_seconds=0.5)
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as line:
        line.sendall(b"\x16\x03\x01")
        assert line.recv(100) == b""


def test_a_flood_of_connections_leaves_room_for_nodes_that_are_there_and_for_other_addresses(make_door):
    door = make_door(strangers=20, strangers_each=8)
    with door.connect() as node:
        assert door.call(line=node)[0] == 200
        with ExitStack() as flood:
            for _ in range(60):
                flood.enter_context(socket.create_connection(("127.0.0.1", door.port), timeout=20))
            while door.refused("connections") < 52:
                time.sleep(0.01)
            assert door.gateway._strangers["127.0.0.1"] == 8
            assert door.call(line=node)[0] == 200
    while door.gateway._strangers.total():
        time.sleep(0.01)
    assert door.call()[0] == 200


def test_one_node_cannot_take_all_connections(make_door):
    """It proves its key on each and leaves it open; the others must still find a place."""
    door = make_door(connections=12, connections_each=8)
    with ExitStack() as opened:
        lines = [opened.enter_context(door.connect()) for _ in range(10)]
        assert [door.call(line=line)[0] for line in lines] == [200] * 8 + [503] * 2
        assert door.call(headers=door.signed("b"))[0] == 200
    while door.gateway._proved:
        time.sleep(0.01)
    assert door.call()[0] == 200
    assert "refused 127.0.0.1: node a has too many connections" in door.lines


def test_a_connection_is_one_nodes(door):
    """Two requests written at once, as one node and as another, with right signatures."""
    both = b"".join(door.written(FIRST, headers=door.signed(node)) + b"hello" for node in ("a", "b"))
    with door.connect() as line:
        assert door.send(both, line)[0] == 200
        answered = answer(line)
        assert (answered[0], reason(answered)) == (400, "this connection belongs to another node")
    assert len(door.flower.requests) == 1


@pytest.mark.parametrize(("address", "source"), [
    ("192.0.2.7", "192.0.2.7"), ("fe80::1%eth0", "fe80::/64"),
    ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
])  # fmt: skip
def test_all_addresses_that_one_machine_may_have_count_as_one(address, source):
    assert module.source_of(address) == source


def test_wrong_signatures_do_not_shut_out_the_node_whose_key_they_name(make_door):
    """Its public key is known, and the address may be a proxy's or a gateway's that many share."""
    door = make_door(failures=3)
    wrong = {**door.signed(), "flwr-signature": "AAAA"}
    assert [door.call(headers=wrong)[0] for _ in range(5)] == [401, 401, 401, 503, 503]
    assert door.call()[0] == 200


def test_a_node_has_a_rate_and_so_have_wrong_signatures_from_one_address(make_door):
    door = make_door(burst=3, rate=0.001, failures=4)
    with door.connect() as line:
        assert [door.call(line=line)[0] for _ in range(4)] == [200, 200, 200, 503]
    wrong = {**door.signed("b"), "flwr-signature": "AAAA"}
    assert [door.call(headers=wrong)[0] for _ in range(5)] == [401, 401, 401, 401, 503]
    assert len(door.flower.requests) == 3


def test_refusals_are_counted_and_told_once_without_the_senders_words(door):
    for _ in range(5):
        door.call("/v1/fleet/evil-words", headers={})
    assert door.refused("path") == 5
    assert door.lines == ["refused 127.0.0.1: this port is for the nodes of a federation"]
    text = door.gateway.report()
    assert 'unskew_gateway_refused_total{reason="path"} 5' in text
    assert 'unskew_node_online{node="a"} 0' in text
    assert "evil" not in text


def test_a_head_without_end_is_refused(door):
    assert door.send(b"POST " + b"x" * 200_000)[0] in (0, 431)  # 0 where the connection ended before we had sent all
    assert door.refused("head") == 1


def test_plain_text_is_refused(door):
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as line:
        line.sendall(b"POST / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in line.recv(100)


def test_a_new_certificate_is_used_without_a_restart(door):
    def serial():
        with door.connect() as line:
            return line.getpeercert()["serialNumber"]

    before = serial()
    initialise(door.federation.path, renew=True)
    end = time.monotonic() + 20
    while serial() == before:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert "the server's new certificate is in use" in door.lines


def test_a_server_that_does_not_answer_is_a_503_after_which_nodes_try_again(door):
    door.flower.trouble = httpx.ConnectError("no")
    assert door.call()[0] == 503
    assert door.call(ASK)[0] == 503


def test_without_a_run_a_question_without_a_message_is_answered_at_once(door):
    began = time.monotonic()
    assert door.call(ASK) == (200, b"")
    assert time.monotonic() - began < 2
    assert len(door.flower.requests) == 1


def test_while_a_run_is_on_a_question_is_kept_open_until_there_is_a_message(door):
    door.flower.answers = [b"first", b"", b"", b"second"]
    assert door.call(ASK)[1] == b"first"
    began = time.monotonic()
    assert door.call(ASK)[1] == b"second"
    assert 0.4 < time.monotonic() - began < 5
    assert len({content for _, _, content in door.flower.requests}) == 1


def test_a_node_that_leaves_gets_no_message(door, monkeypatch):
    monkeypatch.setattr(module, "_SHORTEST", 2.0)
    door.flower.answers = [b"first", b"", b"lost"]
    door.call(ASK)
    with door.connect() as line:
        line.sendall(door.written(f"POST {ASK} HTTP/1.1", "content-length: 0"))
        while len(door.flower.requests) < 2:
            time.sleep(0.005)
    while door.gateway._waiting:
        time.sleep(0.01)
    assert door.flower.answers == [b"lost"]


def test_a_question_is_given_back_after_a_while(door, monkeypatch):
    monkeypatch.setattr(module, "_HOLD", 0.3)
    door.flower.answers = [b"first"]
    door.call(ASK)
    began = time.monotonic()
    assert door.call(ASK)[1] == b""
    assert 0.2 < time.monotonic() - began < 4
