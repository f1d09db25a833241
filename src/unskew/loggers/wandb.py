"""Weights & Biases: a run in the run folder, which its user may sync later."""

import os
import shutil
import sys
import uuid
from collections.abc import Container
from pathlib import Path
from typing import Any

from unskew.core.plugins import require_extra
from unskew.loggers.logger import Facts, Figures, kept
from unskew.runs.prepare import Overview


class WeightsAndBiases:
    """A run of wandb, offline unless WANDB_MODE says otherwise; its id is kept, so that a resumed run has the same.

    An offline run cannot be continued: it is replaced by a new one, written from metrics.jsonl.
    """

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
        self._alone = "wandb" not in sys.modules  # then no other code needs its service process
        self._wandb = require_extra("wandb", "wandb")
        self._run: Any = None

    def start(self, folder: Path, seen: Overview, facts: Facts) -> Container[int]:
        """Online the rounds that the server has are not sent again; offline all are."""
        mode = os.environ.get("WANDB_MODE") or "offline"
        identity = kept(folder / "run-id", lambda: uuid.uuid4().hex[:12])
        old = set(folder.resolve().glob(f"offline-run-*-{identity}"))
        hooks = sys.exit, sys.excepthook  # wandb replaces them
        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "unskew"), name=seen.path.name, id=identity, config=dict(facts),
                dir=str(folder.parent), mode=mode, resume="allow" if mode == "online" else None, reinit="create_new",
                settings=self._wandb.Settings(
                    console="off", silent=True, disable_git=True, save_code=False, disable_job_creation=True,
                    x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
                ),
            )  # fmt: skip
        finally:
            sys.exit, sys.excepthook = hooks
        if mode == "online":
            return range(1, self._run.step)
        for former in old - {Path(self._run.dir).resolve().parent}:
            shutil.rmtree(former)
        return ()

    def write(self, step: int, figures: Figures) -> None:
        """A step of its history; figures of a past step go to the summary."""
        if step < self._run.step:
            self._run.summary.update(dict(figures))
        else:
            self._run.log(dict(figures), step=step)

    def close(self, finished: bool) -> None:
        """End the run, and the service process if we started it."""
        if self._run is not None:
            self._run.finish(exit_code=0 if finished else 1)
        if self._alone:
            self._wandb.teardown()
