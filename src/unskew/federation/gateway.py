"""The one door that nodes come through: TLS, registered keys, the requests of nodes, nothing else.

Flower serves nodes, operators and its own programs on one port, and without accounts of Flower's makers everyone who
reaches this port may submit code and register keys. So Flower listens on loopback, and the port that nodes reach is
this one. It passes a request on only if it is one that nodes make, carries a registered key and is not too large;
whether the request is signed by that key, Flower itself checks.

A node asks for messages and sleeps 3 seconds when there is none, which is fixed in Flower. So while a run is on, the
gateway keeps such a question open and asks Flower again until there is a message: a node has it in a fraction of a
second.
"""

import asyncio
import base64
import datetime
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.plugins import require_extra
from unskew.core.units import format_bytes
from unskew.federation.folder import FederationFolder, read_federation
from unskew.federation.network import public_pem

_LOOK_AGAIN = 1.0  # seconds between two looks at the folder, and between two writings of who was seen


class KnownKeys:
    """Node names by key; a file that is taken away is a node refused, from the next second on."""

    def __init__(self, federation: FederationFolder, tell: Callable[[str], None]) -> None:
        self._federation, self._tell = federation, tell
        self._names: dict[bytes, str] = {}
        self._files: dict[Path, float] = {}
        self._seen: dict[str, float] = {}
        self._looked = self._written = 0.0

    def name(self, header: bytes) -> str | None:
        """The node that has this key, and from now on was seen."""
        if time.monotonic() > self._looked + _LOOK_AGAIN:
            self._look()
        name = self._names.get(header)
        if name is not None:
            self._see(name)
        return name

    def _look(self) -> None:
        self._looked = time.monotonic()
        files = {path: path.stat().st_mtime for path in self._federation.public_keys().values()}
        if files == self._files:
            return
        self._files, self._names = files, {}
        for name, path in self._federation.public_keys().items():
            try:
                self._names[base64.b64encode(public_pem(path))] = name
            except UserError as error:
                self._tell(f"node {name} cannot join: {error}")

    def _see(self, name: str) -> None:
        now = time.time()
        self._seen[name] = now
        if now > self._written + _LOOK_AGAIN:
            self._written = now
            write_whole(self._federation.seen, json.dumps(self._seen).encode())


# the node's side knows the refusals by these words
NOT_REGISTERED = "this node's key is not registered"
CLOCK = "this node's clock is wrong"

_NODES = "/v1/fleet/"
_ASKING = "/v1/fleet/pull-messages"
_JOINING = {"/v1/fleet/activate-node", "/v1/fleet/register-node"}
_MOST_AHEAD, _MOST_LATE = -5.0, 305.0  # seconds of a node's clock, Flower's own limits
_HOLD = 20.0  # seconds for which a question is kept open; nodes give up after 30
_A_RUN_IS_ON = 300.0  # seconds since the last message to any node
_SHORTEST, _EACH, _LONGEST = 0.25, 0.1, 2.0  # seconds until Flower is asked again: so much for each waiting node
_PASSED_ON = {b"accept", b"content-type"}  # besides what begins with "flwr-" or "x-flwr-"
_TELL_AGAIN = 60.0  # seconds between two lines about the same refusal

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class TooLarge(Exception):
    """A request has more bytes than are allowed."""


