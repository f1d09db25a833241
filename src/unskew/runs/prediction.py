"""A finished run's model for new pictures: uint8 [B, ch, H, W] in, probabilities [B, C] out."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from unskew.core.errors import UserError, accepts
from unskew.core.machine import neutral, ready_device
from unskew.data.augment import resize_images
from unskew.data.decode import Broken, center, decode
from unskew.data.photographs import Files, Parquet, Pictures, open_parquet
from unskew.data.tables import read_columns
from unskew.runs.finished import open_network
from unskew.runs.result import ModelInfo, Shape

AT_ONCE = 64  # pictures in a forward pass
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif")
TABLES = (".csv", ".parquet")

Bytes = npt.NDArray[np.uint8]


class Predictor(nn.Module):
    """Pictures as bytes -> probabilities: resizing, normalization, the network and its temperature in one module."""

    scale: Tensor
    offset: Tensor

    def __init__(
        self, network: nn.Module, info: ModelInfo, temperature: float = 1.0, calibration: str | None = None
    ) -> None:
        super().__init__()
        self.network, self.info, self.temperature, self.calibration = network, info, temperature, calibration
        mean, std = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (info.mean, info.std))
        self.register_buffer("scale", (1 / (255 * std)).float())
        self.register_buffer("offset", (-mean / std).float())
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """[B, ch, H, W], values 0 to 255 -> [B, C]."""
        images = images.to(torch.float32)
        if self.info.image != self.info.shape:
            images = resize_images(images, self.info.shape)
        logits: Tensor = self.network(images * self.scale + self.offset)
        return (logits / self.temperature).softmax(1)


def load_predictor(
    path: str | Path, calibration: str | None = None, *, trust: bool = False, model: Any = None
) -> Predictor:
    """A finished run's model from bytes to probabilities; parameters as in ``predict``."""
    run, name, network = open_network(path, calibration, trust=trust, model=model)
    scored = run.result if name is None else run.result.calibrations[name]
    return Predictor(network, run.info, scored.temperature or 1.0, name)


@dataclass(frozen=True, eq=False)
class Predictions:
    """The probabilities of the classes for some pictures."""

    names: tuple[str, ...]  # the pictures' paths or rows
    classes: tuple[str, ...]
    probabilities: npt.NDArray[np.float32]  # [N, C]
    labels: tuple[str, ...] | None = None  # the true classes, if a table has them

    @property
    def answers(self) -> list[str]:
        """The most probable class of each picture."""
        return [self.classes[index] for index in self.probabilities.argmax(1)]

    @property
    def accuracy(self) -> float | None:
        """The share of correct answers; None without labels."""
        return None if self.labels is None else float(np.mean(np.array(self.answers) == np.array(self.labels)))


@neutral()
@accepts
def predict(
    path: str | Path,
    pictures: str | Path | Sequence[str | Path] | Bytes,
    *,
    calibration: str | None = None,
    device: str = "cpu",
    trust: bool = False,
    model: Any = None,
) -> Predictions:
    """Classify new pictures with a finished run, without the training data.

    Parameters
    ----------
    path
        The run directory.
    pictures
        One or more pictures or folders of pictures, a table (.csv with a column path, or .parquet with path or image),
        or an array, uint8 [N, ch, H, W].
    calibration
        The calibrated classifier to use instead of the run's own.
    device
        Where to compute: cpu, cuda, cuda:N, mps or auto.
    trust, model
        As for ``unskew.load``.

    Returns
    -------
    Predictions
        Names, classes and probabilities.
    """
    predictor = load_predictor(path, calibration, trust=trust, model=model).to(ready_device(device))
    shape, classes = predictor.info.image, predictor.info.classes
    labels = None
    if isinstance(pictures, np.ndarray):
        if pictures.dtype != np.uint8 or pictures.shape[1:] != shape:
            given, needed = f"{pictures.dtype} {list(pictures.shape)}", ", ".join(map(str, shape))
            raise UserError(f"the array is {given}; give uint8 [N, {needed}]")
        names = tuple(map(str, range(len(pictures))))
    else:
        source, labels = find_pictures(pictures)
        names = tuple(source.name(row) for row in range(len(source)))
    probabilities = [np.zeros((0, len(classes)), np.float32)]
    with torch.no_grad():
        for first in range(0, len(names), AT_ONCE):
            rows = range(first, min(first + AT_ONCE, len(names)))
            images = pictures[first : rows.stop] if isinstance(pictures, np.ndarray) else _read(source, rows, shape)
            probabilities.append(predictor(torch.from_numpy(images).to(predictor.scale.device)).cpu().numpy())
    return Predictions(names, classes, np.concatenate(probabilities), labels)


