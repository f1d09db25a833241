"""Records that were never run, for tests of what is made from them."""

from dataclasses import replace
from pathlib import Path

from unskew.core.files import write_whole
from unskew.reproduce.cells import Variant, list_seeds, make_cells, name_training, with_seed
from unskew.reproduce.recipe import load_recipe
from unskew.reproduce.records import RunRecord, record_file, run_folder, to_bytes
from unskew.runs.config import Config, deciding
from unskew.runs.result import Calibration, Result


def result(config: Config, path: Path, accuracy: float, calibrations=None) -> Result:
    """A result with these accuracies."""
    made = {name: Calibration(name, value, 1.0, 1000, 2.0) for name, value in (calibrations or {}).items()}
    per_round = config.per_round or config.clients or 10
    return Result(
        path=path, method=config.method, data=config.data, partition=config.partition, clients=config.clients or 10,
        per_round=per_round, rounds=config.rounds, seed=config.seed, engine="loop", accuracy=accuracy, loss=1.0,
        examples=100, seconds=10.0, examples_per_second=10.0, bytes_up=5000, bytes_down=5000, weights_sha256="ab" * 32,
        model=config.model or "tiny-cnn", partition_hash="cd" * 32, data_sha256="ef" * 32, emd=1.5, calibrations=made,
        settings=dict(deciding(config)),
    )  # fmt: skip


def record(out: Path, config: Config, accuracy: float, calibrations=None, **more) -> RunRecord:
    """A record in a folder of results."""
    config = with_seed(config, config.seed)
    name = name_training(config)
    path = run_folder(out, name, config.seed)
    rounds = range(1, config.rounds + 1)
    curve = [{"round": n, "accuracy": accuracy * n / config.rounds, "batches_max": 4} for n in rounds]
    made = RunRecord(result(config, path, accuracy, calibrations), more.pop("curve", curve), **more)
    write_whole(record_file(path), to_bytes(made))
    return made


def fill(
    out: Path, name: str, asked: Variant, accuracy=lambda cell, seed: 0.5, calibrated=lambda cell, seed: 0.6
) -> None:
    """Records for the cells of a recipe that are done at the scale, also those of the baselines."""
    one = load_recipe(name)
    trainings: dict[str, tuple[Config, list]] = {}
    for cell in [cell for cell in make_cells(one, asked) if cell.done]:
        trainings.setdefault(cell.training(), (cell.config, []))[1].append(cell)
        if cell.baseline is not None:
            trainings.setdefault(name_training(cell.baseline), (cell.baseline, []))
    for config, cells in trainings.values():
        for seed in list_seeds(one, asked):
            first = cells[0] if cells else None
            after = {cell.after: calibrated(cell, seed) for cell in cells if cell.after}
            record(out, replace(config, seed=seed), accuracy(first, seed) if first else 0.8, after)
