"""Secure sums through an engine: the clients' jobs, and the server's side, which learns only the sum.

The members send public keys, then shares of their secrets sealed for each other, then their masked words, then the
shares that remove the masks from the sum (``masking``). Between machines, where the server may be dishonest, they
also sign what they were sent, and who answered (``signing``). Shapes: n members, one per visit, in the server's order.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import StorageFailure, UserError
from unskew.core.key import Key
from unskew.core.types import Engine, Failure, Job, Outcome, Reply, Sums, Tensors, Visit
from unskew.privacy.ciphers import SHARE_BYTES, derived_key, exchanged, private_key
from unskew.privacy.masking import (
    BOX_BYTES,
    KEY_BYTES,
    MIN_CLIENTS,
    MOST_CLIENTS,
    PUBLIC_BYTES,
    Agreement,
    Member,
    NoShares,
    member_number,
    named,
    require_enough,
    shares_needed,
    survivors,
    unmask,
)
from unskew.privacy.noise import BITS, to_steps
from unskew.privacy.sessions import MOST_VISITS, SESSION_BYTES, Record, new_session
from unskew.privacy.signing import (
    CONSENT,
    SIGNATURE_BYTES,
    STATED_BYTES,
    STATEMENT_BYTES,
    SURVIVORS,
    Statement,
    read_roster,
    sign,
    signed,
)
from unskew.round.client import ClientSide
from unskew.round.jobs import NOT_FINITE, add, encode_job, register

MOST_MEMBERS = 2000  # every member sends every other a share: n² boxes
MOST_TRIED = 20  # members to leave out one by one if the shares of all do not yield the sum
MIN_SECRET = 16  # bytes
CHECK = "check"  # a word of 1 in every masked answer: the sum shows whether all masks cancelled
WITHHELD = "its work failed; the reason may contain protected data, and is only in its node's log"

Pair = tuple[int, int]  # a client and its visit's number
Value = TypeVar("Value")


# The clients' jobs


def as_steps(sums: Sums, clients: int, who: str) -> dict[str, Tensor]:
    """Round every sum to int64 steps of 2^-BITS; refused, naming ``who``, if a sum over ``clients`` could overflow."""
    if not tensors.finite(sums):
        raise UserError(f"{who}: {NOT_FINITE}")
    room = "use a smaller --lr, fewer clients per round, or leave out secure"
    return {name: to_steps(value, BITS, clients, f"{who}: {name}", room) for name, value in sums.items()}


def _from_steps(total: Outcome) -> Outcome:
    return replace(total, sums={name: value.double() * 2.0**-BITS for name, value in total.sums.items()})


@register
class Rounded(msgspec.Struct, frozen=True, tag="rounded"):
    """A job whose sums are rounded to whole steps, small enough to be added over ``members``."""

    inner: Job
    members: int

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """The inner job's reply with its sums as int64 words."""
        reply = self.inner(side, shared, visit, key)
        steps = as_steps(dict(reply.sums), self.members, f"client {visit.client}")
        return Reply(steps, reply.extra, keep=reply.keep)  # a masked job drops the extra

    def with_share(self, side: ClientSide, words: Tensors, needed: int, members: int) -> Tensors:
        """Add this client's share of the noise to the words, if private updates are released."""
        mechanism = side.algorithm.mechanism
        return words if mechanism is None else mechanism.with_share(words, needed, members)


class SignedTerms(msgspec.Struct, frozen=True):
    """What the members of a signed sum agree on in addition to its job, by member, in their order.

    ``shared`` is the SHA-256 of the tensors that every member receives, ``key`` that of the key for its draws.
    Statements include signatures only where they are checked, in ``MaskShares``.
    """

    shared: bytes
    key: bytes
    weights: tuple[float, ...]
    takes: tuple[int | None, ...]
    statements: tuple[bytes, ...]

    def unsigned(self) -> "SignedTerms":
        """These terms without the statements' signatures."""
        stated = tuple(statement[:STATED_BYTES] for statement in self.statements)
        return msgspec.structs.replace(self, statements=stated)

    @property
    def digest(self) -> str:
        """SHA-256 without the signatures."""
        return hashlib.sha256(msgspec.json.encode(self.unsigned())).hexdigest()


class SecureJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a session's jobs; the lists have an entry for each member, in the members' order.

    ``threshold`` is how many members must stay, ``inner`` the job that is masked. ``sharing`` marks who distributed
    shares, ``answered`` who answered. ``signatures`` are the members', of the agreement or of the list of answers.
    """

    session: bytes
    threshold: int
    inner: Job
    members: tuple[Pair, ...]
    keys: tuple[bytes, ...] = ()
    sharing: tuple[bool, ...] = ()
    answered: tuple[bool, ...] = ()
    terms: SignedTerms | None = None
    signatures: tuple[bytes, ...] = ()

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """The member's reply, with everything but masked words as extra."""
        return self._reply(_Part(self, side, visit, shared, key))

    def _reply(self, part: "_Part") -> Reply:
        raise NotImplementedError


@register
class MaskKeys(SecureJob, frozen=True, tag="mask-keys"):
    """This member's public keys for the session, and its node's statement."""

    def _reply(self, part: "_Part") -> Reply:
        extra = {"keys": part.member.public}
        if part.signer is not None:
            examples = len(part.side.population.examples(part.visit.client))
            extra["statement"] = part.signer.state(part.member, examples)
        return _extra(**extra)


@register
class MaskShares(SecureJob, frozen=True, tag="mask-shares"):
    """Shares of this member's secrets, sealed for the others, and its signature of the agreement."""

    def _reply(self, part: "_Part") -> Reply:
        part.check_statements()
        part.require_enough(part.agreement.members)
        boxes = part.member.boxes(part.agreement)
        part.record(Record.agreed)
        extra = {"shares": b"".join(boxes.get(member, bytes(BOX_BYTES)) for member in part.numbers)}
        if part.signer is not None:
            extra["consent"] = sign(part.member, CONSENT, part.agreement)
        return _extra(**extra)


@register
class Masked(SecureJob, frozen=True, tag="masked"):
    """The inner job's words, masked before they leave the client."""

    def _reply(self, part: "_Part") -> Reply:
        agreement, sharing = part.agreement, part.sharing
        part.require_enough(sharing)
        part.check_inputs()
        part.require_signed(CONSENT, sharing, len(sharing))
        reply = part.work()
        words = dict(sorted({**reply.sums, CHECK: torch.ones((), dtype=torch.int64)}.items()))
        vector = torch.cat([value.flatten() for value in words.values()])
        part.member.mask(vector.numpy().view(np.uint64), agreement, sharing)
        part.record(Record.with_answer, survivors(sharing, ()), part.visit.repeat)
        return Reply(tensors.shaped(vector, words), keep=reply.keep)


@register
class MaskSurvivors(SecureJob, frozen=True, tag="mask-survivors"):
    """A signed list of who answered: a member signs one per session, and opens its shares only for that list."""

    def _reply(self, part: "_Part") -> Reply:
        return _extra(survivors=sign(part.member, SURVIVORS, part.agreement, part.survivors()))


@register
class MaskOpenings(SecureJob, frozen=True, tag="mask-openings"):
    """A share of the seed of each member that answered, and of the key of each that dropped out.

    The visit's parcel has the boxes that the other members sealed for this one, in the members' order.
    """

    def _reply(self, part: "_Part") -> Reply:
        part.require_enough(part.answered)
        parcel = part.visit.parcel
        if len(parcel) != BOX_BYTES * len(part.numbers):
            raise UserError("the server did not forward the shares that the other members sealed for this one")
        boxes = dict(zip(part.numbers, _cut(parcel, BOX_BYTES), strict=True))
        shares = part.member.opened(part.agreement, boxes, part.sharing, part.answered)
        part.require_signed(SURVIVORS, part.answered, self.threshold, part.survivors())
        return _extra(opened=b"".join(shares.get(of, bytes(SHARE_BYTES)) for of in part.numbers))


