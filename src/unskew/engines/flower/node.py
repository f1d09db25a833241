"""A node of the federation: takes one message, answers with one. It has the data, the memories and the secrets.

Whatever comes is checked before anything is done; what does not fit is refused with its reason, and the node goes on.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from unskew.core.errors import UserError
from unskew.core.files import read_content, write_whole
from unskew.core.machine import neutral
from unskew.core.types import Tensors
from unskew.engines.codec import MAX_BODY, BadMessage, Envelope, by_name
from unskew.engines.flower.agreement import Agreement, run_of, text
from unskew.engines.flower.messages import field, seal, unseal
from unskew.engines.flower.node_data import NodeData
from unskew.engines.flower.node_run import NodeRun
from unskew.engines.flower.node_secret import NodeSecret, forget_secret, open_secret
from unskew.engines.flower.numbers import Seen
from unskew.engines.flower.promises import Purpose, name_of

AGREEMENT = "agreement.bin"
ABANDONED = 60 * 24 * 3600.0  # seconds
KINDS = ("describe", "agree", "job", "refuse", "finish")
Say = Callable[[str], None]


class Node:
    """One node, its runs by their names. ``say`` is told what happens, a line each."""

    def __init__(
        self, data: NodeData, folder: Path, *, device: str = "cpu", plugins: tuple[str, ...] = (),
        say: Say = lambda line: None, most: int = MAX_BODY,
    ) -> None:  # fmt: skip
        self.data, self._folder, self._device, self._plugins = data, folder, device, plugins
        self._say, self._most = say, most
        self._runs: dict[str, NodeRun] = {}
        self._secrets: dict[str, NodeSecret] = {}  # by run
        self._seen: dict[str, Seen] = {}
        self._lock = threading.Lock()
        _forget_abandoned(folder / "runs")

    def answer(self, envelope: Envelope) -> Envelope:
        """The reply to a message; never raises for what the message says."""
        with self._lock, neutral():  # one thread: a second one would only wait at every small tensor
            about: dict[str, Any] = {"kind": "refused", "node": self.data.name}
            try:
                header, tensors = unseal(envelope, self._most)
                kind = field(header, "kind", str)
                about |= {"run": run_of(header), "number": field(header, "number", int)}
                if kind not in KINDS:
                    raise BadMessage(f"it asks for {kind[:20]!r}; there are: {', '.join(KINDS)}")
                self._numbers(about["run"]).take(about["number"])
                return getattr(self, f"_{kind}")(header, by_name(tensors), about)  # type: ignore[no-any-return]
            except (BadMessage, UserError) as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  whatever a message brings about, the node goes on
                reason = f"{type(error).__name__}: {error}"
            self._say(f"refused a message: {reason}")
            return seal(about | {"reason": reason})

    def _describe(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        return seal(about | {"kind": "described", "description": self.data.described().to_json()})

    def _agree(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        agreement = Agreement.from_json(header.get("agreement"))
        if agreement.run != about["run"]:
            raise BadMessage("its agreement is of another run")
        self._runs[agreement.run] = self._open(agreement, tensors)
        whole = seal({"agreement": agreement.to_json()}, tensors.items())
        write_whole(self._place(agreement.run) / AGREEMENT, whole.to_bytes())
        self._say(f"run {agreement.run[:8]}: agreed on {agreement.blueprint.method}, {agreement.blueprint.model}")
        return seal(about | {"kind": "agreed", "agreement": agreement.digest})

    def _job(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        run = self._run(about["run"])
        if run is None or run.agreement.digest != field(header, "agreement", str):
            return seal(about | {"kind": "unknown", "reason": "this node does not know what was agreed on"})
        asked = run.asked(header)
        run.check_shared(tensors)
        results = run.work(asked, tensors)
        failed = [each.fields["failure"] for each in results if "failure" in each.fields]
        self._say(
            f"run {about['run'][:8]}, round {Purpose.of(asked.job).round}: {name_of(asked.job)} for "
            f"{', '.join(f'client {visit.client}' for visit in asked.visits[:5])}"
            + (f"; failed: {failed[0]}" if failed else "")
        )
        sent = [pair for each in results for pair in each.tensors]
        return seal(about | {"kind": "done", "results": [dict(each.fields) for each in results]}, sent)

    def _refuse(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        self._say(f"the server leaves this node out: {text(header, 'reason', 2000)}")
        return seal(about | {"kind": "heard"})

    def _finish(self, header: Mapping[str, Any], tensors: Tensors, about: dict[str, Any]) -> Envelope:
        self._runs.pop(about["run"], None)
        place = self._place(about["run"])  # the numbers of its messages stay: one that is sent again is refused
        rmtree(place / "memories", ignore_errors=True)
        (place / AGREEMENT).unlink(missing_ok=True)
        if (own := self._secrets.pop(about["run"], None)) is not None:
            own.sessions.close()
        forget_secret(place)
        self._say(f"run {about['run'][:8]} is finished; what its clients kept is deleted")
        return seal(about | {"kind": "heard"})

    def _run(self, name: str) -> NodeRun | None:
        """The run of that name, opened again from the node's files where this process does not have it."""
        if name not in self._runs:
            content = read_content(self._place(name) / AGREEMENT, self._most)
            if content is None:
                return None
            header, tensors = unseal(Envelope.from_bytes(content), self._most)
            self._runs[name] = self._open(Agreement.from_json(header.get("agreement")), by_name(tensors))
        return self._runs[name]

    def _open(self, agreement: Agreement, frozen: Tensors) -> NodeRun:
        place = self._place(agreement.run)
        if agreement.run not in self._secrets:
            self._secrets[agreement.run] = open_secret(place)
        return NodeRun(
            agreement, self.data, frozen, place, own=self._secrets[agreement.run], device=self._device,
            plugins=self._plugins,
        )  # fmt: skip

    def _numbers(self, run: str) -> Seen:
        if run not in self._seen:
            self._seen[run] = Seen(self._place(run) / "seen.json")
        return self._seen[run]

    def _place(self, run: str) -> Path:
        return self._folder / "runs" / run


def _forget_abandoned(runs: Path) -> None:
    """Remove runs that were never finished and have sent nothing for a long time."""
    with suppress(OSError):
        for run in runs.iterdir():
            if time.time() - max((file.stat().st_mtime for file in run.iterdir()), default=0.0) > ABANDONED:
                rmtree(run, ignore_errors=True)
