"""Calibration of a federation: checks what is possible, gathers the clients' class statistics, makes classifiers."""

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from unskew.calibration.calibrate import calibrate, calibrate_on_features
from unskew.calibration.ccvr import check_virtual_memory
from unskew.calibration.classifier import CalibratedClassifier
from unskew.calibration.covariances import (
    Diagonal,
    Full,
    LowRank,
    Shared,
    advise_smaller_form,
    list_smaller_forms,
    statistics_bytes,
)
from unskew.calibration.finisher import Finisher, RealFeatures, StatisticsRequest
from unskew.calibration.forecast import Forecast, forecast
from unskew.calibration.jobs import PASSES, WORDS, FixedPointMoments, Moments, find_centres
from unskew.calibration.protection import Guarantee, Layout, add_noise
from unskew.calibration.statistics import ClassStatistics, from_sums
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.plugins import require_extra
from unskew.core.types import Engine, PrivacyBudget, Progress, Tensors, Visit
from unskew.data.population import cells
from unskew.models.cut import cut, width_of
from unskew.models.networks import InParts
from unskew.privacy.ledger import Release
from unskew.privacy.masking import MIN_CLIENTS, shares_needed
from unskew.privacy.secure_sum import add_securely
from unskew.round.algorithm import Algorithm
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.jobs import add

MAX_BYTES = 2 * 2**30  # of one client's statistics for all classes, in this process


def check(finisher: Finisher, algorithm: Algorithm, side: ClientSide) -> None:
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


def named(finisher: Finisher, algorithm: Algorithm) -> str:
    """The name of one of the algorithm's calibrations in results: its text and its protections."""
    if isinstance(finisher.needs, RealFeatures):
        return finisher.text
    return " + ".join([finisher.text, *protections(algorithm)])


def protections(algorithm: Algorithm) -> list[str]:
    """The protections of the statistics, as written in a method's text."""
    withhold = f"withhold({algorithm.withhold})" if algorithm.withhold else None
    return [str(part) for part in (withhold, algorithm.private, algorithm.secure) if part]


def class_cells(side: ClientSide) -> tuple[np.ndarray, np.ndarray]:
    """The client and the number of examples of each nonempty (client, class), by client."""
    population = side.population
    owner = np.repeat(np.arange(population.clients, dtype=np.int32), population.sizes)
    clients, _, counts = cells(owner, side.labels[population.order], side.network.classifier.out_features)
    return clients, counts


@dataclass(frozen=True)
class Gathering:
    """What the clients are about to send for a calibration."""

    method: str
    what: str
    clients: int
    bytes_up: int


@dataclass(frozen=True)
class Forecasted:
    """The forecast gain of a calibration."""

    method: str
    forecast: Forecast


# statistics by request and protections, and the bytes and seconds to gather them
Known = dict[tuple[StatisticsRequest, bool, PrivacyBudget | None], tuple[ClassStatistics, int, float]]


