"""What a job is for, and what a node enforces: under secure aggregation it answers masked or not at all.

Server and node agree on the method before the first round. The node then refuses a server that asks for the same
numbers without masks, or with masks that fewer clients could remove.
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
    """The work inside a job and, for a secure sum, how many clients must stay to the end."""

    work: Job
    threshold: int = 0
    under_way: bool = False  # whether a secure sum already has its members

    @staticmethod
    def of(job: Job) -> "Purpose":
        """Unwrap masking and rounding."""
        work = job
        while (inner := getattr(work, "inner", None)) is not None:
            work = inner
        if not isinstance(job, SecureJob):
            return Purpose(work)
        return Purpose(work, max(job.threshold, MIN_CLIENTS), not isinstance(job, MaskKeys))

    @property
    def trains(self) -> bool:
        """Whether it belongs to a training round."""
        return isinstance(self.work, Train)

    @property
    def statistics(self) -> bool:
        """Whether it measures class statistics for a calibration."""
        return isinstance(self.work, Moments | FixedPointMoments)

    @property
    def round(self) -> int:
        """The round number; 0 outside training."""
        return self.work.round if isinstance(self.work, Train) else 0

    @property
    def may_miss(self) -> bool:
        """Whether clients may be missing: in training and evaluation, but not in surveys and statistics."""
        return isinstance(self.work, Train | Evaluate | EvaluateCalibrated)


def name_of(job: Job) -> str:
    """A job's name in messages and logs."""
    return str(type(Purpose.of(job).work).__struct_config__.tag)  # type: ignore[attr-defined]


def check_masked(job: Job, algorithm: Algorithm) -> None:
    """Refuse a job without the agreed masks, or with masks that too few clients could remove."""
    masked = isinstance(algorithm.exchange, SecureUpdates) or (algorithm.secure and Purpose.of(job).statistics)
    if isinstance(job, SecureJob):
        if algorithm.secure is None:
            return
        count = len(job.members)
        if job.threshold < (needed := shares_needed(algorithm.secure.threshold, count)):
            raise BadMessage(f"it lets {job.threshold} of {count} clients remove the masks; {needed} were agreed on")
    elif masked:
        raise BadMessage(f"it asks for {name_of(job)} without masks, but {algorithm.secure} was agreed on")


def subject_of(job: Job, shared: bytes, key: bytes, algorithm: Algorithm) -> str:
    """What a secure sum is about, starting with its kind. Sums about the same subject must have the same members.

    Statistics, surveys and whatever a method measures identically in every round have one set of clients for the whole
    run. Everything else is asked once per set of shared tensors, with digest ``shared``. Training also depends on its
    key: another key gives another update.
    """
    purpose = Purpose.of(job)
    if purpose.statistics:
        return "statistics"
    kind = name_of(job)
    steady = purpose.trains and any(statistic.steady for statistic in algorithm.statistics)
    if steady or isinstance(purpose.work, Survey):
        return kind
    return f"{kind} {shared.hex()} {key.hex()}" if purpose.trains else f"{kind} {shared.hex()}"
