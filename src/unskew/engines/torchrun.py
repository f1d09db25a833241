"""One simulation over the processes that torchrun starts, here and on other machines; rank 0 has the run.

Rank 0 opens a pool: one worker process of its own, and the other ranks, which connect over TCP and do what a pool's
worker does. A rank on the same machine opens rank 0's files. For a rank on another machine their contents travel with
the messages: the data once, the weights with every job, a client's memory and its record of secure sums with every
visit, and the results. So all memories are in rank 0's file, and a run can continue with another number of ranks.
"""

import hashlib
import os
import platform
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from unskew.core.child import INTERRUPTED
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.machine import neutral
from unskew.core.tensors import ALIGN, DOUBLE
from unskew.core.types import EVERYONE, Failure, Job, Note, Reply, Tensors, TestPart, Visit
from unskew.core.units import format_duration
from unskew.engines.pool import SLOTS, Begin, GroupResults, Hello, Pool, Ready, VisitGroup, WorkerFiles, serve
from unskew.engines.results import SharedFile, end_of
from unskew.privacy.sessions import Sessions
from unskew.round.client_memory import anonymous_file

LINE = "torchrun --nproc-per-node 2 -m -- unskew run --engine torchrun"
RESUME = "the run can be resumed with any number of ranks, or without torchrun"
SAME_PROCESSOR = "set ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2 for all ranks"
ADDRESS = "unskew/address"  # in the store: rank 0's port and token
JOIN_SECONDS = 180.0  # that rank 0 waits for the others
SILENT_SECONDS = 15.0  # after which a silent rank counts as lost
ZERO_SILENT_SECONDS = 60.0  # after which rank 0 counts as lost
CLOSE_SECONDS = 5.0  # for a rank to confirm the end of a run
BEAT = 1.0  # seconds between heartbeats
PIECE = 16 * 2**20  # bytes sent at once; a piece must arrive before the other side counts as lost
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Launched:
    """This process among those started together."""

    rank: int
    ranks: int
    host: str  # rank 0's machine, where the ranks meet
    port: int
    local_rank: int = 0  # among those on this machine
    local_ranks: int = 1
    by_torchrun: bool = False  # torchrun ends all ranks of a machine when one of them dies


