"""The small federation of unskew.checks, with local settings as plain keywords."""

from unskew.checks.laws import federation as _federation
from unskew.checks.laws import image_set, largest_difference, partition_of, same
from unskew.core.types import Local
from unskew.round.jobs import add


def federation(
    method="fedavg", *, sizes=(40, 30, 1, 20, 9), images=None, model="tiny-cnn", dtype="float64", seed=0, **local
):
    settings = Local(**{"epochs": 2, "batch": 16, "lr": 0.05, **local})
    return _federation(method, sizes, images, model, dtype, seed, settings)


def total(engine, job, shared, visits, key):
    """What a job's replies add up to."""
    return add(engine.visit(job, shared, visits, key), visits)


__all__ = ["federation", "image_set", "largest_difference", "partition_of", "same", "total"]
