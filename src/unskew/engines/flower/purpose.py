"""What a job is for, from its text: how many replies it needs, whether it is part of a secure sum."""

from dataclasses import dataclass

from unskew.privacy.agreement import MIN_CLIENTS
from unskew.privacy.questions import Question
from unskew.privacy.secure_updates import MASKED, ROUNDED

EXCHANGES = ("mask-keys", "mask-shares", "mask-openings")


def is_secure(job: str) -> bool:
    """Whether a job is one of a secure sum."""
    name = job.partition(" ")[0]
    return name in EXCHANGES or name.startswith(MASKED)


@dataclass(frozen=True)
class Purpose:
    """What a job's text says of its purpose: the work behind it, and in a secure sum how many must stay to the end."""

    work: str
    threshold: int = 0
    under_way: bool = False  # whether a secure sum has its members already

    @staticmethod
    def of(job: str) -> "Purpose":
        """Of a job's text."""
        name, _, options = job.partition(" ")
        if not is_secure(job):
            return Purpose(name.removeprefix(ROUNDED))
        question = Question.from_text(options)
        return Purpose(question.work.removeprefix(MASKED), max(question.threshold, MIN_CLIENTS), name != "mask-keys")

    @property
    def trains(self) -> bool:
        """Whether it is part of a round of training."""
        return self.work == "train"

    @property
    def may_miss(self) -> bool:
        """Whether it counts without some clients: a round and an evaluation do, a survey and statistics do not."""
        return self.trains or self.work.startswith("evaluate")