def expected_extra(job: SecureJob) -> dict[str, int]:
    """The size in bytes of each extra in a node's reply to this job, by name."""
    sizes: dict[type[SecureJob], dict[str, int]] = {
        MaskKeys: {"keys": PUBLIC_BYTES, "statement": STATEMENT_BYTES},
        MaskShares: {"shares": len(job.members) * BOX_BYTES, "consent": SIGNATURE_BYTES},
        MaskSurvivors: {"survivors": SIGNATURE_BYTES},
        MaskOpenings: {"opened": len(job.members) * SHARE_BYTES},
    }
    return sizes.get(type(job), {})


class _Part:
    """A member's part in a job, with checks of what the server sends."""

    def __init__(self, job: SecureJob, side: ClientSide, visit: Visit, shared: Tensors, key: Key) -> None:
        if len(side.secret) < MIN_SECRET or side.sessions is None:
            missing = f"no session record, or a secret shorter than {MIN_SECRET} bytes"
            raise UserError(f"this engine gave ClientSide {missing}; its author must pass both")
        self.side, self.visit, self.signer, self._sessions = side, visit, side.signer, side.sessions
        self._job, self._shared, self._key = job, shared, key
        self._terms = None if side.signer is None else job.terms
        pairs, self.numbers = job.members, [member_number(*pair) for pair in job.members]
        number, count = member_number(visit.client, visit.repeat), len(pairs)
        if (
            not 1 <= job.threshold <= count <= MOST_MEMBERS
            or len(job.session) != SESSION_BYTES
            or not all(0 <= client < MOST_CLIENTS and 0 <= repeat < MOST_VISITS for client, repeat in pairs)
            or len(set(pairs)) < count
            or number not in self.numbers
        ):
            raise UserError(f"{named(number)} refuses: the session or the members of the secure sum are not valid")
        seed = derived_key(side.secret, b"unskew member seed 1 " + number.to_bytes(8, "big"), job.session)
        self.member = Member(number, job.session, seed)
        if self._terms is not None:
            self._statements = self._by_member(map(Statement.read, self._terms.statements))
            weights, takes = self._by_member(self._terms.weights), self._by_member(self._terms.takes)
            self._weights = {number: (weights[number], takes[number]) for number in self.numbers}
            if self._weights[number] != (visit.weight, visit.take):
                raise UserError(f"the server sent others a different weight for {named(number)}")

    def _by_member(self, values: Iterable[Value]) -> dict[int, Value]:
        """A list from the server, by member; refused unless it has one entry for each."""
        found = list(values)
        if len(found) != len(self.numbers):
            members = f"the {len(self.numbers)} members of the secure sum"
            raise UserError(f"the server sent {len(found)} entries for {members}")
        return dict(zip(self.numbers, found, strict=True))

    @cached_property
    def agreement(self) -> Agreement:
        """The agreement of all members, according to the server."""
        publics = {number: public for number, public in self._by_member(self._job.keys).items() if public}
        if self.signer is not None and self._terms is None:
            raise UserError("the server sent nothing that the other members have signed")
        about = describe(self._job.inner, self._terms, self._job.members)
        agreement = Agreement(self.member.session, self._job.threshold, publics, about)
        self.member.check(agreement)
        return agreement

    @cached_property
    def sharing(self) -> list[int]:
        """The members that distributed their shares, according to the server."""
        return [number for number, shared in self._by_member(self._job.sharing).items() if shared]

    @cached_property
    def answered(self) -> list[int]:
        """The members that answered, according to the server."""
        return [number for number, answered in self._by_member(self._job.answered).items() if answered]

    def check_statements(self) -> None:
        """Refuse members that no registered node vouches for, and weights that differ from their examples."""
        if self.signer is None or self._terms is None:
            return
        roster, ones = read_roster(self.signer.registered.roster), set(self._terms.weights) == {1}
        for number, (weight, _) in self._weights.items():
            if (public := self.agreement.publics.get(number)) is None:
                continue
            statement = self._statements[number]
            if statement.node not in roster or not statement.holds(number, self.member.session, public):
                file = self.signer.registered.roster.name
                raise UserError(f"the keys of {named(number)} are not signed by a node in {file}")
            if statement.context != self.signer.context:
                raise UserError(f"{named(number)} was sent a different run: another method, rate or network")
            if not ones and weight != statement.examples:
                raise UserError(
                    f"{named(number)} would have weight {weight:g}, but has {statement.examples:,} examples; every "
                    "weight must equal the client's number of examples, or every weight must be 1"
                )

    def record(self, change: Callable[..., Record], *about: Any) -> None:
        """Record on disk what this member is about to do; refused after something else in this session."""
        self._sessions.change(self.visit.client, change, self._job.session, self.agreement.digest, *about)

    def check_inputs(self) -> None:
        """Refuse tensors or a key that differ from those the members have agreed on."""
        round_key = Key(self._key.seed, self._key.path[:-3])  # without what visit_key adds
        received = digest_of(self._shared), digest_of_key(round_key)
        if self._terms and received != (self._terms.shared, self._terms.key):
            raise UserError("the server sent this client a different model, rate or key than the members agreed on")

    def require_signed(self, purpose: bytes, who: Sequence[int], least: int, content: bytes = b"") -> None:
        """Refuse to continue unless at least ``least`` of these members have signed."""
        if self._terms is None:
            return
        signatures = self._by_member(self._job.signatures)
        count = sum(
            signed(self._statements[number].key, signatures[number], purpose, self.agreement, content) for number in who
        )
        if count < least:
            raise UserError(
                f"only {count} of {len(who)} members have signed what {named(self.member.number)} received, but "
                f"{least} must: the server sent them different things"
            )

    def survivors(self) -> bytes:
        """The digest of who answered; from now on this member opens its shares only for it."""
        self.require_enough(self.answered)
        self.member.require_present(self.agreement, self.sharing, self.answered)
        question = survivors(self.sharing, self.answered)
        self.record(Record.with_opening, survivors(self.sharing, ()), question, self.visit.repeat)
        if self.signer is not None and self._terms is not None:
            subject = self.signer.subject(self._job.inner, self._terms.shared, self._terms.key)
            self.signer.pin(subject, {number: self._weights[number] for number in self.answered})
        return question

    def work(self) -> Reply:
        """The inner job's reply, with this member's share of the noise if clients add it.

        Between machines, the reason for a failure stays on the node: it may contain protected data.
        """
        job = self._job
        try:
            reply = job.inner(self.side, self._shared, self.visit, self._key)
            if (with_share := getattr(job.inner, "with_share", None)) is None:
                return reply
            return replace(reply, sums=with_share(self.side, dict(reply.sums), job.threshold, len(job.members)))
        except StorageFailure:
            raise
        except Exception as error:
            if self.signer is None:
                raise
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.signer.say(f"{named(self.member.number)} failed: {kind}{error}")
            raise UserError(WITHHELD) from error

    def require_enough(self, numbers: Sequence[int]) -> None:
        """Refuse a sum over too few clients, or, between machines, over too few nodes."""
        if self._terms is None:
            require_enough(len({number % MOST_CLIENTS for number in numbers}))
        else:
            require_enough(len({self._statements[number].node for number in numbers}), of="nodes")


