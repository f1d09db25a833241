"""What a node holds its server to: under secure aggregation it answers masked or not at all.

The method's text was agreed on before the first round. A server that asks for the same numbers without masks, or for
masks that fewer clients could take off, is refused.
"""

from unskew.core.types import Tensors
from unskew.engines.flower.messages import BadMessage
from unskew.engines.flower.purpose import is_secure
from unskew.privacy.agreement import shares_needed
from unskew.privacy.questions import MEMBERS, Question
from unskew.privacy.secure_updates import SecureUpdates
from unskew.round.algorithm import Algorithm

STATISTICS = "moments"  # the job that answers with a client's own class statistics


def check_masked(job: str, algorithm: Algorithm) -> None:
    """Refuse a job that would send what was agreed to be masked."""
    name = job.partition(" ")[0]
    masked = isinstance(algorithm.exchange, SecureUpdates) or (algorithm.secure is not None and name == STATISTICS)
    if masked and not is_secure(job):
        raise BadMessage(f"it asks for {name[:60]} without masks; agreed was {algorithm.secure}")


def check_threshold(job: str, shared: Tensors, algorithm: Algorithm) -> None:
    """Refuse a secure sum whose masks fewer clients could take off than the method says."""
    if algorithm.secure is None or not is_secure(job):
        return
    asked, count = Question.from_text(job.partition(" ")[2]).threshold, len(shared.get(MEMBERS, ()))
    if asked < (needed := shares_needed(algorithm.secure.threshold, count)):
        raise BadMessage(f"it says that {asked} of {count} clients can take the masks off; {needed} were agreed on")
