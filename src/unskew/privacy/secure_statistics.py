"""Class statistics added up securely through an engine: the job ``masked-statistics`` and the server's call."""

import json
import warnings
from collections.abc import Callable, Sequence

from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.protection import Layout
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Engine, Tensors, Visit
from unskew.privacy.secure_jobs import MaskedJob, Rounded
from unskew.privacy.secure_sum import secure_words
from unskew.round.client import ClientSide
from unskew.round.jobs import Job

MASKED_STATISTICS = "masked-statistics"
VECTOR = "statistics"  # the name of the words, laid out by a ``Layout``

Measure = Callable[[ClientSide, Tensors, Visit, StatisticsRequest], ClassStatistics]


def secure_statistics(
    engine: Engine, shared: Tensors, request: StatisticsRequest, layout: Layout, visits: Sequence[Visit], key: Key,
    threshold: float,
) -> ClassStatistics:  # fmt: skip
    """The class statistics of all these clients together; of a single one the server learns nothing.

    Clients that drop out are left out, with a warning that names them; ``threshold`` is the share that must stay.
    """
    options = json.dumps({"request": request.to_text(), "layout": [layout.classes, layout.width, layout.bits]})
    total = secure_words(engine, MASKED_STATISTICS, options, shared, visits, key, threshold=threshold)
    if total.void:
        first = total.failures[0] if total.failures else None
        cause = f"client {first.client}, class statistics: {first.reason}; " if first else ""
        raise UserError(f"{cause}{total.void}")
    for failure in total.failures:
        words = f"client {failure.client} dropped out of the secure sum and is not in the statistics"
        warnings.warn(f"{words}: {failure.reason}", stacklevel=2)
    return layout.statistics(total.words[VECTOR], f"the sum over {len(visits) - len(total.failures)} clients")


def masked_statistics_job(measure: Measure) -> Job:
    """The job: the client's statistics as ``measure`` takes them, masked before they leave it."""

    def work(side: ClientSide, shared: Tensors, visit: Visit, key: Key, options: str, clients: int) -> Rounded:
        fields = json.loads(options)
        request = StatisticsRequest.from_text(fields["request"])
        classes, width, bits = fields["layout"]
        layout = Layout.of(classes, width, request.form, bits=bits)
        statistics = measure(side, shared, visit, request)
        return Rounded({VECTOR: layout.quantised(statistics, clients, f"client {visit.client}")})

    return MaskedJob(MASKED_STATISTICS, work)
