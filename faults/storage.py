"""Storage that fails: writes that take only some of the bytes, and power that goes off before all is on the disk.

A short write must change nothing. After a power failure, `unskew resume` gives the result of a run that was never
disturbed, to the last bit, or there is nothing yet to resume.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from faults.kills import METHODS, outcome
from faults.trials import SAME, Trial

DIGITS = {"data": "digits", "clients": 4, "rounds": 4, "epochs": 1, "lr": 0.05, "engine": "loop", "augment": False}
OPTIONS = DIGITS | {"during": "norms + drift + model(every=2)", "patience": 2, "checkpoint_seconds": 0.0}


def storage_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """Short writes and power failures in turn."""
    for number in range(10_000):
        draw, method = np.random.default_rng([seed, number]), METHODS[number // 2 % len(METHODS)]
        kind, work = ("short writes", short) if number % 2 else ("power failure", powerless)
        yield Trial(f"{kind} {number}: {method}", partial(work, folder, method, draw))


@cache
def undisturbed(folder: Path, method: str) -> tuple[str, ...]:
    """The result of a run on storage that works."""
    import unskew

    run = folder / f"undisturbed {METHODS.index(method)}"
    unskew.run(out=run, method=method, **OPTIONS)
    return outcome(run)


# Short writes


@contextmanager
def short_writes(draw: np.random.Generator) -> Iterator[None]:
    """Inside, the system takes as many bytes of a write as it likes, at least one."""
    write, pwrite = os.write, os.pwrite

    def some(content: bytes) -> memoryview:
        view = memoryview(content).cast("B")
        return view[: int(draw.integers(1, len(view) + 1))] if len(view) else view

    os.write = lambda file, content: write(file, some(content))
    os.pwrite = lambda file, content, offset: pwrite(file, some(content), offset)
    try:
        yield
    finally:
        os.write, os.pwrite = write, pwrite


def short(folder: Path, method: str, draw: np.random.Generator) -> str:
    """A run all of whose direct writes are short."""
    import unskew

    expected, run = undisturbed(folder, method), folder / "short"
    shutil.rmtree(run, ignore_errors=True)
    with short_writes(draw):
        unskew.run(out=run, method=method, **OPTIONS)
    return SAME if outcome(run) == expected else "another result"


# Power failures


@dataclass(frozen=True)
class Moment:
    """What a disk may hold if the power goes off now: what was synced, and what has changed since."""

    synced: dict[int, bytes]  # the content of a file, by its number
    named: dict[int, dict[str, int]]  # the entries of a folder when it was synced
    content: dict[int, bytes]
    entries: dict[int, dict[str, int]]

    def restore(self, root: int, target: Path, draw: np.random.Generator) -> None:
        """Write such a disk: of every change that was not synced, it has it or not, whatever the order."""
        target.mkdir()
        before, now = self.named.get(root, {}), self.entries.get(root, {})
        for name in sorted({*before, *now}):
            number = before.get(name)
            if now.get(name) != number and draw.random() < 0.5:
                number = now.get(name)
            if number is None:
                continue
            if number in self.entries or number in self.named:
                self.restore(number, target / name, draw)
            else:
                old = self.synced.get(number, b"")
                new = self.content.get(number, old)  # a file that was replaced in the meantime did not change
                safe = len(old) if new.startswith(old) else 0  # of a file that grew, what was synced stays
                torn = new[: (safe + len(new)) // 2]
                (target / name).write_bytes(old if old == new or draw.random() < 0.5 else torn)


class Disk:
    """Watches what a process syncs below a folder. Numbers of files are not used again: their files are held."""

    def __init__(self, folder: Path, held: Path) -> None:
        self.folder, self._held = folder, held
        self._synced: dict[int, bytes] = {}
        self._named: dict[int, dict[str, int]] = {}
        self.moments: list[Moment] = []
        held.mkdir()

    @property
    def root(self) -> int:
        return self.folder.stat().st_ino

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, every sync is a moment at which the power may go off: just before it, and just after."""
        fsync = os.fsync

        def sync(file: int) -> None:
            self._note()
            fsync(file)
            about = os.fstat(file)
            content, entries = self._look()
            if stat.S_ISDIR(about.st_mode) and about.st_ino in entries:
                self._named[about.st_ino] = entries[about.st_ino]
            elif about.st_ino in content:
                self._synced[about.st_ino] = content[about.st_ino]
            self._note()

        os.fsync = sync
        try:
            yield
        finally:
            os.fsync = fsync

    def _note(self) -> None:
        self.moments.append(Moment(dict(self._synced), dict(self._named), *self._look()))

    def _look(self) -> tuple[dict[int, bytes], dict[int, dict[str, int]]]:
        content, entries = {}, {}
        for place, _, names in os.walk(self.folder):
            inside = entries[os.stat(place).st_ino] = {}
            for entry in os.scandir(place):
                inside[entry.name] = entry.inode()
            for name in names:
                file = Path(place, name)
                number = file.stat().st_ino
                content[number] = file.read_bytes()
                if not (self._held / str(number)).exists():
                    os.link(file, self._held / str(number))
        return content, entries


def powerless(folder: Path, method: str, draw: np.random.Generator) -> str:
    """The power goes off at some moment of a run; then it is resumed."""
    expected, moments, root = undisturbed(folder, method), *_recorded(folder, method)
    moment = moments[int(draw.integers(len(moments)))]
    return after_power_failure(folder, moment, root, draw, expected)


@cache
def _recorded(folder: Path, method: str) -> tuple[list[Moment], int]:
    import unskew

    place = folder / f"watched {METHODS.index(method)}"
    place.mkdir()
    disk = Disk(place, folder / f"held {METHODS.index(method)}")
    with disk.watched():
        unskew.run(out=place / "run", method=method, **OPTIONS)
    return disk.moments, disk.root


def after_power_failure(
    folder: Path, moment: Moment, root: int, draw: np.random.Generator, expected: tuple[str, ...]
) -> str:
    """What becomes of a run whose disk was left like this."""
    import unskew

    shutil.rmtree(folder / "tried", ignore_errors=True)
    moment.restore(root, folder / "tried", draw)
    run = folder / "tried" / "run"
    if not (run / "config.toml").exists():
        return SAME  # it had not begun
    if not (run / "result.json").exists():
        unskew.resume(run)
    return SAME if outcome(run) == expected else "another result"
