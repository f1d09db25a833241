"""Audit logs: on a node, what left it, with signed receipts; on the server, what was asked of each node.

Every line has the hash of the line before it. It is written before the reply leaves, or is used.
"""

import hashlib
import json
import math
import os
import weakref
from base64 import b64decode, b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from unskew.calibration.finisher import StatisticsRequest
from unskew.core.errors import UserError
from unskew.core.files import json_lines, json_object, read_content, write_whole
from unskew.core.plugins import require_extra
from unskew.core.types import PrivacyBudget
from unskew.core.units import counted, format_bytes
from unskew.engines.flower.messages import BadMessage, Envelope
from unskew.privacy.ledger import CLIENT, EXAMPLE
from unskew.privacy.noise import PrivateUpdates
from unskew.privacy.secure_sum import SecureUpdates
from unskew.privacy.signing import ecdsa, load_private
from unskew.round.client import ClientSide

AUDIT, SPENT = "audit.jsonl", "epsilon.json"
FIRST = "0" * 64  # the hash before the first line


class AuditLog:
    """An append-only log file."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = file
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._file)
        size = os.fstat(self._file).st_size
        start = max(0, size - 2**24)  # more than any line
        lines = os.pread(self._file, size - start, start).split(b"\n")
        if lines[-1]:  # cut short by a crash, before the reply left
            os.ftruncate(self._file, size - len(lines[-1]))
        self._last = _hash(lines[-2]) if len(lines) > 1 else FIRST

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write an entry with the time and the hash of the previous one."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, **entry, "previous": self._last}, separators=(",", ":")).encode()
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line + b"\n") != len(line) + 1:
                raise OSError("No space left for the whole line")
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, before)
            reason = error.strerror or error
            raise UserError(f"{self._path.name} cannot be written, so no reply is sent or used: {reason}") from error
        self._last = _hash(line)


def describe_reply(reply: Envelope, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """What leaves in a reply: names, types and shapes, bytes, and the hash that identifies it."""
    sums = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors]
    return {"sums": sums, "bytes": len(reply), "sha256": reply_sha256(reply)}


def reply_sha256(reply: Envelope) -> str:
    """Identifies a reply in both the server's log and the node's: the header contains a hash of the whole message."""
    return hashlib.sha256(reply.header).hexdigest()


class EpsilonBook:
    """The ε spent by the node's runs, with the rounds and releases of each."""

    def __init__(self, file: Path, max_epsilon: float | None) -> None:
        self._file, self._limit = file, max_epsilon
        content = read_content(file, 2**24)
        self._runs: dict[str, dict[str, float]] = {} if content is None else json_object(content, file)

    def spend(
        self, run: str, budget: PrivacyBudget | None, mechanism: PrivateUpdates | None, *, trains: bool
    ) -> float | None:
        """Count one more round or release of statistics. Returns the run's ε so far; None if it promises none.

        Refuses to spend more than the owner allows for all runs. Sampling does not reduce ε: the node took part in all
        of these rounds. Runs and releases are added up, which gives an upper bound. If statistics are released, ε is
        per example (``unit_of``), also for updates.
        """
        now = dict(self._runs.get(run, {"rounds": 0, "releases": 0, "epsilon": 0.0}))
        now["rounds" if trains else "releases"] += 1
        covered, epsilon = (mechanism if trains else budget) is not None, 0.0
        if covered and now["rounds"]:
            rounds, examples = int(now["rounds"]), unit_of(budget) == EXAMPLE
            found = None if mechanism is None else mechanism.epsilon(rounds, 1, 1, replaced=examples)
            covered, epsilon = found is not None, found or 0.0
        if not covered and self._limit is None:
            return None
        if not covered:
            what = "an update" if trains else "statistics"
            raise BadMessage(f"it asks for {what} without noise, but this node has a budget of ε = {self._limit:g}")
        now["epsilon"] = epsilon + (now["releases"] * budget.epsilon if budget is not None else 0.0)
        spent = now["epsilon"] + sum(values["epsilon"] for name, values in self._runs.items() if name != run)
        if self._limit is not None and spent > self._limit:
            raise BadMessage(f"this node's budget of ε = {self._limit:g} is spent: all runs would reach {spent:.3g}")
        runs = {**self._runs, run: now}
        write_whole(self._file, json.dumps(runs, indent=1).encode(), secret=True)  # before the reply leaves
        self._runs = runs
        return float(now["epsilon"])