@dataclass(frozen=True)
class Calibrator:
    """What the calibrations of one model share: the engine, the model, the statistics ``known`` so far."""

    engine: Engine
    side: ClientSide
    model: Tensors
    algorithm: Algorithm
    key: Key
    observe: Callable[[Gathering | Forecasted], None]
    known: Known
    lost: set[int] = field(default_factory=set)  # clients that dropped out of a secure sum, left out of later ones

    def calibrate(self, finisher: Finisher) -> tuple[CalibratedClassifier, int, float]:
        """The classifier, made on the CPU, and the bytes that clients sent and the seconds they took."""
        self.side.load(self.model, training=False)
        head = copy.deepcopy(cut(self.side.network, finisher.needs.layers)[1]).cpu()
        began = time.perf_counter()
        if isinstance(finisher.needs, RealFeatures):
            features, labels = real_features(self.side, finisher.needs, self.key)
            seconds = time.perf_counter() - began
            return calibrate_on_features(head, features, labels, finisher, self.key.seed), 0, seconds
        request = protected_request(finisher.needs, self.algorithm, self._classes, self._width(finisher.needs))
        statistics, sent, seconds = self.statistics(finisher, request)
        classifier = calibrate(head, statistics, finisher, self.key.seed)
        if (budget := self.algorithm.private) is not None:
            digest, names = tensors.sha256(statistics.tensors())[:16], (named(finisher, self.algorithm),)
            promise = budget.epsilon, budget.delta, budget.clip
            release = Release(digest, *promise, names, released=budget.release, in_masks=self._clients_add_noise)
            classifier.report = replace(classifier.report, release=release)
        classifier.clip = request.clip  # features are clipped as they were for the statistics
        return classifier, sent, seconds

    def statistics(self, finisher: Finisher, request: StatisticsRequest) -> tuple[ClassStatistics, int, float]:
        """The requested statistics summed over all clients; bytes and seconds."""
        question = request, self.algorithm.secure is not None, self.algorithm.private
        if question in self.known:
            return self.known[question]
        name, began = named(finisher, self.algorithm), time.perf_counter()
        centres, sent = None, self.sent_bytes(request)
        if request.components > 1:
            first, before, _ = self.statistics(finisher, replace(request, components=1))
            step = replace(request, form=Diagonal())
            sent += before + PASSES * self.sent_bytes(step)
            what = f"statistics of {request.components} components of each class, {PASSES + 1} times in total"
            self.observe(Gathering(name, what, self._clients, sent - before))
            centres = find_centres(first, request.components, lambda moved: self.gather(step, moved), self.key)
        else:
            self.observe(Gathering(name, f"{request.form} class statistics", self._clients, sent))
            self._advise_small_clients(request)
        statistics = self.gather(request, centres)
        if (budget := self.algorithm.private) is not None and not self._clients_add_noise:
            key = None if budget.release else self.key.fold("private")
            statistics = add_noise(statistics, budget.clip, budget.epsilon, budget.delta, key)
        if budget is not None and not len(statistics.held):
            raise UserError(f"{name}: no class is left after this much noise; give a larger epsilon")
        self.known[question] = statistics, sent, time.perf_counter() - began
        if request.components == 1:  # the trained head does not take random features
            head = None if request.expand else cut(self.side.network, request.layers)[1]
            self.observe(Forecasted(name, forecast(head, statistics, self._classes, self.key)))
        return self.known[question]

    @property
    def _clients(self) -> int:
        return len(self.engine.roster.inhabited)

    @property
    def _classes(self) -> int:
        return self.side.network.classifier.out_features

    def _width(self, request: StatisticsRequest) -> int:
        return request.encoder(self.side.network, self.side.train.shape)[1]

    def gather(self, request: StatisticsRequest, centres: Tensor | None) -> ClassStatistics:
        """The statistics of all clients' features under the model, summed; masked if the algorithm is secure."""
        shared = self.model if centres is None else self.model | {"centres": centres}
        if (secure := self.algorithm.secure) is None:
            return gather_statistics(self.engine, shared, request, self.key)
        layout = Layout.of(self._classes * request.components, self._width(request), request.form)
        budget = self.algorithm.private if self._clients_add_noise else None
        return secure_statistics(self.engine, shared, request, layout, self.key, secure.threshold, budget, self.lost)

    @property
    def _clients_add_noise(self) -> bool:
        """Whether a release's noise is added inside the masks."""
        budget = self.algorithm.private
        return budget is not None and budget.release and self.algorithm.secure is not None

    def sent_bytes(self, request: StatisticsRequest) -> int:
        """The bytes that all clients send: each only the classes it has, or all classes if they are masked."""
        width = self._width(request)
        if self.algorithm.secure:
            return self._clients * Layout.of(self._classes * request.components, width, request.form).bytes
        released = self.algorithm.private is not None and self.algorithm.private.release
        if released or not len(self.side.labels):  # the clients' classes are secret: assume all of them
            return self._clients * statistics_bytes(request.form, self._classes * request.components, width)
        owner, count = class_cells(self.side)
        sent = np.bincount(owner[count >= request.min_count], minlength=int(owner.max()) + 1)[np.unique(owner)]
        return sum(statistics_bytes(request.form, int(classes) * request.components, width) for classes in sent)

    def _advise_small_clients(self, request: StatisticsRequest) -> None:
        """Warn if clients with few examples send much, unless their sizes are secret or unknown here."""
        if not len(self.side.labels) or (self.algorithm.private is not None and self.algorithm.private.release):
            return
        owner, count = class_cells(self.side)
        cells = np.stack([np.bincount(owner), np.bincount(owner, weights=count)]).astype(np.int64)
        width, form = self._width(request), request.form
        for classes, examples in np.unique(cells[:, cells[0] > 0], axis=1).T.tolist():
            if advice := advise_smaller_form(form, classes, width, examples):
                warnings.warn(f"some clients have few examples, such as: {advice}", stacklevel=2)
                return


