"""A node of the federation: owns the data, the clients' memories and the secrets, and answers the server's messages.

It checks a message before it acts on it, refuses a bad one with the reason, and keeps running.
"""

import copy
import hashlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import Ended, StorageFailure, UserError
from unskew.core.files import cache_folder, clear_parts, read_content, write_whole
from unskew.core.key import Key
from unskew.core.machine import neutral, physical_memory
from unskew.core.plugins import guard_plugins, parse_plugin
from unskew.core.types import Failure, ImageSet, Job, Split, Tensors, Visit
from unskew.data.batches import AUTO, check_visit, choose_augmentation, visit_bytes
from unskew.data.partition import partition_examples
from unskew.data.photographs import silent
from unskew.data.population import Population
from unskew.data.sources import load
from unskew.data.store import cache_of
from unskew.engines.blueprint import FROZEN, Blueprint, build, dataset
from unskew.engines.features import FrozenPart, images_sha256
from unskew.engines.flower.audit import AUDIT, SPENT, AuditLog, EpsilonBook, announce, describe_reply, unit_of
from unskew.engines.flower.messages import (
    MAX_TENSORS,
    BadMessage,
    ClientFacts,
    Description,
    Envelope,
    Header,
    JobRequest,
    RunAgreement,
    Seen,
    WireContext,
    by_name,
    compact,
    factor_of,
    printable,
    read,
    seal,
    unseal,
)
from unskew.engines.flower.policy import MEGABYTE, Policy, Purpose, check_masked, name_of, subject_of
from unskew.privacy.secure_sum import Masked, SecureJob, digest_of
from unskew.privacy.sessions import Sessions, pin_members
from unskew.privacy.signing import Registered, Signer
from unskew.round.client import ClientSide, plan_ahead
from unskew.round.client_memory import MemoryFormat
from unskew.round.jobs import answer, decode_job, plugins_of

Ints = npt.NDArray[np.int64]
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class OwnClient:
    """A client of this node: the indices of its images, ascending."""

    name: str
    number: int | None  # None: the server assigns one
    train: Ints
    test: Ints


@dataclass(frozen=True)
class NodeData:
    """A node's name, its images and its clients."""

    name: str
    images: ImageSet
    clients: tuple[OwnClient, ...]

    @cached_property
    def sha256(self) -> str:
        """Over all images and labels, and which client has which. Stays on the node: a server could use it to test
        guesses about the data."""
        digest = hashlib.sha256(images_sha256(self.images).encode())
        for client in self.clients:
            digest.update(repr((client.name, client.train.tolist(), client.test.tolist())).encode())
        return digest.hexdigest()

    def describe(self) -> Description:
        """What the node sends the server before the first round."""
        images, own = self.images, self.clients
        clients = tuple(ClientFacts(one.name, one.number, len(one.train), len(one.test)) for one in own)
        look = (images.classes, images.shape, images.mean, images.std, images.augment)
        return Description(self.name, own_version(), clients, *look, choose_augmentation(AUTO, images))

    def fit(self, agreement: RunAgreement) -> tuple[ImageSet, Population, dict[int, Tensor]]:
        """The images as a run uses them, which client has which, and the rows of each client's test images."""
        numbers = agreement.numbers
        stated = {client.name: client.number for client in self.clients}
        if numbers.keys() != stated.keys() or any(stated[name] not in (None, numbers[name]) for name in stated):
            raise UserError(f"node {self.name}: the agreement is for other clients than this node has")
        train, test = (self._fit_part(part, agreement) for part in (self.images.train, self.images.test))
        images = replace(
            self.images, classes=agreement.classes, train=train, test=test, mean=agreement.mean, std=agreement.std
        )
        clients = sorted(self.clients, key=lambda client: numbers[client.name])
        offsets = np.zeros(max(numbers.values()) + 2, np.int64)
        for client in clients:
            offsets[numbers[client.name] + 1] = len(client.train)
        order = np.concatenate([client.train for client in clients]).astype(np.int32)
        tests = {numbers[client.name]: torch.from_numpy(client.test) for client in clients}
        return images, Population(order, np.cumsum(offsets)), tests

    def _fit_part(self, part: Split, agreement: RunAgreement) -> Split:
        """The same images with the agreed channels, and labels that number the agreed classes."""
        own, images = self.images.classes, part.images
        if agreement.blueprint.shape[0] > images.shape[1]:
            if isinstance(images, np.ndarray):
                images = np.repeat(images, 3, axis=1)
            else:  # reads the same files and repeats a gray image in all channels
                images = copy.copy(images)
                images.shape = (len(images), 3, *images.shape[2:])
        if agreement.classes == own:
            return replace(part, images=images)
        number = {name: index for index, name in enumerate(agreement.classes)}
        # compare the described names, not the labels: a server could otherwise test which classes have images here
        if unknown := [name for name in own if name not in number]:
            raise UserError(f"node {self.name} has the class {unknown[0]!r}, which was not agreed on")
        table = np.array([number[name] for name in own], np.int64)
        return replace(part, images=images, labels=table[part.labels])