def unit_of(budget: PrivacyBudget | None) -> str:
    """What a run's ε protects: a whole client or, if statistics are released, a single example."""
    return CLIENT if budget is None else EXAMPLE


def announce(side: ClientSide, jobs: Sequence[str]) -> list[str]:
    """What will leave the node in a run, in plain English."""
    algorithm, masked = side.algorithm, isinstance(side.algorithm.exchange, SecureUpdates)
    where = "masked: the server sees only the sum over clients" if masked else "not masked: the server sees it"
    statistics, lines = algorithm.statistics, []
    if "train" in jobs:
        size = format_bytes(sum(value.nbytes for value in side.weights.values()))
        count = sum(value.numel() for value in side.weights.values())
        lines.append(f"each round, an update of the model: {count:,} numbers, {size}, and its loss; {where}")
        if names := [statistic.name for statistic in statistics if statistic.measure is not None]:
            lines.append(f"each round, what the method measures: {', '.join(names)}; {where}")
        if algorithm.mechanism is not None:
            in_masks = masked and algorithm.mechanism.release
            who = "each client adds its share of the noise" if in_masks else "the server adds noise to their sum"
            lines.append(f"updates are clipped, and {who}, with δ = {algorithm.mechanism.delta:g}")
    names = [statistic.name for statistic in statistics if statistic.survey is not None]
    if "survey" in jobs and names:
        lines.append(f"once, before the first round, a survey: {', '.join(names)} (per class); {where}")
    if "evaluate" in jobs and any(len(rows) for rows in side.own_tests.values()):
        lines.append(f"accuracy: the number of test images and of correct predictions per class, and the loss; {where}")
    for finisher in algorithm.finish if "moments" in jobs else ():
        if not isinstance(needs := finisher.needs, StatisticsRequest):
            continue
        classes = side.network.classifier.out_features * needs.components
        width = needs.encoder(side.network, side.train.shape)[1]
        size = format_bytes(8 * (classes + sum(map(math.prod, needs.form.shapes(classes, width).values()))))
        sent = "all its classes"
        if algorithm.withhold:
            sent = f"without classes of fewer than {algorithm.withhold} examples"
        elif algorithm.secure is None:
            sent += ", even one with a single example (withhold(5) would leave it out)"
        budget, sums = algorithm.private, "masked" if algorithm.secure else "not masked"
        noise = f"noise on the sum, ε = {budget.epsilon:g} for every {EXAMPLE}" if budget else "no noise"
        lines.append(
            f"for {finisher.text}, class statistics ({needs.form}, {width} features), up to {size}, {sent}; {sums}; "
            f"{noise}"
        )
    return lines


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


# Receipts


def read_audit(file: Path) -> list[dict[str, Any]]:
    """Read a log. Refuses it if a line was changed or removed."""
    content = read_content(file)
    if content is None:
        raise UserError(f"{file} does not exist: nothing was recorded yet")
    last, rows = FIRST, json_lines(content, file)
    for number, (line, row) in enumerate(zip(content.split(b"\n"), rows, strict=False), 1):
        if row.get("previous") != last:
            raise UserError(f"{file}: line {number} does not follow line {number - 1}; the log was changed")
        last = _hash(line)
    return rows


