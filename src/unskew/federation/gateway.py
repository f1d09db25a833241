"""The only port that nodes can reach: TLS, ten exact requests, signatures of registered keys, limits on everything.

Flower serves nodes, operators and its own programs on one port, so it listens on loopback, behind this gateway. A
request to Flower is written anew from checked parts. During a run the gateway holds a node's poll open until there is a
message: Flower's nodes poll only every 3 seconds.
"""

import asyncio
import base64
import binascii
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.plugins import require_extra
from unskew.core.units import format_bytes
from unskew.federation import metrics
from unskew.federation.folder import GATEWAY_HEADER, FederationFolder, read_federation
from unskew.federation.network import listen, public_pem

# the node recognizes refusals by these texts
NOT_REGISTERED = "this node's key is not registered"
CLOCK = "this node's clock is wrong"

# What a node may request, and the largest body of each. Only the server registers nodes.
_SMALL = """activate-node deactivate-node send-node-heartbeat pull-messages get-run get-fab pull-object
confirm-message-received"""
ROUTES = {f"/v1/fleet/{name}": 64 * 1024 for name in _SMALL.split()} | {
    "/v1/fleet/push-messages": 4 * 2**20,  # the names of a message's objects
    "/v1/fleet/push-object": 6 * 2**20,  # Flower sends arrays in pieces of 5 MiB
}

_MOST_AHEAD, _MOST_LATE = -5.0, 305.0  # seconds of a node's clock, Flower's own limits
_HOLD = 20.0  # seconds for which a poll is held open; nodes give up after 30
_A_RUN_IS_ON = 300.0  # seconds since the last message to any node
_SHORTEST, _EACH, _LONGEST = 0.25, 0.1, 2.0  # seconds until Flower is asked again: least, per waiting node, most
_LOOK_AGAIN = 1.0  # seconds between checks of the folder, and between updates of seen.json
_LOG_AGAIN = 60.0  # seconds between two log lines about the same refusal


@dataclass(frozen=True)
class Limits:
    """What one sender, and all of them together, may use."""

    head_bytes: int = 16 * 1024
    head_seconds: float = 10.0  # for the handshake, and for a request's head before the sender has proved its key
    idle_seconds: float = 75.0  # between two requests of a node
    body_seconds: float = 20.0  # for a body, plus its bytes at the slowest rate
    slowest: float = 16_000.0  # bytes a second
    strangers: int = 256  # connections whose key is not proved
    strangers_each: int = 64  # of these, from one address
    connections: int = 2000
    connections_each: int = 64  # concurrent, one node
    in_flight: int = 128 * 2**20  # bytes of bodies in memory, all nodes
    in_flight_each: int = 48 * 2**20  # one node
    requests_each: int = 24  # concurrent, one node
    queue_seconds: float = 20.0  # that a body waits for room
    rate: float = 200.0  # requests per second, one node
    burst: int = 2000
    failures: int = 30  # per address, and per key and address; one more every second
    volumes: int = 4  # times max_message: what a node may send between two messages to it


class Refused(Exception):
    """A refused request: status, reason and label, none of which quotes the sender."""

    def __init__(self, status: int, reason: str, label: str) -> None:
        super().__init__(reason)
        self.status, self.reason, self.label = status, reason, label


@dataclass(frozen=True)
class Request:
    """A request's validated head."""

    path: str
    headers: dict[str, str]  # each once
    size: int  # bytes of the body


_LINE = re.compile(rb"POST (/v1/fleet/[a-z-]{1,40}) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\x20-\x7e]*)")
_SIZE = re.compile(r"0|[1-9][0-9]{0,12}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{6})?\+00:00")


def read_head(head: bytes, most: int = Limits.head_bytes) -> Request:
    """Parse a request's head, up to the empty line; strict where HTTP is lenient."""
    if len(head) > most:
        raise Refused(431, "the request's head is too large", "head")
    line, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    found = _LINE.fullmatch(line)
    path = found[1].decode() if found else ""
    if path not in ROUTES:
        raise Refused(404, "this port is for the nodes of a federation", "path")
    headers: dict[str, str] = {}
    for field in fields:
        parts = _HEADER.fullmatch(field)
        if parts is None or (name := parts[1].decode().lower()) in headers:
            raise Refused(400, "a header is malformed or repeated", "head")
        headers[name] = parts[2].decode().strip()
    if "transfer-encoding" in headers or not _SIZE.fullmatch(headers.get("content-length", "")):
        raise Refused(400, "the request needs a content-length and no other length", "head")
    return Request(path, headers, int(headers["content-length"]))