def read_node_data(
    name: str, data: str, *, data_dir: str | None = None, partition: str | None = None, clients: Sequence[int] = (),
    of: int | None = None, seed: int = 0,
) -> NodeData:  # fmt: skip
    """Load the node's own data as one client's, or its ``clients``' part of a partitioned data set.

    ``of`` is the partition's number of clients, if its text does not have it, and ``seed`` is its seed.
    """
    if (partition is None) == bool(clients):
        raise UserError(f"node {name}: give partition and client together, such as client = 0, or neither")
    images = load(data, Path(data_dir) if data_dir else None, cache_of(None, None, None))
    if partition is None:
        train, test = (np.arange(len(part), dtype=np.int64) for part in (images.train, images.test))
        return NodeData(name, images, (OwnClient(name, None, train, test),))
    parts = partition_examples(
        partition, images.train.labels, clients=of, key=Key(seed), users=images.users, places=images.places,
        classes=len(images.classes),
    )  # fmt: skip
    if max(clients) >= parts.clients or len(set(clients)) < len(clients):
        given = f"clients {clients} do not fit a partition into {parts.clients}"
        raise UserError(f"node {name}: {given}; give distinct numbers from 0 to {parts.clients - 1}")
    owners = np.arange(len(images.test)) % parts.clients  # [n], of each test image: dealt out in turn, or its user
    if parts.names is not None and images.test_users is not None and len(images.test_users) == len(images.test):
        number_of = {user: index for index, user in enumerate(parts.names)}
        owners = np.array([number_of.get(user, -1) for user in images.test_users.tolist()])
    own = []
    for number in clients:
        train, test = (np.flatnonzero(who == number).astype(np.int64) for who in (parts.client, owners))
        alone = name if len(clients) == 1 else f"{name}-{number}"
        own.append(OwnClient(parts.names[number] if parts.names else alone, number, train, test))
    return NodeData(name, images, tuple(own))


def own_version() -> str:
    """The installed version of unskew."""
    with suppress(PackageNotFoundError):
        return version("unskew")
    return "unknown"


TICKET = re.compile(r"(\d{1,10})\.(\d{1,18})-([0-9a-f]{8})")  # client, file number, keyed checksum
FILE = re.compile(r"(\d{1,10})\.(\d{1,18})\.state")


