"""The state of a federation's nodes and run, read from its folder; counters and gauges for Prometheus."""

import asyncio
import json
import time
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import read_content, read_json
from unskew.federation import network
from unskew.federation.folder import FederationFolder

GONE_SECONDS = 75.0  # of silence until a node counts as offline; its heartbeat comes every 30
_MOST_SERIES = 10_000
_TAIL = 2**20  # bytes at the end of metrics.jsonl that contain at least one line


@dataclass(frozen=True)
class RunProgress:
    """The run that was submitted last."""

    directory: str
    method: str
    round: int  # the last finished one
    rounds: int
    state: str  # waiting | training | finished
    seconds: float  # since its last round was written, or since it was submitted


def last_seen(federation: FederationFolder) -> dict[str, float]:
    """When each node was last heard from, in seconds since 1970."""
    if not federation.seen.exists():
        return {}
    values = read_json(federation.seen)
    return {name: float(when) for name, when in values.items() if isinstance(when, int | float)}


def last_run(federation: FederationFolder) -> RunProgress | None:
    """The progress of the last submitted run, from its own files; None before the first."""
    submitted = _toml(federation.run_config)
    if not submitted.get("out"):
        return None
    out = Path(str(submitted["out"]))
    config = _toml(out / "config.toml") or _toml(Path(str(submitted.get("recipe", ""))))
    lines, number = out / "metrics.jsonl", 0
    for line in reversed(_end(lines).splitlines()):
        with suppress(ValueError, TypeError, KeyError):
            number = int(json.loads(line)["round"])
            break
    finished = (out / "result.json").exists()
    newest = max((_changed(path) for path in (federation.run_config, lines, out / "result.json")), default=0.0)
    rounds = config.get("rounds", 0)
    return RunProgress(
        directory=str(out),
        method=str(config.get("method", "")),
        round=number,
        rounds=rounds if isinstance(rounds, int) else 0,
        state="finished" if finished else "training" if number else "waiting",
        seconds=max(time.time() - newest, 0.0),
    )


def _toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads((read_content(path) or b"").decode())
    except (UserError, OSError, ValueError):
        return {}


def _end(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class Counts:
    """Counters with labels, in the text form that Prometheus reads."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()

    def add(self, name: str, count: int, **labels: str) -> None:
        """Add to a counter; labels are our own words and names of registered nodes, never text from a sender."""
        key = name, tuple(sorted(labels.items()))
        if key in self._values or len(self._values) < _MOST_SERIES:
            self._values[key] += count

    def get(self, name: str, **labels: str) -> int:
        """The sum of a counter over all series with these labels."""
        wanted = set(labels.items())
        return sum(
            count for (counter, given), count in self._values.items() if counter == name and wanted <= set(given)
        )

    def text(self, gauges: dict[str, int]) -> str:
        """All counters and these gauges."""
        names = sorted({name for name, _ in self._values})
        lines = []
        for name in names:
            lines.append(f"# TYPE unskew_gateway_{name}_total counter")
            for (counter, labels), count in sorted(self._values.items()):
                if counter == name:
                    lines.append(_sample(f"unskew_gateway_{name}_total", count, dict(labels)))
        for name, value in gauges.items():
            lines += [f"# TYPE unskew_gateway_{name} gauge", _sample(f"unskew_gateway_{name}", value)]
        return "\n".join(lines) + "\n"


def describe_folder(federation: FederationFolder) -> str:
    """Nodes, certificate and run as gauges."""
    samples: list[tuple[str, float, dict[str, str]]] = []
    seen, now = last_seen(federation), time.time()
    for name in federation.public_keys():
        when = seen.get(name, 0.0)
        samples.append(("node_online", float(now - when < GONE_SECONDS), {"node": name}))
        samples.append(("node_last_seen_timestamp_seconds", when, {"node": name}))
    with suppress(UserError):
        days = network.days_left(read_content(federation.certificate) or b"", "the certificate")
        samples.append(("certificate_expiry_seconds", days * 86400, {}))
    if (run := last_run(federation)) is not None:
        labels = {"directory": run.directory, "method": run.method, "state": run.state}
        samples += [("run_info", 1.0, labels), ("run_round", run.round, {}), ("run_rounds", run.rounds, {})]
    lines, typed = [], set[str]()
    for name, value, labels in samples:
        lines += [] if name in typed else [f"# TYPE unskew_{name} gauge"]
        typed.add(name)
        lines.append(_sample(f"unskew_{name}", value, labels))
    return "\n".join(lines) + "\n"


def _sample(name: str, value: float, labels: dict[str, str] | None = None) -> str:
    written = ",".join(f"{key}={json.dumps(text, ensure_ascii=False)}" for key, text in (labels or {}).items())
    return f"{name}{{{written}}} {value:.15g}" if written else f"{name} {value:.15g}"


@asynccontextmanager
async def served(port: int, healthy: Callable[[], Awaitable[bool]], report: Callable[[], str]) -> AsyncIterator[None]:
    """Answer ``GET /health`` and ``GET /metrics`` on this port of loopback, in plain HTTP; 0 for no port."""
    if not port:
        yield
        return
    open_now = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        try:
            if open_now <= 16:
                async with asyncio.timeout(5.0):
                    line = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0]
                    writer.write(await _reply(line, healthy, report))
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass
        finally:
            open_now -= 1
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port, limit=8192)
    async with server:
        yield


async def _reply(line: bytes, healthy: Callable[[], Awaitable[bool]], report: Callable[[], str]) -> bytes:
    match line.split(b" "):
        case [b"GET", b"/metrics", _]:
            status, kind, body = "200 OK", "text/plain; version=0.0.4", report()
        case [b"GET", b"/health", _]:
            well = await healthy()
            status, kind, body = ("200 OK", "text/plain", "ok\n") if well else _ILL
        case _:
            status, kind, body = "404 Not Found", "text/plain", "GET /health or /metrics\n"
    content = body.encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    return head.encode() + content


_ILL = ("503 Service Unavailable", "text/plain", "Flower's server does not answer\n")
