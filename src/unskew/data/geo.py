"""The partition ``geo``: photographs that were taken near each other belong to one client, a cell of the S2 grid.

Shapes: N examples, M of them with a place, K cells. Cells come from the official package ``s2geometry`` (extra geo).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unskew.core.errors import UserError
from unskew.core.plugins import require_extra
from unskew.core.units import counted
from unskew.data.population import Clients, Partition

Places = npt.NDArray[np.float64]  # [N, 2], latitude and longitude in degrees; NaN where unknown
Cells = npt.NDArray[np.uint64]

LEAF = 30  # the level of the smallest cells, about a square centimetre; the six faces of the cube have level 0
LIMITS = (("latitude", 90.0), ("longitude", 180.0))


@dataclass(frozen=True)
class Geo:
    """The knobs of ``geo``: the most examples of a cell, and the fewest of one that is kept.

    Starting from the six faces of the S2 cube, a cell with more than ``max`` examples is divided into its four
    children, until none has more. Then cells with fewer than ``min`` are dropped; without ``min`` it is 0.01·max
    (Hsu, Qi and Brown 2020, section 4.1, N_max and N_min).
    """

    max: int = 1000
    min: int | None = None

    def __post_init__(self) -> None:
        if self.max < 1:
            raise ValueError(f"geo: max counts examples of a cell, give at least 1, not {self.max}")
        if self.min is not None and not 0 <= self.min <= self.max:
            raise ValueError(f"geo: min counts examples of a cell, give 0 to max ({self.max}), not {self.min}")

    @property
    def least(self) -> float:
        """How many examples a cell must have to be a client."""
        return self.max / 100 if self.min is None else self.min


def deal(geo: Geo, places: Places, *, scheme: str, seed: int) -> Partition:
    """The partition into cells: clients are numbered along S2's curve and named by their cells' tokens.

    It depends on the places alone: not on the seed, nor on the order of the rows. Examples without a place and those in
    cells that were dropped belong to no client; the notes count them.
    """
    known = _check(places)
    cell = np.zeros(len(places), np.uint64)
    cell[known] = divide(leaf_cells(places[known]), geo.max)
    tokens, inverse, sizes = np.unique(cell, return_inverse=True, return_counts=True)
    kept = (tokens > 0) & (sizes >= geo.least)
    if not kept.any():
        best = int(sizes[tokens > 0].max(initial=0))
        raise UserError(
            f"partition {scheme}: no cell has {geo.least:g} examples, the largest has {best}; give a smaller min"
        )
    number = np.where(kept, np.cumsum(kept) - 1, -1).astype(np.int32)
    client: Clients = number[inverse]
    client.flags.writeable = False
    names = tuple(token(int(each)) for each in tokens[kept])
    notes = _notes(geo, sizes[tokens > 0], int(np.count_nonzero(~known)))
    return Partition(client, len(names), scheme, seed, names, notes=notes)


def leaf_cells(places: Places) -> Cells:
    """[M] ids of the smallest cells that the places are in, by the S2 library."""
    s2 = require_extra("s2geometry", "geo")
    point, cell = s2.S2LatLng.FromDegrees, s2.S2CellId
    return np.fromiter((cell(point(*each)).id() for each in places.tolist()), np.uint64, len(places))


def divide(leaves: Cells, most: int) -> Cells:
    """[M] the cell of each leaf cell, when cells with more than ``most`` of them are divided, from the faces down.

    Leaf cells are not divided: if more than ``most`` photographs are from one square centimetre, they stay together.
    """
    order = np.argsort(leaves, kind="stable")
    left, found = leaves[order], np.zeros(len(leaves), np.uint64)
    at = np.arange(len(leaves))  # where what is left goes
    for level in range(LEAF + 1):
        cells = parents(left, level)
        starts = np.flatnonzero(np.concatenate([[True], cells[1:] != cells[:-1]])) if len(cells) else np.zeros(0, int)
        sizes = np.diff(np.append(starts, len(cells)))
        done = np.repeat((sizes <= most) | (level == LEAF), sizes)
        found[at[done]] = cells[done]
        left, at = left[~done], at[~done]
    out = np.empty_like(found)
    out[order] = found
    return out


def parents(leaves: Cells, level: int) -> Cells:
    """[M] the cells of that level which contain the leaf cells.

    An id is three bits for the face, two for each level, a 1 and zeros: the 1 marks the level.
    """
    mark = np.uint64(1 << 2 * (LEAF - level))
    cleared: Cells = leaves & ~np.uint64(2 * int(mark) - 1)
    return cleared | mark


def token(cell: int) -> str:
    """A cell's id as S2 writes it: hexadecimal, without the zeros at its end."""
    return f"{cell:016x}".rstrip("0")


def _check(places: Places) -> npt.NDArray[np.bool_]:
    """[N] which places are known; half of one, or one that is not on Earth, is refused with its row."""
    known = ~np.isnan(places)
    if len(half := np.flatnonzero(known[:, 0] != known[:, 1])):
        has, lacks = ("latitude", "longitude") if known[half[0], 0] else ("longitude", "latitude")
        raise UserError(f"partition geo: training example {half[0]} has a {has} and no {lacks}; give both or neither")
    for column, (what, most) in enumerate(LIMITS):
        if len(wrong := np.flatnonzero(np.abs(places[:, column]) > most)):
            raise UserError(
                f"partition geo: training example {wrong[0]} has the {what} {places[wrong[0], column]:g}; it goes from "
                f"−{most:g} to {most:g} degrees"
            )
    if not known.any():
        raise UserError("partition geo: no training example has a place; take users, dirichlet or file:FILE")
    both: npt.NDArray[np.bool_] = known[:, 0]
    return both


def _notes(geo: Geo, sizes: npt.NDArray[np.int64], unknown: int) -> tuple[str, ...]:
    """What the user should know of a partition: what belongs to no client, and cells that could not be divided."""
    small = sizes[sizes < geo.least]
    notes = []
    if len(small):
        lost = f"{counted(int(small.sum()), 'training example')} in {counted(len(small), 'cell')}"
        notes.append(f"left to no client: {lost} with fewer than {geo.least:g}")
    if unknown:
        notes.append(f"left to no client: {counted(unknown, 'training example')} without a place")
    if len(large := sizes[sizes > geo.max]):
        where = f"{counted(len(large), 'place')} of a square centimetre"
        notes.append(
            f"{where} with more than max={geo.max:,} examples, up to {int(large.max()):,}: not divided further"
        )
    return tuple(notes)
