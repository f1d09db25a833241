"""What can be done with a finished run: calibrate its classifier, load its model."""

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unskew import engines, methods
from unskew.calibration.classifier import load_calibrated
from unskew.calibration.feasible import check, named
from unskew.calibration.federated import Known
from unskew.calibration.finisher import Finisher
from unskew.core import tensors
from unskew.core.cache import VARIABLE as CACHE_VARIABLE
from unskew.core.errors import COUNT, FUNCTION, PATH, TEXT, UserError, accepts, optional
from unskew.core.key import Key
from unskew.core.limits import usable_path
from unskew.core.machine import default_workers, neutral
from unskew.core.types import Tensors
from unskew.data.batches import steps_for
from unskew.engines.blueprint import build
from unskew.models.any_module import AnyNetwork
from unskew.models.cut import cut
from unskew.privacy.ledger import with_release
from unskew.round.algorithm import Algorithm
from unskew.round.client import ClientSide
from unskew.runs import config as configs
from unskew.runs.check import unsealed_note
from unskew.runs.client_accuracy import CLIENTS, read_clients, spread, told, with_classifier
from unskew.runs.config import NODES, Config
from unskew.runs.federated import images_of, nodes_of
from unskew.runs.federation_file import FEDERATION, read_terms
from unskew.runs.finish import Calibrated, Event, Stage, finish
from unskew.runs.folder import (
    MODEL,
    arrays_bytes,
    calibration_bytes,
    calibration_file,
    json_bytes,
    locked_folder,
    plain_names,
    read_calibration,
    read_model,
    seal,
)
from unskew.runs.given import Given, take_same
from unskew.runs.manifest import require_sealed, write_sealed
from unskew.runs.prepare import Prepared, prepare
from unskew.runs.read_data import read_data
from unskew.runs.result import RESULT, Result, read_result, to_json


@neutral()
@accepts(
    path=PATH, engine=optional(TEXT), workers=optional(COUNT), data_dir=optional(PATH), device=optional(TEXT),
    observe=optional(FUNCTION),
)  # fmt: skip
def calibrate_run(
    path: str | Path, *sources: str | Finisher, engine: str | None = None, workers: int | None = None,
    data_dir: str | Path | None = None, device: str | None = None, observe: Callable[[Event], None] | None = None,
    data: Any = None, model: Any = None, method: Any = None,
) -> Result:  # fmt: skip
    """Add calibrations such as ``"ccvr(per_class=2000) + secure"`` to a finished run; its own weights stay as they are.

    A Finisher is a calibration too. One of another package is written ``package.module:function(…)``.

    Each is written as soon as it is ready, so that an interrupt loses at most the one under way. A run that was given
    ``data``, ``model`` or ``method`` as values from Python needs the same values again.
    """
    engines.work_beside(engine)
    path = usable_path(path)
    result = read_result(path)
    if odd := [
        each for each in sources if not isinstance(each, Finisher) and not (isinstance(each, str) and each.strip())
    ]:
        raise UserError(f"give a calibration as a text such as ccvr or lda(layers=2), or as a Finisher, not {odd[0]!r}")
    if not sources:
        raise UserError(f"no calibration was named; give one or more, such as ccvr or lda (for {path})")
    asked = [_algorithm(source) for source in sources]
    given = {"data": data, "model": model, "method": method}
    prepared = prepared_of(path, result, engine, workers, data_dir, device, given)
    if prepared.nodes is not None:
        raise UserError(
            f"{path} is of a federation, whose images are at its nodes; name the calibration in the recipe's method"
        )
    if observe is not None:
        tell = observe
        prepared = replace(prepared, say=lambda words, done, total: tell(Stage(words, done, total)))
    held = prepared.data
    side = build(prepared.blueprint, held)
    for algorithm in asked:
        for finisher in algorithm.finish:
            check(finisher, algorithm, side)
    weights = weights_of(path, result, side.network)
    chosen, count = engine_for(prepared, side)
    with locked_folder(path):
        working = engines.open_engine(chosen, engines.EngineSetup(prepared.blueprint, held, count))

        def keep(event: Event) -> None:
            nonlocal result
            if isinstance(event, Calibrated):
                result = _added(path, event, prepared)
            if observe is not None:
                observe(event)

        known: Known = {}
        by_image = prepared.test_owners is not None
        try:
            for algorithm in asked:
                finish(working, side, weights, algorithm, Key(prepared.config.seed), keep, known, by_image=by_image)
        finally:
            working.close()
    return result