class NodeMemory:
    """The clients' memories in one run, as files in a folder."""

    def __init__(self, folder: Path, layout: MemoryFormat, secret: bytes) -> None:
        self._folder, self.format, self.bytes = folder, layout, layout.bytes
        self._key = hashlib.sha256(b"unskew memory 1 " + secret).digest()
        self._clients: dict[int, int] = {}  # by the number of the file that a visit may write
        self.lost = False  # whether a client's memory was missing, since the last check
        with suppress(OSError):
            clear_parts(folder)
        self._next = max((number for _, number in self._files()), default=-1) + 1

    def assign(self, visit: Visit) -> Visit:
        """Give the visit the number of the file that it may write."""
        if not visit.keep:
            return visit
        number, self._next = self._next, self._next + 1
        self._clients = {number: visit.client}
        return replace(visit, slot=number)

    def recall(self, visit: Visit) -> Tensors:
        """What the client stored at its last visit; empty at its first, or if the file is lost."""
        if visit.ticket is None:
            return {}
        found = TICKET.fullmatch(visit.ticket)
        if found is not None and int(found[1]) == visit.client:
            number = int(found[2])
            with suppress(UserError):
                content = read_content(self._file(visit.client, number), self.format.bytes) or b""
                if len(content) == self.format.bytes and self._tag(number, content) == found[3]:
                    return self.format.unpacked(bytearray(content))
        self.lost = True
        return {}

    def write(self, slot: int, values: Tensors) -> str:
        """Write the values into the file with this number and return their ticket."""
        content, client = self.format.packed(values), self._clients[slot]
        try:
            write_whole(self._file(client, slot), bytes(content))
        except UserError as error:
            raise StorageFailure(f"the client's state cannot be saved: {error}") from error
        return f"{client}.{slot}-{self._tag(slot, content)}"

    def clear(self, visits: Iterable[Visit], tickets: Iterable[str]) -> None:
        """Remove the old files of clients that will write a new one, unless a visit or a ticket refers to them."""
        writing = {visit.client: visit.ticket or "" for visit in visits if visit.keep}
        found = map(TICKET.fullmatch, [*tickets, *writing.values()])
        kept = {(int(ticket[1]), int(ticket[2])) for ticket in found if ticket}
        for client, number in self._files():
            if client in writing and (client, number) not in kept:
                with suppress(OSError):
                    self._file(client, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing to close: no file stays open."""

    def _tag(self, slot: int, content: bytes | bytearray) -> str:
        """A keyed checksum: with a plain one the server could test guesses about a memory's content."""
        return hashlib.blake2s(slot.to_bytes(8, "big") + content, key=self._key, digest_size=4).hexdigest()

    def _file(self, client: int, number: int) -> Path:
        return self._folder / f"{client}.{number}.state"

    def _files(self) -> list[tuple[int, int]]:
        names = [file.name for file in self._folder.iterdir()] if self._folder.exists() else []
        return [(int(found[1]), int(found[2])) for name in names if (found := FILE.fullmatch(name))]


SECRET, RECORD = "secret", "sessions"
COMMITMENT = "commitment.key"
DATA = "data.sha256"
SECRET_LENGTH = 32  # bytes


def open_secret(folder: Path) -> tuple[bytes, Sessions]:
    """Read or make the run's secret, which masks are derived from, and open its record of secure sums."""
    known = read_content(folder / SECRET, 2 * SECRET_LENGTH)
    if known is not None and len(known) != SECRET_LENGTH:
        raise UserError(f"{folder / SECRET} is damaged; delete it to let the node make a new one")
    if known is None or not (folder / RECORD).exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        forget_secret(folder)
        write_whole(folder / RECORD, b"", secret=True)  # first: a secret without a record is replaced
        known = os.urandom(SECRET_LENGTH)
        write_whole(folder / SECRET, known, secret=True)
    return known, Sessions.in_file(folder / RECORD)


def commit(file: Path, sha256: str) -> str:
    """Commit to the node's data: a server can store and compare the value, but learns nothing else from it.

    The owner has the key in ``file`` and can later prove which data it was.
    """
    key = read_content(file, 2 * SECRET_LENGTH)
    if key is None or len(key) != SECRET_LENGTH:
        key = os.urandom(SECRET_LENGTH)
        write_whole(file, key, secret=True)
    return hashlib.blake2s(sha256.encode(), key=key).hexdigest()


def forget_secret(folder: Path) -> None:
    """Delete the secret and its record, so that nobody with the node's files can remove a mask later."""
    for name in (SECRET, RECORD):
        (folder / name).unlink(missing_ok=True)


MEMORY_SHARE = 3  # stored features, and plans of visits, may each take 1/MEMORY_SHARE of the memory
MODEL = ("params/", "buffers/")
VisitResult = tuple[dict[str, Any], tuple[tuple[str, Tensor], ...]]  # fields and tensors
VisitResults = list[VisitResult]


class NodeRun:
    """The node's part in one run. It handles one message at a time; its weights are scratch space."""

    def __init__(self, node: "Node", agreement: RunAgreement, frozen: Tensors, folder: Path) -> None:
        self.agreement, self._policy = agreement, node.policy
        blueprint, policy = agreement.blueprint, node.policy
        policy.check_texts(blueprint)
        policy.check_size(blueprint, node.data.images.shape)
        policy.check_protection(blueprint.algorithm())
        size = sum(value.nbytes for value in frozen.values())
        if (frozen and blueprint.layers is None) or size > policy.max_model * MEGABYTE:
            raise BadMessage("it sends a frozen part that its network does not have, or that is too large")
        images, population, own_tests = node.data.fit(agreement)
        blueprint, (secret, sessions) = replace(blueprint, device=node.device), open_secret(folder)
        if blueprint.stored:
            most = policy.max_disk * MEGABYTE
            blueprint, images = _store_features(blueprint, images, population, frozen, agreement.views, most)
        side = build(blueprint, dataset(images, population) | tensors.prefixed(frozen, FROZEN))
        self.memory: NodeMemory | None = None
        if side.algorithm.remember:
            layout = MemoryFormat(side.algorithm.remember, side.weights)
            self.memory = NodeMemory(folder / "memories", layout, secret)
        signer = None
        if node.registered is not None:
            context = hashlib.sha256(agreement.common + digest_of(frozen)).digest()
            subject = partial(subject_of, algorithm=side.algorithm)
            signer = Signer(node.registered, context, subject, partial(pin_members, folder / "sums"), node.say)
        self.side: ClientSide = replace(
            side, memory=self.memory, secret=secret, sessions=sessions, signer=signer, own_tests=own_tests
        )

    def check(self, request: JobRequest, shared: Tensors) -> tuple[Job, list[Visit]]:
        """The job and its visits. Refuses what is not for this node, or not allowed on it."""
        try:
            job = decode_job(request.job)
        except ValueError as error:
            raise BadMessage(f"its job cannot be read: {str(error)[:300]}", "its job cannot be read") from error
        for name in plugins_of(job):
            self._policy.check_plugin(parse_plugin(name, "job"))
        check_masked(job, self.side.algorithm)
        if isinstance(job, SecureJob) and self.side.signer is None:
            raise BadMessage("it asks for a secure sum, but this node has no key or no roster to check the others with")
        visits = [Visit(**vars(visit)) for visit in request.visits]
        sizes = {}
        for visit in visits:
            if visit.client not in self.agreement.numbers.values():
                raise BadMessage(f"client {visit.client} does not belong to this node")
            sizes[visit.client] = len(self.side.population.examples(visit.client))
            if visit.weight > max(1, sizes[visit.client]):
                raise BadMessage(f"client {visit.client} cannot have weight {visit.weight:g}: it has fewer examples")
        if len({(visit.client, visit.repeat) for visit in visits}) < len(visits):
            raise BadMessage("it asks for the same visit twice")
        self._policy.check_job(job, self.side.algorithm, visits, sizes)
        self._check_shared(job, shared)
        return job, visits

    def _check_shared(self, job: Job, shared: Tensors) -> None:
        """Refuse another network's model, numbers that are not finite, and statistics that the policy forbids."""
        model, own = (
            {name: (value.shape, value.dtype) for name, value in values.items() if name.startswith(MODEL)}
            for values in (shared, self.side.weights)
        )
        if model and model != own:
            raise BadMessage("its model is not the agreed network")
        if not tensors.finite({name: value for name, value in shared.items() if value.is_floating_point()}):
            raise BadMessage("its tensors contain NaN or infinity")
        if model:  # key and share exchanges of a secure sum have none
            self._policy.check_statistics(job, self.side, shared)

    def work(self, job: Job, shared: Tensors, visits: Sequence[Visit], key: Key, keep: Iterable[str]) -> VisitResults:
        """Do the job for every visit. ``keep`` are the tickets of memories that the server still needs."""
        if self.memory is not None:
            self.memory.clear(visits, keep)
        local, shape = self.side.algorithm.local, self.agreement.blueprint.shape
        planned = sum(visit_bytes(self._examples(visit), local, shape) for visit in visits)
        if planned < physical_memory() / MEMORY_SHARE:  # otherwise each visit is checked and planned on its own
            plan_ahead(self.side, job, shared, visits, key)
        results, size, count = VisitResults(), 0, 0
        for visit in visits:
            results.append(result := self._visit_client(job, shared, visit, key))
            size, count = size + sum(value.nbytes for _, value in result[1]), count + len(result[1])
            if size > self._policy.max_message * MEGABYTE or count > MAX_TENSORS:
                limits = f"{self._policy.max_message:,} MB or {MAX_TENSORS:,} tensors, the limits of a message"
                raise BadMessage(f"the reply to its visits would take more than {limits}")
        return results

    def _examples(self, visit: Visit) -> int:
        return len(self.side.population.examples(visit.client)) if visit.take is None else visit.take

    def _visit_client(self, job: Job, shared: Tensors, visit: Visit, key: Key) -> VisitResult:
        fields: dict[str, Any] = {"client": visit.client, "repeat": visit.repeat}
        try:
            check_visit(self._examples(visit), self.side.algorithm.local, self.agreement.blueprint.shape)
            mine = visit if self.memory is None else self.memory.assign(visit)
            reply = answer(self.side, job, shared, mine, key)
        except (StorageFailure, UserError) as error:
            return fields | {"failure": str(error)}, ()
        if isinstance(reply, Failure):
            return fields | {"failure": reply.reason}, ()
        context = WireContext(shared, visit.weight, factor_of(reply.sums, visit.weight))
        sent = compact(reply.sums, context)
        fields |= {"forms": [form for _, form, _ in sent], "extra": len(reply.extra)}
        fields |= {"factor": context.factor, "ticket": reply.ticket}
        if self.memory is not None and self.memory.lost:
            fields["anew"], self.memory.lost = True, False
        return fields, (*((name, value) for name, _, value in sent), *reply.extra.items())


def _store_features(
    blueprint: Blueprint, images: ImageSet, population: Population, frozen: Tensors, views: int, max_bytes: int
) -> tuple[Blueprint, ImageSet]:
    """The frozen part's output instead of the images, computed once; the images if it is too large."""
    part, cache = FrozenPart(blueprint, frozen, images, population, images_sha256(images), views), cache_folder()
    on_disk = part.bytes + sum(map(_disk_bytes, cache.glob("features-*")))
    if part.bytes > physical_memory() / MEMORY_SHARE or on_disk > max_bytes:
        return replace(blueprint, stored=False), images
    return blueprint, part.output(cache, silent)


def _disk_bytes(folder: Path) -> int:
    """What a folder's files take on disk; files deleted meanwhile do not count."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += 512 * os.lstat(os.path.join(root, name)).st_blocks
    return total


AGREEMENT, PROMISE = "agreement.bin", "promise"
OPEN_RUNS = 4  # kept in memory; the others are reopened from their files
ENDED_RUNS = 256  # whose message numbers are remembered
MAX_REASONS = 200  # counted separately
ABANDONED = 60 * 24 * 3600.0  # seconds without a message
KINDS = ("describe", "agree", "job", "refuse", "finish")


class Node:
    """A node and its runs. ``say`` gets a log line for every event."""

    def __init__(
        self, data: NodeData, folder: Path, *, device: str = "cpu", registered: Registered | None = None,
        say: Say = lambda line: None, policy: Policy | None = None,
    ) -> None:  # fmt: skip
        self.data, self._folder, self.device, self.registered, self.say = data, folder, device, registered, say
        self.policy = policy or Policy()
        self._max_bytes = self.policy.max_message * MEGABYTE
        self.refusals: Counter[str] = Counter()  # by reason
        self._runs: dict[str, NodeRun] = {}  # the most recently used ones
        self._seen: dict[str, Seen] = {}
        self._lock = threading.Lock()
        self._audit = AuditLog(folder / AUDIT)
        self._spent = EpsilonBook(folder / SPENT, self.policy.max_epsilon)
        self._commitment = commit(folder / COMMITMENT, data.sha256)
        self._described = False  # whether the description is in the audit log
        with suppress(OSError):
            for run in (folder / "runs").iterdir():
                if time.time() - max((file.stat().st_mtime for file in run.iterdir()), default=0.0) > ABANDONED:
                    rmtree(run, ignore_errors=True)

    def answer(self, envelope: Envelope) -> Envelope:
        """Reply to a message. Never raises because of its content."""
        # one thread: a second would only wait on small tensors
        with self._lock, neutral(), guard_plugins(self.policy.check_plugin):
            about: dict[str, Any] = {"kind": "refused", "node": self.data.name}
            try:
                fields, tensors = unseal(envelope, self._max_bytes)
                header = read(fields, Header)
                about |= {"run": header.run, "number": header.number}
                if header.kind not in KINDS:
                    raise BadMessage(f"its kind is unknown; the kinds are {', '.join(KINDS)}")
                # the server has given up on a job that a newer message overtook: doing it would delete memories that
                # the newer one needs
                self._numbers(header.run).take(header.number, in_order=header.kind == "job")
                return getattr(self, f"_{header.kind}")(fields, by_name(tensors), about)  # type: ignore[no-any-return]
            except Ended:
                raise
            except BadMessage as error:
                reason, logged = str(error), error.logged
            except UserError as error:
                reason, logged = str(error), "this node cannot do what it asks"
            except BaseException as error:  # noqa: BLE001  no message may stop the node
                reason, logged = f"{type(error).__name__}: {error}", f"it caused {type(error).__name__}"
            self.count_refusal(logged)
            return seal(about | {"reason": reason})

    def count_refusal(self, reason: str) -> None:
        """Count a refused message, and log the first for each reason, which must not contain the sender's text."""
        reason = reason if reason in self.refusals or len(self.refusals) < MAX_REASONS else "others"
        self.refusals[reason] += 1
        if self.refusals[reason] == 1 or self.refusals.total().bit_count() == 1:
            self.say(f"refused message {self.refusals.total():,}: {reason}")

    def _describe(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        description = replace(self.data.describe(), data=self._commitment)
        reply = seal(about | {"kind": "described", "description": description})
        if not self._described:  # it is the same every time
            self._audit.append({"run": about["run"], "job": "describe", **describe_reply(reply, ())})
            self._described = True
        return reply

    def _agree(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        agreement = RunAgreement.from_json(header.get("agreement"))
        if agreement.run != about["run"]:
            raise BadMessage("its agreement is for another run")
        folder, promise = self._run_folder(agreement.run), agreement.promise.encode()
        if (before := read_content(folder / PROMISE, 100)) not in (None, promise):
            raise BadMessage("this run was agreed on with other settings, which cannot change; start a new run")
        if before is None and len(list((self._folder / "runs").glob(f"*/{AGREEMENT}"))) >= self.policy.max_runs:
            raise BadMessage(f"this node has {self.policy.max_runs} unfinished runs; its owner can raise max_runs")
        run = self._open(agreement, tensors)
        whole = seal({"agreement": agreement.to_json()}, tensors.items()).to_bytes()
        self._check_disk(len(whole))
        write_whole(folder / PROMISE, promise)
        write_whole(folder / AGREEMENT, whole)
        if before is None:
            terms = printable(f"{agreement.blueprint.method}, {agreement.blueprint.model}")
            self.say(f"run {agreement.run[:8]}: agreed on {terms}")
            for line in announce(run.side, self.policy.jobs):
                self.say(f"run {agreement.run[:8]}: will leave this node: {line}")
        return seal(about | {"kind": "agreed", "agreement": agreement.digest})

    def _job(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        run, request = self._run(about["run"]), read(header, JobRequest)
        if run is None or run.agreement.digest != request.agreement:
            return seal(about | {"kind": "unknown", "reason": "this node does not have this agreement"})
        job, visits = run.check(request, tensors)
        purpose, algorithm, epsilon = Purpose.of(job), run.side.algorithm, None
        self._check_disk(run.memory.bytes * sum(visit.keep for visit in visits) if run.memory else 0)
        reveals = not isinstance(job, SecureJob) or isinstance(job, Masked)  # the exchanges around it do not
        if reveals and (purpose.trains or purpose.statistics):
            epsilon = self._spent.spend(about["run"], algorithm.private, algorithm.mechanism, trains=purpose.trains)
        results = run.work(job, tensors, visits, Key(request.seed, request.key), request.keep)
        failed = [fields["failure"] for fields, _ in results if "failure" in fields]
        clients = ", ".join(f"client {visit.client}" for visit in visits[:5])
        failure = f"; failed: {printable(failed[0])}" if failed else ""
        self.say(f"run {about['run'][:8]}, round {purpose.round}: {name_of(job)} for {clients}{failure}")
        sent = [pair for _, pairs in results for pair in pairs]
        reply = seal(about | {"kind": "done", "results": [fields for fields, _ in results]}, sent)
        self._audit.append({
            "run": about["run"], "job": str(type(job).__struct_config__.tag),  # type: ignore[attr-defined]
            "work": name_of(job), "round": purpose.round, "clients": [visit.client for visit in visits],
            "members": len(job.members) if isinstance(job, SecureJob) else None,
            "epsilon": epsilon, "unit": None if epsilon is None else unit_of(algorithm.private),
            **describe_reply(reply, sent),
        })  # fmt: skip
        return reply

    def _check_disk(self, more: int) -> None:
        if more and _disk_bytes(self._folder) + more > self.policy.max_disk * MEGABYTE:
            raise BadMessage(f"this node's disk quota for runs, {self.policy.max_disk:,} MB, is used up (max_disk)")

    def _refuse(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        self.say(f"the server leaves this node out: {printable(header.get('reason'))}")
        return seal(about | {"kind": "heard"})

    def _finish(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        self._runs.pop(about["run"], None)
        folder = self._run_folder(about["run"])  # message numbers stay, so that replays are refused
        rmtree(folder / "memories", ignore_errors=True)
        (folder / AGREEMENT).unlink(missing_ok=True)
        forget_secret(folder)
        self.say(f"run {about['run'][:8]} is finished; its clients' memories are deleted")
        return seal(about | {"kind": "heard"})

    def _run(self, name: str) -> NodeRun | None:
        """The run with this name, reopened from the node's files if it is not in memory."""
        if name in self._runs:
            return self._runs[name]
        content = read_content(self._run_folder(name) / AGREEMENT, self._max_bytes)
        if content is None:
            return None
        header, tensors = unseal(Envelope.from_bytes(content), self._max_bytes)
        return self._open(RunAgreement.from_json(header.get("agreement")), by_name(tensors))

    def _open(self, agreement: RunAgreement, frozen: Tensors) -> NodeRun:
        folder = self._run_folder(agreement.run)
        if (known := read_content(folder / DATA, 1000)) is None:
            write_whole(folder / DATA, self.data.sha256.encode(), secret=True)
        elif known.decode() != self.data.sha256:
            raise BadMessage("this node's data have changed since the run began; restore them, or start a new run")
        run = NodeRun(self, agreement, frozen, folder)
        self._runs.pop(agreement.run, None)
        self._runs[agreement.run] = run
        for name in list(self._runs)[:-OPEN_RUNS]:
            del self._runs[name]
        return run

    def _numbers(self, run: str) -> Seen:
        if run not in self._seen:
            if not self._run_folder(run).exists():  # make room: remove the oldest that ended or never began
                with suppress(OSError):
                    ended = [run for run in (self._folder / "runs").iterdir() if not (run / AGREEMENT).exists()]
                    ended.sort(key=lambda run: run.stat().st_mtime, reverse=True)
                    for old in ended[ENDED_RUNS - 1 :]:
                        rmtree(old, ignore_errors=True)
            self._seen[run] = Seen(self._run_folder(run) / "seen.json")
            for name in list(self._seen)[:-ENDED_RUNS]:
                del self._seen[name]
        return self._seen[run]

    def _run_folder(self, run: str) -> Path:
        return self._folder / "runs" / run
