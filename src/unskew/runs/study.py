"""A finished run opened for measures: its folder, models and images, each loaded when first used."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskew import engines
from unskew.core.errors import Missing as Missing
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.limits import usable_path
from unskew.core.types import Engine, ImageSet, ServerState, Tensors
from unskew.data.partition_files import Holdings, read_holdings
from unskew.engines.blueprint import build
from unskew.round.algorithm import Algorithm
from unskew.round.client import IMAGES_AT_ONCE, ClientSide
from unskew.runs import config as configs
from unskew.runs import recorded, replay
from unskew.runs.checkpoint import MEMORIES, open_memories
from unskew.runs.federation_file import FEDERATION
from unskew.runs.finished import calibrated_parts, engine_for, final_weights, prepared_of, weights_of
from unskew.runs.folder import MODEL, classifier_names, read_calibration
from unskew.runs.manifest import SealBroken, require_sealed
from unskew.runs.metrics import read_metrics
from unskew.runs.prepare import Prepared
from unskew.runs.result import Result, read_result

Say = Callable[[str, int, int], None]  # progress: the stage, how much is done, of how much


@dataclass(frozen=True, eq=False)
class Outputs:
    """The model's outputs on the test images: features [n, d], true classes [n], predictions [n] by classifier."""

    features: Tensor
    labels: Tensor
    predicted: Mapping[str, Tensor]  # "" is the run's own classifier, the others are its calibrations