@neutral()
@accepts(path=PATH, calibration=optional(TEXT), data_dir=optional(PATH))
def load(
    path: str | Path, calibration: str | None = None, *, data_dir: str | Path | None = None, data: Any = None,
    model: Any = None, method: Any = None,
) -> nn.Module:  # fmt: skip
    """A finished run's model in eval mode, [B, ch, H, W] -> [B, C]; with its own classifier or a calibrated one.

    ``data_dir`` is the data set's folder, if it has moved since the run. Images are normalised as
    the run's overview says: (x/255 − mean) / std. ``data``, ``model`` and ``method`` are the run's values, where it was
    given values from Python.
    """
    path = usable_path(path)
    result = read_result(path)
    if note := unsealed_note(path):
        warnings.warn(note, stacklevel=4)
    if calibration is not None and calibration not in result.calibrations:
        with suppress(UserError):
            calibration = plain_name(calibration)  # ccvr(per_class=2000) is ccvr
    if calibration is not None and calibration not in result.calibrations:
        there = ", ".join(result.calibrations) or "none"
        raise UserError(f"{path} has no calibration {calibration!r}; there are: {there}")
    given = {"data": data, "model": model, "method": method}
    prepared = prepared_of(path, result, data_dir=data_dir, device="cpu", values=given)
    network = prepared.blueprint.whole()
    tensors.overwrite(network, weights_of(path, result, network))
    network.eval()
    if calibration is None:
        return network.module if isinstance(network, AnyNetwork) else network
    encoder, classifier = calibrated_parts(path, calibration, read_calibration(path, calibration), network)
    return nn.Sequential(OrderedDict(encoder=encoder, classifier=classifier)).eval()


def calibrated_parts(path: Path, name: str, values: Tensors, network: Any) -> tuple[nn.Module, nn.Module]:
    """Encoder and calibrated classifier of a run, from the tensors of its file."""
    try:
        return load_calibrated(values, lambda layers: cut(network, layers))
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        file = calibration_file(path, name)
        words = " ".join(str(error).split())  # PyTorch complains in several lines
        raise UserError(f"{file} does not fit the network: {words}; restore it from a copy") from error


def _algorithm(source: str | Finisher) -> Algorithm:
    """The calibrations of a text; methods that need training are refused."""
    if isinstance(source, Finisher):
        changed: Algorithm = source(Algorithm())
        return changed
    return methods.parse_calibrations(source)


def plain_name(source: str) -> str:
    """A calibration's name in its plainest spelling, as results have it."""
    algorithm = _algorithm(source)
    return named(algorithm.finish[0], algorithm)


def prepared_of(
    path: Path, result: Result, engine: str | None = None, workers: int | None = None,
    data_dir: str | Path | None = None, device: str | None = None, values: Mapping[str, Any] | None = None,
) -> Prepared:  # fmt: skip
    """A finished run's federation as it was, its data set read from where it was or from ``data_dir``.

    ``values`` are the data, model and method of a run that was given them from Python.
    """
    config = configs.read_run(path)
    config = replace(
        config,
        data=config.data if data_dir is None else _moved(config.data, Path(data_dir)),
        data_dir=config.data_dir if data_dir is None else str(data_dir),
        cache_dir=os.environ.get(CACHE_VARIABLE) or config.cache_dir,  # the run's own may have been another machine's
        engine=engines.inherited(config.engine) if engine is None else engine,
        workers=config.workers if workers is None else workers,
        device=config.device if device is None else device,
    )
    given = take_same(values or {}, config)
    config = configs.checked(config)
    if (path / FEDERATION).exists():
        return _federated(path, result, config)
    kept = (path / "partition.npz").absolute()
    if not kept.is_file():
        raise UserError(f"{kept} is not there; it says which client holds what")
    require_sealed(path, kept.name)
    whole = final_weights(path, result)[0] if config.pretrained is not None or config.train != "all" else None
    prepared = prepare(replace(config, baseline=None), f"file:{kept}", given, whole)
    if prepared.data_sha256 != result.data_sha256:
        raise UserError(
            f"the data set {config.data} is not the one that {path} was trained on; restore what was changed since"
        )
    if prepared.partition.hash != result.partition_hash:
        raise UserError(f"{kept} is not the partition that {path} was trained with")
    return prepared


