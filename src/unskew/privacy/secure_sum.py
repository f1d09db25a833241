"""Secure sums through an engine: the clients' jobs, and the server's side, which learns only the sum.

The members send public keys, then shares of their secrets sealed for each other, then their masked words, then the
shares that remove the masks from the sum (``agreement``). Between machines, where the server may be dishonest, they
also sign what they were sent, and who answered (``signing``). Shapes: n members, one per visit, in the server's order.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from unskew.core import tensors
from unskew.core.errors import StorageFailure, UserError
from unskew.core.key import Key
from unskew.core.types import Engine, Failure, Job, Outcome, Reply, Sums, Tensors, Visit
from unskew.privacy.agreement import (
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
    unmask,
)
from unskew.privacy.ciphers import SHARE_BYTES, derived_key, exchanged, private_key
from unskew.privacy.noise import BITS
from unskew.privacy.sessions import MOST_VISITS, SESSION_BYTES, Sessions, new_session
from unskew.privacy.signing import (
    CONSENT,
    SIGNATURE_BYTES,
    STATED_BYTES,
    STATEMENT_BYTES,
    SURVIVORS,
    NodeRoster,
    Statement,
    sign,
    signed,
    survivors,
)
from unskew.round.client import ClientSide
from unskew.round.jobs import NOT_FINITE, add, encode_job, register

MOST_MEMBERS = 2000  # every member sends every other a share: n² boxes
MOST_TRIED = 20  # members to leave out one by one if the shares of all do not yield the sum
MIN_SECRET = 16  # bytes
CHECK = "check"  # a word of 1 in every masked answer: the sum shows whether all masks cancelled
NOBODY = b""  # for a member that sent no public key
WITHHELD = "its work failed; the reason may contain protected data, and is only in its node's log"

Pair = tuple[int, int]  # a client and its visit's number


# The clients' jobs


def as_steps(sums: Sums, clients: int, who: str) -> dict[str, Tensor]:
    """Round every sum to int64 steps of 2^-BITS; refused, naming ``who``, if a sum over ``clients`` could overflow."""
    if not tensors.finite(sums):
        raise UserError(f"{who}: {NOT_FINITE}")
    limit = (2**63 - 1) // clients
    rounded = {}
    for name, value in sums.items():
        steps = (value * 2.0**BITS).round()
        if bool((steps.abs() >= 2.0**63).any()) or bool((steps.long().abs() > limit).any()):
            raise UserError(
                f"{who}: {name} reaches {float(value.abs().max()):.3g}, but a secure sum over {clients} visits has "
                f"room for {limit * 2.0**-BITS:.3g} each; use a smaller --lr, fewer clients per round, or no secure"
            )
        rounded[name] = steps.long()
    return rounded


def from_steps(rounded: Mapping[str, Tensor]) -> Sums:
    """The sums as float64."""
    return {name: torch.as_tensor(value.double() * 2.0**-BITS) for name, value in rounded.items()}


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
        return msgspec.structs.replace(
            self, statements=tuple(statement[:STATED_BYTES] for statement in self.statements)
        )

    @property
    def digest(self) -> str:
        """SHA-256 without the signatures."""
        return hashlib.sha256(msgspec.json.encode(self.unsigned())).hexdigest()


class SecureJob(msgspec.Struct, frozen=True):
    """The common part of a session's jobs: its id, how many must stay, the masked job, the members."""

    session: bytes
    threshold: int
    inner: Job
    members: tuple[Pair, ...]


