"""After the last round: class statistics gathered from the clients, classifiers made from them, how well they do."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unskew.calibration.classifier import CalibratedClassifier
from unskew.calibration.forecast import Forecast, forecast
from unskew.calibration.forms import Form
from unskew.calibration.methods import Calibration, calibrate, parse_calibration, retrained_on
from unskew.calibration.mixture import PASSES, found_centres
from unskew.calibration.request import StatisticsRequest, width_of
from unskew.calibration.statistics import ClassStatistics
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.plugins import require_extra
from unskew.core.types import Engine, PrivacyBudget, Sums, Tensors, Visit
from unskew.data.population import cells
from unskew.models.cut import cut
from unskew.privacy.fixed_point import Layout
from unskew.privacy.masking import LEAST
from unskew.privacy.noise import noisy
from unskew.privacy.secure_sum import secure_statistics
from unskew.round.algorithm import Algorithm
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.round.evaluation import evaluate
from unskew.round.jobs import job_text
from unskew.runs.prepare import Prepared
from unskew.runs.result import Calibration as Row

OTHERS = ("shared", "diagonal", "low-rank(32)")
MOST_BYTES = 2 * 2**30  # of one client's statistics laid out for all classes, in this process
CLOSER = 1 - 1e-3  # under a secure sum features are clipped a little shorter: fixed point may lengthen the sum


@dataclass(frozen=True)
class Gathering:
    """What is about to be sent for a calibration, said before it is."""

    method: str
    what: str
    clients: int
    bytes_up: int


@dataclass(frozen=True)
class Forecasted:
    """What a calibration may gain, said before it is made."""

    method: str
    forecast: Forecast


@dataclass(frozen=True)
class Calibrated:
    """A calibrated classifier, how it did, and what there is to say of it."""

    result: Row
    classifier: CalibratedClassifier
    notes: tuple[str, ...]


Event = Gathering | Forecasted | Calibrated
Known = dict[
    tuple[StatisticsRequest, bool, PrivacyBudget | None], tuple[ClassStatistics, int, float]
]  # statistics, bytes, seconds


def finish(
    prepared: Prepared, side: ClientSide, engine: Engine, model: Tensors, algorithm: Algorithm,
    observe: Callable[[Event], None], known: "Known | None" = None,
) -> list[Calibrated]:  # fmt: skip
    """Each of the algorithm's calibrations in turn; statistics that are ``known`` already are not gathered again."""
    if not algorithm.finish:
        return []
    work, made = _Work(prepared, side, engine, model, algorithm, observe, {} if known is None else known), []
    for source in algorithm.finish:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            classifier, sent, seconds = work.made(source)
        values = tensors.prefixed(classifier.tensors(), "calibrated/")
        found = evaluate(engine, model | values, len(prepared.images.test), work.key, job="evaluate-calibrated")
        row = Row(named(source, algorithm), found.accuracy, found.loss, sent, seconds + classifier.report.seconds)
        notes = dict.fromkeys([*(str(warning.message) for warning in said), *classifier.report.notes()])
        done = Calibrated(row, classifier, tuple(notes))
        observe(done)
        made.append(done)
    return made


