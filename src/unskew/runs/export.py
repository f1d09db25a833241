"""A finished run's model as a file for other programs, with its preprocessing, class names and a model card."""

import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from unskew.core.errors import UserError, accepts, nearest
from unskew.core.files import make_folder, write_whole
from unskew.core.machine import neutral
from unskew.core.plugins import require_extra
from unskew.core.units import counted
from unskew.runs.inference import Predictor, load_predictor
from unskew.runs.result import MODEL_INFO, Calibration, ModelInfo, Result, read_result

CARD = "README.md"
INPUT, OUTPUT = "images", "probabilities"


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
        As for ``unskew.predict``.

    Returns
    -------
    Path
        The model's file. Next to it are model.json and the model card, README.md.
    """
    if form not in FORMATS:
        raise UserError(f"--format {form}: {nearest(form, FORMATS)}")
    write, suffix = FORMATS[form]
    predictor = load_predictor(path, calibration, trust=trust, model=model)
    folder = Path(out) if out is not None else Path(f"{Path(path).absolute().name}-{form}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; choose another --out")
    new = not folder.exists()
    make_folder(folder)
    file = folder / f"model{suffix}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside the exporters
            write(predictor, file)
    except Exception as error:  # exporters raise anything for a layer that they do not support
        file.unlink(missing_ok=True)
        if new:
            folder.rmdir()
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"the model cannot be exported as {form}: {reason}; choose another format") from error
    write_whole(folder / MODEL_INFO, predictor.info.to_bytes())
    write_whole(folder / CARD, model_card(read_result(Path(path)), predictor.info, predictor.calibration).encode())
    return file


def _example(predictor: Predictor) -> torch.Tensor:
    return torch.zeros(2, *predictor.info.image, dtype=torch.uint8)


def _about(predictor: Predictor) -> dict[str, str]:
    """The metadata of every format."""
    info = predictor.info
    return {
        "classes": json.dumps(info.classes, ensure_ascii=False),
        "image": json.dumps(info.image),
        "shape": json.dumps(info.shape),
        "mean": json.dumps(info.mean),
        "std": json.dumps(info.std),
        "temperature": json.dumps(predictor.temperature),
    }


def _torchscript(predictor: Predictor, file: Path) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(predictor, (_example(predictor),))  # type: ignore[no-untyped-call]
    torch.jit.save(traced, str(file), _extra_files=_about(predictor))


def _torch_export(predictor: Predictor, file: Path) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(predictor, (_example(predictor),), dynamic_shapes={INPUT: {0: batch}})
    torch.export.save(program, file, extra_files=_about(predictor))


def _onnx(predictor: Predictor, file: Path) -> None:
    onnx = require_extra("onnx", "onnx")
    require_extra("onnxscript", "onnx")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns about missing packages that are not needed
    program = torch.onnx.export(
        predictor,
        (_example(predictor),),
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes={INPUT: {0: torch.export.Dim("batch", min=1)}},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    onnx.helper.set_model_props(proto, _about(predictor))
    onnx.save(proto, str(file))


def _safetensors(predictor: Predictor, file: Path) -> None:
    values = {name: value.contiguous().clone() for name, value in predictor.network.state_dict().items()}
    save_file(values, file, metadata=_about(predictor))


FORMATS: dict[str, tuple[Callable[[Predictor, Path], None], str]] = {
    "onnx": (_onnx, ".onnx"),
    "torchscript": (_torchscript, ".pt"),
    "torch-export": (_torch_export, ".pt2"),
    "safetensors": (_safetensors, ".safetensors"),
}


def model_card(result: Result, info: ModelInfo, calibration: str | None = None) -> str:
    """A model card in Markdown: the model, its training, evaluation, intended use and limits."""
    used: Result | Calibration = result if calibration is None else result.calibrations[calibration]
    channels, height, width = info.image
    settings, (kind, colon, path) = result.settings, result.data.partition(":")
    data = f"{kind}{colon}{Path(path).name}"  # a card is published, so without the folders of this machine
    length = f"{settings['steps']} steps" if "steps" in settings else counted(int(settings.get("epochs", 1)), "epoch")
    mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (info.mean, info.std))
    lines = [
        f"# {result.model} trained with {result.method}",
        "",
        f"Classifies pictures of {width}x{height} pixels ({'gray' if channels == 1 else 'color'}) into "
        f"{counted(len(info.classes), 'class')}. Trained with Unskew by federated learning.",
        "",
        "## Model",
        f"- Network: {result.model}; input {list(info.shape)}; pixels are normalized as (x/255 - mean) / std, "
        f"mean {mean}, std {std}",
        f"- Classifier: {f'calibrated with {calibration}' if calibration else 'as trained, without calibration'}",
        f"- Weights: SHA-256 {result.weights_sha256} (before calibration)",
        *(f"- Note: {note}" for note in result.notes),
        "",
        "## Training",
        f"- Data: {data}",
        f"- Partition: {result.partition}, {counted(result.clients, 'client')}"
        + ("" if result.emd is None else f", EMD {result.emd:.3f}"),
        f"- Method: {result.method}; {counted(result.rounds, 'round')}, {result.per_round:,} clients per round, "
        f"{length} per round on each; seed {result.seed}",
        *([f"- Privacy: {result.privacy.describe()}"] if result.privacy is not None else []),
        "",
        "## Evaluation",
        f"Measured on {result.measured_on}; one run, one seed.",
        "",
        "| classifier | accuracy | loss | ECE | ECE with temperature | temperature |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        _row(result),
        *map(_row, result.calibrations.values()),
        "",
        "The expected calibration error (ECE, 15 bins) compares confidence with accuracy. This model's logits "
        f"are divided by a temperature of {used.temperature or 1:.3g} before the softmax.",
        "",
        *_per_class(info, calibration or ""),
        "## Intended use",
        f"Pictures like those of {data}, with one of the classes below. Probabilities are meaningful for such "
        "pictures only.",
        "",
        "## Limits",
        "- A picture that shows none of the classes is still assigned to one of them.",
        "- Accuracy on pictures from other cameras, sites or times than the training data was not measured.",
        "- Accuracy differs between classes; see the table.",
        *(
            ["- Accuracy is measured on part of the training images (--validation), not on a test set."]
            if result.evaluated_on == "validation"
            else []
        ),
        "",
        "## Classes",
        ", ".join(info.classes),
    ]
    return "\n".join(lines) + "\n"


def _row(scores: Result | Calibration) -> str:
    name = "as trained" if isinstance(scores, Result) else scores.name
    numbers = (scores.ece, scores.ece_scaled, scores.temperature)
    cells = ["-" if value is None else f"{value:.3g}" for value in numbers]
    return f"| {name} | {scores.accuracy:.2%} | {scores.loss:.4f} | {' | '.join(cells)} |"


def _per_class(info: ModelInfo, name: str) -> list[str]:
    if not (accuracy := info.class_accuracy.get(name)):
        return []
    rows = [
        f"| {label} | {'-' if value is None else f'{value:.1%}'} |"
        for label, value in zip(info.classes, accuracy, strict=True)
    ]
    return ["| class | accuracy |", "| --- | ---: |", *rows, ""]