def digest_of(shared: Tensors) -> bytes:
    """SHA-256 of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(shared):
        value = shared[name].detach().cpu()
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def digest_of_key(key: Key) -> bytes:
    """SHA-256 of a key's number."""
    return hashlib.sha256(b"unskew key 1 " + key.number().to_bytes(16, "big")).digest()


def describe(job: Job, terms: SignedTerms | None = None, members: Sequence[Pair] = ()) -> str:
    """The text that all members agree on: the job, and in a signed sum the terms and the members' order."""
    text = json.dumps(encode_job(job), sort_keys=True)
    return text if terms is None else f"{text} {terms.digest} {json.dumps(members)}"


def _extra(**contents: bytes) -> Reply:
    return Reply(
        {}, {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in contents.items()}
    )


def _cut(content: bytes, size: int) -> list[bytes]:
    return [content[start : start + size] for start in range(0, len(content), size)]


# The server's side


@dataclass(frozen=True)
class SecureUpdates:
    """The clients' sums reach the server masked; ``threshold`` is the share of a round's visits that must stay."""

    threshold: float
    masks: ClassVar[bool] = True  # private updates may add their noise inside

    def __call__(self, engine: Engine, job: Job, shared: Tensors, visits: Sequence[Visit], key: Key) -> Outcome:
        """The job's sums over all visits that did not drop out; nothing else is revealed."""
        inner = Rounded(job, len(visits))
        return _from_steps(add_securely(engine, inner, shared, visits, key, threshold=self.threshold))


