"""A finished run's model as a file for other programs, with its model card."""

import json
import logging
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from unskew.core.errors import UserError, accepts, nearest
from unskew.core.files import make_folder, write_whole
from unskew.core.machine import neutral
from unskew.core.plugins import require_extra
from unskew.core.units import counted
from unskew.runs.prediction import Predictor, load_predictor
from unskew.runs.result import MODEL_INFO, Calibration, ModelInfo, Result, read_result

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
