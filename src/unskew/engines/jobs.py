"""The table of all jobs that an engine can do, by name: those of the round, of evaluation, calibration and privacy."""

from collections.abc import Mapping

from unskew.calibration import jobs as calibration
from unskew.privacy import secure_updates
from unskew.round import client, evaluation
from unskew.round.jobs import Job

JOBS: Mapping[str, Job] = {**client.JOBS, **evaluation.JOBS, **calibration.JOBS, **secure_updates.JOBS}
