"""Our messages inside Flower's: through its own serialisation and back; a grid that only has what Flower promises."""

from types import SimpleNamespace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from nodes import make_node
from unskew.engines.flower import client_app
from unskew.engines.flower.grid import KIND, RECORD, GridExchange, unwrap, wrap
from unskew.engines.flower.messages import Envelope, Presence, seal, unseal

MESSAGE = seal({"kind": "job"}, [("weight", torch.arange(5.0))])


class FakeGrid:
    """What we use of a grid, answered by a node in this process."""

    def __init__(self, node):
        self.node, self.pushed = node, []

    def get_nodes(self):
        rows = [(7, "online", "hospital", "then"), (8, "offline", "gone", ""), (9, "online", "", "")]
        return [
            SimpleNamespace(node_id=number, status=status, name=name, last_activated_at=since, public_key=b"")
            for number, status, name, since in rows
        ]

    def push_messages(self, messages):
        self.pushed += messages
        return [f"id-{message.metadata.dst_node_id}" if message.metadata.dst_node_id else None for message in messages]

    def pull_messages(self, ids):
        return [
            SimpleNamespace(
                metadata=SimpleNamespace(reply_to_message_id=name),
                has_error=lambda name=name: name == "id-2",
                error=SimpleNamespace(reason="ClientApp stopped responding."),
                content=wrap(MESSAGE) if name != "id-3" else RecordDict({"other": ConfigRecord({})}),
            )
            for name in ids
        ]


@pytest.fixture
def identity(monkeypatch):
    """A process that Flower has not started has no run: its messages need one."""
    for name, value in {"_run_id": 1, "_task_id": 1, "_node_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value, raising=False)


@pytest.mark.parametrize("envelope", [MESSAGE, Envelope(b"{}"), Envelope(b"x" * 10, b"y" * 6_000_000)])
def test_a_message_survives_flowers_own_serialisation(envelope):
    content = wrap(envelope)
    sent = {name: each.deflate() for name, each in get_all_nested_objects(content).items()}
    assert unwrap(inflate_object_from_contents(content.object_id, sent)) == envelope
    assert sum(map(len, sent.values())) < 1.02 * len(envelope) + 2000


def test_a_model_for_many_nodes_is_stored_once():
    objects = {}
    for number in range(10):
        objects |= get_all_nested_objects(wrap(Envelope(f"{number}".encode(), b"m" * 10**6)))
    assert sum(len(each.deflate()) for each in objects.values()) < 1.1e6


@pytest.mark.parametrize("content", [
    {}, {"other": ArrayRecord({})}, {RECORD: ConfigRecord({"header": b"x"})}, {RECORD: ArrayRecord({})},
])  # fmt: skip
def test_another_content_is_refused(content):
    with pytest.raises(ValueError, match="not an unskew message"):
        unwrap(RecordDict(content))


def test_nodes_that_are_online_are_there_with_the_names_of_their_keys():
    assert GridExchange(FakeGrid(None)).nodes() == {7: Presence("hospital", "then"), 9: Presence(None, "")}


def test_what_could_not_be_pushed_has_no_id_and_what_comes_back_is_a_message_or_a_reason(identity):
    grid = FakeGrid(None)
    exchange = GridExchange(grid)
    assert [exchange.send(node, MESSAGE) for node in range(4)] == [None, "id-1", "id-2", "id-3"]
    assert [message.metadata.message_type for message in grid.pushed] == [KIND] * 4
    assert exchange.receive([]) == {}
    assert exchange.receive(["id-1", "id-2", "id-3"]) == {
        "id-1": MESSAGE,
        "id-2": "its node reported an error: ClientApp stopped responding.",
        "id-3": "its reply is refused: its content is not an unskew message",
    }


def test_the_client_app_answers_what_the_grid_sends(identity, tmp_path, monkeypatch):
    node = make_node(tmp_path, 0)

    def ask(path, parts):
        reply = node.answer(Envelope(*parts))
        return [reply.header, reply.body]

    monkeypatch.setattr(client_app, "_ask", ask)
    question = seal({"kind": "describe", "run": "0" * 32, "number": 1})
    message = Message(wrap(question), dst_node_id=3, message_type=KIND, ttl=60.0)
    context = SimpleNamespace(node_config={"socket": "here"})
    assert unseal(unwrap(client_app.app(message, context).content))[0]["kind"] == "described"
    with pytest.raises(RuntimeError, match="has no path to its node service"):
        client_app.app(message, SimpleNamespace(node_config={}))
    other = Message(RecordDict({}), dst_node_id=3, message_type=KIND, ttl=60.0)
    with pytest.raises(ValueError, match="not an unskew message"):
        client_app.app(other, context)
