"""A federation ready to start: its data, its network's first weights, what of them is frozen."""

from dataclasses import dataclass
from functools import cached_property

from unskew.core import tensors
from unskew.core.cache import cache_folder
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import ImageSet, Tensors
from unskew.data.population import Clients, Partition, Population, emd
from unskew.data.scan import Say
from unskew.data.tables import silent
from unskew.engines.blueprint import FROZEN, Blueprint, dataset, pixels
from unskew.engines.features import Frozen, stored_features
from unskew.models.layers import Network
from unskew.round.algorithm import Algorithm
from unskew.runs.client_accuracy import test_owners
from unskew.runs.config import Config
from unskew.runs.first_model import FirstModel, first_model, first_weights
from unskew.runs.given import Nodes
from unskew.runs.recording import Recorded
from unskew.runs.result import Result


@dataclass(frozen=True)
class Prepared:
    """A federation ready to start.

    With a validation part, ``images.test`` is that part, and ``population`` does not have it; ``partition`` is whole.
    """

    config: Config
    images: ImageSet
    partition: Partition
    population: Population
    blueprint: Blueprint
    algorithm: Algorithm
    data_sha256: str
    baseline: Result | None
    first_model: FirstModel
    recordings: tuple[Recorded, ...] = ()
    start: Algorithm | None = None  # the calibration that makes the initial classifier
    finished: Tensors | None = None  # the whole network's weights at a run's end, by their plain names
    say: Say = silent  # progress of what takes long
    nodes: Nodes | None = None  # where the training images are; None: here

    @cached_property
    def first(self) -> Tensors:
        """The whole network's weights before the first round."""
        file = self.first_model.file
        if self.finished is not None and self.config.pretrained is not None:
            file = first_model(self.config, self.images, self.blueprint.values.network, None).file
        return first_weights(self.blueprint.whole(), file, Key(self.config.seed).fold("model"))

    @cached_property
    def frozen(self) -> Tensors:
        """The weights that nobody trains, by the names of ``tensors.of_module``; none where all are trained."""
        if self.blueprint.layers is None:
            return {}
        trained = tensors.of_module(self.blueprint.network())
        if self.finished is None:
            return {name: value for name, value in self.first.items() if name not in trained}
        names = [name for name in tensors.of_module(self.blueprint.whole()) if name not in trained]
        if missing := [name for name in names if name.partition("/")[2] not in self.finished]:
            raise UserError(
                f"the run's weights do not fit its network {self.config.model}: {missing[0]} is not among them; was "
                "the network changed since?"
            )
        return {name: self.finished[name.partition("/")[2]] for name in names}

    def whole(self, model: Tensors) -> Tensors:
        """The whole network's weights with those that were trained in their places."""
        if self.blueprint.layers is None:
            return model
        names = tensors.of_module(self.blueprint.whole())
        return {name: model[name] if name in model else self.frozen[name] for name in names}

    def initialise(self, network: Network) -> None:
        """Give what is trained the weights that it has before the first round."""
        tensors.overwrite(network, self.first)

    @cached_property
    def data(self) -> Tensors:
        """All that the clients hold: images, or what a frozen part makes of them, which is computed once."""
        images = self.images
        if self.blueprint.stored:
            network = self.blueprint.whole()
            tensors.overwrite_some(network, self.frozen)
            parts = pixels(self.blueprint, dataset(images, self.population))
            frozen = Frozen(self.blueprint, network, parts, self.data_sha256, self.config.views or 0)
            images = stored_features(frozen, images, cache_folder(self.config.cache_dir), self.say)
        return dataset(images, self.population) | tensors.prefixed(self.frozen, FROZEN)

    @cached_property
    def emd(self) -> float | None:
        """The partition's EMD; None where the labels are at the nodes."""
        if self.nodes is not None:
            return None
        return emd(self.partition.client, self.images.train.labels, len(self.images.classes))

    @cached_property
    def test_owners(self) -> Clients | None:
        """[n], the client that each test image belongs to; None where that is not known."""
        users = self.images.test_users
        known = users is not None and len(users) == len(self.images.test)
        return test_owners(self.partition.names, users) if known else None