def find_pictures(pictures: str | Path | Sequence[str | Path]) -> tuple[Pictures, tuple[str, ...] | None]:
    """The pictures, and their labels if a table has any."""
    try:
        paths = [Path(path) for path in ([pictures] if isinstance(pictures, str | PathLike) else pictures)]
    except TypeError:
        raise UserError(f"pictures must be paths or uint8 [N, ch, H, W], not {type(pictures).__name__}") from None
    if len(paths) == 1 and paths[0].suffix.lower() in TABLES and paths[0].is_file():
        return _open_table(paths[0])
    names: list[str] = []
    for path in paths:
        pictures_here = [path] if path.is_file() else [p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES]
        if not pictures_here:
            problem = "contains no pictures" if path.exists() else "does not exist"
            raise UserError(f"{path} {problem}; give files or folders of {', '.join(SUFFIXES)}, or a single table")
        names += sorted(map(str, pictures_here))
    return Files.of(Path(), names), None


def _open_table(path: Path) -> tuple[Pictures, tuple[str, ...] | None]:
    root = path.absolute().parent
    if path.suffix.lower() == ".csv":
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            header = [name.strip() for name in file.readline().split(",")]
        columns = read_columns(path, ["path", *(["label"] if "label" in header else [])])
        return Files.of(root, columns[0]), tuple(columns[1]) if len(columns) > 1 else None
    parquet = open_parquet(path)
    names = parquet.schema_arrow.names
    column = next((name for name in ("image", "path") if name in names), None)
    if column is None:
        raise UserError(f"{path} has neither a column path nor image; its columns are {', '.join(names)}")

    def read(name: str) -> tuple[str, ...]:
        return tuple(map(str, parquet.read(columns=[name]).column(name).to_pylist()))

    labels = read("label") if "label" in names else None
    if column == "path":
        return Files.of(root, read("path")), labels
    return Parquet(path.absolute(), column, np.arange(parquet.metadata.num_rows)), labels


def _read(source: Pictures, rows: range, shape: Shape) -> Bytes:
    """uint8 [B, ch, H, W], scaled and cropped as the training pictures were."""
    images, size = np.empty((len(rows), *shape), np.uint8), shape[1] if shape[1] == shape[2] else None
    for image, row, content in zip(images, rows, source.contents(list(rows)), strict=True):
        try:
            with warnings.catch_warnings(action="ignore"):
                pixels = center(decode(content, size), size)
        except Broken as error:
            raise UserError(f"{source.name(row)} {error}; replace it, or leave it out") from error
        if pixels.shape[0] == 3 and shape[0] == 1:
            pixels = np.asarray(Image.fromarray(pixels.transpose(1, 2, 0)).convert("L"))[None]
        if pixels.shape[1:] != shape[1:]:
            scaled = resize_images(torch.from_numpy(pixels.copy())[None].float(), (len(pixels), *shape[1:]))
            pixels = scaled[0].round().clamp(0, 255).byte().numpy()
        image[:] = pixels  # grey becomes three equal channels
    return images


def list_predictions(predictions: Predictions) -> list[dict[str, Any]]:
    """A record for each picture: its class, its label if known, and the probability of every class."""
    rows = [[round(share, 6) for share in row] for row in predictions.probabilities.tolist()]
    labels = [{"label": label} for label in predictions.labels or ()] or [{}] * len(rows)
    return [
        {"picture": name, "class": answer, "probability": max(row)}
        | label
        | {"probabilities": dict(zip(predictions.classes, row, strict=True))}
        for name, answer, label, row in zip(predictions.names, predictions.answers, labels, rows, strict=True)
    ]
