"""A round's sums under secure aggregation: updates, statistics and metrics leave every client masked.

``SecureUpdates`` and ``RoundedUpdates`` are exchanges, what the round puts between itself and the engine. Both round
every client's sums to steps of 2⁻³²; the second adds no masks and gives the same bits, since masks cancel exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from unskew.core.key import Key
from unskew.core.types import Engine, Outcome, Sums, Tensors, Visit
from unskew.privacy import rows
from unskew.privacy.fixed_point import as_steps, from_steps
from unskew.privacy.secure_jobs import MaskedJob, Rounded, mask_keys, mask_openings, mask_shares
from unskew.privacy.secure_sum import secure_words
from unskew.round.client import JOBS as ROUND_JOBS
from unskew.round.client import ClientSide
from unskew.round.evaluation import JOBS as EVALUATION_JOBS
from unskew.round.jobs import Answer, Job, job_text

MASKED, ROUNDED = "masked-", "rounded-"  # before the name of a round's job


@dataclass(frozen=True)
class SecureUpdates:
    """The clients' sums reach the server masked; ``threshold`` is the share of a round's visits that must stay."""

    threshold: float

    def __call__(
        self, engine: Engine, job: str, shared: Tensors, visits: Sequence[Visit], key: Key, *, round: int = 0
    ) -> Outcome:
        """The job's sums over all visits that did not drop out, and nothing of a single one."""
        name, _, options = job.partition(" ")
        total = secure_words(
            engine, MASKED + name, options, shared, visits, key, threshold=self.threshold, round=round
        )  # fmt: skip
        return Outcome(
            from_steps(total.words), total.failures, total.receipts, total.notes, total.void, total.bytes_up,
            total.bytes_down,
        )  # fmt: skip


@dataclass(frozen=True)
class RoundedUpdates:
    """The clients' sums are rounded as for a secure sum, and not masked."""

    def __call__(
        self, engine: Engine, job: str, shared: Tensors, visits: Sequence[Visit], key: Key, *, round: int = 0
    ) -> Outcome:
        """The job's sums, with the bits that a secure sum has."""
        name, _, options = job.partition(" ")
        text = job_text(ROUNDED + name, job_text(str(len(visits)), options))
        outcome = engine.map_sum(text, shared, visits, key, round=round)
        return replace(outcome, sums=from_steps(rows.joined(outcome.sums)))


def _work(inner: Job) -> Callable[[ClientSide, Tensors, Visit, Key, str, int], Rounded]:
    def work(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str, clients: int) -> Rounded:
        done = inner(side, shared, visit, key, options)
        answer = done if isinstance(done, Answer) else Answer(done)
        return Rounded(as_steps(answer.sums, clients, f"client {visit.client}"), answer.kept)

    return work


def _rounded_job(inner: Job) -> Job:
    work = _work(inner)

    def rounded(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str) -> Sums | Answer:
        clients, _, options = options.partition(" ")
        done = work(side, shared, visit, key, options, int(clients))
        return Answer(rows.halves(done.words), done.kept)

    return rounded


def protected(jobs: Mapping[str, Job]) -> dict[str, Job]:
    """The same jobs masked, and rounded without masks, for what ``SecureUpdates`` and ``RoundedUpdates`` ask."""
    masked = {MASKED + name: MaskedJob(MASKED + name, _work(job)) for name, job in jobs.items()}
    return {**masked, **{ROUNDED + name: _rounded_job(job) for name, job in jobs.items()}}


JOBS: Mapping[str, Job] = {
    "mask-keys": mask_keys,
    "mask-shares": mask_shares,
    "mask-openings": mask_openings,
    **protected({**ROUND_JOBS, **EVALUATION_JOBS}),
}