@dataclass(frozen=True)
class RoundedUpdates:
    """The clients' sums are rounded as for a secure sum, but not masked."""

    def __call__(self, engine: Engine, job: Job, shared: Tensors, visits: Sequence[Visit], key: Key) -> Outcome:
        """The job's sums, with the same bits as a secure sum."""
        return _from_steps(add(engine.visit(Rounded(job, len(visits)), shared, visits, key), visits))


def add_securely(
    engine: Engine, inner: Job, shared: Tensors, visits: Sequence[Visit], key: Key, *, threshold: float
) -> Outcome:
    """The sum of a job's int64 words over these visits; the server learns nothing about a single one.

    ``threshold`` is the share of the visits that must stay to the end. If fewer stay, ``void`` is the reason.
    """
    if len(visits) > MOST_MEMBERS:
        raise UserError(
            f"a secure sum over {len(visits):,} visits is refused; sample at most {MOST_MEMBERS:,} per round"
        )
    session = _Session(engine, inner, shared, visits, key, threshold)
    try:
        words = session.run()
    except NoShares as error:
        visit, client = divmod(error.member, MOST_CLIENTS)
        session.failures.append(Failure(client, str(error), visit))
        if (leave_out := getattr(engine, "leave_out", None)) is not None:
            leave_out(client, str(error))  # from now on
        return session.outcome({}, str(error))
    except _TooFew as reason:
        return session.outcome({}, str(reason))
    return session.outcome(words)


class _TooFew(Exception):
    """Too few members stayed, or followed the agreement."""


