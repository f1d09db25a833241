"""Rendezvous: each rank reports its versions, rank 0 checks that they are the same, gloo connects them."""

import atexit
import hashlib
import json
import os
import platform
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from unskew.core.errors import UserError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LINE = "torchrun --nproc-per-node 2 -m -- unskew run --engine torchrun"


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
    if missing := [name for name in VARIABLES if not os.environ.get(name)]:
        reason = f"{missing[0]} is not set, so torchrun did not start this process"
        raise UserError(f"--engine torchrun: {reason}; start it with: {LINE} …, or give --engine auto")
    (rank, ranks, port), host = map(_number, ("RANK", "WORLD_SIZE", "MASTER_PORT")), os.environ["MASTER_ADDR"]
    local = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    launch = Launched(rank, ranks, host, port, *local, by_torchrun="TORCHELASTIC_RUN_ID" in os.environ)
    if not launch.rank < launch.ranks:
        raise UserError(
            f"RANK={launch.rank}, WORLD_SIZE={launch.ranks}: ranks are numbered from 0; start it with: {LINE} …"
        )
    return launch


def check_command(engine: str | None) -> None:
    """Refuse a command that torchrun has started several times if each would be a separate run."""
    if "TORCHELASTIC_RUN_ID" in os.environ and engine != "torchrun" and (ranks := launched().ranks) > 1:
        hint = "give --engine torchrun to make it one run, or start it without torchrun"
        raise UserError(f"torchrun has started this command {ranks} times; {hint}")


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text}: torchrun sets it to a whole number; start it with: {LINE} …")
    return int(text)


JOIN_SECONDS = 180.0  # that rank 0 waits for the others
CONNECT_SECONDS = 60.0
POLL_SECONDS = 0.05
BEGIN = "unskew/begin"  # in the store: GO or NOT_NEEDED, set by rank 0
GO, NOT_NEEDED = "go", "not needed"
INTERFACE = "GLOO_SOCKET_IFNAME"
ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux
SAME_PROCESSOR = "set ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2 for all ranks"

Facts = dict[str, str]


@dataclass(frozen=True)
class Rank:
    """Another rank, as rank 0 knows it."""

    rank: int
    name: str  # in messages
    ended_with_us: bool  # whether torchrun also ends this process when that one dies


