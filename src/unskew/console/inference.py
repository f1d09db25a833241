"""The commands that use a trained model: predict, export."""

import csv
import io
import json
from pathlib import Path
from typing import Annotated

import typer

from unskew.console.options import Trust, check_suffix, option
from unskew.console.progress import Json, out, print_json
from unskew.core.files import write_whole
from unskew.core.units import counted
from unskew.runs import export as exports
from unskew.runs import prediction
from unskew.runs.config import OPTIONS

Calibration = Annotated[str | None, option("The calibrated classifier (default: the run's own).", metavar="NAME")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A finished run.")]


def predict(
    run: Run,
    pictures: Annotated[
        list[Path],
        typer.Argument(metavar="PICTURES...", help="Pictures, folders of pictures, or one table: .csv | .parquet"),
    ],
    calibration: Calibration = None,
    file: Annotated[Path | None, option("Write all probabilities to FILE.csv.", "--out")] = None,
    as_json: Json = False,
    device: Annotated[str, option(OPTIONS["device"].help, metavar="NAME")] = "auto",
    trust: Trust = False,
) -> None:
    """Classify new pictures, without the training data."""
    check_suffix("--out", file, ".csv")
    predictions = prediction.predict(run, pictures, calibration=calibration, device=device, trust=trust)
    records, count = prediction.list_predictions(predictions), len(predictions.names)
    if file is not None:
        text, label = io.StringIO(), [] if predictions.labels is None else ["label"]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["picture", "class", "probability", *label, *predictions.classes])
        for *about, shares in map(dict.values, records):
            cells = (*about, *shares.values())
            writer.writerow([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in cells])
        write_whole(file, text.getvalue().encode())
    if as_json:
        print(json.dumps(records, indent=2, ensure_ascii=False))  # noqa: T201
    lines = [f"{record['picture']}: {record['class']} ({record['probability']:.1%})" for record in records]
    out.say(*(lines if file is None else [f"{counted(count, 'picture')}: {file}"]))
    if predictions.accuracy is not None:
        out.say(f"accuracy {predictions.accuracy:.2%} on {counted(count, 'labeled picture')}")


def export(
    run: Run,
    form: Annotated[str, option(" | ".join(exports.FORMATS), "--format")],
    calibration: Calibration = None,
    folder: Annotated[
        Path | None, option("A new folder (default: the run's name and the format).", "--out", metavar="DIR")
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write the model for other programs, with preprocessing, class names and a model card."""
    file = exports.export(run, form, calibration=calibration, out=folder, trust=trust)
    about, card = file.parent / "model.json", file.parent / exports.CARD
    out.say(f"{file}; class names in {about}, model card in {card}")
    if as_json:
        print_json({"model": file, "about": about, "card": card})
