"""TensorBoard: event files in the run folder."""

from collections.abc import Container
from pathlib import Path
from typing import Any

from unskew.core.plugins import require_extra
from unskew.loggers.logger import Facts, Figures
from unskew.runs.prepare import Overview


class TensorBoard:
    """Event files. A resumed run tells TensorBoard to forget the rounds that are sent again."""

    def __init__(self) -> None:
        require_extra("tensorboard", "tensorboard")
        self._torch = require_extra("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = None

    def start(self, folder: Path, seen: Overview, facts: Facts) -> Container[int]:
        """The last round is sent again too: the calibrations are logged with it, and they are made again."""
        known = any(folder.glob("events.out.tfevents.*"))
        held = range(1, min(seen.first_round, seen.config.rounds)) if known else range(1, 1)
        self._writer = self._torch.SummaryWriter(str(folder), purge_step=held[-1] + 1 if held else 0)
        if not known:
            lines = ["| name | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items())]
            self._writer.add_text("run", "\n".join(lines), 0)
            final = {"final/accuracy": 0.0, "final/loss": 0.0}  # names only: where to find the final figures
            for summary in self._torch.summary.hparams(dict(facts), final):
                self._writer.file_writer.add_summary(summary)
            self._writer.flush()
        return held

    def write(self, step: int, figures: Figures) -> None:
        """One scalar for each figure; flushed, so that a killed process loses none."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