def _federated(path: Path, result: Result, config: Config) -> Prepared:
    """A finished run over nodes, as its server has it: without a training image."""
    terms = read_terms(path)
    own = None if config.data == NODES else read_data(config)
    whole = final_weights(path, result)[0] if config.pretrained is not None or config.train != "all" else None
    given = Given(data=images_of(terms, config, own), nodes=nodes_of(terms, config))
    prepared = prepare(replace(config, baseline=None), given=given, finished=whole)
    if prepared.data_sha256 != result.data_sha256:
        raise UserError(f"the data set {config.data} is not the one that {path} was evaluated on")
    return prepared


def _moved(data: str, folder: Path) -> str:
    """A user's own ``arrays:`` or ``folder:`` is looked for by its last name in the folder."""
    kind, colon, place = data.partition(":")
    return f"{kind}:{folder / Path(place).name}" if colon and kind in ("arrays", "folder", "table") else data


def weights_of(path: Path, result: Result, network: nn.Module) -> Tensors:
    """The run's final weights, if they are those of its result and fit the network."""
    names, weights = tensors.of_module(network), final_weights(path, result)[0]
    for name, own in plain_names(names).items():
        there = weights.get(name)
        if there is None or there.dtype != own.dtype or there.shape != own.shape:
            found = "nothing" if there is None else f"{_kind(there)}"
            raise UserError(f"{path / MODEL} does not fit the network: {name} must be {_kind(own)}, there is {found}")
    return {name: weights[plain] for name, plain in zip(names, plain_names(names), strict=True)}


def final_weights(path: Path, result: Result) -> tuple[Tensors, dict[str, str]]:
    """The run's final weights by the network's own names, if they are those of its result; the words beside them."""
    weights, about = read_model(path)
    sealed = result.weights_seal is None or seal(weights, about) == result.weights_seal
    if not sealed or tensors.sha256(weights) != result.weights_sha256:
        raise UserError(
            f"{path / MODEL} does not have the weights that result.json names; it was changed after the run: restore "
            "it from a copy"
        )
    return weights, about


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def engine_for(prepared: Prepared, side: ClientSide, passes: float = 1 / 3) -> tuple[str, int]:
    """The run's engine; ``auto`` weighs the start of a pool against passes over all images.

    A pass without gradient counts as a third of one with it.
    """
    config: Config = prepared.config
    sizes: Sequence[int] = prepared.population.sizes.tolist()
    count = min(config.workers or default_workers(config.device), len(sizes))
    if not prepared.blueprint.crosses:
        return "loop", count
    step = engines.seconds_per_step(side, config.batch) if config.engine == "auto" else 0.0
    work = step * passes * steps_for(sum(sizes), replace(config.local(), epochs=1))
    return engines.choose(config.engine, count, work, len(sizes)), count


def _added(path: Path, event: Calibrated, prepared: Prepared) -> Result:
    """The run's result with one calibration more; one of the same name is replaced."""
    result, name = read_result(path), event.result.name
    spent = with_release(result.privacy, event.classifier.report.release)
    seen = told(prepared.partition, prepared.images.train.labels, prepared.test_owners, event.score)
    added = replace(event.result, clients_accuracy=spread(*seen))
    result = replace(result, calibrations={**result.calibrations, name: added}, privacy=spent)
    files = {
        calibration_file(path, name).name: calibration_bytes(name, event.classifier),
        CLIENTS: arrays_bytes(with_classifier(read_clients(path), name, seen)),
        RESULT: json_bytes(to_json(result)),
    }
    write_sealed(path, files)
    return result
