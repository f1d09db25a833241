"""Batches as users have them: pairs or dicts of tensors, numpy arrays or lists, as images and labels on a device."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unskew.core.errors import UserError

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
    labels = labels if isinstance(labels, Tensor) else _tensor(labels, "labels")
    return images, labels.detach().cpu()


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
        words = f"{what} must be a tensor, a numpy array or a list of numbers, this is a {type(values).__name__}"
        raise UserError(f"{words} ({error})") from error
