"""Whether a run can have a calibration: refused before the first round where memory, data or a protection forbids."""

from typing import TYPE_CHECKING

import numpy as np

from unskew.calibration.ccvr import check_virtual_memory
from unskew.calibration.covariances import Diagonal, LowRank, Shared, statistics_bytes
from unskew.calibration.finisher import Finisher, RealFeatures, StatisticsRequest, width_of
from unskew.calibration.protection import Layout, sensitivity_known
from unskew.core.errors import UserError
from unskew.core.plugins import require_extra
from unskew.data.population import cells
from unskew.models.cut import cut
from unskew.privacy.agreement import MIN_CLIENTS

if TYPE_CHECKING:
    from unskew.round.algorithm import Algorithm
    from unskew.round.client import ClientSide

OTHER_FORMS = (Shared(), Diagonal(), LowRank(32))
MAX_BYTES = 2 * 2**30  # of one client's statistics laid out for all classes, in this process


def check(finisher: Finisher, algorithm: "Algorithm", side: "ClientSide") -> None:
    """Refuse a calibration that this network cannot have, that takes too much memory, or that breaks a protection."""
    needs = finisher.needs
    encoder, _ = cut(side.network, needs.layers)
    if isinstance(needs, RealFeatures):
        if not len(side.labels):
            raise UserError(f"{finisher.text} pools real features, which no federation can do; leave it out")
        others = [each for each in algorithm.finish if isinstance(each.needs, StatisticsRequest)]
        if protections(algorithm) and not others:
            what = " + ".join(protections(algorithm))
            raise UserError(f"{finisher.text} pools real features, which {what} does not protect; leave {what} out")
        return
    width = width_of(encoder, side.train.shape) + needs.expand
    _check_memory(finisher.text, needs, side.network.classifier.out_features * needs.components, width)
    if finisher.virtual:
        check_virtual_memory(finisher.virtual * side.network.classifier.out_features, finisher.virtual, width)
    here = len(side.labels) > 0  # the server of a federation has no labels; its nodes find out what they lack
    if here and needs.components > 1 and needs.components > (most := _largest_class(side) // 2):
        raise UserError(f"{finisher.text}: the largest class has {2 * most} examples; give at most {most} components")
    if here and algorithm.withhold and algorithm.withhold > (most := _largest_class_of_a_client(side)):
        raise UserError(
            f"{finisher.text} with withhold({algorithm.withhold}): no client has more than {most} examples of a class, "
            f"and no client would send anything; give {most} or less"
        )
    if algorithm.secure:
        require_extra("cryptography")
        if (clients := len(side.population.roster.inhabited)) < MIN_CLIENTS:
            words = f"a sum over {clients} clients would reveal too much of each; at least {MIN_CLIENTS} are needed"
            raise UserError(f"{finisher.text} with secure: {words}")
    if algorithm.private is not None:
        require_extra("dp_accounting")
        _check_private(finisher.text, needs, algorithm.withhold)
        if algorithm.secure:
            Layout.of(side.network.classifier.out_features, width, needs.form).shorter(algorithm.private.clip)


def named(finisher: Finisher, algorithm: "Algorithm") -> str:
    """The name of one of the algorithm's calibrations in results: its text, and what protects its statistics."""
    if isinstance(finisher.needs, RealFeatures):
        return finisher.text
    return " + ".join([finisher.text, *protections(algorithm)])


def protections(algorithm: "Algorithm") -> list[str]:
    """What keeps the statistics private, as the text of a method has it."""
    words = []
    if algorithm.withhold:
        words.append(f"withhold({algorithm.withhold})")
    if algorithm.private is not None:
        words.append(str(algorithm.private))
    if algorithm.secure:
        words.append(str(algorithm.secure))
    return words


def _check_memory(text: str, needs: StatisticsRequest, classes: int, width: int) -> None:
    needed = statistics_bytes(needs.form, classes, width)
    if needed > MAX_BYTES:
        forms = [f"{form} ({statistics_bytes(form, classes, width) / 1e9:.2f} GB)" for form in OTHER_FORMS]
        hint = f"take covariance = {', '.join(forms)}" if needs.form != Shared() else "give a smaller expand"
        raise UserError(
            f"{text}: {needs.form} covariances of {classes:,} classes and {width:,} features take "
            f"{needed / 1e9:.1f} GB a client, more than {MAX_BYTES / 1e9:.1f} GB; {hint}"
        )


def _check_private(text: str, needs: StatisticsRequest, withhold: int) -> None:
    if withhold:
        raise UserError(
            f"{text} with withhold and private: one example more may bring a whole class of its client into the "
            "sum, and the promise is for one example; leave withhold out"
        )
    if needs.components > 1 or not sensitivity_known(needs.form):
        what = "components" if needs.components > 1 else str(needs.form)
        raise UserError(f"{text} with private: the promise is for one release, one Gaussian a class, not {what}")


def _largest_class(side: "ClientSide") -> int:
    """How many examples of the largest class all clients together hold."""
    return int(np.bincount(side.labels[side.population.order]).max())


def _largest_class_of_a_client(side: "ClientSide") -> int:
    """The most examples of one class that one client holds."""
    return int(class_cells(side)[1].max())


def class_cells(side: "ClientSide") -> tuple[np.ndarray, np.ndarray]:
    """The client and the number of examples of each class that each client holds, by client."""
    population = side.population
    owner = np.repeat(np.arange(population.clients, dtype=np.int32), population.sizes)
    labels = side.labels[population.order]
    clients, _, counts = cells(owner, labels, side.network.classifier.out_features)
    return clients, counts
