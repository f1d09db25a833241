"""What a process must know to do any client's work: texts and numbers, and tensors in shared memory."""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unskew import methods, models
from unskew.calibration import jobs
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.machine import ready_device
from unskew.core.tensors import pack
from unskew.core.types import ImageSet, Local, Split, StoredImages, Tensors
from unskew.data.batches import Pixels
from unskew.data.photographs import open_photographs, with_memory
from unskew.data.population import Population
from unskew.models.finetune import FineTuned, fine_tune
from unskew.models.networks import Network
from unskew.privacy import secure_sum
from unskew.round import evaluation
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide
from unskew.round.client_memory import ClientMemory

WITH_JOBS = (evaluation, jobs, secure_sum)  # importing these registers their jobs
STORED = "stored"  # in the names of tensors that describe images which are read when asked for
CANNOT_CROSS = (
    "a lambda, a closure or a function defined in __main__ cannot be sent to another process; "
    "give --engine loop, or define a plain function in a module"
)
CPU = torch.device("cpu")
FROZEN = "frozen/"  # begins the names of the weights that every process has and nobody trains


@dataclass(frozen=True)
class Values:
    """The values of a blueprint's texts, where this process already has them: nothing is parsed twice."""

    algorithm: Algorithm | None = None
    network: Callable[..., nn.Module] | None = None  # (shape, classes) -> the network, where it has no name


@dataclass(frozen=True)
class Blueprint:
    """The algorithm by its text, the network by its name, the local settings, the device; JSON can carry it.

    ``values`` stay in this process. Without them the texts are parsed, as a worker process does.
    """

    method: str
    model: str
    shape: tuple[int, int, int]  # of the images that the network takes
    classes: int
    local: Local
    dtype: str = "float32"
    device: str = "cpu"
    crosses: bool = True  # whether another process can build the same from the texts alone
    layers: int | None = None  # how many at the end are trained; None: all
    stored: bool = False  # whether the data are what the frozen part made of the images
    values: Values = field(default=Values(), compare=False, repr=False)

    def algorithm(self) -> Algorithm:
        """The algorithm: the value where there is one, otherwise parsed from the text."""
        return self.values.algorithm or methods.parse_method(self.method, self.local)

    def whole(self) -> Network:
        """A new network of the blueprint's shape, from the value where there is one, otherwise by its name."""
        return models.build(self.values.network or self.model, self.shape, self.classes)

    def network(self) -> Network:
        """What the clients train: the whole network, or its last layers behind a frozen part."""
        whole = self.whole()
        return whole if self.layers is None else fine_tune(whole, self.shape, self.layers, stored=self.stored)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings; refused where they do not say enough for another process."""
        if not self.crosses:
            raise UserError(f"{self.method}, {self.model}: {CANNOT_CROSS}")
        fields = asdict(replace(self, values=Values()))
        del fields["values"]
        return fields

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Blueprint":
        """What ``to_json`` gave, as it was."""
        return Blueprint(**{**fields, "shape": tuple(fields["shape"]), "local": Local(**fields["local"])})


def dataset(images: ImageSet, population: Population) -> Tensors:
    """All that the clients hold, as tensors by name: what goes into shared memory.

    Images that are read when asked for go as their description: "<part>/stored", JSON in UTF-8, and arrays under it.
    Test examples that are some of the training images go as their rows.
    """
    rows = images.test.rows
    return {
        **_images("train", images.train),
        "train/labels": torch.from_numpy(images.train.labels),
        **(_images("test", images.test) if rows is None else {"test/rows": torch.from_numpy(rows)}),
        "test/labels": torch.from_numpy(images.test.labels),
        "population/order": torch.tensor(population.order),
        "population/offsets": torch.tensor(population.offsets),
        "mean": torch.tensor(images.mean, dtype=torch.float64),
        "std": torch.tensor(images.std, dtype=torch.float64),
    }


def pixels(blueprint: Blueprint, data: Tensors, device: torch.device | None = None) -> dict[str, Pixels]:
    """The images of the train and test part as the network takes them; on the CPU where no device is given."""
    dtype = getattr(torch, blueprint.dtype)

    def part(name: str) -> Pixels:
        images, labels = _opened(name, data), data[f"{name}/labels"]
        return Pixels.of(images, labels, data["mean"], data["std"], dtype, blueprint.shape).to(device or CPU)

    train = part("train")
    test = train.select(data["test/rows"].to(train.device)) if "test/rows" in data else part("test")
    return {"train": train, "test": test}


def build(blueprint: Blueprint, data: Tensors, memories: int | None = None) -> ClientSide:
    """The same client side in every process that has the same blueprint and data.

    ``memories`` is the descriptor of the file with the clients' saved states, where a method keeps some.
    """
    dtype, device = getattr(torch, blueprint.dtype), ready_device(blueprint.device)
    parts = pixels(blueprint, data, device)
    algorithm, network = blueprint.algorithm(), blueprint.network()
    if isinstance(network, FineTuned):
        tensors.overwrite_some(network.whole, tensors.under(data, FROZEN))
    network = network.to(dtype)
    kept = None if memories is None else ClientMemory(algorithm.remember, tensors.of_module(network), memories)
    return ClientSide(
        algorithm=algorithm,
        network=network.to(device),
        packed=pack(network),
        train=parts["train"],
        test=parts["test"],
        population=Population(data["population/order"].numpy(), data["population/offsets"].numpy()),
        memory=kept,
    )


def with_shares(data: Tensors, processes: int) -> Tensors:
    """The data for several processes at once: the memory that images may take is divided among them."""
    texts = {f"{part}/{STORED}" for part in ("train", "test")} & data.keys()
    return data | {name: _bytes(with_memory(_text(data[name]), processes)) for name in texts}


def _images(part: str, split: Split) -> Tensors:
    if isinstance(split.images, np.ndarray):
        return {f"{part}/images": torch.from_numpy(np.ascontiguousarray(split.images))}
    text, arrays = split.images.described()
    named = {f"{part}/{STORED}/{name}": torch.from_numpy(np.array(values)) for name, values in arrays.items()}
    return {f"{part}/{STORED}": _bytes(text), **named}


def _opened(part: str, data: Tensors) -> Tensor | StoredImages:
    if f"{part}/images" in data:
        return data[f"{part}/images"]
    arrays = {name: value.numpy() for name, value in tensors.under(data, f"{part}/{STORED}/").items()}
    return open_photographs(_text(data[f"{part}/{STORED}"]), arrays)


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _text(content: Tensor) -> str:
    return content.numpy().tobytes().decode()


# Freed memory stays with the process for the next step. A step allocates and frees the same few megabytes again and
# again; by default glibc gives them back to the kernel each time and pays for fresh pages the next.
KEEP = 256 * 2**20  # bytes of freed memory that stay with the process
LARGE = 32 * 2**20  # blocks above this size are mapped, and given back at once; glibc allows no more
AHEAD = 64 * 2**20  # how much more than needed is asked of the kernel at a time

_TRIM, _TOP, _MMAP = -1, -2, -3  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD of malloc.h


def keep_freed_memory() -> bool:
    """Set it for this process; False where the C library is not glibc, and nothing was changed."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return all(mallopt(option, value) for option, value in ((_TRIM, KEEP), (_MMAP, LARGE), (_TOP, AHEAD)))