@dataclass
class _Session:
    """A secure sum in progress."""

    engine: Engine
    inner: Job
    shared: Tensors
    visits: Sequence[Visit]
    key: Key
    share: float
    failures: list[Failure] = field(default_factory=list)  # of visits that are not in the sum
    notes: list[str] = field(default_factory=list)
    tickets: Mapping[int, str] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0

    def outcome(self, words: Mapping[str, Tensor], void: str = "") -> Outcome:
        """The outcome of the exchange."""
        return Outcome(
            dict(words), tuple(self.failures), self.tickets, tuple(self.notes),
            void=void, bytes_up=self.bytes_up, bytes_down=self.bytes_down,
        )  # fmt: skip

    def run(self) -> dict[str, Tensor]:
        """Run all exchanges in sequence."""
        count, everyone = len(self.visits), range(len(self.visits))
        self.needed = shares_needed(self.share, count)
        members = tuple((visit.client, visit.repeat) for visit in self.visits)
        numbers = [member_number(*pair) for pair in members]
        common = (new_session(), self.needed, self.inner, members)
        self._require_enough(everyone, "take part")

        outcome, present = self._ask(MaskKeys(*common), everyone, "sent keys")
        keys = self._contents(outcome, "keys")
        terms = None
        if any("statement" in extra for extra in outcome.extra.values()):  # nodes sign
            statements = self._contents(outcome, "statement")
            weights, takes = tuple(visit.weight for visit in self.visits), tuple(visit.take for visit in self.visits)
            terms = SignedTerms(digest_of(self.shared), digest_of_key(self.key), weights, takes, statements)
            acceptable = _acceptable(terms, common[0], numbers, keys)
            present = self._drop(present, "the other members would refuse its keys", acceptable)
            keys = tuple(public if index in present else b"" for index, public in enumerate(keys))
        publics = {numbers[index]: keys[index] for index in present}
        agreement = Agreement(common[0], self.needed, publics, describe(self.inner, terms, members))
        self._count(present, up=PUBLIC_BYTES, down=PUBLIC_BYTES * len(present))

        outcome, sharing = self._ask(MaskShares(*common, keys, terms=terms), present, "distributed shares")
        boxes = [sent or bytes(count * BOX_BYTES) for sent in self._contents(outcome, "shares")]  # to all members
        self._count(sharing, up=BOX_BYTES * (len(present) - 1))
        consents: tuple[bytes, ...] = ()
        if terms is not None:
            consents = self._contents(outcome, "consent")
            signers = [Statement.read(statement).key for statement in terms.statements]
            sharing = self._drop(
                sharing,
                "it did not sign what it received",
                lambda index: signed(signers[index], consents[index], CONSENT, agreement),
            )
            self._count(present, up=STATEMENT_BYTES, down=STATEMENT_BYTES * len(present))
            self._count(sharing, up=SIGNATURE_BYTES, down=(SIGNATURE_BYTES + STATED_BYTES) * len(sharing))
            terms = terms.unsigned()

        flags = tuple(index in sharing for index in everyone)
        job = Masked(*common, keys, flags, terms=terms, signatures=consents)
        masked, answered = self._ask(job, sharing, "answered")

        lists = (keys, flags, tuple(index in answered for index in everyone), terms)
        signatures: tuple[bytes, ...] = ()
        failed_before = len(self.failures)
        if terms is not None:
            outcome, signing = self._ask(MaskSurvivors(*common, *lists), answered, "signed the list of answers")
            signatures = self._contents(outcome, "survivors")
            self._count(signing, up=SIGNATURE_BYTES, down=(SIGNATURE_BYTES + 2 * STATED_BYTES) * len(signing))

        openings = MaskOpenings(*common, *lists, signatures)
        outcome, opening = self._ask(openings, answered, "opened their shares", boxes)
        self._count(answered, up=SHARE_BYTES * len(sharing), down=BOX_BYTES * (len(sharing) - 1))
        del self.failures[failed_before:]  # members that left after answering are in the sum
        contents = self._contents(outcome, "opened")
        opened = {
            numbers[index]: dict(zip(numbers, _cut(contents[index], SHARE_BYTES), strict=False)) for index in opening
        }
        shared_by, answered_by = ([numbers[index] for index in group] for group in (sharing, answered))
        words, liar = _unmask(masked.sums, agreement, shared_by, answered_by, opened)
        if liar is not None:
            self.notes.append(f"{named(liar)} opened wrong shares; the sum was computed from the other members' shares")
        return words

    def _contents(self, outcome: Outcome, name: str) -> tuple[bytes, ...]:
        """The bytes that each member sent under this name, if any; the engine has checked their size."""
        nothing = torch.zeros(0, dtype=torch.uint8)
        sent = (outcome.extra.get(index, {}).get(name, nothing) for index in range(len(self.visits)))
        return tuple(content.numpy().tobytes() for content in sent)

    def _drop(self, who: Sequence[int], reason: str, holds: Callable[[int], bool]) -> list[int]:
        """The members for which it holds; the others have failed for this reason."""
        left = [index for index in who if holds(index)]
        for index in sorted(set(who) - set(left)):
            self.failures.append(Failure(self.visits[index].client, reason, self.visits[index].repeat))
        self._require_enough(left, "are left")
        return left

    def _ask(
        self, job: SecureJob, who: Sequence[int], verb: str, boxes: Sequence[bytes] = ()
    ) -> tuple[Outcome, list[int]]:
        """A job's outcome for these visits, and which of them answered, by their index among the members.

        Of the ``boxes`` that each member sent to all, a visit's parcel has those for its member.
        """
        visits, shared = [self.visits[index] for index in who], self.shared
        if not isinstance(job, Masked):  # only the work itself needs the model, and stores memories
            spans = [slice(index * BOX_BYTES, (index + 1) * BOX_BYTES) for index in who]
            parcels = [b"".join(sent[span] for sent in boxes) for span in spans]
            visits = [
                replace(visit, ticket=None, keep=False, slot=None, parcel=parcel)
                for visit, parcel in zip(visits, parcels, strict=True)
            ]
            shared = {}
        outcome = add(self.engine.visit(job, shared, visits, self.key), visits)
        self.failures += outcome.failures
        self.notes += outcome.notes
        self.tickets = outcome.tickets or self.tickets
        answered = [who[position] for position in outcome.replied]
        extra = {who[position]: values for position, values in outcome.extra.items()}
        self._count(answered, up=8 * sum(value.numel() for value in outcome.sums.values()))  # masked words
        self._require_enough(answered, verb)
        return replace(outcome, extra=extra), answered

    def _require_enough(self, who: Sequence[int], verb: str) -> None:
        clients = len({self.visits[index].client for index in who})
        if len(who) < self.needed:
            raise _TooFew(f"{len(who)} of {len(self.visits)} visits {verb}, but a secure sum needs {self.needed}")
        if clients < MIN_CLIENTS:
            raise _TooFew(f"{clients} clients {verb}, but a secure sum needs {MIN_CLIENTS}")

    def _count(self, who: Sequence[int], *, up: int, down: int = 0) -> None:
        self.bytes_up += up * len(who)
        self.bytes_down += down * len(who)