@register
class MaskKeys(SecureJob, frozen=True, tag="mask-keys"):
    """This member's public keys for the session, and its node's statement."""

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Return the keys and the statement as extra."""
        part = _Part(self, side, visit)
        extra = {"keys": _bytes(part.member.public)}
        if part.signer is not None:
            extra["statement"] = _bytes(part.signer.state(part.member, part.examples))
        return Reply({}, extra)


@register
class MaskShares(SecureJob, frozen=True, tag="mask-shares"):
    """Shares of this member's secrets, sealed for the others. ``keys`` are all members' public keys."""

    keys: tuple[bytes, ...]
    terms: SignedTerms | None = None

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Return the sealed boxes in the members' order, and the signature of the agreement, as extra."""
        part = _Part(self, side, visit, self.terms)
        agreement = part.agreement(self.keys)
        part.check_statements(agreement)
        part.require_enough(agreement.members)
        boxes = part.member.boxes(agreement)
        part.sessions.agree(visit.client, self.session, agreement.digest)
        extra = {"shares": _bytes(b"".join(boxes.get(member, bytes(BOX_BYTES)) for member in part.numbers))}
        if part.signer is not None:
            extra["consent"] = _bytes(sign(part.member, CONSENT, agreement))
        return Reply({}, extra)


@register
class Masked(SecureJob, frozen=True, tag="masked"):
    """The inner job's words, masked before they leave the client.

    ``sharing`` marks who distributed shares; ``consents`` are their signatures of the agreement.
    """

    keys: tuple[bytes, ...]
    sharing: tuple[bool, ...]
    terms: SignedTerms | None = None
    consents: tuple[bytes, ...] = ()

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Return the masked words, and what the client stores."""
        part = _Part(self, side, visit, self.terms)
        agreement, sharing = part.agreement(self.keys), part.listed(self.sharing)
        part.require_enough(sharing)
        part.check_inputs(shared, key)
        part.require_signed(CONSENT, agreement, self.consents, sharing, len(sharing))
        reply = part.work(shared, key)
        words = {**reply.sums, CHECK: torch.ones((), dtype=torch.int64)}
        names = sorted(words)
        vector = torch.cat([words[name].flatten() for name in names])
        part.member.mask(vector.numpy().view(np.uint64), agreement, sharing)
        pieces = torch.split(vector, [words[name].numel() for name in names])
        masked = {name: piece.view(words[name].shape) for name, piece in zip(names, pieces, strict=True)}
        part.sessions.answer(visit.client, self.session, agreement.digest, survivors(sharing, ()), visit.repeat)
        return Reply(masked, keep=reply.keep)


@register
class MaskSurvivors(SecureJob, frozen=True, tag="mask-survivors"):
    """A signed list of who answered: a member signs one per session, and opens its shares only for that list."""

    keys: tuple[bytes, ...]
    sharing: tuple[bool, ...]
    answered: tuple[bool, ...]
    terms: SignedTerms | None = None

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Return the signature as extra."""
        part = _Part(self, side, visit, self.terms)
        agreement = part.agreement(self.keys)
        question = part.survivors(agreement, self.sharing, self.answered)
        return Reply({}, {"survivors": _bytes(sign(part.member, SURVIVORS, agreement, question))})