def make_receipt(file: Path, node: str, key_file: Path) -> dict[str, Any]:
    """What left the node, by run, signed with its registered key."""
    rows, content = read_audit(file), read_content(file) or b""
    runs = []
    for run in dict.fromkeys(row.get("run") for row in rows):
        mine = [row for row in rows if row.get("run") == run]
        spent = [row["epsilon"] for row in mine if row.get("epsilon") is not None]
        runs.append({
            "run": run, "from": mine[0]["time"], "to": mine[-1]["time"],
            "jobs": dict(Counter(str(row["job"]) for row in mine)),
            "rounds": max((int(row.get("round") or 0) for row in mine), default=0),
            "bytes": sum(int(row["bytes"]) for row in mine),
            "masked": all(row.get("members") for row in mine if row["job"] != "describe"),
            "epsilon": max(spent, default=None),
            "unit": next((row["unit"] for row in reversed(mine) if row.get("unit")), None),
        })  # fmt: skip
    receipt = {
        "node": node, "made": datetime.now(UTC).isoformat(timespec="seconds"), "lines": len(rows),
        "last": _hash(content.split(b"\n")[len(rows) - 1]) if rows else FIRST, "runs": runs,
    }  # fmt: skip
    signature = load_private(key_file).sign(_signed(receipt), ecdsa())
    return {**receipt, "signature": b64encode(signature).decode()}


def verify_receipt(receipt: Mapping[str, Any], public: bytes) -> None:
    """Refuse a receipt that is not signed with this key, or was changed since."""
    keys = require_extra("cryptography.hazmat.primitives.serialization", "flower")
    invalid = require_extra("cryptography.exceptions", "flower").InvalidSignature
    values = {name: value for name, value in receipt.items() if name != "signature"}
    try:
        signature = b64decode(str(receipt.get("signature", "")), validate=True)
        keys.load_ssh_public_key(public).verify(signature, _signed(values), ecdsa())
    except (ValueError, TypeError, AttributeError, invalid) as error:
        raise UserError("the receipt is not signed with this key, or was changed since") from error


def receipt_lines(receipt: Mapping[str, Any]) -> list[str]:
    """A receipt in plain English."""
    lines = [f"node {receipt['node']}: {counted(int(receipt['lines']), 'message')} left, as of {receipt['made']}"]
    for run in receipt["runs"]:
        jobs = ", ".join(f"{count} × {job}" for job, count in run["jobs"].items())
        noise, masked = "no ε promised", "all masked" if run["masked"] else "not all masked"
        if run["epsilon"] is not None:
            noise = f"ε = {run['epsilon']:.3g} for every {run.get('unit') or CLIENT} so far"
        lines.append(
            f"run {str(run['run'])[:8]}, {run['from'][:16]} to {run['to'][:16]} UTC: {jobs}; "
            f"{format_bytes(run['bytes'])}, {masked}, {noise}"
        )
    return lines


def record_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A server's log in plain English: who submitted the run, and what each node was and sent."""
    first, last = rows[0], rows[-1]
    jobs = Counter(str(row["job"]) for row in rows)
    people = ", ".join(dict.fromkeys(str(row["submitter"] or "unknown") for row in rows))
    lines = [
        f"run {str(first['run'])[:8]}, submitted by {people}, {first['time'][:16]} to {last['time'][:16]} UTC: "
        f"{', '.join(f'{count} × {job}' for job, count in jobs.items())}"
    ]
    asked = defaultdict[str, list[Mapping[str, Any]]](list)
    for entry in (entry for row in rows for entry in row["nodes"]):
        asked[str(entry["node"])].append(entry)
    for node, mine in sorted(asked.items()):
        given = [dict.fromkeys(str(row[name]) for row in mine if row[name]) for name in ("key", "version", "data")]
        key, version, data = (", then ".join(values) or "unknown" for values in given)
        up, down = (format_bytes(sum(int(entry[f"bytes_{way}"]) for entry in mine)) for way in ("up", "down"))
        failed = sum(entry["left_out"] is not None for entry in mine)
        lines.append(
            f"node {node}: key {key}, unskew {version}, data {data}; answered {len(mine) - failed} of {len(mine)}, "
            f"{up} up, {down} down"
        )
    return lines


def _signed(receipt: Mapping[str, Any]) -> bytes:
    return b"unskew receipt 1 " + json.dumps(receipt, sort_keys=True).encode()
