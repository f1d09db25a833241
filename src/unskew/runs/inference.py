"""A finished run's model for new pictures, uint8 [B, ch, H, W] in, probabilities [B, C] out, and as a file."""

import json
import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from unskew.core.errors import UserError, accepts, nearest
from unskew.core.files import make_folder, write_whole
from unskew.core.machine import neutral, ready_device
from unskew.core.plugins import require_extra
from unskew.core.units import counted
from unskew.data.augment import resize_images
from unskew.data.decode import Broken, center, decode
from unskew.data.photographs import Files, Parquet, Pictures, open_parquet
from unskew.data.tables import read_columns
from unskew.runs.finished import open_network
from unskew.runs.result import MODEL_INFO, Calibration, ModelInfo, Result, Shape, read_result

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


# Export

CARD = "README.md"
INPUT, OUTPUT = "images", "probabilities"
FORMATS = {"onnx": ".onnx", "torchscript": ".pt", "torch-export": ".pt2", "safetensors": ".safetensors"}


@neutral()
@accepts
def export(
    path: str | Path,
    form: str,
    *,
    calibration: str | None = None,
    out: str | Path | None = None,
    trust: bool = False,
    model: Any = None,
) -> Path:
    """Write a finished run's model for other programs.

    The model takes uint8 pictures [B, ch, H, W] in the size of the data set and returns probabilities [B, C]: scaling,
    normalization and temperature are part of it. The class names are in the file and in model.json.

    Parameters
    ----------
    path
        The run directory.
    form
        onnx, torchscript, torch-export or safetensors (the weights alone, with all names in the file's metadata).
    calibration
        The calibrated classifier to use instead of the run's own.
    out
        The folder to write, which must be new or empty (default: the run's name and the format).
    trust, model
        As for ``unskew.load``.

    Returns
    -------
    Path
        The model's file. Next to it are model.json and the model card, README.md.
    """
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
    predictor = load_predictor(path, calibration, trust=trust, model=model)
    folder = Path(out) if out is not None else Path(f"{Path(path).absolute().name}-{form}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; choose another --out")
    make_folder(folder)
    file = folder / f"model{FORMATS[form]}"
    try:
        with warnings.catch_warnings(action="ignore"):  # deprecations inside the exporters
            _write_model(predictor, form, file)
    except Exception as error:  # exporters raise anything for a layer that they do not support
        file.unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the model cannot be exported as {form}: {reason}; choose another format") from error
    write_whole(folder / MODEL_INFO, predictor.info.to_bytes())
    write_whole(folder / CARD, model_card(read_result(Path(path)), predictor.info, predictor.calibration).encode())
    return file


def _write_model(predictor: Predictor, form: str, file: Path) -> None:
    facts = asdict(predictor.info) | {"temperature": predictor.temperature}
    del facts["class_accuracy"]
    about = {name: json.dumps(value, ensure_ascii=False) for name, value in facts.items()}
    example = (torch.zeros(2, *predictor.info.image, dtype=torch.uint8),)
    shapes = {INPUT: {0: torch.export.Dim("batch", min=1)}}
    if form == "safetensors":
        values = {name: value.contiguous().clone() for name, value in predictor.network.state_dict().items()}
        save_file(values, file, metadata=about)
    elif form == "torchscript":
        with torch.no_grad():
            traced = torch.jit.trace(predictor, example)  # type: ignore[no-untyped-call]
        torch.jit.save(traced, str(file), _extra_files=about)
    elif form == "torch-export":
        torch.export.save(torch.export.export(predictor, example, dynamic_shapes=shapes), file, extra_files=about)
    else:
        onnx = require_extra("onnx", "onnx")
        require_extra("onnxscript", "onnx")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about missing packages that are not needed
        names: dict[str, Any] = {"input_names": [INPUT], "output_names": [OUTPUT]}
        program = torch.onnx.export(predictor, example, dynamic_shapes=shapes, dynamo=True, verbose=False, **names)
        assert program is not None
        proto = program.model_proto
        onnx.helper.set_model_props(proto, about)
        onnx.save(proto, str(file))


def model_card(result: Result, info: ModelInfo, calibration: str | None = None) -> str:
    """A model card in Markdown: the model, its training, evaluation, intended use and limits."""
    used: Result | Calibration = result if calibration is None else result.calibrations[calibration]
    channels, height, width = info.image
    settings, (kind, colon, path) = result.settings, result.data.partition(":")
    data = f"{kind}{colon}{Path(path).name}"  # a card is published, so without the folders of this machine
    length = f"{settings['steps']} steps" if "steps" in settings else counted(int(settings.get("epochs", 1)), "epoch")
    mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (info.mean, info.std))
    notes = "".join(f"- Note: {note}\n" for note in result.notes)
    emd = "" if result.emd is None else f", EMD {result.emd:.3f}"
    privacy = "" if result.privacy is None else f"- Privacy: {result.privacy.describe()}\n"
    classifiers = ""
    listed: dict[str, Result | Calibration] = {"as trained": result, **result.calibrations}
    for name, scores in listed.items():
        numbers = (scores.ece, scores.ece_scaled, scores.temperature)
        cells = " | ".join("-" if value is None else f"{value:.3g}" for value in numbers)
        classifiers += f"| {name} | {scores.accuracy:.2%} | {scores.loss:.4f} | {cells} |\n"
    by_class = ""
    if accuracy := info.class_accuracy.get(calibration or ""):
        shares = ["-" if value is None else f"{value:.1%}" for value in accuracy]
        rows = [f"| {label} | {share} |\n" for label, share in zip(info.classes, shares, strict=True)]
        by_class = "\n| class | accuracy |\n| --- | ---: |\n" + "".join(rows)
    return f"""# {result.model} trained with {result.method}

Classifies pictures of {width}x{height} pixels ({"gray" if channels == 1 else "color"}) into \
{counted(len(info.classes), "class")}. Trained with Unskew by federated learning.

## Model
- Network: {result.model}; input {list(info.shape)}; pixels are normalized as (x/255 - mean) / std, \
mean {mean}, std {std}
- Classifier: {f"calibrated with {calibration}" if calibration else "as trained, without calibration"}
- Weights: SHA-256 {result.weights_sha256} (before calibration)
{notes}
## Training
- Data: {data}
- Partition: {result.partition}, {counted(result.clients, "client")}{emd}
- Method: {result.method}; {counted(result.rounds, "round")}, {result.per_round:,} clients per round, \
{length} per round on each; seed {result.seed}
{privacy}
## Evaluation
Measured on {result.measured_on}; one run, one seed.

| classifier | accuracy | loss | ECE | ECE with temperature | temperature |
| --- | ---: | ---: | ---: | ---: | ---: |
{classifiers}
The expected calibration error (ECE, 15 bins) compares confidence with accuracy. This model's logits are divided by a
temperature of {used.temperature or 1:.3g} before the softmax.
{by_class}
## Intended use
Pictures like those of {data}, with one of the classes below. Probabilities are meaningful for such pictures only.

## Limits
- A picture that shows none of the classes is still assigned to one of them.
- Accuracy on pictures from other cameras, sites or times than the training data was not measured.
- Accuracy differs between classes.

## Classes
{", ".join(info.classes)}
"""