class KnownKeys:
    """Node names by key; removing a key file locks its node out within a second."""

    def __init__(self, federation: FederationFolder, log: Callable[[str], None]) -> None:
        self._federation, self._log = federation, log
        self._nodes: dict[str, tuple[str, Any]] = {}
        self._files: dict[Path, tuple[int, int, int]] = {}
        self._seen: dict[str, float] = {}
        self._looked = self._written = 0.0
        self._load = require_extra("cryptography.hazmat.primitives.serialization", "flower").load_pem_public_key

    def find(self, header: str) -> tuple[str, Any] | None:
        """The name of the node with this key, and the key."""
        if time.monotonic() > self._looked + _LOOK_AGAIN:
            self._look()
        return self._nodes.get(header)

    def see(self, name: str) -> None:
        """Record that this node was heard from."""
        self._seen[name] = now = time.time()
        if now > self._written + _LOOK_AGAIN:
            self._written = now
            with suppress(UserError):  # a full disk must not lock nodes out
                write_whole(self._federation.seen, json.dumps(self._seen).encode())

    def _look(self) -> None:
        self._looked, keys, files = time.monotonic(), self._federation.public_keys(), {}
        for path in keys.values():
            with suppress(OSError):  # removed just now
                about = path.stat()
                files[path] = (about.st_mtime_ns, about.st_size, about.st_ino)
        if files == self._files:
            return
        self._files, self._nodes = files, {}
        for name, path in keys.items():
            try:
                pem = public_pem(path)
                other, _ = self._nodes.setdefault(base64.b64encode(pem).decode(), (name, self._load(pem)))
                if other != name:
                    raise UserError(f"node {other} has the same key")
            except UserError as error:
                self._log(f"node {name} cannot join: {error}")


class Buckets:
    """Rate limits by name (token buckets): ``burst`` events at once, ``rate`` per second."""

    def __init__(self, burst: int, rate: float, most: int = 10_000) -> None:
        self._burst, self._rate, self._most = burst, rate, most
        self._left = OrderedDict[Hashable, tuple[float, float]]()

    def take(self, name: Hashable) -> bool:
        """Count an event; whether it was allowed."""
        now = time.monotonic()
        count, when = self._left.get(name, (float(self._burst), 0.0))
        left = min(self._burst, count + (now - when) * self._rate)
        if name not in self._left and len(self._left) >= self._most:
            self._left.popitem(last=False)
        self._left[name] = max(left - 1.0, 0.0), now
        return left >= 1.0


class Signatures:
    """The signatures each node has used: each is valid once, while it is fresh."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._used = defaultdict[str, OrderedDict[str, float]](OrderedDict)  # when each was used, by key

    def check_fresh(self, text: str, *, joining: bool) -> float:
        """The signed time; refused if it is too far from now."""
        try:
            signed = datetime.fromisoformat(text if _TIME.fullmatch(text) else "").timestamp()
        except (ValueError, OverflowError) as error:
            raise Refused(401, "the request is not signed", "signature") from error
        late = time.time() - signed
        if not _MOST_AHEAD < late < _MOST_LATE:
            which = "behind" if late > 0 else "ahead of"
            status = 400 if joining else 401  # a node logs the reason of a 400, and exits after a 401
            raise Refused(status, f"{CLOCK}: it is {abs(late):.0f} s {which} the server's", "clock")
        return signed

    def use(self, name: str, key: str, text: str, signed: float) -> None:
        """Mark a valid signature as used; refuse a used one, and one from before this process started."""
        now = time.time()
        if signed < now - (time.monotonic() - self._began):  # by the present clock, which may have been set since
            raise Refused(503, "the request was signed before the gateway started; sign it again", "replay")
        used = self._used[key]
        while used and next(iter(used.values())) < now - _MOST_LATE + _MOST_AHEAD:
            used.popitem(last=False)
        if text in used:
            raise Refused(503, "this request was sent before", "replay")  # an honest node signs it again
        used[text] = now


class Budget:
    """Bytes of bodies in memory, in total and by node; a request without room waits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.taken: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reserve(self, name: str, size: int) -> AsyncIterator[None]:
        """Reserve room for a body of this size."""
        limits = self._limits

        def fits() -> bool:
            all_fit = self.taken.total() + size <= limits.in_flight and self.taken[name] + size <= limits.in_flight_each
            return all_fit and self._requests[name] < limits.requests_each

        try:
            async with self._changed, asyncio.timeout(limits.queue_seconds):
                await self._changed.wait_for(fits)
                self.taken[name] += size
                self._requests[name] += 1
        except TimeoutError:
            raise Refused(503, "the gateway is busy; try again", "busy") from None
        try:
            yield
        finally:
            self.taken -= Counter({name: size})  # a count of zero is dropped
            self._requests -= Counter([name])
            async with self._changed:
                self._changed.notify_all()


