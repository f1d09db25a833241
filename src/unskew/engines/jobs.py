"""Every job that an engine can be asked for, by name: the tables of the packages that they belong to, side by side."""

from collections.abc import Mapping

from unskew.calibration import jobs as calibration
from unskew.round import client, evaluation
from unskew.round.jobs import Job

JOBS: Mapping[str, Job] = {**client.JOBS, **evaluation.JOBS, **calibration.JOBS}
