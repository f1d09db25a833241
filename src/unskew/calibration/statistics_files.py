"""Files of class statistics: reading one that may come from a stranger."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from unskew.calibration.covariances import parse_form
from unskew.calibration.forms import Form
from unskew.calibration.known_noise import KnownNoise
from unskew.core.errors import UserError
from unskew.core.limits import check_plain, check_unpacked, size_on_disk
from unskew.core.types import Tensors


def read_statistics(file: Path) -> tuple[Any, Form, Tensors, KnownNoise | None]:
    """Classes as the file says, form, tensors, and the noise added for privacy; the numbers are not checked yet."""
    check_plain(file)
    if file.exists():
        check_unpacked(file.stat().st_size, size_on_disk([file]), str(file))  # it may be sparse
    try:
        with safe_open(file, framework="pt") as content:
            about = json.loads((content.metadata() or {})["unskew"])
            # copies: what safe_open gives is the file itself, and changes with it
            values = {name: content.get_tensor(name).clone() for name in content.keys()}  # noqa: SIM118
        if about["statistics"] != 1:
            raise ValueError(f"they are of version {about['statistics']!r}")
        noise = KnownNoise(*map(float, about["noise"])) if "noise" in about else None
        if noise is not None and not (0 <= noise.sums < float("inf") and 0 <= noise.second < float("inf")):
            raise ValueError(f"the noise is {about['noise']}")
        return about["classes"], parse_form(about["form"]), values, noise
    except FileNotFoundError:
        raise UserError(f"there is no file {file}") from None
    except Exception as why:  # what a stranger's file breaks is the file's fault, whatever it is
        line = str(why).partition("\n")[0]
        raise UserError(f"{file} does not hold class statistics of this version: {line}") from why
