"""What a process needs to do any client's work: texts and numbers, and tensors in shared memory."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
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
STORED = "stored"  # in the names of tensors that describe images which are read on demand
CANNOT_CROSS = (
    "a lambda, a closure or a function defined in __main__ cannot be sent to another process; "
    "give --engine loop, or define a plain function in a module"
)
CPU = torch.device("cpu")
FROZEN = "frozen/"  # prefix of the weights that are not trained


@dataclass(frozen=True)
class Blueprint:
    """The algorithm by its text, the network by its name, the local settings, the device; serializable as JSON.

    ``parsed`` and ``factory`` stay in this process; without them the texts are parsed, as in a worker process.
    """

    method: str
    model: str
    shape: tuple[int, int, int]  # of the network's input
    classes: int
    local: Local
    dtype: str = "float32"
    device: str = "cpu"
    crosses: bool = True  # whether another process can build the same from the texts alone
    layers: int | None = None  # how many of the last layers are trained; None: all
    stored: bool = False  # whether the data are the frozen part's output instead of images
    parsed: Algorithm | None = field(default=None, compare=False, repr=False)
    factory: Callable[..., nn.Module] | None = field(default=None, compare=False, repr=False)  # (shape, classes)

    def algorithm(self) -> Algorithm:
        """The algorithm, parsed from its text unless this process already has it."""
        return self.parsed or methods.parse_method(self.method, self.local)

    def whole(self) -> Network:
        """A new network of the blueprint's shape."""
        return models.build(self.factory or self.model, self.shape, self.classes)

    def network(self) -> Network:
        """The network that clients train: all of it, or its last layers behind a frozen part."""
        whole = self.whole()
        return whole if self.layers is None else fine_tune(whole, self.shape, self.layers, stored=self.stored)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings; rejected if another process could not build the same from them."""
        if not self.crosses:
            raise UserError(f"method {self.method} with model {self.model}: {CANNOT_CROSS}")
        fields = asdict(replace(self, parsed=None, factory=None))
        return {name: value for name, value in fields.items() if name not in ("parsed", "factory")}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Blueprint":
        """Read what ``to_json`` returned."""
        return Blueprint(**{**fields, "shape": tuple(fields["shape"]), "local": Local(**fields["local"])})


def dataset(images: ImageSet, population: Population) -> Tensors:
    """The clients' data as tensors by name, for shared memory.

    Images that are read on demand are described: "<part>/stored", JSON in UTF-8, and arrays below it. A validation
    split is given by its rows in the training images.
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
    """The images of the train and test part as the network's input, by default on the CPU."""
    dtype = getattr(torch, blueprint.dtype)

    def part(name: str) -> Pixels:
        images, labels = _opened(name, data), data[f"{name}/labels"]
        return Pixels.of(images, labels, data["mean"], data["std"], dtype, blueprint.shape).to(device or CPU)

    train = part("train")
    test = train.select(data["test/rows"].to(train.device)) if "test/rows" in data else part("test")
    return {"train": train, "test": test}


def build(blueprint: Blueprint, data: Tensors, memories: int | None = None) -> ClientSide:
    """Build the client side; it is the same in every process with the same blueprint and data.

    ``memories`` is the descriptor of the file with the clients' saved states, if the method has any.
    """
    device, algorithm, network = ready_device(blueprint.device), blueprint.algorithm(), blueprint.network()
    parts = pixels(blueprint, data, device)
    if isinstance(network, FineTuned):
        tensors.overwrite_some(network.whole, tensors.under(data, FROZEN))
    network = network.to(getattr(torch, blueprint.dtype))
    memory = None if memories is None else ClientMemory(algorithm.remember, tensors.of_module(network), memories)
    return ClientSide(
        algorithm=algorithm,
        network=network.to(device),
        packed=pack(network),
        train=parts["train"],
        test=parts["test"],
        population=Population(data["population/order"].numpy(), data["population/offsets"].numpy()),
        memory=memory,
    )


def with_shares(data: Tensors, processes: int) -> Tensors:
    """The data for several processes, among which the memory for images is divided."""
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


# A step allocates and frees the same few megabytes again and again. By default glibc returns them to the kernel each
# time and pays for fresh pages in the next step, so the process keeps them instead.
MALLOPT = {-1: 256 * 2**20, -3: 32 * 2**20, -2: 64 * 2**20}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_TOP_PAD: bytes


def keep_freed_memory() -> None:
    """Keep freed memory in this process, if its C library is glibc."""
    with suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOPT.items():
            mallopt(option, value)