def _acceptable(
    terms: SignedTerms, session: bytes, numbers: Sequence[int], keys: Sequence[bytes]
) -> Callable[[int], bool]:
    """Whether the other members will accept this one, so that only a dishonest one is left out."""
    statements = [Statement.read(content) for content in terms.statements]
    contexts = Counter(statement.context for statement in statements if statement.context)
    common, trial = max(contexts, key=contexts.__getitem__, default=b""), private_key(os.urandom(32))
    ones = all(weight == 1 for weight in terms.weights)

    def acceptable(index: int) -> bool:
        statement, public = statements[index], keys[index]
        try:
            for start in range(0, PUBLIC_BYTES, KEY_BYTES):
                exchanged(trial, public[start : start + KEY_BYTES], "")
        except UserError:
            return False
        fits = ones or terms.weights[index] == statement.examples
        return fits and statement.context == common and statement.holds(numbers[index], session, public)

    return acceptable


def _unmask(
    masked: Sums, agreement: Agreement, sharing: Sequence[int], answered: Sequence[int],
    opened: Mapping[int, Mapping[int, bytes]],
) -> tuple[dict[str, Tensor], int | None]:  # fmt: skip
    """The unmasked sums by name, and the member that opened wrong shares, if one did and the others suffice."""
    masked = dict(sorted(masked.items()))
    for liar in (None, *sorted(opened)[:MOST_TRIED]):
        shares = {giver: values for giver, values in opened.items() if giver != liar}
        if liar is not None and len(shares) < agreement.threshold:
            break
        vector = torch.cat([value.flatten() for value in masked.values()])
        try:
            unmask(vector.numpy().view(np.uint64), agreement, sharing, answered, shares)
        except NoShares:
            raise
        except UserError:
            continue
        words = tensors.shaped(vector, masked)
        if int(words.pop(CHECK)) == len(answered):
            return words, liar
    raise _TooFew("the masks of a secure sum do not cancel: a client violated the agreement; the sum is lost")