def facts() -> Facts:
    """The versions that must be equal on all ranks for identical results, and the identity of this one."""
    return {
        "machine": socket.gethostname(),
        "process": str(os.getpid()),
        "group": os.environ.get("GROUP_RANK", ""),  # the same for all ranks of one torchrun
        "Unskew": _source(),
        "PyTorch": torch.__version__,
        "NumPy": np.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def _source() -> str:
    """A hash of the package's own code, which changes with every edit, unlike a version number."""
    digest, package = hashlib.sha256(), Path(__file__).parents[2]
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return f"of source {digest.hexdigest()[:12]}"


def open_store(launch: Launched) -> None:
    """On rank 0: let the others join; they are released when this process exits."""
    if launch.ranks > 1:
        _store(launch)


def gather(launch: Launched, *, processors: bool) -> list[Rank]:
    """On rank 0: connect the other ranks; refuse them if their results could differ.

    ``processors``: whether they compute on CPUs, which must then be of the same kind.
    """
    others, own = range(1, launch.ranks), facts()
    if not others:
        return []
    store = _store(launch)
    _wait_for(store, others)
    reported: dict[int, Facts] = {rank: json.loads(store.get(_key(rank))) for rank in others}
    known = [
        Rank(rank, name_rank(rank, about), launch.by_torchrun and about["group"] == own["group"])
        for rank, about in reported.items()
    ]
    if store.check([BEGIN]):  # connected in an earlier run of this process
        return known
    _check_same(own, reported, processors)
    store.set(BEGIN, GO)
    _interruptible(lambda: _connect(store, launch))
    return known


def join_rank_zero(launch: Launched) -> bool:
    """On another rank: wait for rank 0, then connect; False if it ended without needing this rank."""
    store = _store(launch)
    store.set(_key(launch.rank), json.dumps(facts()))
    try:
        while not store.check([BEGIN]):
            time.sleep(POLL_SECONDS)
        if store.get(BEGIN) != GO.encode():
            return False
    except RuntimeError:  # rank 0 and its store have ended
        return False
    _connect(store, launch)
    return True


def name_rank(rank: int, known: Facts) -> str:
    """A rank's name in messages."""
    return f"rank {rank} on {known['machine']} (process {known['process']})"


def _key(rank: int) -> str:
    return f"unskew/rank/{rank}"


@cache
def _store(launch: Launched) -> Store:
    """The key-value store that the ranks share: torchrun's, or rank 0's if another program started them."""
    master = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        patience = timedelta(seconds=JOIN_SECONDS)
        store = TCPStore(launch.host, launch.port, None, master, patience, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise UserError(
            f"rank {launch.rank} on {socket.gethostname()} cannot reach rank 0's machine at {launch.host}, port "
            f"{launch.port} ({reason}); check the address, and that the port is open"
        ) from error
    if launch.rank == 0:
        atexit.register(_release_ranks, store)
    return store


def _release_ranks(store: Store) -> None:
    """Release ranks that still wait when rank 0 exits."""
    with suppress(RuntimeError):  # the store may have ended already
        if not store.check([BEGIN]):
            store.set(BEGIN, NOT_NEEDED)


def _wait_for(store: Store, others: Iterable[int]) -> None:
    end = time.monotonic() + JOIN_SECONDS
    while missing := [rank for rank in others if not store.check([_key(rank)])]:
        if time.monotonic() > end:
            ranks = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
            raise UserError(
                f"{ranks} not joined within {JOIN_SECONDS:.0f} s; check that the same command with --engine torchrun "
                "was started on every machine and did not fail"
            )
        time.sleep(POLL_SECONDS)


def _check_same(own: Facts, others: dict[int, Facts], processors: bool) -> None:
    for rank, known in others.items():
        for what in ("Unskew", "PyTorch", "NumPy", "Python", *(["processor"] if processors else [])):
            if known[what] != own[what]:
                advice = SAME_PROCESSOR if what == "processor" else f"install the same {what} on both"
                raise UserError(
                    f"{name_rank(rank, known)} has {what} {known[what]}, but {name_rank(0, own)} has {own[what]}, so "
                    f"results could differ; {advice}"
                )


def _connect(store: Store, launch: Launched) -> None:
    if dist.is_initialized():
        if "gloo" not in (kinds := dist.get_backend_config()):
            raise UserError(
                f"torch.distributed was initialized with {kinds}; use cpu:gloo, or let unskew initialize it"
            )
        return
    name = None if INTERFACE in os.environ else _interface(launch)
    try:
        if name is not None:
            os.environ[INTERFACE] = name
        own, patience = PrefixStore("unskew", store), timedelta(seconds=CONNECT_SECONDS)
        dist.init_process_group("gloo", store=own, rank=launch.rank, world_size=launch.ranks, timeout=patience)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:300]
        raise UserError(
            f"rank {launch.rank} on {socket.gethostname()} cannot connect to the others ({reason}); on each "
            f"machine, set the network interface that they share, as in {INTERFACE}=eth0, and open its ports"
        ) from error
    finally:
        if name is not None:
            del os.environ[INTERFACE]


def _interface(launch: Launched) -> str | None:
    """The network interface that reaches rank 0's machine; None: let gloo choose."""
    try:
        import fcntl
    except ImportError:  # not on Linux or macOS
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((launch.host, launch.port))  # sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(probe, ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                except OSError:  # it has no address
                    continue
                if answer[20:24] == own:  # other machines cannot reach this one through its loopback
                    return None if launch.local_ranks < launch.ranks and name == "lo" else name
    except OSError:  # a name that does not resolve, another operating system
        return None
    return None


def _interruptible(work: Callable[[], None]) -> None:
    """Do the work in a thread, because waiting inside PyTorch cannot be interrupted."""
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    thread = Thread(target=attempt, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
    if errors:
        raise errors[0]
