"""Gaussian noise for releases: from the operating system, or from a key for studies that must be repeatable."""

import os

import numpy as np
import torch
from torch import Tensor

from unskew.core.key import Key


def normal(shape: tuple[int, ...], key: Key | None, *path: str | int) -> Tensor:
    """Standard Gaussian noise from 64 random bits a value: a sign, and the quantile of 63 bits, out to 9.1."""
    size = 8 * torch.Size(shape).numel()
    drawn = os.urandom(size) if key is None else key.fold("noise", *path).numpy().bytes(size)
    words = torch.from_numpy(np.frombuffer(drawn, dtype="<i8").copy()).reshape(shape)
    share = ((words & (2**63 - 1)).double() + 0.5) * 2.0**-64  # (0, ½]
    noise: Tensor = torch.special.ndtri(share) * torch.where(words < 0, 1.0, -1.0)
    return noise