@dataclass
class Visitor:
    """One connection."""

    address: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    name: str | None = None  # the node, once it has proved its key

    @property
    def gone(self) -> bool:
        """Whether the connection has ended, for any reason."""
        return self.reader.at_eof() or self.reader.exception() is not None or self.writer.transport.is_closing()


class Gateway:
    """The server in front of Flower's; ``log`` gets each line for the log."""

    def __init__(self, federation: FederationFolder, limits: Limits, log: Callable[[str], None]) -> None:
        self._federation, self._limits, self._log = federation, limits, log
        self._httpx, hazmat = require_extra("httpx", "flower"), "cryptography.hazmat.primitives"
        ec, hashes = require_extra(f"{hazmat}.asymmetric.ec", "flower"), require_extra(f"{hazmat}.hashes", "flower")
        self._scheme = ec.ECDSA(hashes.SHA256())
        self._wrong = require_extra("cryptography.exceptions", "flower").InvalidSignature
        self._keys, self._signatures, self._budget = KnownKeys(federation, log), Signatures(), Budget(limits)
        self._rates, self._failures = Buckets(limits.burst, limits.rate), Buckets(limits.failures, 1.0)
        self._sent: Counter[str] = Counter()  # bytes of each node since its last message
        self._strangers: Counter[str] = Counter()  # connections of each address
        self._proved: Counter[str] = Counter()  # connections of each node
        self.counts = metrics.Counts()
        self._logged: dict[str, float] = {}
        self._last_message = float("-inf")
        self._waiting = 0
        self._stirred = asyncio.Event()
        self._certified: list[int] = []  # when the files of the certificate in use were written
        self._load_certificate()
        self._server = self._httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{federation.settings.control_port}",
            headers={GATEWAY_HEADER: federation.token("gateway")},
            verify=ssl.create_default_context(cafile=str(federation.local_authority)),
            timeout=60.0,
            limits=self._httpx.Limits(max_connections=None),
            trust_env=False,
        )

    def _load_certificate(self) -> None:
        """Load the server's certificate if its files are new."""
        files = self._federation.certificate, self._federation.key
        written = [path.stat().st_mtime_ns for path in files]
        if written == self._certified:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*files)
        if self._certified:
            self._log("the server's new certificate is in use")
        self._tls, self._certified = context, written

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop, limits = asyncio.get_running_loop(), self._limits
        listener.setblocking(False)
        async with aclosing(self._server), asyncio.TaskGroup() as tasks:
            while True:
                try:
                    line, address = await loop.sock_accept(listener)
                except OSError:  # too many open files, or the sender has left already
                    await asyncio.sleep(0.05)
                    continue
                source, strangers = source_of(str(address[0])), self._strangers.total()
                full = strangers >= limits.strangers or strangers + self._proved.total() >= limits.connections
                if full or self._strangers[source] >= limits.strangers_each:
                    self._refuse(source, "too many connections", "connections")
                    line.close()
                    continue
                self._strangers[source] += 1
                tasks.create_task(self._welcome(line, source))

    async def _welcome(self, line: socket.socket, address: str) -> None:
        """Serve one connection until it ends."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=2**16)
        protocol, visitor = asyncio.StreamReaderProtocol(reader), None
        try:
            with suppress(OSError):  # only one of its two files is written yet: the next connection sees both
                self._load_certificate()
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, line, ssl=self._tls, ssl_handshake_timeout=self._limits.head_seconds,
                ssl_shutdown_timeout=2.0,
            )  # fmt: skip
            visitor = Visitor(address, reader, asyncio.StreamWriter(transport, protocol, reader, loop))
            while await self._answer_one(visitor):
                pass
        except (OSError, EOFError, TimeoutError, self._httpx.HTTPError):
            pass  # the sender left, or is too slow
        except Exception as error:  # noqa: BLE001  one sender must not affect the others
            self._refuse(address, f"internal error, {type(error).__name__}", "error")
        finally:
            if visitor is None or visitor.name is None:
                self._strangers -= Counter([address])
            else:
                self._proved -= Counter([visitor.name])
            (line if visitor is None else visitor.writer).close()

    async def _answer_one(self, visitor: Visitor) -> bool:
        """Answer one request; whether the connection stays open."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.idle_seconds if visitor.name else limits.head_seconds):
                head = await visitor.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            head = b" " * (limits.head_bytes + 1)
        try:
            request = read_head(head, limits.head_bytes)
            name = self._authenticate(request, visitor)
            self._check_size(request, name)
            async with self._budget.reserve(name, request.size):
                async with asyncio.timeout(limits.body_seconds + request.size / limits.slowest):
                    body = await visitor.reader.readexactly(request.size)
                self.counts.add("received_bytes", request.size, node=name)
                return await self._pass_on(request, body, visitor)
        except Refused as refused:
            self._refuse(visitor.address, refused.reason, refused.label)
            if refused.label in ("path", "head", "key", "signature") and not self._failures.take(visitor.address):
                return False  # no more answers for this address
            await _answer(visitor, refused.status, refused.reason)
        except self._httpx.TransportError:
            await _answer(visitor, 503, "the server is not ready")  # nodes try again after a 503
        return False

    def _authenticate(self, request: Request, visitor: Visitor) -> str:
        """The name of the node whose registered key signed this request, just now and for the first time."""
        joining = request.path.endswith("/activate-node")
        header = request.headers.get("flwr-public-key", "")
        known = self._keys.find(header)
        if known is None:
            raise Refused(400 if joining else 401, NOT_REGISTERED, "key")  # a node logs the reason of a 400
        name, key = known
        text = request.headers.get("flwr-timestamp", "")
        signed = self._signatures.check_fresh(text, joining=joining)
        try:
            signature = base64.b64decode(request.headers.get("flwr-signature", ""), validate=True)
            key.verify(signature, text.encode(), self._scheme)
        except (self._wrong, ValueError, binascii.Error):
            # others may send wrong signatures from the same address: they must not lock out a node with a right one
            if not self._failures.take((visitor.address, name)):
                raise Refused(503, "too many wrong signatures from this address; try again later", "rate") from None
            raise Refused(401, "the signature does not match the node's key", "signature") from None
        self._signatures.use(name, header, text, signed)
        if not self._rates.take(name):
            raise Refused(503, f"node {name} sends more than {self._limits.rate:.0f} requests per second", "rate")
        self._keys.see(name)
        if visitor.name is None:
            if self._proved[name] >= self._limits.connections_each:
                raise Refused(503, f"node {name} has too many connections", "connections")
            self._strangers -= Counter([visitor.address])
            self._proved[name] += 1
            visitor.name = name
        elif visitor.name != name:
            raise Refused(400, "this connection belongs to another node", "key")
        return name

    def _check_size(self, request: Request, name: str) -> None:
        most = self._federation.settings.max_message
        if request.size > (bound := min(ROUTES[request.path], most)):
            raise Refused(413, f"the request is larger than {format_bytes(bound)}, the limit for its path", "size")
        if self._sent[name] + request.size > self._limits.volumes * most:
            raise Refused(413, f"node {name} sends more than max_message allows", "size")
        if request.path.endswith(("push-object", "push-messages")):
            self._sent[name] += request.size

    async def _pass_on(self, request: Request, body: bytes, visitor: Visitor) -> bool:
        """Return Flower's answer, of its headers only type and length; whether the connection stays open."""
        headers = {"accept-encoding": "identity"}
        for name, value in request.headers.items():
            if name in ("accept", "content-type") or name.startswith(("flwr-", "x-flwr-")):
                headers[name] = value
        asked = self._server.build_request("POST", request.path, headers=headers, content=body)
        if request.path.endswith("/pull-messages"):
            response = await self._hold_open(asked, visitor)
        else:
            response = await self._server.send(asked, stream=True)
        try:
            self.counts.add("requests", 1, node=visitor.name or "", path=request.path, status=str(response.status_code))
            names = [name for name in ("content-type", "content-length") if name in response.headers]
            stays = "content-length" in names
            headers = {name: response.headers[name] for name in names}
            _start(visitor.writer, response.status_code, headers, stays=stays)
            async for part in response.aiter_bytes():
                visitor.writer.write(part)
                self.counts.add("sent_bytes", len(part), node=visitor.name or "")
                async with asyncio.timeout(self._limits.body_seconds + len(part) / self._limits.slowest):
                    await visitor.writer.drain()
            return stays
        finally:
            await response.aclose()

    async def _hold_open(self, asked: Any, visitor: Visitor) -> Any:
        """Poll Flower until there is a message, the time is up, or the node has left."""
        end = time.monotonic() + _HOLD
        self._waiting += 1
        try:
            while True:
                response, now = await self._server.send(asked), time.monotonic()
                if response.status_code == 200 and response.content:
                    self._last_message = now
                    self._sent.pop(visitor.name or "", None)
                    self._stirred.set()  # the other nodes' messages are probably there too
                    self._stirred = asyncio.Event()
                    return response
                if response.status_code != 200 or now > min(end, self._last_message + _A_RUN_IS_ON):
                    return response
                with suppress(TimeoutError):
                    pause = min(max(_SHORTEST, _EACH * self._waiting), _LONGEST)
                    await asyncio.wait_for(self._stirred.wait(), pause)
                if visitor.gone:
                    raise EOFError("the node has left")
        finally:
            self._waiting -= 1

    def _refuse(self, address: str, reason: str, label: str) -> None:
        """Count a refusal, and log the same one at most once a minute."""
        self.counts.add("refused", 1, reason=label)
        line, now = f"refused {address}: {reason}", time.monotonic()
        if now > self._logged.get(line, -_LOG_AGAIN) + _LOG_AGAIN:
            if len(self._logged) > 1000:
                self._logged.clear()
            self._logged[line] = now
            self._log(line)

    async def healthy(self) -> bool:
        """Whether Flower's server answers."""
        try:
            return bool((await self._server.get("/health", timeout=5.0)).status_code == 200)
        except self._httpx.HTTPError:
            return False

    def report(self) -> str:
        """The counters for Prometheus, and the state of nodes and run from the folder."""
        strangers = self._strangers.total()
        gauges = {"connections": strangers + self._proved.total(), "strangers": strangers}
        gauges |= {"waiting_nodes": self._waiting, "in_flight_bytes": self._budget.taken.total()}
        return self.counts.text(gauges) + metrics.describe_folder(self._federation)


