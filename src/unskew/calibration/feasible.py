"""Checks, before the first round, whether memory, data and protections allow a run's calibrations."""

from typing import TYPE_CHECKING

import numpy as np

from unskew.calibration.ccvr import check_virtual_memory
from unskew.calibration.covariances import Full, LowRank, Shared, list_smaller_forms, statistics_bytes
from unskew.calibration.finisher import Finisher, RealFeatures, StatisticsRequest, width_of
from unskew.calibration.protection import Layout
from unskew.core.errors import UserError
from unskew.core.plugins import require_extra
from unskew.data.population import cells
from unskew.models.cut import cut
from unskew.privacy.masking import MIN_CLIENTS

if TYPE_CHECKING:
    from unskew.round.algorithm import Algorithm
    from unskew.round.client import ClientSide

MAX_BYTES = 2 * 2**30  # of one client's statistics for all classes, in this process


def check(finisher: Finisher, algorithm: "Algorithm", side: "ClientSide") -> None:
    """Refuse a calibration that does not fit the network, needs too much memory, or breaks a protection."""
    needs = finisher.needs
    encoder, _ = cut(side.network, needs.layers)
    if isinstance(needs, RealFeatures):
        if not len(side.labels):
            raise UserError(f"{finisher.text} pools real features, which a federation cannot do; leave it out")
        protected = any(isinstance(other.needs, StatisticsRequest) for other in algorithm.finish)
        if (what := " + ".join(protections(algorithm))) and not protected:
            raise UserError(f"{finisher.text} pools real features, which {what} does not protect; leave out {what}")
        return
    width, classes = width_of(encoder, side.train.shape) + needs.expand, side.network.classifier.out_features
    parts = classes * needs.components
    needed = statistics_bytes(needs.form, parts, width)
    if isinstance(needs.form, (Full, Shared)):
        needed = max(needed, 8 * width**2)  # a second moment is a square matrix before its triangle is packed

    def refuse(reason: str) -> UserError:
        return UserError(f"{named(finisher, algorithm)}: {reason}")

    if needed > MAX_BYTES:
        hint = list_smaller_forms(needs.form, parts, width)
        raise refuse(
            f"{needs.form} covariances of {parts:,} classes and {width:,} features need {needed / 1e9:.1f} GB per "
            f"client, more than {MAX_BYTES / 1e9:.1f} GB; use {f'covariance={hint}' if hint else 'a smaller expand'}"
        )
    if finisher.virtual:
        check_virtual_memory(finisher.virtual * classes, width)
    if len(side.labels):  # a federation's server has no labels; its nodes check theirs
        most = int(np.bincount(side.labels[side.population.order]).max()) // 2
        if needs.components > max(1, most):
            raise refuse(f"the largest class has {2 * most} examples; give at most {most} components")
        if algorithm.withhold and algorithm.withhold > (most := class_cells(side)[1].max()):
            reason = f"no client has more than {most} examples of a class, so no client would send anything"
            raise refuse(f"{reason}; give withhold({most}) or less")
    if algorithm.secure:
        require_extra("cryptography")
        if (clients := len(side.population.roster.inhabited)) < MIN_CLIENTS:
            raise refuse(f"a sum over {clients} clients would reveal too much about each; {MIN_CLIENTS} are needed")
    if algorithm.private is not None:
        require_extra("dp_accounting")
        if algorithm.withhold or needs.components > 1 or isinstance(needs.form, LowRank):
            raise refuse(
                "private covers one Gaussian per class from all examples; leave out withhold, components and low-rank"
            )
        if algorithm.secure:
            Layout.of(classes, width, needs.form).shorter(algorithm.private.clip)


def named(finisher: Finisher, algorithm: "Algorithm") -> str:
    """The name of one of the algorithm's calibrations in results: its text and its protections."""
    if isinstance(finisher.needs, RealFeatures):
        return finisher.text
    return " + ".join([finisher.text, *protections(algorithm)])


def protections(algorithm: "Algorithm") -> list[str]:
    """The protections of the statistics, as written in a method's text."""
    withhold = f"withhold({algorithm.withhold})" if algorithm.withhold else None
    return [str(part) for part in (withhold, algorithm.private, algorithm.secure) if part]


def class_cells(side: "ClientSide") -> tuple[np.ndarray, np.ndarray]:
    """The client and the number of examples of each nonempty (client, class), by client."""
    population = side.population
    owner = np.repeat(np.arange(population.clients, dtype=np.int32), population.sizes)
    clients, _, counts = cells(owner, side.labels[population.order], side.network.classifier.out_features)
    return clients, counts
