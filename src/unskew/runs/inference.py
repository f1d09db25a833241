"""A finished run's model for new pictures: bytes in, probabilities out.

Shapes: B pictures, uint8 [B, ch, H, W] as the data set has them; probabilities [B, C].
"""

import json
import warnings
from collections.abc import Iterable, Sequence
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
from unskew.runs.finished import FinishedRun, find_calibration, load_network
from unskew.runs.result import ModelInfo, Shape

AT_ONCE = 64  # pictures in a forward pass
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2", ".avif")
TABLES = (".csv", ".parquet")

Bytes = npt.NDArray[np.uint8]


class Predictor(nn.Module):
    """Pictures as bytes -> probabilities: resizing, normalization, the network and its temperature in one module.

    Parameters
    ----------
    network
        Normalized images -> logits.
    info
        The model's inputs and classes.
    temperature
        Divides the logits before the softmax.
    calibration
        The name of the calibrated classifier in the network; None for the run's own.
    """

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
    run = FinishedRun(path, device="cpu", values={"model": model}, trust=trust, only_model=True)
    name = find_calibration(run, calibration)
    scored = run.result if name is None else run.result.calibrations[name]
    return Predictor(load_network(run, name), run.info, scored.temperature or 1.0, name)


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
        if self.labels is None:
            return None
        return float(np.mean([answer == label for answer, label in zip(self.answers, self.labels, strict=True)]))


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
    trust
        Whether the network may be a plug-in of somebody else's run directory.
    model
        The run's network, if it was passed from Python.

    Returns
    -------
    Predictions
        Names, classes and probabilities.
    """
    predictor = load_predictor(path, calibration, trust=trust, model=model).to(ready_device(device))
    if isinstance(pictures, np.ndarray):
        if pictures.dtype != np.uint8 or pictures.shape[1:] != predictor.info.image:
            expected = ", ".join(map(str, predictor.info.image))
            raise UserError(f"the array is {pictures.dtype} {list(pictures.shape)}; give uint8 [N, {expected}]")
        names = tuple(str(row) for row in range(len(pictures)))
        batches: Iterable[Bytes] = (pictures[row : row + AT_ONCE] for row in range(0, len(pictures), AT_ONCE))
        return Predictions(names, predictor.info.classes, _classify(predictor, batches))
    source, labels = find_pictures(pictures)
    rows = range(0, len(source), AT_ONCE)
    batches = (_read(source, range(row, min(row + AT_ONCE, len(source))), predictor.info.image) for row in rows)
    probabilities = _classify(predictor, batches)
    names = tuple(source.name(row) for row in range(len(source)))
    return Predictions(names, predictor.info.classes, probabilities, labels)


def _classify(predictor: Predictor, batches: Iterable[Bytes]) -> npt.NDArray[np.float32]:
    probabilities = [np.zeros((0, len(predictor.info.classes)), np.float32)]
    with torch.no_grad():
        for images in batches:
            probabilities.append(predictor(torch.from_numpy(images).to(predictor.scale.device)).cpu().numpy())
    return np.concatenate(probabilities)


def find_pictures(pictures: str | Path | Sequence[str | Path]) -> tuple[Pictures, tuple[str, ...] | None]:
    """The pictures, and their labels if a table has any."""
    several = [pictures] if isinstance(pictures, str | PathLike) else pictures
    if not isinstance(several, Sequence) or not all(isinstance(path, str | PathLike) for path in several):
        raise UserError(f"pictures must be paths or an array uint8 [N, ch, H, W], not {type(pictures).__name__}")
    paths = [Path(path) for path in several]
    tables = [path for path in paths if path.suffix.lower() in TABLES]
    if tables and len(paths) > 1:
        raise UserError(f"{tables[0]} is a table; give a single table, or pictures and folders")
    if tables:
        return _open_table(tables[0])
    names: list[str] = []
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
            if not files:
                raise UserError(f"{path} contains no pictures ({', '.join(SUFFIXES)}); give another folder")
            names += map(str, files)
        elif not path.exists():
            raise UserError(f"{path} does not exist; give pictures, a folder of pictures, or a table")
        else:
            names.append(str(path))
    return Files.of(Path(), names), None


def _open_table(path: Path) -> tuple[Pictures, tuple[str, ...] | None]:
    if not path.exists():
        raise UserError(f"{path} does not exist; give a .csv or .parquet table")
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
    texts = {
        name: [str(value) for value in parquet.read(columns=[name]).column(name).to_pylist()]
        for name in ("path", "label")
        if name in names and (name, column) != ("path", "image")
    }
    labels = tuple(texts["label"]) if "label" in texts else None
    if column == "path":
        return Files.of(root, texts["path"]), labels
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


def predictions_table(predictions: Predictions) -> tuple[list[str], list[list[str]]]:
    """The header and rows of a table: each picture, its class, and the probability of every class."""
    labels, answers, rows = predictions.labels, predictions.answers, []
    for number, (name, row) in enumerate(zip(predictions.names, predictions.probabilities, strict=True)):
        label = [] if labels is None else [labels[number]]
        rows.append([name, answers[number], f"{row.max():.6f}", *label, *(f"{value:.6f}" for value in row)])
    header = ["picture", "class", "probability", *([] if labels is None else ["label"]), *predictions.classes]
    return header, rows


def predictions_json(predictions: Predictions) -> str:
    """The predictions as JSON: a list with a record for each picture."""
    labels, classes, answers = predictions.labels, predictions.classes, predictions.answers
    records = [
        {"picture": name, "class": answers[number], "probability": round(float(row.max()), 6)}
        | ({} if labels is None else {"label": labels[number]})
        | {"probabilities": {label: round(float(value), 6) for label, value in zip(classes, row, strict=True)}}
        for number, (name, row) in enumerate(zip(predictions.names, predictions.probabilities, strict=True))
    ]
    return json.dumps(records, indent=2, ensure_ascii=False)