@register
class MaskOpenings(SecureJob, frozen=True, tag="mask-openings"):
    """A share of the seed of each member that answered, and of the key of each that dropped out.

    The visit's parcel has the boxes that the other members sealed for this one, in the members' order. ``signatures``
    are those of the list of who answered.
    """

    keys: tuple[bytes, ...]
    sharing: tuple[bool, ...]
    answered: tuple[bool, ...]
    terms: SignedTerms | None = None
    signatures: tuple[bytes, ...] = ()

    def __call__(self, side: ClientSide, shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Return the opened shares in the members' order as extra."""
        part = _Part(self, side, visit, self.terms)
        agreement, sharing, answered = part.agreement(self.keys), part.listed(self.sharing), part.listed(self.answered)
        part.require_enough(answered)
        if len(visit.parcel) != BOX_BYTES * len(part.numbers):
            raise UserError("the server did not forward the shares that the other members sealed for this one")
        starts = range(0, len(visit.parcel), BOX_BYTES)
        boxes = {
            number: visit.parcel[start : start + BOX_BYTES] for number, start in zip(part.numbers, starts, strict=True)
        }
        shares = part.member.opened(agreement, boxes, sharing, answered)
        question = part.survivors(agreement, self.sharing, self.answered)
        part.require_signed(SURVIVORS, agreement, self.signatures, answered, self.threshold, question)
        content = b"".join(shares.get(number, bytes(SHARE_BYTES)) for number in part.numbers)
        return Reply({}, {"opened": _bytes(content)})


def expected_extra(job: SecureJob) -> dict[str, int]:
    """The size in bytes of each extra in a node's reply to this job, by name."""
    count = len(job.members)
    if isinstance(job, MaskKeys):
        return {"keys": PUBLIC_BYTES, "statement": STATEMENT_BYTES}
    if isinstance(job, MaskShares):
        return {"shares": count * BOX_BYTES, "consent": SIGNATURE_BYTES}
    if isinstance(job, MaskSurvivors):
        return {"survivors": SIGNATURE_BYTES}
    return {"opened": count * SHARE_BYTES} if isinstance(job, MaskOpenings) else {}


class _Part:
    """A member's part in a job, with checks of what the server sends."""

    def __init__(self, job: SecureJob, side: ClientSide, visit: Visit, terms: SignedTerms | None = None) -> None:
        if len(side.secret) < MIN_SECRET or side.sessions is None:
            raise UserError(
                "this engine has no secret or no record of sessions; its author must pass both to ClientSide"
            )
        self.sessions: Sessions = side.sessions
        self.signer, self._terms = side.signer, None if side.signer is None else terms
        self._job, self._side, self._visit = job, side, visit
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
        self._statements: dict[int, Statement] = {}  # of a signed sum, by member
        if self._terms is not None:
            self._check_length(self._terms.weights, self._terms.takes, self._terms.statements)
            self._statements = dict(zip(self.numbers, map(Statement, self._terms.statements), strict=True))
            mine = self.numbers.index(number)
            if (self._terms.weights[mine], self._terms.takes[mine]) != (visit.weight, visit.take):
                raise UserError(f"the server sent others a different weight for {named(number)}")

    @property
    def examples(self) -> int:
        """The client's number of examples."""
        return len(self._side.population.examples(self._visit.client))

    def _check_length(self, *lists: Sequence[Any]) -> None:
        """Refuse lists that do not have one entry for each member."""
        for found in lists:
            if len(found) != len(self.numbers):
                raise UserError(f"the server listed {len(found)} of {len(self.numbers)} members of the secure sum")

    def agreement(self, keys: Sequence[bytes]) -> Agreement:
        """The agreement of all members, according to the server."""
        self._check_length(keys)
        if self.signer is not None and self._terms is None:
            raise UserError("the server sent nothing that the other members have signed")
        publics = {number: public for number, public in zip(self.numbers, keys, strict=True) if public}
        about = describe(self._job.inner, self._terms, self._job.members)
        agreement = Agreement(self.member.session, self._job.threshold, publics, about)
        self.member.check(agreement)
        return agreement

    def check_statements(self, agreement: Agreement) -> None:
        """Refuse members that no registered node vouches for, and weights that differ from their examples."""
        if self.signer is None or self._terms is None:
            return
        roster, ones = NodeRoster.read(self.signer.registered.roster), set(self._terms.weights) == {1}
        for number, weight in zip(self.numbers, self._terms.weights, strict=True):
            if (public := agreement.publics.get(number)) is None:
                continue
            statement = self._statements[number]
            self.signer.check(roster, named(number), statement, number, self.member.session, public)
            if not ones and weight != statement.examples:
                raise UserError(
                    f"{named(number)} would have weight {weight:g}, but has {statement.examples:,} examples; all "
                    "weights must be the numbers of examples, or all must be 1"
                )

    def check_inputs(self, shared: Tensors, key: Key) -> None:
        """Refuse tensors or a key that differ from those the members have agreed on."""
        round_key = Key(key.seed, key.path[:-3])  # without what visit_key adds
        if self._terms and (digest_of(shared), digest_of_key(round_key)) != (self._terms.shared, self._terms.key):
            raise UserError("the server sent this client a different model, rate or key than the members agreed on")

    def require_signed(
        self, purpose: bytes, agreement: Agreement, signatures: Sequence[bytes], who: Sequence[int], least: int,
        content: bytes = b"",
    ) -> None:  # fmt: skip
        """Refuse to continue unless at least ``least`` of these members have signed."""
        if self._terms is None:
            return
        self._check_length(signatures)
        by_number = dict(zip(self.numbers, signatures, strict=True))
        count = sum(
            signed(self._statements[number].key, by_number[number], purpose, agreement, content) for number in who
        )
        if count < least:
            raise UserError(
                f"only {count} of {len(who)} members have signed what {named(self.member.number)} received, but "
                f"{least} must: the server sent them different things"
            )

    def survivors(self, agreement: Agreement, sharing: Sequence[bool], answered: Sequence[bool]) -> bytes:
        """The digest of who answered; from now on this member opens its shares only for it."""
        masked, present = self.listed(sharing), self.listed(answered)
        self.require_enough(present)
        self.member.require_present(agreement, masked, present)
        question = survivors(masked, present)
        self.sessions.open(
            self._visit.client, self._job.session, agreement.digest, survivors(masked, ()), question, self._visit.repeat
        )
        if self.signer is not None and (terms := self._terms) is not None:
            terms_of = dict(zip(self.numbers, zip(terms.weights, terms.takes, strict=True), strict=True))
            subject = self.signer.subject(self._job.inner, terms.shared, terms.key)
            self.signer.pin(subject, {number: terms_of[number] for number in present})
        return question

    def work(self, shared: Tensors, key: Key) -> Reply:
        """The inner job's reply, with this member's share of the noise if clients add it.

        Between machines, the reason for a failure stays on the node: it may contain protected data.
        """
        job = self._job
        try:
            reply = job.inner(self._side, shared, self._visit, key)
            if (with_share := getattr(job.inner, "with_share", None)) is None:
                return reply
            return replace(reply, sums=with_share(self._side, dict(reply.sums), job.threshold, len(job.members)))
        except StorageFailure:
            raise
        except Exception as error:
            if self.signer is None:
                raise
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.signer.say(f"{named(self.member.number)} failed: {kind}{error}")
            raise UserError(WITHHELD) from error

    def listed(self, flags: Sequence[bool]) -> list[int]:
        """The members whose flag is set."""
        self._check_length(flags)
        return [number for number, flag in zip(self.numbers, flags, strict=True) if flag]

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


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# The server's side


@dataclass(frozen=True)
class SecureUpdates:
    """The clients' sums reach the server masked; ``threshold`` is the share of a round's visits that must stay."""

    threshold: float
    masks: ClassVar[bool] = True  # private updates may add their noise inside

    def __call__(self, engine: Engine, job: Job, shared: Tensors, visits: Sequence[Visit], key: Key) -> Outcome:
        """The job's sums over all visits that did not drop out; nothing else is revealed."""
        total = add_securely(engine, Rounded(job, len(visits)), shared, visits, key, threshold=self.threshold)
        return replace(total, sums=from_steps(total.sums))


@dataclass(frozen=True)
class RoundedUpdates:
    """The clients' sums are rounded as for a secure sum, but not masked."""

    def __call__(self, engine: Engine, job: Job, shared: Tensors, visits: Sequence[Visit], key: Key) -> Outcome:
        """The job's sums, with the same bits as a secure sum."""
        total = add(engine.visit(Rounded(job, len(visits)), shared, visits, key), visits)
        return replace(total, sums=from_steps(total.sums))


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
    session = _Session(engine, inner, visits, key, threshold)
    try:
        words = session.run(shared)
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
            dict(words), tuple(self.failures), self.tickets, tuple(self.notes), void=void, bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
        )  # fmt: skip

    def run(self, shared: Tensors) -> dict[str, Tensor]:
        """Run all exchanges in sequence."""
        count, everyone = len(self.visits), range(len(self.visits))
        self.needed = shares_needed(self.share, count)
        members = tuple((visit.client, visit.repeat) for visit in self.visits)
        numbers = [member_number(*pair) for pair in members]
        common = (new_session(), self.needed, self.inner, members)
        self._require_enough(everyone, "take part")

        outcome, present = self._ask(MaskKeys(*common), {}, everyone, "sent keys")
        keys = [_content(outcome, index, "keys", PUBLIC_BYTES) if index in present else NOBODY for index in everyone]
        terms = self._terms(shared, outcome, present)
        if terms is not None:
            acceptable = _acceptable(terms, common[0], numbers, keys)
            present = self._drop(present, "the other members would refuse its keys", acceptable)
            keys = [public if index in present else NOBODY for index, public in enumerate(keys)]
        publics = {numbers[index]: keys[index] for index in present}
        agreement = Agreement(common[0], self.needed, publics, describe(self.inner, terms, members))
        self._count(present, up=PUBLIC_BYTES, down=PUBLIC_BYTES * len(present))

        outcome, sharing = self._ask(MaskShares(*common, tuple(keys), terms), {}, present, "distributed shares")
        size = count * BOX_BYTES
        boxes = {index: _content(outcome, index, "shares", size) for index in sharing}  # from each, to all members
        self._count(sharing, up=BOX_BYTES * (len(present) - 1))
        consents: tuple[bytes, ...] = ()
        if terms is not None:
            consents, signers = _signatures(outcome, sharing, count, "consent"), terms.statements
            sharing = self._drop(
                sharing,
                "it did not sign what it received",
                lambda index: signed(Statement(signers[index]).key, consents[index], CONSENT, agreement),
            )
            self._count(present, up=STATEMENT_BYTES, down=STATEMENT_BYTES * len(present))
            self._count(sharing, up=SIGNATURE_BYTES, down=(SIGNATURE_BYTES + STATED_BYTES) * len(sharing))
            terms = terms.unsigned()

        flags = tuple(index in sharing for index in everyone)
        job = Masked(*common, tuple(keys), flags, terms, consents)
        masked, answered = self._ask(job, shared, sharing, "answered", keep=True)

        survived = tuple(index in answered for index in everyone)
        signatures: tuple[bytes, ...] = ()
        failed_before = len(self.failures)
        if terms is not None:
            listed = MaskSurvivors(*common, tuple(keys), flags, survived, terms)
            outcome, signing = self._ask(listed, {}, answered, "signed the list of answers")
            signatures = _signatures(outcome, signing, count, "survivors")
            self._count(signing, up=SIGNATURE_BYTES, down=(SIGNATURE_BYTES + 2 * STATED_BYTES) * len(signing))

        empty = bytes(BOX_BYTES)

        def parcel(to: int) -> bytes:
            span = slice(to * BOX_BYTES, (to + 1) * BOX_BYTES)
            return b"".join(boxes[index][span] if index in boxes else empty for index in everyone)

        openings = MaskOpenings(*common, tuple(keys), flags, survived, terms, signatures)
        outcome, opening = self._ask(openings, {}, answered, "opened their shares", parcel=parcel)
        self._count(answered, up=SHARE_BYTES * len(sharing), down=BOX_BYTES * (len(sharing) - 1))
        del self.failures[failed_before:]  # members that left after answering are in the sum
        opened = {}
        for index in opening:
            content = _content(outcome, index, "opened", count * SHARE_BYTES)
            opened[numbers[index]] = {numbers[of]: content[of * SHARE_BYTES : (of + 1) * SHARE_BYTES] for of in sharing}
        shared_by, answered_by = ([numbers[index] for index in group] for group in (sharing, answered))
        words, liar = _unmask(masked.sums, agreement, shared_by, answered_by, opened)
        if liar is not None:
            self.notes.append(f"{named(liar)} opened wrong shares; the sum was computed from the other members' shares")
        return words

    def _terms(self, shared: Tensors, outcome: Outcome, present: Sequence[int]) -> SignedTerms | None:
        """The terms that nodes sign; None if no client has a signer."""
        if not any("statement" in extra for extra in outcome.extra.values()):
            return None
        statements = [
            _content(outcome, index, "statement", STATEMENT_BYTES) if index in present else NOBODY
            for index in range(len(self.visits))
        ]
        weights, takes = tuple(visit.weight for visit in self.visits), tuple(visit.take for visit in self.visits)
        return SignedTerms(digest_of(shared), digest_of_key(self.key), weights, takes, tuple(statements))

    def _drop(self, who: Sequence[int], reason: str, holds: Callable[[int], bool]) -> list[int]:
        """The members for which it holds; the others have failed for this reason."""
        left = [index for index in who if holds(index)]
        for index in sorted(set(who) - set(left)):
            self.failures.append(Failure(self.visits[index].client, reason, self.visits[index].repeat))
        self._require_enough(left, "are left")
        return left

    def _ask(
        self, job: Job, shared: Tensors, who: Sequence[int], verb: str, *, keep: bool = False,
        parcel: Callable[[int], bytes] | None = None,
    ) -> tuple[Outcome, list[int]]:  # fmt: skip
        """A job's outcome for these visits, and which of them answered, by their index among the members."""
        visits = [self.visits[index] for index in who]
        if not keep:  # only the work itself stores memories
            visits = [replace(visit, ticket=None, keep=False, slot=None) for visit in visits]
        if parcel is not None:
            visits = [replace(visit, parcel=parcel(index)) for index, visit in zip(who, visits, strict=True)]
        outcome = add(self.engine.visit(job, shared, visits, self.key), visits)
        self.failures += outcome.failures
        self.notes += outcome.notes
        if keep:
            self.tickets = outcome.tickets
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