class FinishedRun:
    """A finished run, read from its folder. ``close`` ends the worker processes that it may have started."""

    def __init__(
        self, path: str | Path, *, data_dir: str | Path | None = None, engine: str | None = None,
        workers: int | None = None, device: str | None = None, say: Say | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if engine == "torchrun":
            raise UserError("--engine torchrun: measures of finished runs are taken on one machine; give auto or pool")
        self.path = usable_path(path)
        self.result: Result = read_result(self.path)
        self.config = configs.read_run(self.path)
        self.rows = read_metrics(self.path)
        self.during = recorded.read(self.path)
        self.say: Say = say or _silent
        self._asked = {
            "engine": engine, "workers": workers, "data_dir": data_dir, "device": device, "values": values,
        }  # fmt: skip
        self._local: dict[tuple[int, int], dict[int, Tensors]] = {}
        self._states: dict[int, ServerState] = {}
        self._lacking: Missing | None = None
        self._engine: Engine | None = None
        self.notes: list[str] = []  # what a reader of the charts must know

    def __enter__(self) -> "FinishedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def key(self) -> Key:
        """The run's own key: what a measure draws is the same every time."""
        return Key(self.config.seed)

    @cached_property
    def holdings(self) -> Holdings:
        """How many examples of each class every client has; no data set is needed."""
        if (self.path / FEDERATION).exists():
            raise Missing("which client has what is known to the nodes of the federation alone")
        require_sealed(self.path, "partition.npz")
        return read_holdings(self.path / "partition.npz")

    @cached_property
    def prepared(self) -> Prepared:
        """The federation as it was; raises Missing where its data set is not available."""
        if self._lacking is not None:
            raise self._lacking
        try:
            self.say("reading the data set", 0, 0)
            return prepared_of(self.path, self.result, **self._asked)  # type: ignore[arg-type]
        except SealBroken:
            raise
        except UserError as error:
            self._lacking = Missing(str(error))
            raise self._lacking from error

    @property
    def without_data(self) -> bool:
        """Whether the data set was needed and is not available."""
        return self._lacking is not None

    @property
    def at_hand(self) -> bool:
        """Whether the data set is available."""
        with suppress(Missing):
            return self.prepared is not None
        return False

    @property
    def images(self) -> ImageSet:
        """The data set."""
        return self.prepared.images

    @cached_property
    def _data(self) -> Tensors:
        return replace(self.prepared, say=self.say).data

    @cached_property
    def side(self) -> ClientSide:
        """A network to work with, and all images; its weights are scratch."""
        return build(self.prepared.blueprint, self._data)

    @property
    def algorithm(self) -> Algorithm:
        """What the run trained with."""
        return self.prepared.algorithm

    @cached_property
    def weights(self) -> Tensors:
        """The run's final weights by the network's own names, without a data set."""
        return self._final[0]

    @cached_property
    def _final(self) -> tuple[Tensors, dict[str, str]]:
        return final_weights(self.path, self.result)

    @property
    def classifier_weight(self) -> Tensor:
        """[C, d], the weight of the run's own classifier at its end."""
        name = classifier_names(self.path, self._final[1])[0]
        weight = self.weights.get(name)
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            raise UserError(f"{self.path / MODEL} has no classifier weight {name!r}; restore the file from a copy")
        return weight

    @cached_property
    def model(self) -> Tensors:
        """The final weights as the side takes them."""
        return weights_of(self.path, self.result, self.side.network)

    @cached_property
    def calibrated(self) -> dict[str, Tensors]:
        """The calibrated classifiers' tensors by name; one that cannot be read is left out, with a note."""
        classifiers = {}
        for name in self.result.calibrations:
            try:
                classifiers[name] = read_calibration(self.path, name)
            except SealBroken:
                raise
            except UserError as error:
                self.notes.append(f"the calibration {name} is left out: {error}")
        return classifiers

    @property
    def classes(self) -> list[str]:
        """The classes' names; their numbers where the data set is not available."""
        try:
            return list(self.images.classes)
        except Missing:
            return [str(label) for label in range(len(self.classifier_weight))]

    @property
    def engine(self) -> Engine:
        """Where local models are trained again."""
        if self._engine is None:
            self._engine = self.opened(open_memories(self.path) if self.remembered else None)
        return self._engine

    @property
    def remembered(self) -> bool:
        """Whether the clients' saved states are available."""
        return bool(self.algorithm.remember) and (self.path / MEMORIES).exists()

    def opened(self, memories: int | None) -> Engine:
        """An engine; without a file for what clients remember, it has one that goes with it."""
        if self.prepared.nodes is not None:
            return self.prepared.nodes.open_engine(engines.EngineSetup(self.prepared.blueprint, self._data))
        chosen, workers = engine_for(self.prepared, self.side, passes=self.config.epochs)
        return engines.open_engine(chosen, engines.EngineSetup(self.prepared.blueprint, self._data, workers, memories))

    @cached_property
    def outputs(self) -> Outputs:
        """Features and predictions on all test images, by the run's own classifier and each calibrated one."""
        side, predicted, features = self.side, dict[str, list[Tensor]](), []
        if not len(side.test.labels):
            raise Missing("the test images are at the nodes of the federation")
        side.load(self.model, training=False)
        pairs = {"": (side.network.encoder, side.network.classifier)}
        for name, values in self.calibrated.items():
            encoder, classifier = calibrated_parts(self.path, name, values, side.network)
            pairs[name] = (encoder, classifier.cpu())  # type: ignore[assignment]
        count = len(side.test.labels)
        with torch.no_grad():
            for some in torch.split(torch.arange(count), IMAGES_AT_ONCE):
                self.say("classifying the test images", int(some[0]), count)
                images, _ = side.test.batch(some)
                known = {id(side.network.encoder): side.network.encoder(images)}
                features.append(known[id(side.network.encoder)].cpu())
                for name, (encoder, classifier) in pairs.items():
                    inside = known[id(encoder)] if id(encoder) in known else encoder(images)
                    logits = classifier(inside.cpu() if name else inside)  # a calibrated one works on the CPU
                    predicted.setdefault(name, []).append(logits.argmax(1).cpu())
        joined = {name: torch.cat(batches) for name, batches in predicted.items()}
        return Outputs(torch.cat(features), side.test.labels.cpu(), joined)

    def state(self, number: int | None = None) -> ServerState:
        """The server's state after that round (None: the last): as it was kept, or by training again up to it."""
        number = self.result.final_round if number is None else number
        if number not in self._states:
            self._states[number] = replay.state_after(self, number)
        return self._states[number]

    def local_models(self, number: int | None = None, most: int = 10) -> dict[int, Tensors]:
        """By client, its local model of the round after that one; at most ``most`` clients."""
        number = self.result.final_round if number is None else number
        if most < 1:
            raise UserError(f"clients={most}: give at least one")
        if (number, most) not in self._local:
            self._local[number, most] = replay.local_models(self, number, most)
        return self._local[number, most]

    def number(self, round: int) -> int:
        """The round that a knob means: −1 is the one whose model is the result (the last; with --patience the best)."""
        return self.result.final_round if round == -1 else round


def _silent(stage: str, done: int, total: int) -> None:
    return
