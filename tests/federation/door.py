"""A real gateway on loopback before a stand-in for Flower's server, and callers that write each byte themselves."""

import asyncio
import base64
import contextlib
import json
import re
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from unskew.federation.folder import initialise, renew_secrets
from unskew.federation.gateway import Gateway, Limits, listen
from unskew.federation.network import public_pem

ASK, PUSH, JOIN = "/v1/fleet/pull-messages", "/v1/fleet/push-object", "/v1/fleet/activate-node"


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

        headers = {"content-type": "application/protobuf", "content-length": str(len(body)), "server": "x"}
        return httpx.Response(200, content=stream(), headers=headers)


class Door:
    """The gateway of a federation of nodes ``a`` and ``b``, serving in a thread of its own."""

    def __init__(self, path, nodes=("a", "b"), **limits):
        self.federation = initialise(path, nodes=list(nodes))
        renew_secrets(self.federation)
        self.lines, self.flower, self._ready = [], Flower(), threading.Event()
        self._limits = Limits(**limits)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self):
        self.gateway = Gateway(self.federation, self._limits, self.lines.append)
        await self.gateway._server.aclose()
        headers = self.gateway._server.headers
        transport = httpx.MockTransport(self.flower)
        self.gateway._server = httpx.AsyncClient(base_url="https://flower", transport=transport, headers=headers)
        with listen("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
            self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(self.gateway.serve(listener))
            self._ready.set()
            await asyncio.gather(self._task, return_exceptions=True)

    def refused(self, label):
        """How many requests were refused with this label."""
        found = re.search(rf'refused_total{{reason="{label}"}} (\d+)', self.gateway.counts.text({}))
        return int(found[1]) if found else 0

    def close(self):
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def connect(self, seconds=20.0):
        trust = ssl.create_default_context(cafile=str(self.federation.authority))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=seconds)
        return trust.wrap_socket(plain, server_hostname="127.0.0.1")

    def key(self, node):
        return load_ssh_private_key((self.federation.node(node) / "node.key").read_bytes(), None)

    def signed(self, node="a", *, seconds=0.0, signer=None, text=None):
        """The headers by which a node proves who it is."""
        text = text or (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="microseconds")
        signature = (signer or self.key(node)).sign(text.encode(), ec.ECDSA(hashes.SHA256()))
        pem = public_pem(self.federation.public_keys()[node])
        return {
            "flwr-public-key": base64.b64encode(pem).decode(),
            "flwr-timestamp": text,
            "flwr-signature": base64.b64encode(signature).decode(),
        }

    def call(self, path=PUSH, body=b"hello", headers=None, *, method="POST", size=None, line=None):
        """One request over a connection of its own, or the one given; status and content."""
        fields = f"content-length: {len(body) if size is None else size}"
        return self.send(self.written(f"{method} {path} HTTP/1.1", fields, headers) + body, line)

    def told(self, *given, **more):
        """What ``call`` is answered: status and reason."""
        status, content = self.call(*given, **more)
        return status, reason((status, content))

    def written(self, first, fields="content-length: 5", headers=None):
        """A request's head with this first line and these fields, signed by node ``a`` unless there are headers."""
        headers = self.signed() if headers is None else headers
        proof = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{first}\r\nhost: x\r\n{fields}\r\n{proof}\r\n".encode("latin-1")

    def send(self, content, line=None):
        """These bytes, and what comes back: status (0 for nothing) and content."""
        own = line or self.connect()
        try:
            with contextlib.suppress(OSError):
                own.sendall(content)
            return answer(own)
        finally:
            if line is None:
                own.close()


def answer(line):
    """The next answer on a connection."""
    content = b""
    try:
        while b"\r\n\r\n" not in content:
            if not (part := line.recv(65536)):
                return 0, b""
            content += part
        head, _, body = content.partition(b"\r\n\r\n")
        fields = dict(each.split(": ", 1) for each in head.decode().split("\r\n")[1:])
        while len(body) < int(fields.get("content-length", 0)):
            if not (part := line.recv(65536)):
                return 0, b""
            body += part
    except OSError:
        return 0, b""
    return int(head.split()[1]), body


def reason(answered):
    return json.loads(answered[1])["detail"]
