"""The end of a run: its result, and all that goes into the run folder with it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unskew.core import tensors
from unskew.core.types import Tensors
from unskew.privacy.ledger import with_release
from unskew.round.evaluation import Evaluation
from unskew.runs import config as configs
from unskew.runs.checkpoint import drop_memories
from unskew.runs.client_accuracy import CLIENTS, OWN, spread, to_arrays, told
from unskew.runs.early_stopping import best_row
from unskew.runs.finish import Calibrated
from unskew.runs.folder import (
    MODEL,
    arrays_bytes,
    calibration_bytes,
    calibration_file,
    classifier_words,
    json_bytes,
    model_bytes,
    plain_names,
    seal,
)
from unskew.runs.journal import DURING, METRICS, LineFile
from unskew.runs.manifest import write_sealed
from unskew.runs.prepare import Prepared
from unskew.runs.protected import notes_on_protections, spent_in_rounds
from unskew.runs.result import AT_NODES, RESULT, TEST, VALIDATION, Calibration, Result, to_json


def conclude(
    prepared: Prepared, path: Path, model: Tensors, classifier: Sequence[str], calibrated: Sequence[Calibrated],
    engine: str, seconds: float, metrics: LineFile, during: LineFile, score: Evaluation,
    start: Calibration | None = None,
) -> Result:  # fmt: skip
    """Write the model, the calibrations and the result, sealed with the metrics; the result comes last.

    ``score`` is how well the model does, ``start`` what made its initial classifier.
    """
    config, rows, model = prepared.config, metrics.rows(), prepared.whole(model)
    spent = spent_in_rounds(prepared, len(rows))
    for each in calibrated:
        spent = with_release(spent, each.classifier.report.release)
    best = best_row(rows, config.monitor) if config.patience else None
    scores = {OWN: score} | {each.result.name: each.score for each in calibrated}
    held = prepared.partition, prepared.images.train.labels, prepared.test_owners
    seen = {} if prepared.nodes else {name: told(*held, each) for name, each in scores.items()}
    spreads = {name: spread(*each) for name, each in seen.items()}
    examples = sum(row["examples"] for row in rows)
    working = sum(row["seconds"] for row in rows)
    result = Result(
        path=path,
        method=config.method,
        data=config.data,
        partition=config.partition,
        clients=prepared.partition.clients,
        per_round=config.per_round or 0,
        rounds=len(rows),
        seed=config.seed,
        engine=engine,
        accuracy=score.accuracy,
        loss=score.loss,
        emd=prepared.emd,
        examples=examples,
        seconds=seconds,
        examples_per_second=examples / max(working, 1e-9),
        bytes_up=sum(row["bytes_up"] for row in rows) or (0 if start is None else start.bytes_up),
        bytes_down=sum(row["bytes_down"] for row in rows),
        weights_sha256=tensors.sha256(model),
        model=config.model or "",
        partition_hash=prepared.partition.hash,
        data_sha256=prepared.data_sha256,
        failures=sum(len(row.get("failures", ())) for row in rows),
        calibrations={
            each.result.name: replace(each.result, clients_accuracy=spreads.get(each.result.name))
            for each in calibrated
        },
        clients_accuracy=spreads.get(OWN),
        settings=configs.deciding(config),
        privacy=spent,
        notes=[*prepared.first_model.notes, *notes_on_protections(prepared.algorithm, bool(config.validation))],
        best_round=best["round"] if best else None,
        stopped_at=len(rows) if len(rows) < config.rounds else None,
        evaluated_on=VALIDATION if config.validation else TEST if len(prepared.images.test) else AT_NODES,
        start=start,
        weights_seal=seal(plain_names(model), classifier_words(classifier)),
    )
    if prepared.baseline is not None:
        reference = prepared.baseline.accuracy
        result = replace(
            result, baseline=config.baseline, baseline_accuracy=reference, relative_accuracy=result.accuracy / reference
        )
    files = {MODEL: model_bytes(model, classifier)}
    if seen:
        files[CLIENTS] = arrays_bytes(to_arrays(seen))
    if not metrics.mark.bytes:
        files[METRICS] = b""  # a run without rounds has the file too
    files |= {calibration_file(path, each.result.name).name: calibration_bytes(each.result.name, each.classifier)
              for each in calibrated}  # fmt: skip
    drop_memories(path)  # before the result, which says that nothing is left to do
    grown = {METRICS: metrics.mark.sha256} | ({DURING: during.mark.sha256} if during.mark.bytes else {})
    write_sealed(path, {**files, RESULT: json_bytes(to_json(result))}, grown=grown)
    return result
