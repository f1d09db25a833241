"""Batches as users have them: pairs or dicts of tensors, numpy arrays or lists, as images and labels on a device."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unskew.core.errors import UserError, a_kind

IMAGE_KEYS = ("image", "images", "pixel_values", "x", "img")
LABEL_KEYS = ("label", "labels", "y", "target")


def images_and_labels(batch: Any, device: torch.device, dtype: torch.dtype | None) -> tuple[Any, Tensor]:
    """Images on the device and labels [n] on the CPU, of a pair or a dict.

    Tensors keep their type. Arrays and lists of numbers become ``dtype``, the encoder's. Images of any other type are
    the encoder's own affair and stay as they are.
    """
    if isinstance(batch, Mapping):
        images, labels = _value(batch, IMAGE_KEYS, "images"), _value(batch, LABEL_KEYS, "labels")
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        images, labels = batch
    else:
        kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
        raise UserError(f"batches must be pairs of (images, labels) or dicts with both; this is a {kind}")
    if isinstance(images, np.ndarray | list | tuple):
        images = _tensor(images, "images")
        if dtype is not None:
            images = images.to(dtype)
    if isinstance(images, Tensor):
        images = images.to(device)
    return images, labels_of(labels)


def labels_of(labels: Any) -> Tensor:
    """Labels as a tensor on the CPU: whole numbers of any type as int64, anything else as it is."""
    values: Tensor = labels if isinstance(labels, Tensor) else _tensor(labels, "labels")
    values = values.detach().cpu()
    return values if values.is_floating_point() or values.is_complex() else values.long()


class Encoding:
    """The encoder as it is. Where it refuses images of another floating-point type, they become its own type first."""

    def __init__(self, encoder: nn.Module, dtype: torch.dtype | None) -> None:
        self._encoder, self._dtype, self._cast = encoder, dtype, False

    def __call__(self, images: Any) -> Any:
        """What the encoder makes of the images."""
        other = isinstance(images, Tensor) and images.is_floating_point() and images.dtype != self._dtype
        if not other or self._dtype is None or not self._dtype.is_floating_point:
            return self._encoder(images)
        if not self._cast:
            try:
                return self._encoder(images)
            except RuntimeError as error:
                if "type" not in str(error):  # "expected … to have the same dtype", "Input type … and weight type …"
                    raise
        features = self._encoder(images.to(self._dtype))
        self._cast = True
        return features


def check_batch(features: Any, labels: Tensor, classes: int) -> None:
    """Refuse a batch that statistics cannot be taken of."""
    if not isinstance(features, Tensor):
        raise UserError(f"features must be a tensor [n, d], this is {a_kind(features)}")
    if features.dim() != 2 or labels.dim() != 1 or len(features) != len(labels) or not features.shape[1]:
        raise UserError(
            f"features must be [n, d] and labels [n], these are {list(features.shape)} and {list(labels.shape)}"
        )
    if features.is_complex() or labels.is_complex() or labels.is_floating_point():
        raise UserError(f"features must be real, labels whole numbers; these are {features.dtype} and {labels.dtype}")
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise UserError(f"labels must be in 0..{classes - 1}, these go from {int(labels.min())} to {int(labels.max())}")
    if not bool(features.isfinite().all()):
        raise UserError("features hold NaN or infinity; the encoder or its images are broken")


@contextmanager
def resting(encoder: nn.Module) -> Iterator[None]:
    """The module in eval mode inside, each part as it was outside."""
    before = {part: part.training for part in encoder.modules()}
    encoder.eval()
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training


def _value(batch: Mapping[Any, Any], keys: tuple[str, ...], what: str) -> Any:
    for key in keys:
        if key in batch:
            return batch[key]
    there = ", ".join(map(repr, batch)) or "nothing"
    raise UserError(f"a dict batch must have its {what} under {', '.join(keys)}; in this one there is: {there}")


def _tensor(values: Any, what: str) -> Tensor:
    try:
        if isinstance(values, list | tuple) and values and isinstance(values[0], Tensor):
            return torch.stack(list(values))
        return torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        words = f"{what} must be a tensor, a numpy array or a list of numbers, this is {a_kind(values)}"
        raise UserError(f"{words} ({error})") from error
