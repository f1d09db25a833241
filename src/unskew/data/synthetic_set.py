"""A synthetic population of photographers, as an image set in memory or a table with pictures.

In memory: ``--data "unskew.data.synthetic_set:population(users=300)"``.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from PIL import Image

from unskew.core.errors import UserError
from unskew.core.files import in_pieces, write_again, write_whole
from unskew.core.key import Key
from unskew.core.plugins import require_extra
from unskew.core.types import ImageSet, Split
from unskew.data.interface import Rows
from unskew.data.tables import table_columns, table_csv

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Chosen so that EMD and the numbers of geo clients are close to the paper's; docs/how-to/data.md compares them.
SIZES = 1.75  # standard deviation of the logarithm of users' sizes
REGIONS, RANK = 40, 1.2  # where people live: region r has a share proportional to r^−RANK
REGION, TRAVEL = (4.0, 0.7), (0.1, 1.2)  # degrees from a region's center, and from home; deviation of their logarithm
RANGE = (0.02, 0.4)  # of a species, as a fraction of all places: from rare to everywhere
TAIL = 1.611  # standard deviation of the logarithm of class sizes that are not balanced

MOST = 10_000_000  # examples
BATCH = 1000  # pictures drawn at a time, and per folder
GRID = 4  # a picture is an enlarged pattern of 4×4 colors
NOISE = 20.0  # standard deviation of its colors in 0..255; at three times that, classes are hard to tell apart


@dataclass(frozen=True)
class Shape:
    """The size of a population: by default that of iNaturalist-User-120k, with 100 training examples per class."""

    users: int = 9275
    classes: int = 1203
    examples: int = 120_300
    test: int = 12_030
    balanced: bool = True

    def __post_init__(self) -> None:
        fewest = max(self.users, self.classes)
        if self.users < 1 or self.classes < 2 or self.test < 1 or not fewest <= self.examples <= MOST - self.test:
            wanted = f"1 user, 2 classes, 1 test example, and {fewest:,} to {MOST:,} examples"
            raise UserError(f"the population is too small or too large: give at least {wanted}")


def draw_rows(shape: Shape, root: Path, *, seed: int = 0) -> Rows:
    """List the training examples, user by user, then test examples of the same users and classes."""
    key = Key(seed).fold("population")
    train, test = (_part(shape, count, key, name) for name, count in (("train", shape.examples), ("test", shape.test)))
    labels, users, places = (np.concatenate(columns) for columns in zip(train, test, strict=True))
    paths = [f"{n // BATCH:04d}/{n:07d}.jpg" for n in range(len(labels))]
    classes = tuple(f"class {c:0{len(str(shape.classes - 1))}d}" for c in range(shape.classes))
    names = np.array([f"user {u}" for u in range(shape.users)], np.str_)[users]
    notes = ("this is a synthetic population: accuracy on it does not predict accuracy on iNaturalist",)
    return Rows(root, paths, labels, classes, np.arange(len(labels)) >= shape.examples, names, places, notes)


def pictures(rows: Rows, *, size: int = 32, seed: int = 0, noise: float = NOISE) -> Iterator[bytes]:
    """A small JPEG for each row: its class's pattern, tinted by its user's camera, with noise."""
    key = Key(seed).fold("pictures")
    pattern = key.fold("classes").numpy().uniform(40, 215, (len(rows.classes), GRID, GRID, 3))
    users = np.unique(rows.users, return_inverse=True)[1] if rows.users is not None else np.zeros(len(rows), int)
    light = key.fold("users").numpy().normal(0, 12, (int(users.max(initial=0)) + 1, 1, 1, 3))
    for first in range(0, len(rows), BATCH):
        batch = slice(first, first + BATCH)
        grain = key.fold("noise", first).numpy().normal(0, noise, (len(rows.labels[batch]), GRID, GRID, 3))
        for colors in np.clip(pattern[rows.labels[batch]] + light[users[batch]] + grain, 0, 255).astype(np.uint8):
            packed = io.BytesIO()
            Image.fromarray(colors).resize((size, size), Image.Resampling.BICUBIC).save(packed, "JPEG", quality=85)
            yield packed.getvalue()


def _part(shape: Shape, count: int, key: Key, name: str) -> tuple[Ints, Ints, Floats]:
    """Label, user and place of ``count`` examples.

    Places are sorted along a curve over the map, classes along a line on which each has a home and a range, and the
    n-th place gets the n-th class. So neighbors see the same species, and all sizes are exact.
    """
    draw = key.fold(name).numpy()
    weight = key.fold("users").numpy().lognormal(0, SIZES, shape.users)
    user = np.repeat(np.arange(shape.users), shares(weight, count, least=int(count >= shape.users)))
    homes = key.fold("homes").numpy()
    latitude, longitude = np.degrees(np.arcsin(homes.uniform(-0.8, 0.95, REGIONS))), homes.uniform(-180, 180, REGIONS)
    people = np.arange(1, REGIONS + 1) ** -RANK
    region = homes.choice(REGIONS, shape.users, p=people / people.sum())
    lives = np.stack([latitude, longitude], 1)[region] + _steps(homes, shape.users, *REGION)
    location = lives[user] + _steps(draw, count, *TRAVEL)
    location[:, 0] = np.clip(location[:, 0], -89, 89)
    location[:, 1] = (location[:, 1] + 180) % 360 - 180
    label = np.repeat(np.arange(shape.classes), class_sizes(shape, count))
    line = key.fold("classes").numpy()
    home, width = line.random(shape.classes), np.exp(line.uniform(np.log(RANGE[0]), np.log(RANGE[1]), shape.classes))
    position = (home[label] + width[label] * draw.standard_normal(count)) % 1
    labels = np.empty(count, np.int64)
    labels[np.argsort(_along_curve(location), kind="stable")] = label[np.argsort(position, kind="stable")]
    return labels, user.astype(np.int64), location


def shares(weight: Floats, total: int, *, least: int) -> Ints:
    """Split ``total`` into integers by weight, at least ``least`` each, by largest remainders."""
    exact = weight / weight.sum() * (total - least * len(weight))
    counts: Ints = np.floor(exact).astype(np.int64)
    short = total - least * len(weight) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    counts += least
    return counts


def class_sizes(shape: Shape, count: int) -> Ints:
    """[C], the sizes of the classes: equal, or with the long tail of iNaturalist-2017.

    There the logarithm of sizes is normal: of 5,089 classes with 579,184 examples, 1,203 have 100 or more.
    """
    weight = np.ones(shape.classes)
    if not shape.balanced:
        rank = (np.arange(shape.classes) + 0.5) / shape.classes  # the largest first
        weight = np.exp(-TAIL * np.array([NormalDist().inv_cdf(share) for share in rank]))
    return shares(weight, count, least=int(count >= shape.classes))


def _steps(draw: np.random.Generator, count: int, degrees: float, spread: float) -> Floats:
    return draw.standard_normal((count, 2)) * degrees * draw.lognormal(0, spread, (count, 1))


def _along_curve(location: Floats) -> Ints:
    """[N], the position of each place on a Z-order curve over the map: the interleaved bits of both degrees."""
    grid = np.clip(((location / [180, 360] + 0.5) * 65536).astype(np.int64), 0, 65535)
    code = np.zeros(len(location), np.int64)
    for bit in range(16):
        for column in range(2):
            code |= (grid[:, column] >> bit & 1) << (2 * bit + 1 - column)
    return code


Report = Callable[[int, int], None]  # pictures so far, and in total

GROUP = 500  # rows in a row group, which readers unpack together


def write_population(
    file: Path, shape: Shape, *, size: int | None = 32, seed: int = 0, report: Report = lambda done, total: None
) -> Rows:
    """Write the table and its pictures of ``size``×``size`` pixels; without a size, only their paths."""
    if file.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {file}: give a file name that ends with .csv or .parquet")
    if size is not None and not 4 <= size <= 512:
        raise UserError(f"--size {size}: size must be 4 to 512 pixels")
    rows = draw_rows(shape, file.parent / f"{file.stem}-pictures", seed=seed)
    drawn = iter(()) if size is None else pictures(rows, size=size, seed=seed)
    if file.suffix == ".csv":
        for done, content in enumerate(drawn):
            write_again(rows.root / rows.paths[done], content)
            if done % GROUP == 0:
                report(done, len(rows))
        write_whole(file, table_csv(rows, file))
        return rows
    pyarrow, parquet = require_extra("pyarrow", "tables"), require_extra("pyarrow.parquet", "tables")
    writer = None
    with in_pieces(file) as temporary, ExitStack() as stack:
        for start in range(0, len(rows), GROUP):  # all pictures together may not fit in memory
            part = rows.part(np.arange(start, min(start + GROUP, len(rows))))
            columns = table_columns(part)
            if size is not None:
                del columns["path"]
                columns = {"image": pyarrow.array(list(islice(drawn, len(part))), pyarrow.binary()), **columns}
                report(start, len(rows))
            table = pyarrow.table(columns)
            writer = writer or stack.enter_context(parquet.ParquetWriter(temporary, table.schema))
            writer.write_table(table)
    return rows


def population(
    users: int = Shape.users, classes: int = Shape.classes, examples: int = Shape.examples, test: int = Shape.test,
    size: int = 32, seed: int = 0, noise: float = NOISE,
) -> ImageSet:  # fmt: skip
    """The population that ``unskew data generate`` draws, without a file."""
    if not 4 <= size <= 512:
        raise UserError(f"population(size={size}): size must be 4 to 512 pixels")
    if not 0 <= noise <= 1000:
        raise UserError(f"population(noise={noise}): noise must be 0 to 1000")
    rows = draw_rows(Shape(users, classes, examples, test), Path(), seed=seed)
    drawn = pictures(rows, size=size, seed=seed, noise=noise)
    images = np.stack([np.asarray(Image.open(io.BytesIO(c)).convert("RGB")).transpose(2, 0, 1) for c in drawn])
    train, held = (rows.part(np.flatnonzero(part)) for part in (~rows.test, rows.test))
    pixels = images[~rows.test].reshape(len(train), 3, -1) / 255
    mean, std = tuple(pixels.mean((0, 2)).tolist()), tuple(pixels.std((0, 2)).tolist())
    splits = Split(images[~rows.test], train.labels), Split(images[rows.test], held.labels)
    return ImageSet(
        "population", rows.classes, *splits, mean, std, users=train.users, notes=rows.notes, places=train.places,
        test_users=held.users,
    )  # fmt: skip
