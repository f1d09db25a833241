"""What a run had reached by which round: the figures of Hsu, Qi and Brown (ECCV 2020), from metrics.jsonl.

All functions take the rounds in their order, as ``runs.read_metrics`` gives them; a round that was not evaluated has no
``accuracy``.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import isfinite
from typing import Any

from unskew.core.errors import UserError

Rows = Sequence[Mapping[str, Any]]


def accuracy_at_round(rows: Rows, round: int) -> float | None:
    """Acc@round: the accuracy of the last evaluated round up to ``round``; None if there is none.

    Reference: Hsu et al. 2020, Table 2.
    """
    reached = [accuracy for number, accuracy in _evaluated(rows) if number <= round]
    return reached[-1] if reached else None


def accuracy_at_batch(rows: Rows, batches: int) -> float | None:
    """Acc@batch: the accuracy of the last evaluated round by whose end at most ``batches`` were counted; None if none.

    The batches of a round are the steps of its largest client, for which the others wait: their sum measures time.

    Reference: Hsu et al. 2020, Table 2.
    """
    within = sum(count <= batches for count in accumulate(_steps(rows)))
    reached = [accuracy for _, accuracy in _evaluated(rows[:within])]
    return reached[-1] if reached else None


def batches(rows: Rows) -> int:
    """The steps of each round's largest client, summed over rounds. Reference: Hsu et al. 2020, Table 2."""
    return sum(_steps(rows))


def rounds_to(rows: Rows, accuracy: float) -> int | None:
    """Rounds@accuracy: the first evaluated round with at least ``accuracy``; None if it was never reached.

    Reference: Hsu et al. 2020, Table 5, where ``accuracy`` is a share of what central training reaches.
    """
    # a share is rounded: 0.9 * 0.1 > 0.09; no test set is large enough for 1e-9 of accuracy to be an example
    return next((number for number, reached in _evaluated(rows) if reached >= accuracy - 1e-9), None)


def _evaluated(rows: Rows) -> list[tuple[int, float]]:
    """Round and accuracy wherever there is an accuracy."""
    evaluated = [(row["round"], row["accuracy"]) for row in rows if row.get("accuracy") is not None]
    for number, accuracy in evaluated:
        if not isinstance(accuracy, int | float) or not isfinite(accuracy):
            raise UserError(
                f"round {number} has the accuracy {accuracy!r}, which is not a number; the file was changed"
            )
    return evaluated


def _steps(rows: Rows) -> list[int]:
    """The steps of each round's largest client."""
    for row in rows:
        if not isinstance(row.get("batches_max"), int):
            raise UserError(
                f"round {row['round']} has no batches_max, the steps of its largest client; the file was changed or is "
                "of an older version: start a new run"
            )
    return [row["batches_max"] for row in rows]
