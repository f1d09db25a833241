"""A node that was killed says that its last life is over."""

import base64

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import unskew.federation.node as last_life
from unskew.federation.folder import initialise, read_node
from unskew.federation.network import free_pair


@pytest.fixture
def node(tmp_path):
    return read_node(initialise(tmp_path, nodes=["a"], port=free_pair()).federation.node("a"))


def test_the_number_of_the_last_life_is_sent_once_and_as_protobuf_writes_it(node, monkeypatch):
    sent = []
    monkeypatch.setattr(last_life, "_post", lambda _, body: sent.append(body) or 200)
    assert not last_life.say_farewell(node)  # it never was connected
    last_life.remember(node, "300")
    assert last_life.say_farewell(node)
    assert not last_life.say_farewell(node)
    assert sent == [b"\x08\xac\x02"]  # field 1, varint: 300 = 0b10_0101100
    last_life.remember(node, str(2**64 - 1))
    last_life.say_farewell(node)
    assert sent[1] == b"\x08" + b"\xff" * 9 + b"\x01"


def test_the_time_is_signed_with_the_nodes_key(node):
    headers = last_life._signed(node)
    key = serialization.load_pem_public_key(base64.b64decode(headers["flwr-public-key"]))
    signature = base64.b64decode(headers["flwr-signature"])
    key.verify(signature, headers["flwr-timestamp"].encode(), ec.ECDSA(hashes.SHA256()))


def test_a_server_that_is_not_there_and_a_damaged_number_are_no_trouble(node):
    last_life.remember(node, "300")
    assert not last_life.say_farewell(node)
    last_life.remember(node, "x")
    assert not last_life.say_farewell(node)