class Gateway:
    """An ASGI application that stands before Flower's server."""

    def __init__(self, federation: FederationFolder) -> None:
        self._httpx = require_extra("httpx", "flower")
        self._keys, self._most = KnownKeys(federation, _tell), federation.settings.max_message
        trusted = ssl.create_default_context(cafile=str(federation.authority))
        self._server = self._httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{federation.settings.control_port}",
            verify=trusted,
            timeout=60.0,
            limits=self._httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._told: dict[str, float] = {}
        self._last_message = float("-inf")
        self._waiting = 0
        self._stirred = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        headers = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            self._tell_once(f"refused {_peer(scope)}: {refusal[1]}")
            await _answer(send, *refusal)
            return
        kept = {
            name: value
            for name, value in headers.items()
            if name in _PASSED_ON or name.startswith((b"flwr-", b"x-flwr-"))
        }
        kept[b"accept-encoding"] = b"identity"
        try:
            passing = self._hold_open if scope["path"] == _ASKING else self._pass_on
            await passing(scope["path"], kept, receive, send)
        except TooLarge:
            self._tell_once(f"refused {_peer(scope)}: {self._too_large()}")
            await _answer(send, 413, self._too_large())
        except self._httpx.TransportError:
            await _answer(send, 503, "the server is not ready")  # nodes try again after a 503

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if scope["method"] != "POST" or not scope["path"].startswith(_NODES):
            return 404, "this port is for the nodes of a federation"
        joining = scope["path"] in _JOINING
        if self._keys.name(headers.get(b"flwr-public-key", b"")) is None:
            return (400 if joining else 401), NOT_REGISTERED  # nodes end at once after a 401, and give a 400's reason
        if joining and not _MOST_AHEAD < (late := _lateness(headers)) < _MOST_LATE:
            return 400, f"{CLOCK}: it is {abs(late):.0f} s {'behind' if late > 0 else 'ahead of'} the server's"
        try:
            size = int(headers.get(b"content-length", b"0"))
        except ValueError:
            return 400, "content-length is not a number"
        return (413, self._too_large()) if size > self._most else None

    def _too_large(self) -> str:
        return f"the request is larger than {format_bytes(self._most)}, the most that max_message allows"

    async def _pass_on(self, path: str, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        request = self._server.build_request("POST", path, headers=headers, content=self._body(receive))
        response = await self._server.send(request, stream=True)
        try:
            await _start(send, response)
            async for part in response.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    async def _hold_open(self, path: str, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """Ask until there is a message, or it has lasted long enough, or the node is gone."""
        body = b"".join([part async for part in self._body(receive)])
        gone = asyncio.ensure_future(receive())  # the next thing to come is the end of the connection
        end = time.monotonic() + _HOLD
        self._waiting += 1
        try:
            while True:
                response = await self._server.post(path, headers=headers, content=body)
                now = time.monotonic()
                if response.status_code != 200 or response.content:
                    break
                if now > end or now > self._last_message + _A_RUN_IS_ON or gone.done():
                    break
                await self._next_look(gone)
            if response.status_code == 200 and response.content:
                self._last_message = now
                self._stirred.set()  # the others' messages are there as well, most likely
                self._stirred = asyncio.Event()
        finally:
            self._waiting -= 1
            gone.cancel()
        await _start(send, response)
        await send({"type": "http.response.body", "body": response.content})

    async def _next_look(self, gone: "asyncio.Future[Any]") -> None:
        pause = min(max(_SHORTEST, _EACH * self._waiting), _LONGEST)
        stirred = asyncio.ensure_future(self._stirred.wait())
        try:
            await asyncio.wait({gone, stirred}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stirred.cancel()

    async def _body(self, receive: Receive) -> AsyncIterator[bytes]:
        count = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise self._httpx.ReadError("the node is gone")
            part = message.get("body", b"")
            count += len(part)
            if count > self._most:
                raise TooLarge
            yield part
            if not message.get("more_body", False):
                return

    def _tell_once(self, line: str) -> None:
        now = time.monotonic()
        if now > self._told.get(line, -_TELL_AGAIN) + _TELL_AGAIN:
            if len(self._told) > 1000:
                self._told.clear()
            self._told[line] = now
            _tell(line)


_GIVEN_BACK = {b"content-type", b"content-length"}


async def _start(send: Send, response: Any) -> None:
    given = [(name.lower(), value) for name, value in response.headers.raw if name.lower() in _GIVEN_BACK]
    await send({"type": "http.response.start", "status": response.status_code, "headers": given})


async def _answer(send: Send, status: int, text: str) -> None:
    """An answer in the form in which Flower's nodes look for a reason."""
    body = json.dumps({"code": status, "detail": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


def _lateness(headers: dict[bytes, bytes]) -> float:
    """By how many seconds the time that a node has signed is behind ours; 0 where it does not say."""
    try:
        signed = datetime.datetime.fromisoformat(headers[b"flwr-timestamp"].decode("ascii"))
        return (datetime.datetime.now(datetime.UTC) - signed).total_seconds()
    except (KeyError, ValueError, TypeError):
        return 0.0


def _peer(scope: Scope) -> str:
    return str((scope.get("client") or ("someone",))[0])


def _tell(line: str) -> None:
    print(line, flush=True)  # noqa: T201  the server reads it


def main() -> None:
    """Serve until a signal comes: ``python -m unskew.federation.gateway DIR``."""
    uvicorn = require_extra("uvicorn", "flower")
    federation = read_federation(Path(sys.argv[1]))
    settings = uvicorn.Config(
        Gateway(federation),
        host=federation.settings.listen,
        port=federation.settings.port,
        ssl_certfile=str(federation.certificate),
        ssl_keyfile=str(federation.key),
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    uvicorn.Server(settings).run()


if __name__ == "__main__":
    main()