def launched() -> Launched:
    """Read this process's rank from torchrun's variables."""
    required = ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    given = {name: text for name in (*required, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if (text := os.environ.get(name))}
    if missing := [name for name in required if name not in given]:
        reason = f"{missing[0]} is not set, so torchrun did not start this process"
        raise UserError(f"--engine torchrun: {reason}; start it with: {LINE} …, or give --engine auto")
    host, number = given.pop("MASTER_ADDR"), {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, text in given.items():
        if not (text.isascii() and text.isdigit()):
            raise UserError(f"{name}={text}: torchrun sets it to a whole number; start it with: {LINE} …")
        number[name] = int(text)
    rank, ranks, local = number["RANK"], number["WORLD_SIZE"], (number["LOCAL_RANK"], number["LOCAL_WORLD_SIZE"])
    if rank >= ranks:
        raise UserError(f"RANK={rank}, WORLD_SIZE={ranks}: ranks are numbered from 0; start it with: {LINE} …")
    return Launched(rank, ranks, host, number["MASTER_PORT"], *local, "TORCHELASTIC_RUN_ID" in os.environ)


def check_command(engine: str | None) -> None:
    """Reject a command that torchrun has started several times if each would be a separate run."""
    if "TORCHELASTIC_RUN_ID" in os.environ and engine != "torchrun" and (ranks := launched().ranks) > 1:
        hint = "give --engine torchrun to make it one run, or start it without torchrun"
        raise UserError(f"torchrun has started this command {ranks} times; {hint}")


class Joined(msgspec.Struct, tag="joined"):
    """A rank's first message: what it is, and the versions that must be equal on all ranks for identical results."""

    rank: int
    local_rank: int
    name: str  # in messages
    proof: tuple[str, str]  # a file and its content, which a rank on the same machine can read
    versions: dict[str, str]


class Open(msgspec.Struct, tag="open"):
    """A new engine: the files of rank 0's process ``process``, or what a copy of them needs."""

    hello: Hello
    process: int
    files: list[int]  # descriptors; empty: the contents are sent
    data_bytes: int
    slot_bytes: int  # of a client's memory; 0 without memories


DATA = "data"  # with a piece of the data file
CLOSE = "close"  # the end of an engine
CLOSED = "closed"  # the rank waits for another engine
INTERRUPT = "interrupt"  # the rank was interrupted and exits
ALIVE = "alive"  # a heartbeat

Message = Joined | Open | Begin | VisitGroup | Ready | GroupResults | str


class Frame(msgspec.Struct):
    """A message, and the lengths of the contents of files that follow it."""

    message: Message
    lengths: list[int]


Content = bytes | bytearray | memoryview
_decoder = msgspec.json.Decoder(Frame)


class Stream:
    """Messages over TCP in both directions, with the contents of files. A thread sends heartbeats and what is queued.

    ``queues``: whether messages are queued, so that the caller computes while they travel.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.queues = connection, False
        self._lock = Lock()
        self._outbox: SimpleQueue[tuple[Message, Sequence[Content]] | None] = SimpleQueue()
        self._writer = Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, message: Message, *contents: Content) -> None:
        """Send or queue a message; if the other side is lost, ``receive`` reports it."""
        if self.queues:
            self._outbox.put((message, contents))
        else:
            self.send_now(message, contents)

    def send_now(self, message: Message, contents: Sequence[Content] = ()) -> None:
        """Send a message before those that are queued."""
        head = msgspec.json.encode(Frame(message, [len(content) for content in contents]))
        with self._lock:
            try:
                for part in (len(head).to_bytes(8, "little") + head, *contents):
                    for start in range(0, len(part), PIECE):
                        self.connection.sendall(memoryview(part)[start : start + PIECE])
            except OSError:
                self.close()

    def receive(self) -> tuple[Message, list[bytearray]] | None:
        """The next message and contents; None if the other side is lost, or silent for the connection's timeout."""
        try:
            frame = _decoder.decode(self.read(int.from_bytes(self.read(8), "little")))
            return frame.message, [self.read(length) for length in frame.lengths]
        except (OSError, msgspec.DecodeError):
            return None

    def read(self, length: int) -> bytearray:
        """So many bytes; ConnectionError if there are fewer."""
        content = bytearray(length)
        rest = memoryview(content)
        while rest:
            if not (received := self.connection.recv_into(rest)):
                raise ConnectionError
            rest = rest[received:]
        return content

    def close(self) -> None:
        """End the connection, which wakes threads that wait for it."""
        self._outbox.put(None)
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        while True:
            try:
                if (item := self._outbox.get(timeout=BEAT)) is None:
                    return
                self.send_now(*item)
            except Empty:
                with suppress(OSError, ValueError):
                    if select.select([], [self.connection], [], 0)[1]:  # not if nobody reads for a long time
                        self.send_now(ALIVE)


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks for identical results."""
    source, package = hashlib.sha256(), Path(__file__).parents[1]  # changes with every edit, unlike a version number
    for file in sorted(package.rglob("*.py")):
        source.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return {
        "Unskew": f"of source {source.hexdigest()[:12]}",
        "PyTorch": str(torch.__version__),
        "NumPy": np.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def name_rank(rank: int) -> str:
    """This process's name in messages."""
    return f"rank {rank} on {socket.gethostname()} (process {os.getpid()})"


def _store(launch: Launched) -> Store:
    """The key-value store that the ranks share: torchrun's, or rank 0's if another program started them."""
    own = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=JOIN_SECONDS)
    try:
        return TCPStore(launch.host, launch.port, None, own, patience, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        raise _unreachable(launch, launch.port, error) from error


def _unreachable(launch: Launched, port: int, error: Exception) -> UserError:
    reason = str(error).partition("\n")[0][:300]
    return UserError(
        f"{name_rank(launch.rank)} cannot reach rank 0's machine at {launch.host}, port {port} ({reason}); check the "
        "address, and that the port is open"
    )


@cache
def listen(launch: Launched) -> tuple[socket.socket, bytes, Store]:
    """On rank 0: the socket that the others connect to, the token that they show, and the store with both."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, backlog=launch.ranks, dualstack_ipv6=both)
    token, store = secrets.token_hex(16), _store(launch)
    store.set(ADDRESS, f"{listener.getsockname()[1]} {token}")
    return listener, token.encode(), store


def gather(launch: Launched, *, processors: bool) -> list["Rank"]:
    """On rank 0: the other ranks; rejected if their results could differ.

    ``processors``: whether they compute on CPUs, which must then be of the same kind.
    """
    if launch.ranks == 1:
        return []
    ranks = _accept(launch)
    own = versions()
    for rank in ranks:
        for what in ("Unskew", "PyTorch", "NumPy", "Python", *(["processor"] if processors else [])):
            if (other := rank.joined.versions[what]) != own[what]:
                advice = SAME_PROCESSOR if what == "processor" else f"install the same {what} on both"
                differ = f"{rank.name} has {what} {other}, but {name_rank(0)} has {own[what]}"
                raise UserError(f"{differ}, so results could differ; {advice}")
    return ranks


@cache
def _accept(launch: Launched) -> list["Rank"]:
    listener, token, _ = listen(launch)
    ranks: dict[int, Rank] = {}
    end = time.monotonic() + JOIN_SECONDS
    while missing := [rank for rank in range(1, launch.ranks) if rank not in ranks]:
        listener.settimeout(max(end - time.monotonic(), 0.01))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            late = f"after {JOIN_SECONDS:.0f} s, still waiting for rank {', '.join(map(str, missing))}"
            check = "check that the same command with --engine torchrun was started on every machine and did not fail"
            raise UserError(f"{late}; {check}") from None
        connection.settimeout(SILENT_SECONDS)
        stream = Stream(connection)
        with suppress(OSError):
            if stream.read(len(token)) == token and (received := stream.receive()) is not None:
                assert isinstance(received[0], Joined)
                ranks[received[0].rank] = Rank(stream, received[0])
                continue
        stream.close()
    return [ranks[rank] for rank in sorted(ranks)]


class LostRank(UserError):
    """A rank that died or cannot be reached."""


class Rank:
    """Another rank, as a pool's worker: the pool sends it messages, and waits for its own."""

    def __init__(self, stream: Stream, joined: Joined) -> None:
        self.joined, self.name, self._stream = joined, joined.name, stream
        self._files: WorkerFiles | None = None  # of the engine that it works for
        self._heard = time.monotonic()
        self._interrupted = False
        self._number = 0  # of the current job
        self._visits: dict[int, Visit] = {}  # those in progress, if their memories are sent
        file, content = joined.proof
        self.near = False  # whether it is on this machine
        with suppress(OSError):
            self.near = Path(file).read_bytes() == content.encode()

    def fileno(self) -> int:
        """The descriptor, so that a selector can wait for messages."""
        return self._stream.connection.fileno()

    def pending(self) -> bool:
        """Nothing is buffered."""
        return False

    def attach(self, files: WorkerFiles) -> "Rank":
        """Work for an engine with these files."""
        if self._files is not None:
            raise UserError("--engine torchrun: the other ranks are still working on another run of this process")
        self._files = files
        return self

    def send(self, message: Hello | Begin | VisitGroup) -> None:
        """Send a message, and what it refers to if the rank is on another machine."""
        assert self._files is not None
        files, memory, sessions = self._files, self._files.side.memory_file, self._files.side.sessions
        self._stream.queues = not self.near and not isinstance(message, Hello)
        if isinstance(message, Hello):
            data, slot_bytes = memoryview(files.data.mapped(1)), 0 if memory is None else memory.slot_bytes
            shared = files.descriptors if self.near else []
            self._stream.send(Open(message, os.getpid(), shared, len(data), slot_bytes))
            for start in range(0, 0 if self.near else len(data), PIECE):
                self._stream.send(DATA, data[start : start + PIECE])
            return
        contents: list[Content] = []
        if isinstance(message, Begin):
            self._heard, self._number, self._visits = time.monotonic(), message.number, {}
            contents = [] if self.near else [files.weights.content(message.weights)]
        elif not self.near:
            for index, visit in message.visits:
                self._visits[index] = visit
                kept = None if memory is None or visit.ticket is None else memory.content(visit.ticket, visit.client)
                record = None if sessions is None or visit.client == EVERYONE else sessions.content(visit.client)
                contents += [kept or b"", record or b""]
        self._stream.send(message, *contents)

    def receive(self, kind: Any = None) -> Message | None:
        """The next message; None if the rank is lost. Memories and results of another machine are stored here."""
        if (received := self._stream.receive()) is None:
            return None
        message, contents = received
        self._heard = time.monotonic()
        if message == INTERRUPT:
            self._interrupted = True
            self.exit_reason()
        if isinstance(message, GroupResults) and contents and message.number == self._number:
            assert self._files is not None
            memory, sessions = self._files.side.memory_file, self._files.side.sessions
            self._files.results[message.slot].fill(contents[0])
            for result, kept, record in zip(message.results, contents[1::2], contents[2::2], strict=True):
                visit = self._visits.pop(result.index, None)
                if visit is not None and record and sessions is not None:
                    sessions.join(visit.client, bytes(record))
                if visit is not None and kept and memory is not None and visit.slot is not None:
                    result.ticket = memory.put(visit.slot, kept)
        return message

    def check_heard(self) -> None:
        """Stop waiting for a silent rank."""
        if time.monotonic() - self._heard > SILENT_SECONDS:
            self.exit_reason()

    def exit_reason(self) -> NoReturn:
        """A lost rank cannot be replaced; an interrupt of one is an interrupt of the run."""
        if self._interrupted:
            raise KeyboardInterrupt
        reason = "its connection closed"
        if time.monotonic() - self._heard > SILENT_SECONDS:
            reason = f"nothing was received from it for {format_duration(SILENT_SECONDS)}"
        raise LostRank(f"{self.name} is lost: {reason}; {RESUME}")

    def end(self, patience: float = CLOSE_SECONDS) -> None:
        """Make the rank wait for another engine; if it does not confirm in time, it cannot work for another."""
        self._stream.send(CLOSE)
        end = time.monotonic() + CLOSE_SECONDS
        with suppress(KeyboardInterrupt):
            while (left := end - time.monotonic()) > 0 and select.select([self], [], [], left)[0]:
                if (received := self._stream.receive()) is None:
                    return
                if received[0] == CLOSED:
                    self._files = None
                    return

    def close(self) -> None:
        """Let the rank exit."""
        self._stream.close()
        self._stream.connection.close()


class Ranks:
    """A pool of the other ranks and a worker of this one. If a rank dies, the run ends and can be resumed.

    torchrun then interrupts this process, as it does on Ctrl-C. The first interrupt raises a KeyboardInterrupt, or the
    loss of the rank that is behind it; later ones are ignored, so that the checkpoint is written.
    """

    def __init__(self, pool: Pool, ranks: Sequence[Rank], *, by_torchrun: bool) -> None:
        self._pool, self._ranks, self._by_torchrun = pool, ranks, by_torchrun
        self.roster, self.memory = pool.roster, pool.memory
        self._ending = self._closed = False
        self._before: dict[int, Any] = {}
        if current_thread() is main_thread():
            self._before = {number: signal.signal(number, self._interrupt) for number in INTERRUPTS}

    def visit(
        self, job: Job, shared: Tensors, visits: Sequence[Visit] | Sequence[TestPart], key: Key
    ) -> Iterator[Reply | Failure | Note]:
        """Distribute the visits among the ranks, the longest first."""
        try:
            yield from self._pool.visit(job, shared, visits, key)
        except KeyboardInterrupt:
            self._ending = True
            raise self._cause() from None
        except LostRank:
            self._ending = True
            raise

    def close(self) -> None:
        """Make the other ranks wait for another run, and close the files."""
        if self._closed:
            return
        self._closed = True
        interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)  # between two jobs
        cause = self._cause() if interrupted else None
        self._pool.close()
        if not (self._ending and self._by_torchrun):  # otherwise torchrun is about to interrupt this process
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if cause is not None:
            raise cause from None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._ending and self._before.get(number) is not signal.SIG_IGN:
            self._ending = True
            raise KeyboardInterrupt

    def _cause(self) -> BaseException:
        """The error behind an interrupt."""
        end = time.monotonic() + 0.3
        try:
            while (left := end - time.monotonic()) > 0:
                for rank in select.select(self._ranks, [], [], left)[0]:
                    if rank.receive() is None:
                        rank.exit_reason()
        except (LostRank, KeyboardInterrupt) as error:
            return error
        return KeyboardInterrupt()


def follow(launch: Launched) -> NoReturn:
    """Work for rank 0, run after run, until it exits."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_DFL)  # nothing to clean up yet
    try:
        port, token = _store(launch).get(ADDRESS).decode().split()
    except RuntimeError:  # rank 0 and its store have ended
        sys.exit(0)
    try:
        connection = socket.create_connection((launch.host, int(port)), SILENT_SECONDS)
    except OSError as error:
        raise _unreachable(launch, int(port), error) from error
    connection.settimeout(None)  # until rank 0 needs this rank
    connection.sendall(token.encode())
    secret, file = secrets.token_hex(16), anonymous_file()
    os.write(file, secret.encode())
    proof = f"/proc/{os.getpid()}/fd/{file}", secret
    stream = Stream(connection)
    stream.send(Joined(launch.rank, launch.local_rank, name_rank(launch.rank), proof, versions()))
    parent = RankZero(stream, launch.rank)
    with neutral():
        while (opened := parent.open()) is not None:
            hello, descriptors = opened
            serve(parent, hello, *descriptors)
            stream.send(CLOSED)
    sys.exit(0)


class RankZero:
    """Rank 0, as the parent of a pool's worker. A thread listens, so that its loss is noticed even during a visit."""

    def __init__(self, stream: Stream, rank: int) -> None:
        self._stream, self._rank = stream, rank
        self._inbox: SimpleQueue[tuple[Message, list[bytearray]] | None] = SimpleQueue()
        self._working = False  # whether rank 0 has an engine open
        self._copies: list[SharedFile] | None = None  # of the weights and the results, if rank 0 is on another machine
        for number in INTERRUPTS:
            signal.signal(number, lambda *_: Thread(target=self._leave, daemon=True).start())
        Thread(target=self._listen, daemon=True).start()

    def open(self) -> tuple[Hello, list[int]] | None:
        """Wait for an engine; the descriptors of its files, or of copies. None: there will be none."""
        while (item := self._inbox.get()) is not None:
            if isinstance(opening := item[0], Open):
                break
        else:
            return None
        self._copies, self._stream.queues = None, not opening.files
        if opening.files:
            folder = f"/proc/{opening.process}/fd"
            return opening.hello, [os.open(f"{folder}/{file}", os.O_RDWR) for file in opening.files]
        data, *self._copies = (SharedFile() for _ in range(2 + SLOTS))
        for start in range(0, opening.data_bytes, PIECE):
            if (item := self._inbox.get()) is None:
                return None
            data.mapped(opening.data_bytes)[start : start + PIECE] = item[1][0]
        self._sessions, self._slot_bytes = Sessions.temporary(), opening.slot_bytes
        self._memories = anonymous_file() if opening.slot_bytes else None
        others = [os.dup(self._sessions.descriptor)] + ([] if self._memories is None else [self._memories])
        return opening.hello, [data.descriptor, *(file.descriptor for file in self._copies), *others]

    def receive(self, kind: Any = None) -> Message | None:
        """The next message; what came with it is in the copies."""
        if (item := self._inbox.get()) is None:
            return None
        message, contents = item
        if self._copies is not None and isinstance(message, Begin):
            self._copies[0].fill(contents[0])
        elif self._copies is not None and isinstance(message, VisitGroup):
            self._clients = {index: visit.client for index, visit in message.visits}
            for at, (index, visit) in enumerate(message.visits):
                kept, record = contents[2 * at : 2 * at + 2]
                if record:
                    self._sessions.join(visit.client, bytes(record))
                if self._memories is not None:  # the copy has two slots per visit: what it reads, and what it stores
                    os.pwrite(self._memories, kept, 2 * at * self._slot_bytes)
                    ticket = visit.ticket and f"{2 * at}-{visit.ticket.partition('-')[2]}"
                    slot = None if visit.slot is None else 2 * at + 1
                    message.visits[at] = index, replace(visit, ticket=ticket, slot=slot)
        return message

    def send(self, message: Ready | GroupResults) -> None:
        """Send a message, and the results if rank 0 is on another machine."""
        if self._copies is None or isinstance(message, Ready):
            self._stream.send(message)
            return
        ends = [result.where[0] + DOUBLE * result.where[1] for result in message.results if result.where]
        end = max([ALIGN, *ends, *(end_of(result.extra) for result in message.results)])
        contents = [self._copies[1 + message.slot].mapped(end)[:end]]
        for result in message.results:
            client, kept = self._clients.get(result.index, EVERYONE), b""
            if result.ticket is not None and self._memories is not None:
                slot = int(result.ticket.partition("-")[0])
                kept = os.pread(self._memories, self._slot_bytes, slot * self._slot_bytes)
            contents += [kept, b"" if client == EVERYONE else self._sessions.content(client)]
        self._stream.send(message, *contents)

    def _listen(self) -> None:
        while (received := self._stream.receive()) is not None:
            self._stream.connection.settimeout(ZERO_SILENT_SECONDS)
            if received[0] == CLOSE or isinstance(received[0], Open):
                self._working = received[0] != CLOSE
            if received[0] != ALIVE:
                self._inbox.put(received)
        if self._working:  # otherwise rank 0 has ended as it should
            if self._rank == 1:
                os.write(2, b"unskew: rank 0 is lost: its connection closed; resume its run with: unskew resume RUN\n")
            os._exit(1)
        self._inbox.put(None)

    def _leave(self) -> None:
        """Notify rank 0, in another thread than the interrupted one, which may be in the middle of a message."""
        self._stream.send_now(INTERRUPT)
        os._exit(INTERRUPTED)