def protected_request(needs: StatisticsRequest, algorithm: Algorithm, classes: int, width: int) -> StatisticsRequest:
    """The request with the algorithm's protections: the smallest class to send, and the length of features."""
    budget = algorithm.private
    clip = 0.0 if budget is None else budget.clip
    if budget is not None and algorithm.secure:  # rounding to fixed point may lengthen the sum
        sigma = _guarantee(budget).sigma if budget.release else 0.0
        clip = Layout.of(classes, width, needs.form).shorter(clip, sigma)
    return replace(needs, min_count=algorithm.withhold, clip=clip)


def gather_statistics(
    engine: Engine, shared: Tensors, request: StatisticsRequest, key: Key, progress: Progress | None = None
) -> ClassStatistics:
    """The class statistics of all clients' features under the shared model, summed."""
    visits = every_client(engine)
    outcome = add(engine.visit(Moments(request.to_plain()), shared, visits, key.fold("moments")), visits, progress)
    if outcome.failures:
        failure = outcome.failures[0]
        raise UserError(f"client {failure.client}, class statistics: {failure.reason}")
    return from_sums(tensors.under(outcome.sums, "stat/moments/"), request.form)


def secure_statistics(
    engine: Engine, shared: Tensors, request: StatisticsRequest, layout: Layout, key: Key, threshold: float,
    budget: PrivacyBudget | None = None, lost: set[int] | None = None,
) -> ClassStatistics:  # fmt: skip
    """The summed class statistics of all clients except the ``lost``; the server learns nothing about a single one.

    Clients that drop out are left out, with a warning that names them, and added to ``lost``. ``threshold`` is the
    share that must stay. With a ``budget`` the clients add its noise.
    """
    visits = [visit for visit in every_client(engine) if visit.client not in (lost or ())]
    noise = None if budget is None else (budget.epsilon, budget.delta, budget.clip)
    job = FixedPointMoments(request.to_plain(), layout.classes, layout.width, layout.bits, len(visits), noise)
    total = add_securely(engine, job, shared, visits, key, threshold=threshold)
    if total.void:
        causes = [f"client {failure.client}, class statistics: {failure.reason}; " for failure in total.failures[:1]]
        raise UserError("".join([*causes, total.void]))
    for failure in total.failures:
        left_out = f"client {failure.client} dropped out of the secure sum and is not in the statistics"
        warnings.warn(f"{left_out}: {failure.reason}", stacklevel=2)
        if lost is not None and failure.client is not None:
            lost.add(failure.client)
    stayed = len(visits) - len(total.failures)
    if budget is not None:
        return layout.released(total.sums[WORDS], _guarantee(budget), stayed / shares_needed(threshold, len(visits)))
    return layout.statistics(total.sums[WORDS], f"the sum over {stayed} clients")


def _guarantee(budget: PrivacyBudget) -> Guarantee:
    return Guarantee.of(budget.clip, budget.epsilon, budget.delta, in_masks=True)


def every_client(engine: Engine) -> list[Visit]:
    """A visit to every client that has examples."""
    return [Visit(client, 1.0) for client in engine.roster.inhabited.tolist()]


def real_features(side: ClientSide, needs: RealFeatures, key: Key) -> tuple[Tensor, Tensor]:
    """The training features [n, d] for a bound for study, and their labels, on the CPU."""
    encoder = InParts(cut(side.network, needs.layers)[0])
    index = torch.from_numpy(np.sort(side.population.order.astype(np.int64)))
    labels = torch.from_numpy(side.labels)
    if needs.per_class:  # this many of each class, or all if there are fewer
        index = index[torch.randperm(len(index), generator=key.fold("oracle", "examples").torch())]
        classes = range(int(labels[index].max()) + 1)
        index = torch.cat([index[labels[index] == label][: needs.per_class] for label in classes]).sort().values
    with torch.no_grad():
        features = [encoder(side.train.batch(some)[0]).cpu() for some in torch.split(index, IMAGES_AT_ONCE)]
    return torch.cat(features), labels[index]
