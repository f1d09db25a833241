"""Bytes and 64-bit words as sums: an engine adds float64 numbers, and what it adds must come through exactly.

Of bytes six make a number, below 2⁴⁸; each client has a row of its own, where all others add zero. Of a word the lower
and the upper 32 bits are a number each: sums of up to two million of them are exact.

Shapes: n clients, L bytes, P = ⌈L/6⌉ numbers of a row.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unskew.core.types import Sums

PACK = 6  # bytes in a number
HALF, MASK = np.uint64(32), np.uint64(2**32 - 1)  # bits of a half word, and which
LOW, HIGH = "low/", "high/"

Bytes = npt.NDArray[np.uint8]


def numbers_for(length: int) -> int:
    """P, the numbers that so many bytes take."""
    return -(-length // PACK)


def packed(content: Bytes) -> Tensor:
    """[…, L] bytes as […, P] float64."""
    length = content.shape[-1]
    padded = np.zeros((*content.shape[:-1], numbers_for(length), PACK), np.float64)
    padded.reshape(*content.shape[:-1], -1)[..., :length] = content
    return torch.from_numpy(padded @ 256.0 ** np.arange(PACK))


def unpacked(numbers: Tensor, length: int) -> Bytes:
    """[…, P] float64 as […, L] bytes."""
    whole = numbers.numpy().astype(np.uint64)[..., None] >> (np.uint64(8) * np.arange(PACK, dtype=np.uint64))
    return (whole & np.uint64(255)).astype(np.uint8).reshape(*numbers.shape[:-1], -1)[..., :length]


def as_bytes(contents: Mapping[int, bytes], count: int, length: int) -> Bytes:
    """[count, L], each content in the row of its number, zeros elsewhere."""
    rows = np.zeros((count, length), np.uint8)
    for row, content in contents.items():
        rows[row] = np.frombuffer(content, np.uint8)
    return rows


def in_row(row: int, count: int, values: Tensor) -> Tensor:
    """[count, …], the values in their row and zeros in all others."""
    rows = torch.zeros(count, *values.shape, dtype=torch.float64)
    rows[row] = values
    return rows


def halves(words: Mapping[str, Tensor]) -> Sums:
    """Words of 64 bits by name as two sums each."""
    sums: Sums = {}
    for name, value in words.items():
        whole = value.numpy().view(np.uint64)
        sums[LOW + name] = torch.from_numpy(np.asarray(whole & MASK, dtype=np.float64))
        sums[HIGH + name] = torch.from_numpy(np.asarray(whole >> HALF, dtype=np.float64))
    return sums


def joined(sums: Sums) -> dict[str, Tensor]:
    """The words whose halves were added up, modulo 2⁶⁴, as int64."""
    words = {}
    for name in (each.removeprefix(LOW) for each in sums if each.startswith(LOW)):
        low, high = (sums[half + name].numpy().astype(np.uint64) for half in (LOW, HIGH))
        words[name] = torch.from_numpy(np.asarray(low + (high << HALF)).view(np.int64))
    return words