def _content(outcome: Outcome, index: int, name: str, size: int) -> bytes:
    content = outcome.extra[index][name].numpy().tobytes() if name in outcome.extra.get(index, {}) else b""
    if len(content) != size:
        raise UserError(f"a member of a secure sum sent {len(content)} bytes of {name}, expected {size}")
    return content


def _acceptable(
    terms: SignedTerms, session: bytes, numbers: Sequence[int], keys: Sequence[bytes]
) -> Callable[[int], bool]:
    """Whether the other members will accept this one, so that only a dishonest one is left out."""
    statements = [Statement(content) for content in terms.statements]
    contexts = Counter(statement.context for statement in statements if statement.content)
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


def _signatures(outcome: Outcome, who: Sequence[int], count: int, name: str) -> tuple[bytes, ...]:
    """Each member's signature; empty if it sent none."""
    return tuple(_content(outcome, index, name, SIGNATURE_BYTES) if index in who else b"" for index in range(count))


def _unmask(
    masked: Mapping[str, Tensor], agreement: Agreement, sharing: Sequence[int], answered: Sequence[int],
    opened: Mapping[int, Mapping[int, bytes]],
) -> tuple[dict[str, Tensor], int | None]:  # fmt: skip
    """The unmasked sums by name, and the member that opened wrong shares, if one did and the others suffice."""
    names = sorted(masked)
    for liar in (None, *sorted(opened)[:MOST_TRIED]):
        shares = {giver: values for giver, values in opened.items() if giver != liar}
        if liar is not None and len(shares) < agreement.threshold:
            break
        vector = torch.cat([masked[name].flatten() for name in names])
        try:
            unmask(vector.numpy().view(np.uint64), agreement, sharing, answered, shares)
        except NoShares:
            raise
        except UserError:
            continue
        parts = torch.split(vector, [masked[name].numel() for name in names])
        words = {name: part.view(masked[name].shape) for name, part in zip(names, parts, strict=True)}
        if int(words.pop(CHECK)) == len(answered):
            return words, liar
    raise _TooFew("the masks of a secure sum do not cancel: a client violated the agreement; the sum is lost")