def source_of(address: str) -> str:
    """Whom an address counts for: of IPv6 it is a block of 2^64 addresses, which one machine may have all of."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return address if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


def _start(writer: asyncio.StreamWriter, status: int, headers: dict[str, str], *, stays: bool) -> None:
    lines = [f"HTTP/1.1 {status} {'OK' if status == 200 else 'Refused'}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [] if stays else ["connection: close"]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))


async def _answer(visitor: Visitor, status: int, text: str) -> None:
    """Send an answer in the form Flower's nodes expect, and end the connection."""
    body = json.dumps({"code": status, "detail": text}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    _start(visitor.writer, status, headers, stays=False)
    visitor.writer.write(body)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.0):  # with bytes left unread, TCP would reset the connection and lose the answer
            await visitor.writer.drain()
            for _ in range(16):
                if not await visitor.reader.read(2**16):
                    break


async def _run(federation: FederationFolder) -> None:
    gateway = Gateway(federation, Limits(), lambda line: print(line, flush=True))  # noqa: T201  the server reads it
    settings = federation.settings
    serving = asyncio.ensure_future(gateway.serve(listen(settings.listen, settings.port)))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    async with metrics.served(settings.metrics_port, gateway.healthy, gateway.report):
        with suppress(asyncio.CancelledError):
            await serving


if __name__ == "__main__":  # python -m unskew.federation.gateway DIR
    import resource  # not on Windows

    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_run(read_federation(Path(sys.argv[1]))))
