"""The commands that use a trained model: predict, export."""

import csv
import io
from pathlib import Path
from typing import Annotated

import typer

from unskew.console.options import Trust
from unskew.console.progress import Json, out, print_json
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.units import counted
from unskew.runs import export as exports
from unskew.runs import inference
from unskew.runs.config import OPTIONS

Calibration = Annotated[
    str | None, typer.Option(metavar="NAME", help="The calibrated classifier to use (default: the run's own).")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A finished run.")]


def predict(
    run: Run,
    pictures: Annotated[
        list[Path],
        typer.Argument(metavar="PICTURES...", help="Pictures, folders of pictures, or one table: .csv | .parquet"),
    ],
    calibration: Calibration = None,
    file: Annotated[Path | None, typer.Option("--out", help="Write all probabilities to FILE.csv.")] = None,
    as_json: Json = False,
    device: Annotated[str, typer.Option(metavar="NAME", help=OPTIONS["device"].help)] = "auto",
    trust: Trust = False,
) -> None:
    """Classify new pictures, without the training data."""
    if file is not None and file.suffix != ".csv":
        raise UserError(f"--out {file}: the file must end in .csv")
    predictions = inference.predict(run, pictures, calibration=calibration, device=device, trust=trust)
    if file is not None:
        text = io.StringIO()
        header, rows = inference.predictions_table(predictions)
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        write_whole(file, text.getvalue().encode())
    if as_json:
        print(inference.predictions_json(predictions))  # noqa: T201
    count = len(predictions.names)
    if file is None:
        for name, answer, row in zip(predictions.names, predictions.answers, predictions.probabilities, strict=True):
            out.say(f"{name}: {answer} ({row.max():.1%})")
    else:
        out.say(f"{counted(count, 'picture')}: {file}")
    if predictions.accuracy is not None:
        out.say(f"accuracy {predictions.accuracy:.2%} on {counted(count, 'labeled picture')}")


def export(
    run: Run,
    form: Annotated[str, typer.Option("--format", help=" | ".join(exports.FORMATS))],
    calibration: Calibration = None,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="A new folder (default: the run's name and the format).")
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
