"""What a run starts from: pretrained weights, how images are brought to the network, which layers are trained."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unskew import models
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.machine import physical_memory
from unskew.core.types import ImageSet, Tensors
from unskew.core.units import counted, format_bytes
from unskew.data.augment import DATA, normalised
from unskew.engines.features import stored_bytes
from unskew.models import pretrained
from unskew.models.finetune import find_cut, last_layers, parse_train
from unskew.models.layers import Network
from unskew.runs import config as configs
from unskew.runs.config import SHA256, Config

MEMORY_SHARE = 3  # stored features may take one part in so many of the memory


@dataclass(frozen=True)
class FirstModel:
    """A run's start: the configuration and images as it uses them, the network's shape, the weights of the file."""

    config: Config
    images: ImageSet  # normalised as the network expects
    shape: tuple[int, int, int]  # of the images that the network takes
    layers: int | None  # how many at the end are trained; None: all
    stored: bool  # whether the frozen part's output is stored
    file: Tensors  # what the network takes from the file, by the names of ``tensors.of_module``
    notes: tuple[str, ...] = ()


def first_model(config: Config, images: ImageSet, model: Any, finished: Tensors | None) -> FirstModel:
    """Read the pretrained weights, fill in what follows from them. ``model`` is the network's name, or its factory.

    ``finished`` are the whole network's weights at the end of a run, by their plain names: then no file is read.
    """
    channels, height, width = images.shape
    side = config.resize
    shape = (channels, side or height, side or width)
    name = config.model or models.suited(shape)
    config = replace(config, model=name)
    layers = parse_train(config.train)
    file, notes = finished or {}, list[str]()
    if config.pretrained is not None and finished is None:
        config, file = _read(config)
    if config.pretrained is not None and channels == 1 and _takes_colour(model or name, shape, images, file):
        shape = (3, *shape[1:])
        notes.append("grey images are repeated as three channels, which the pretrained network takes")
    config = replace(config, normalise=config.normalise or _expected(config))
    images = normalised(images, config.normalise or DATA, shape[0])
    config = _augmented(config, images, layers)
    fitted, stored = dict[str, Tensor](), False
    if config.pretrained is not None or layers is not None:
        network = models.build(model or name, shape, len(images.classes))
    if config.pretrained is not None and finished is None:
        fitted, said = _fitted(network, file, config)
        notes += said
    if layers is not None:
        stored, said = _stored(config, images, network, shape, layers)
        notes += [_trained_words(config.train, network, layers, shape), *said]
    if side and (height, width) != (side, side):
        notes.append(f"images are scaled from {width}x{height} to {side}x{side} pixels")
    return FirstModel(config, images, shape, layers, stored, fitted, tuple(notes))


def _read(config: Config) -> tuple[Config, Tensors]:
    """The file's tensors, and the configuration with their hash, which they must have where it is there already."""
    where, _, known = (config.pretrained or "").partition(SHA256)
    if configs.from_python(config.model):
        path = Path(where)
    else:
        path = pretrained.imagenet_file(config.model or "") if where == pretrained.IMAGENET else Path(where)
    values = pretrained.read_weights(path)
    found = pretrained.sha256(values)
    if known and known != found:
        raise UserError(
            f"--pretrained {where} has other weights (sha256 {found}…) than the run was started with ({known}…); give "
            "that file, or start another run"
        )
    return replace(config, pretrained=f"{where}{SHA256}{found}"), values


def _fitted(network: Network, file: Tensors, config: Config) -> tuple[Tensors, list[str]]:
    where, _, sha256 = (config.pretrained or "").partition(SHA256)
    fit = pretrained.fit(network, file, where, config.model or "")
    words = f"starts from {where} (sha256 {sha256}), pixels normalised as --normalise {config.normalise}"
    if fit.left_out:
        reasons = dict.fromkeys(fit.left_out, "not in the file")
        if fit.classes is not None:  # the last of them is the classifier
            here = network.classifier.out_features
            counts = f"{fit.classes:,} classes in the file, {here:,} here"
            reasons[fit.left_out[-1]] = counts if fit.classes != here else "of another shape in the file"
        layers = " and ".join(f"{layer} ({reason})" for layer, reason in reasons.items())
        words += f"; {layers} {'starts' if len(reasons) == 1 else 'start'} as drawn from the seed"
    return fit.values, [words]


def _expected(config: Config) -> str | None:
    """How the pretrained network's pixels were normalised; None without one: as the data set says."""
    if config.pretrained is None:
        return None
    where, name = config.pretrained.partition(SHA256)[0], (config.model or "").partition("(")[0]
    if name == pretrained.IMAGENET_FOR and where == pretrained.IMAGENET:
        return "lite"
    if (Path(where).parent / configs.CONFIG).is_file():  # of a run of ours
        return configs.read_run(Path(where).parent).normalise or DATA
    if name == pretrained.IMAGENET_FOR:
        return "lite"
    return "imagenet" if name in models.PUBLIC else DATA


def _takes_colour(model: Any, shape: tuple[int, int, int], images: ImageSet, file: Tensors) -> bool:
    """Whether the file's first convolution takes three channels where the network for these images takes one."""
    network = models.build(model, shape, len(images.classes))
    first = next((name for name, part in network.named_modules() if isinstance(part, nn.Conv2d)), None)
    weights = [value for name, value in file.items() if name.endswith(f"{first}.weight")]  # wrappers may be before it
    return any(weight.dim() == 4 and weight.shape[1] == 3 for weight in weights)


def _augmented(config: Config, images: ImageSet, layers: int | None) -> Config:
    """Augmentation as suits the data; a frozen part's output is stored once, so there only where it is asked for."""
    if config.views is not None:
        if layers is None:
            raise UserError(f"--views {config.views}: only a frozen part's output is stored; give --train too")
        if config.augment is False:
            raise UserError(f"--views {config.views}: views are of augmented images; leave --no-augment out")
        return replace(config, augment=True)
    if config.augment is None:
        return replace(config, augment=images.augment and layers is None)
    return config


def _stored(
    config: Config, images: ImageSet, network: Network, shape: tuple[int, int, int], layers: int
) -> tuple[bool, list[str]]:
    """Whether the frozen part's output is stored, and a note where it is not."""
    again = "the frozen part runs again at every step"
    if config.augment and config.views is None:
        return False, [f"every step augments its images, so {again}; --views 4 stores four views of each image instead"]
    cut = find_cut(network, shape, layers)
    if cut is None:
        return False, [f"no place was found where this network can be cut in two, so {again}"]
    size = stored_bytes(images, cut.shape, config.views or 0)
    if size > (most := physical_memory() / MEMORY_SHARE):
        return False, [
            f"its output for all images would take {format_bytes(size)}, and {format_bytes(most)} is the limit, so "
            f"{again}"
        ]
    return True, []


def _trained_words(train: str, network: Network, layers: int, shape: tuple[int, int, int]) -> str:
    trained = {id(v) for part in last_layers(network, shape, layers)[0] for v in part.parameters()}
    counts = [(id(value) in trained, value.numel()) for value in network.parameters()]
    some, total = sum(n for mine, n in counts if mine), sum(n for _, n in counts)
    return f"--train {train}: {some:,} of {counted(total, 'parameter')} are trained and sent, the others are frozen"


def first_weights(network: Network, file: Tensors, key: Any) -> Tensors:
    """The whole network's weights before the first round: drawn from the key, those of the file over them."""
    models.initialise(network, key)
    tensors.overwrite_some(network, file)
    return tensors.copy(tensors.of_module(network))
