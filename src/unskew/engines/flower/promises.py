"""What a job is for, and what a node holds its server to: under secure aggregation it answers masked or not at all.

The method's text was agreed on before the first round. A server that asks for the same numbers without masks, or for
masks that fewer clients could take off, is refused.
"""

from dataclasses import dataclass

from unskew.calibration.jobs import EvaluateCalibrated, FixedPointMoments, Moments
from unskew.core.types import Job
from unskew.engines.codec import BadMessage
from unskew.privacy.agreement import MIN_CLIENTS, shares_needed
from unskew.privacy.secure_sum import MaskKeys, SecureJob, SecureUpdates
from unskew.round.algorithm import Algorithm
from unskew.round.client import Survey, Train
from unskew.round.evaluation import Evaluate


@dataclass(frozen=True)
class Purpose:
    """The work behind a job, and in a secure sum how many must stay to the end."""

    work: Job
    threshold: int = 0
    under_way: bool = False  # whether a secure sum has its members already

    @staticmethod
    def of(job: Job) -> "Purpose":
        """Unwrap what masks or rounds the work."""
        work = job
        while (inner := getattr(work, "inner", None)) is not None:
            work = inner
        if not isinstance(job, SecureJob):
            return Purpose(work)
        return Purpose(work, max(job.threshold, MIN_CLIENTS), not isinstance(job, MaskKeys))

    @property
    def trains(self) -> bool:
        """Whether it is part of a round of training."""
        return isinstance(self.work, Train)

    @property
    def round(self) -> int:
        """The round's number; 0 outside training."""
        return self.work.round if isinstance(self.work, Train) else 0

    @property
    def may_miss(self) -> bool:
        """Whether it counts without some clients: a round and an evaluation do, a survey and statistics do not."""
        return isinstance(self.work, Train | Evaluate | EvaluateCalibrated)


def name_of(job: Job) -> str:
    """A job as messages name it."""
    return str(type(Purpose.of(job).work).__struct_config__.tag)  # type: ignore[attr-defined]


def check_masked(job: Job, algorithm: Algorithm) -> None:
    """Refuse a job that would send what was agreed to be masked, or a sum whose masks fewer clients could take off."""
    work = Purpose.of(job).work
    statistics = isinstance(work, Moments | FixedPointMoments)
    masked = isinstance(algorithm.exchange, SecureUpdates) or (algorithm.secure is not None and statistics)
    if isinstance(job, SecureJob):
        if algorithm.secure is None:
            return
        count = len(job.members)
        if job.threshold < (needed := shares_needed(algorithm.secure.threshold, count)):
            raise BadMessage(f"it lets {job.threshold} of {count} clients remove the masks; {needed} were agreed on")
    elif masked:
        raise BadMessage(f"it asks for {name_of(job)} without masks; agreed was {algorithm.secure}")


def subject_of(job: Job, shared: bytes, key: bytes, algorithm: Algorithm) -> str:
    """What a secure sum is about; the first word names it. Two sums about one subject must have the same members.

    Statistics, the survey and what a method measures alike in every round are asked of one set of clients in a whole
    run. Anything else is asked once under the same tensors, of which ``shared`` is the digest; training also draws from
    a key, and with another one gives another update.
    """
    work = Purpose.of(job).work
    once = isinstance(work, Moments | FixedPointMoments | Survey) or (
        isinstance(work, Train) and any(statistic.steady for statistic in algorithm.statistics)
    )
    kind = "statistics" if isinstance(work, Moments | FixedPointMoments) else name_of(work)
    if once:
        return kind
    return f"{kind} {shared.hex()} {key.hex()}" if isinstance(work, Train) else f"{kind} {shared.hex()}"
