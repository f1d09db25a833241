"""The state of a federation's nodes and run, read from its folder; counters and gauges for Prometheus."""

import asyncio
import json
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import read_content, read_json
from unskew.federation import network
from unskew.federation.folder import FederationFolder

GONE_SECONDS = 75.0  # of silence until a node counts as offline; its heartbeat comes every 30
_MOST_SERIES = 10_000


def last_seen(federation: FederationFolder) -> dict[str, float]:
    """When each node was last heard from, in seconds since 1970."""
    return read_json(federation.seen) if federation.seen.exists() else {}


def last_run(federation: FederationFolder) -> dict[str, Any] | None:
    """The progress of the last submitted run, from its own files; None before the first."""
    submitted = _toml(federation.run_config)
    if not submitted.get("out"):
        return None
    out = Path(str(submitted["out"]))
    config = _toml(out / "config.toml") or _toml(Path(str(submitted.get("recipe", ""))))
    lines, result, number = out / "metrics.jsonl", out / "result.json", 0
    for line in (read_content(lines) or b"").splitlines()[-2:]:
        with suppress(ValueError, TypeError, KeyError):  # the last one may be cut short
            number = int(json.loads(line)["round"])
    changed = max(file.stat().st_mtime for file in (federation.run_config, lines, result) if file.exists())
    return {
        "directory": str(out),
        "method": str(config.get("method", "")),
        "round": number,  # the last finished one
        "rounds": config.get("rounds", 0),
        "state": "finished" if result.exists() else "training" if number else "waiting",
        "seconds": max(time.time() - changed, 0.0),  # since its last round was written, or since it was submitted
    }


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((read_content(path) or b"").decode())
    except (UserError, ValueError):
        return {}


class Counts:
    """Counters with labels, in the text form that Prometheus reads."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()

    def add(self, name: str, count: int, **labels: str) -> None:
        """Add to a counter; labels are our own words and names of registered nodes, never text from a sender."""
        key = name, tuple(sorted(labels.items()))
        if key in self._values or len(self._values) < _MOST_SERIES:
            self._values[key] += count

    def text(self, gauges: dict[str, int]) -> str:
        """All counters and these gauges."""
        counters = [(f"gateway_{name}_total", count, dict(labels)) for (name, labels), count in self._values.items()]
        others = [(f"gateway_{name}", value, dict[str, str]()) for name, value in gauges.items()]
        return _render(sorted(counters, key=str), "counter") + _render(others, "gauge")


def describe_folder(federation: FederationFolder) -> str:
    """Nodes, certificate and run as gauges."""
    samples: list[tuple[str, float, dict[str, str]]] = []  # name, value, labels
    seen, now = last_seen(federation), time.time()
    for name in federation.public_keys():
        when = seen.get(name, 0.0)
        samples.append(("node_online", now - when < GONE_SECONDS, {"node": name}))
        samples.append(("node_last_seen_timestamp_seconds", when, {"node": name}))
    with suppress(UserError):
        days = network.days_left(read_content(federation.certificate) or b"", "the certificate")
        samples.append(("certificate_expiry_seconds", days * 86400, {}))
    if (run := last_run(federation)) is not None:
        samples.append(("run_info", 1.0, {name: run[name] for name in ("directory", "method", "state")}))
        samples += [("run_round", run["round"], {}), ("run_rounds", run["rounds"], {})]
    return _render(samples, "gauge")


def _render(samples: Iterable[tuple[str, float, dict[str, str]]], kind: str) -> str:
    lines, typed = "", set[str]()
    for name, value, labels in samples:
        lines += "" if name in typed else f"# TYPE unskew_{name} {kind}\n"
        typed.add(name)
        written = ",".join(f"{key}={json.dumps(text, ensure_ascii=False)}" for key, text in labels.items())
        lines += f"unskew_{name}{'{' + written + '}' if written else ''} {value:.15g}\n"
    return lines


@asynccontextmanager
async def served(port: int, healthy: Callable[[], Awaitable[bool]], report: Callable[[], str]) -> AsyncIterator[None]:
    """Answer ``GET /health`` and ``GET /metrics`` on this port of loopback, in plain HTTP; 0 for no port."""
    if not port:
        yield
        return
    free = asyncio.Semaphore(16)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            if not free.locked():
                async with free, asyncio.timeout(5.0):
                    line = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0]
                    writer.write(await _reply(line, healthy, report))
                    await writer.drain()

    async with await asyncio.start_server(answer, "127.0.0.1", port, limit=8192):
        yield


async def _reply(line: bytes, healthy: Callable[[], Awaitable[bool]], report: Callable[[], str]) -> bytes:
    status, kind, body = "404 Not Found", "text/plain", "GET /health or /metrics\n"
    match line.split(b" "):
        case [b"GET", b"/metrics", _]:
            status, kind, body = "200 OK", "text/plain; version=0.0.4", report()
        case [b"GET", b"/health", _]:
            status, body = "503 Service Unavailable", "Flower's server does not answer\n"
            if await healthy():
                status, body = "200 OK", "ok\n"
    content = body.encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    return head.encode() + content