def check(source: str, algorithm: Algorithm, side: ClientSide) -> None:
    """Refuse a calibration that this network cannot have, that takes too much memory, or that breaks a promise."""
    calibration = parse_calibration(source)
    encoder, _ = cut(side.network, calibration.layers)
    if calibration.make is None:
        if protections(algorithm) and not any(parse_calibration(other).make for other in algorithm.finish):
            what = " + ".join(protections(algorithm))
            raise UserError(f"{source} pools real features, and {what} protects nothing of them; leave it out")
        return
    width = width_of(encoder, tuple(side.train.images.shape[1:])) + calibration.expand
    classes = side.network.classifier.out_features * calibration.components
    needed = calibration.form.bytes(classes, width)
    if needed > MOST_BYTES:
        forms = [f"{form} ({Form.parse(form).bytes(classes, width) / 1e9:.2f} GB)" for form in OTHERS]
        hint = f"take covariance = {', '.join(forms)}" if calibration.form.name != "shared" else "give a smaller expand"
        raise UserError(
            f"{source}: {calibration.form} covariances of {classes:,} classes and {width:,} features take "
            f"{needed / 1e9:.1f} GB a client, more than {MOST_BYTES / 1e9:.1f} GB; {hint}"
        )
    if calibration.components > 1 and calibration.components > (most := _largest_class(side) // 2):
        raise UserError(f"{source}: the largest class has {2 * most} examples; give at most {most} components")
    if algorithm.withhold and algorithm.withhold > (most := _most_of_a_class(side)):
        raise UserError(
            f"{source} with withhold({algorithm.withhold}): no client has more than {most} examples of a class, and "
            f"nobody would send anything; give {most} or less"
        )
    if algorithm.secure:
        require_extra("cryptography")
        if (clients := len(side.population.roster.inhabited)) < LEAST:
            words = f"a sum over {clients} clients would say too much of each; wanted are at least {LEAST}"
            raise UserError(f"{source} with secure: {words}")
    if algorithm.private is not None:
        require_extra("dp_accounting")
        if algorithm.withhold:
            raise UserError(
                f"{source} with withhold and private: one example more may bring a whole class of its client into the "
                "sum, and the promise is for one example; leave withhold out"
            )
        if calibration.components > 1 or calibration.form.name == "low-rank":
            what = "components" if calibration.components > 1 else str(calibration.form)
            raise UserError(f"{source} with private: the promise is for one release, one Gaussian a class, not {what}")


def named(source: str, algorithm: Algorithm) -> str:
    """The name of one of the algorithm's calibrations in results: its text, and what protects its statistics."""
    return " + ".join([source, *protections(algorithm)]) if parse_calibration(source).make else source


def protections(algorithm: Algorithm) -> list[str]:
    """What keeps the statistics private, as the text of a method has it."""
    found = []
    if algorithm.withhold:
        found.append(f"withhold({algorithm.withhold})")
    if algorithm.private is not None:
        found.append(str(algorithm.private))
    if algorithm.secure:
        found.append("secure")
    return found


@dataclass(frozen=True)
class _Work:
    """What calibrations of one model have in common."""

    prepared: Prepared
    side: ClientSide
    engine: Engine
    model: Tensors
    algorithm: Algorithm
    observe: Callable[[Event], None]
    known: Known

    @property
    def key(self) -> Key:
        return Key(self.prepared.config.seed)

    def ask(self, calibration: Calibration) -> StatisticsRequest:
        """What the calibration wants to know of the clients."""
        promise = self.algorithm.private
        clip = 0.0 if promise is None else promise.clip * (CLOSER if self.algorithm.secure else 1)
        return StatisticsRequest(
            str(calibration.form), calibration.layers, calibration.expand, calibration.components,
            self.algorithm.withhold, clip,
        )  # fmt: skip

    def made(self, source: str) -> tuple[CalibratedClassifier, int, float]:
        """The classifier, the bytes that clients sent for it, the seconds that they took."""
        calibration, seed = parse_calibration(source), self.prepared.config.seed
        self.side.load(self.model, training=False)
        _, head = cut(self.side.network, calibration.layers)
        if calibration.make is None:
            began = time.perf_counter()
            features, labels = real_features(self.side, calibration, self.key)
            seconds = time.perf_counter() - began
            return retrained_on(head, features, labels, source, seed), 0, seconds
        statistics, sent, seconds = self.statistics(source, self.ask(calibration))
        classifier = calibrate(head, statistics, source, seed)
        classifier.clip = self.ask(calibration).clip  # features are cut in use as they were for the statistics
        return classifier, sent, seconds

    def statistics(self, source: str, ask: StatisticsRequest) -> tuple[ClassStatistics, int, float]:
        """What was asked for, of all clients together; bytes and seconds."""
        question = ask, self.algorithm.secure, self.algorithm.private
        if question in self.known:
            return self.known[question]
        began = time.perf_counter()
        centres, sent = None, self.sent_bytes(ask)
        whole = replace(ask, components=1)
        if ask.components > 1:
            first, before, _ = self.statistics(source, whole)
            step = replace(ask, form="diagonal")
            sent += before + PASSES * self.sent_bytes(step)
            words = f"statistics of {ask.components} parts of each class, {PASSES + 1} times in all"
            self.observe(Gathering(named(source, self.algorithm), words, self._clients, sent - before))
            centres = found_centres(first, ask.components, lambda moved: self.gather(step, moved), self.key)
        else:
            self.observe(Gathering(named(source, self.algorithm), f"{ask.form} class statistics", self._clients, sent))
        found = self.gather(ask, centres)
        promise = self.algorithm.private
        if promise is not None:
            found = noisy(found, promise.clip, promise.epsilon, promise.delta, self.key.fold("private"))
            if not len(found.held):
                raise UserError(
                    f"{named(source, self.algorithm)}: no class stands out of so much noise; give a larger epsilon"
                )
        self.known[question] = found, sent, time.perf_counter() - began
        if ask.components == 1:
            self.observe(Forecasted(named(source, self.algorithm), self._forecast(ask, found)))
        return self.known[question]

    def _forecast(self, ask: StatisticsRequest, statistics: ClassStatistics) -> Forecast:
        """Random features have no head of the network's behind them: then there is the separability alone."""
        head = None if ask.expand else cut(self.side.network, ask.layers)[1]
        return forecast(head, statistics, self.side.network.classifier.out_features, self.key)

    @property
    def _clients(self) -> int:
        return len(self.engine.roster.inhabited)

    def gather(self, ask: StatisticsRequest, centres: Tensor | None) -> ClassStatistics:
        """The statistics of all clients' features under the model, added up; masked where they must not be seen."""
        shared = self.model if centres is None else self.model | {"centres": centres}
        job, key = job_text("moments", ask.to_text()), self.key.fold("moments")
        visits = [Visit(client, 1.0) for client in self.engine.roster.inhabited.tolist()]
        if not self.algorithm.secure:
            return ClassStatistics.gathered(self._asked(job, shared, visits, key), ask.form)

        _, width = ask.encoder(self.side.network, self.prepared.blueprint.shape)
        layout = Layout.of(self.side.network.classifier.out_features * ask.components, width, ask.form)
        return secure_statistics(self.engine, shared, ask, layout, visits, key)

    def _asked(self, job: str, shared: Tensors, visits: Sequence[Visit], key: Key) -> Sums:
        outcome = self.engine.map_sum(job, shared, visits, key)
        if outcome.failures:
            failure = outcome.failures[0]
            raise UserError(f"client {failure.client}, class statistics: {failure.reason}")
        return tensors.under(outcome.sums, "stat/moments/")

    def sent_bytes(self, ask: StatisticsRequest) -> int:
        """What all clients together send: each only of the classes it holds; all classes where they are masked."""
        _, width = ask.encoder(self.side.network, self.prepared.blueprint.shape)
        form = Form.parse(ask.form)
        if self.algorithm.secure:
            return (
                self._clients * Layout.of(self.side.network.classifier.out_features * ask.components, width, form).bytes
            )
        owner, _, number = cells(
            self.prepared.partition.client, self.prepared.images.train.labels, len(self.prepared.images.classes)
        )
        told = owner[number >= ask.min_count]
        held = np.bincount(told, minlength=int(owner.max()) + 1)[np.unique(owner)]
        return sum(form.bytes(int(count) * ask.components, width) for count in held)


def real_features(side: ClientSide, calibration: Calibration, key: Key) -> tuple[Tensor, Tensor]:
    """The training features [n, d] that the oracle wants, and their labels: a simulation has the images at hand."""
    encoder, _ = cut(side.network, calibration.layers)
    index = torch.from_numpy(np.sort(side.population.order.astype(np.int64)))
    if calibration.real:
        index = _some(index, side.train.labels[index], calibration.real, key)
    features = []
    with torch.no_grad():
        for some in torch.split(index, IMAGES_AT_ONCE):
            features.append(encoder(side.train.batch(some)[0]))
    return torch.cat(features), side.train.labels[index]


def _largest_class(side: ClientSide) -> int:
    """The most examples of one class that all clients together hold."""
    return int(np.bincount(side.train.labels.numpy()[side.population.order]).max())


def _most_of_a_class(side: ClientSide) -> int:
    """The most examples of one class that one client holds."""
    population = side.population
    owner = np.repeat(np.arange(population.clients, dtype=np.int32), population.sizes)
    labels = side.train.labels.numpy()[population.order]
    return int(cells(owner, labels, side.network.classifier.out_features)[2].max())


def _some(index: Tensor, labels: Tensor, per_class: int, key: Key) -> Tensor:
    """So many of each class, or all where there are fewer."""
    order = torch.randperm(len(index), generator=key.fold("oracle", "examples").torch())
    index, labels = index[order], labels[order]
    kept = [index[labels == label][:per_class] for label in range(int(labels.max()) + 1)]
    return torch.cat(kept).sort().values
