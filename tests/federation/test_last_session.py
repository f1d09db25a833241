"""A node that was killed closes its last session when it starts again."""

import base64

import httpx
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import DeactivateNodeRequest

from unskew.federation.folder import initialise, read_node
from unskew.federation.network import free_port
from unskew.federation.node import close_last_session


@pytest.fixture
def node(tmp_path):
    return read_node(initialise(tmp_path, nodes=["a"], port=free_port(3)).node("a"))


@pytest.fixture
def requests(monkeypatch):
    """What is sent to the server, which knows every session."""
    seen = []

    def answer(self, request):
        seen.append(request)
        return httpx.Response(200, request=request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    return seen


@pytest.mark.parametrize("number", [300, 2**64 - 1])
def test_the_last_session_is_closed_once_and_signed_with_the_nodes_key(node, requests, number):
    close_last_session(node)  # it was never connected
    node.session.write_text(str(number))
    for _ in range(2):
        close_last_session(node)
    (request,) = requests
    assert str(request.url) == f"https://{node.settings.server}/v1/fleet/deactivate-node"
    assert DeactivateNodeRequest.FromString(request.content).node_id == number
    key = serialization.load_pem_public_key(base64.b64decode(request.headers["flwr-public-key"]))
    signature = base64.b64decode(request.headers["flwr-signature"])
    key.verify(signature, request.headers["flwr-timestamp"].encode(), ec.ECDSA(hashes.SHA256()))


def test_an_unreachable_server_and_a_damaged_number_are_no_trouble(node):
    for content in ("300", "x"):
        node.session.write_text(content)
        close_last_session(node)
        assert not node.session.exists()
