"""A population of photographers that does not exist, with the shape of iNaturalist-User-120k: for tests and benchmarks.

Users, classes and places have long tails; the pictures are patterns. Accuracy on them says nothing about iNaturalist.
Shapes: N examples, U users, C classes.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from PIL import Image

from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.rows import Rows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Chosen so that EMD and the numbers of geo clients are near those of the paper: docs/data.md has both.
SIZES = 1.75  # deviation of the logarithm of users' sizes
REGIONS, RANK = 40, 1.2  # where people live: region r has r^−RANK of them
REGION, TRAVEL = (4.0, 0.7), (0.1, 1.2)  # degrees from a region's centre, and from home; deviation of their logarithm
RANGE = (0.02, 0.4)  # of a species, as a part of all places: from rare to everywhere
TAIL = 1.611  # deviation of the logarithm of classes' sizes, where they are not balanced

MOST = 10_000_000  # examples
BATCH = 1000  # pictures drawn at a time, and in a folder
GRID = 4  # a picture is a pattern of 4×4 colours, drawn larger
NOISE = 20.0  # deviation of its colours, of 0 to 255; with three times that, classes are hard to tell apart


@dataclass(frozen=True)
class Shape:
    """How large a population is: by default as iNaturalist-User-120k, which has 100 training examples of each class."""

    users: int = 9275
    classes: int = 1203
    examples: int = 120_300
    test: int = 12_030
    balanced: bool = True

    def __post_init__(self) -> None:
        for name, least in (("users", 1), ("classes", 2), ("test", 1)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} {getattr(self, name)}: give at least {least}")
        if self.examples < (least := max(self.users, self.classes)):
            raise UserError(f"--examples {self.examples}: each user and each class has one, give at least {least}")
        if self.examples + self.test > MOST:
            raise UserError(f"--examples {self.examples} and --test {self.test}: give at most {MOST:,} together")


def draw_rows(shape: Shape, root: Path, *, seed: int = 0) -> Rows:
    """The table: training examples user by user, then test examples of the same users and classes."""
    key = Key(seed).fold("population")
    train, test = (_part(shape, count, key, name) for name, count in (("train", shape.examples), ("test", shape.test)))
    labels, users, places = (np.concatenate(columns) for columns in zip(train, test, strict=True))
    paths = np.array([f"{n // BATCH:04d}/{n:07d}.jpg" for n in range(len(labels))], np.str_)
    classes = tuple(f"class {c:0{len(str(shape.classes - 1))}d}" for c in range(shape.classes))
    names = np.array([f"user {u}" for u in range(shape.users)], np.str_)[users]
    notes = ("a drawn population, not iNaturalist: accuracy on it says nothing about iNaturalist",)
    return Rows(root, paths, labels, classes, np.arange(len(labels)) >= shape.examples, names, places, notes)


def pictures(rows: Rows, *, size: int = 32, seed: int = 0, noise: float = NOISE) -> Iterator[bytes]:
    """A small JPEG for each row: its class's pattern in the light of its user's camera, and noise."""
    key = Key(seed).fold("pictures")
    pattern = key.fold("classes").numpy().uniform(40, 215, (len(rows.classes), GRID, GRID, 3))
    users = np.unique(rows.users, return_inverse=True)[1] if rows.users is not None else np.zeros(len(rows), int)
    light = key.fold("users").numpy().normal(0, 12, (int(users.max(initial=0)) + 1, 1, 1, 3))
    for first in range(0, len(rows), BATCH):
        own = slice(first, first + BATCH)
        grain = key.fold("noise", first).numpy().normal(0, noise, (len(rows.labels[own]), GRID, GRID, 3))
        colours = np.clip(pattern[rows.labels[own]] + light[users[own]] + grain, 0, 255).astype(np.uint8)
        for each in colours:
            packed = io.BytesIO()
            Image.fromarray(each).resize((size, size), Image.Resampling.BICUBIC).save(packed, "JPEG", quality=85)
            yield packed.getvalue()


def _part(shape: Shape, count: int, key: Key, name: str) -> tuple[Ints, Ints, Floats]:
    """Label, user and place of ``count`` examples.

    Places are put in order along a curve over the map, and classes along a line on which each has a home and a range:
    the n-th place gets the n-th class. So neighbours see the same species, and all sizes are met exactly.
    """
    draw = key.fold(name).numpy()
    weight = key.fold("users").numpy().lognormal(0, SIZES, shape.users)
    user = np.repeat(np.arange(shape.users), shares(weight, count, least=int(count >= shape.users)))
    place = _homes(shape.users, key)[user] + _steps(draw, count, *TRAVEL)
    place[:, 0] = np.clip(place[:, 0], -89, 89)
    place[:, 1] = (place[:, 1] + 180) % 360 - 180
    label = np.repeat(np.arange(shape.classes), class_sizes(shape, count))
    line = key.fold("classes").numpy()
    home, width = line.random(shape.classes), np.exp(line.uniform(np.log(RANGE[0]), np.log(RANGE[1]), shape.classes))
    position = (home[label] + width[label] * draw.standard_normal(count)) % 1
    labels = np.empty(count, np.int64)
    labels[np.argsort(_along_curve(place), kind="stable")] = label[np.argsort(position, kind="stable")]
    return labels, user.astype(np.int64), place


def shares(weight: Floats, total: int, *, least: int) -> Ints:
    """``total`` in whole shares by weight, at least ``least`` each; what rounding leaves goes to the largest rests."""
    exact = weight / weight.sum() * (total - least * len(weight))
    whole: Ints = np.floor(exact).astype(np.int64)
    short = total - least * len(weight) - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:short]] += 1
    whole += least
    return whole


def class_sizes(shape: Shape, count: int) -> Ints:
    """[C] how many of ``count`` examples each class has: the same, or with the long tail of iNaturalist-2017.

    There the logarithm of sizes is normal: of 5,089 classes with 579,184 examples, 1,203 have 100 or more.
    """
    if shape.balanced:
        return shares(np.ones(shape.classes), count, least=int(count >= shape.classes))
    rank = (np.arange(shape.classes) + 0.5) / shape.classes  # the largest first
    weight = np.exp(-TAIL * np.array([NormalDist().inv_cdf(each) for each in rank]))
    return shares(weight, count, least=int(count >= shape.classes))


def _homes(users: int, key: Key) -> Floats:
    """[U, 2] where the users live: in regions of which few have most of the people."""
    draw = key.fold("homes").numpy()
    centre = np.stack([np.degrees(np.arcsin(draw.uniform(-0.8, 0.95, REGIONS))), draw.uniform(-180, 180, REGIONS)], 1)
    people = np.arange(1, REGIONS + 1) ** -RANK
    return centre[draw.choice(REGIONS, users, p=people / people.sum())] + _steps(draw, users, *REGION)


def _steps(draw: np.random.Generator, count: int, degrees: float, spread: float) -> Floats:
    """[count, 2] ways in any direction, most short and few long."""
    return draw.standard_normal((count, 2)) * degrees * draw.lognormal(0, spread, (count, 1))


def _along_curve(place: Floats) -> Ints:
    """[N] the number of each place along a Z-shaped curve over the map: the bits of both degrees in turn."""
    grid = np.clip(((place / [180, 360] + 0.5) * 65536).astype(np.int64), 0, 65535)
    code = np.zeros(len(place), np.int64)
    for bit in range(16):
        for column in range(2):
            code |= (grid[:, column] >> bit & 1) << (2 * bit + 1 - column)
    return code
