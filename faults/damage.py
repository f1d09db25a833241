"""Damaged run folders: one change to one file, then every command that reads it.

A finished run and an interrupted one are made once. The changes: each byte of the binary files' headers with a bit
flipped, bytes of their bodies, files cut short, emptied, deleted or replaced by another of their kind; each number of
a text file replaced by another number, by NaN, null, a word, 1e999; lines dropped, doubled, swapped.
"""

import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from faults.trials import SAME, Answer, Trial, command, digest, refusal, shuffled

DIGITS = {"data": "digits", "clients": 4, "rounds": 3, "epochs": 1, "lr": 0.05, "engine": "loop", "augment": False}
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
INSTEAD = (b"NaN", b"null", b'"word"', b"1e999", b"-1", b"9223372036854775808", b"[]", b"0", b"true")
DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
BINARY = (".safetensors", ".npz", ".bin")
IGNORED = (".lock", "report.html")  # not a part of a result
BODY_BYTES = 64  # of a binary file's body that are tried

Reader = Callable[[Path], "str | Answer"]
Change = Callable[[Path], None]


def finished_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """Faults in a finished run, for load, calibrate, analyse, compare and report."""
    import unskew

    sound = folder / "finished"
    unskew.run(out=sound, method="fedavg + ccvr + lda", during="norms", **DIGITS)
    other = folder / "other"
    unskew.run(out=other, method="fedavg + ccvr + lda", during="norms", **(DIGITS | {"lr": 0.03}))
    for run in (sound, other):
        unskew.analyse(run, "norms", "skew")
    yield from _trials(sound, other, folder / "tried", READERS, seed)


def interrupted_trials(folder: Path, seed: int) -> Iterator[Trial]:
    """Faults in an interrupted run, for resume."""
    import unskew

    sound, other = folder / "interrupted", folder / "other"
    for run, rate in ((sound, 0.05), (other, 0.03)):
        options = DIGITS | {"lr": rate, "method": "moon + fedavgm + lda", "during": "norms", "checkpoint_seconds": 0}
        try:
            unskew.run(
                out=run, observe=lambda event: unskew.STOP if getattr(event, "round", 0) == 2 else None, **options
            )
        except unskew.StopRun:
            continue
        raise AssertionError("the run was not stopped")
    yield from _trials(sound, other, folder / "tried", {"resume": resume}, seed)


def _trials(sound: Path, other: Path, tried: Path, readers: dict[str, Reader], seed: int) -> Iterator[Trial]:
    expected = {name: _read(reader, sound, tried) for name, reader in readers.items()}
    for name, answer in expected.items():
        if isinstance(answer, Answer):
            raise AssertionError(f"{name} fails on a sound folder: {answer.err}")
        if answer != _read(readers[name], sound, tried):
            raise AssertionError(f"{name} does not give the same result twice")
    faults = [
        (f"{name}, {fault}, {reader}", name, change, reader)
        for name in files_of(sound)
        for fault, change in changes(sound / name, other / name, seed)
        for reader in readers
        if reader in read_by(name)
    ]
    for title, name, change, reader in shuffled(faults, seed):
        yield Trial(title, partial(_tried, sound, tried, name, change, readers[reader], expected[reader]))


def read_by(name: str) -> tuple[str, ...]:
    """The readers that a fault in this file is tried on: those that use it."""
    for start, readers in READ_BY.items():
        if name.startswith(start):
            return (*readers, "resume")
    return (*READERS, "resume")


def files_of(run: Path) -> list[str]:
    """The files of a run that decide a result or are shown as one."""
    names = (str(file.relative_to(run)) for file in sorted(run.rglob("*")) if file.is_file())
    return [name for name in names if Path(name).name not in IGNORED]


def _read(reader: Reader, sound: Path, tried: Path) -> "str | Answer":
    shutil.rmtree(tried, ignore_errors=True)
    shutil.copytree(sound, tried)
    return reader(tried)


def _tried(sound: Path, tried: Path, name: str, change: Change, reader: Reader, expected: str) -> str:
    shutil.rmtree(tried, ignore_errors=True)
    shutil.copytree(sound, tried)
    change(tried / name)
    got = reader(tried)
    if isinstance(got, Answer):
        return refusal(got, named=Path(name).name)
    return SAME if got == expected else "another result, and exit code 0"


# The changes


def changes(file: Path, other: Path, seed: int) -> Iterator[tuple[str, Change]]:
    """Every change to a file: what it is called, and how it is made."""
    content = file.read_bytes()
    yield "deleted", lambda path: path.unlink()
    yield "emptied", lambda path: path.write_bytes(b"")
    yield "replaced by that of another run", lambda path: shutil.copy(other, path)
    yield "random bytes", lambda path: path.write_bytes(np.random.default_rng(seed).bytes(1000))
    for part in (0.1, 0.5, 0.99):
        yield f"cut to {part:.0%}", _writes(content[: int(len(content) * part)])
    if file.name.startswith("calibration-"):
        twins = [path.name for path in file.parent.glob("calibration-*") if path != file]
        yield "replaced by another calibration", lambda path: shutil.copy(path.with_name(twins[0]), path)
    yield from _of_bytes(content, seed) if file.suffix in BINARY else _of_text(content, seed)


def _writes(content: bytes) -> Change:
    return lambda path: path.write_bytes(content) and None


def _of_bytes(content: bytes, seed: int) -> Iterator[tuple[str, Change]]:
    """A bit flipped in every byte of the header, and in some of the body."""
    draw = np.random.default_rng(seed)
    header = min(8 + struct.unpack("<Q", content[:8])[0], len(content)) if content[8:9] == b"{" else 0
    body = sorted(draw.choice(range(header, len(content)), min(BODY_BYTES, len(content) - header), replace=False))
    for place in [*range(header), *body]:
        bit = int(draw.integers(8))
        changed = content[:place] + bytes([content[place] ^ (1 << bit)]) + content[place + 1 :]
        yield f"byte {place} bit {bit}", _writes(changed)
    for old, new in ((b"F32", b"I32"), (b"F64", b"I64"), (b"[64,", b"[46,")):
        if old in content[:header]:
            yield f"{old.decode()} to {new.decode()}", _writes(content.replace(old, new, 1))


def _of_text(content: bytes, seed: int) -> Iterator[tuple[str, Change]]:
    """Every number replaced, lines dropped, doubled and swapped, nesting without an end."""
    draw = np.random.default_rng(seed)
    for place, match in enumerate(NUMBER.finditer(content)):
        more = [b"1" + match[0].lstrip(b"-"), INSTEAD[int(draw.integers(len(INSTEAD)))]]
        for new in more:
            yield (
                f"number {place} to {new.decode()[:20]}",
                _writes(content[: match.start()] + new + content[match.end() :]),
            )
    lines = content.splitlines(keepends=True)
    for place in draw.choice(len(lines), min(5, len(lines)), replace=False):
        yield f"line {place} dropped", _writes(b"".join([*lines[:place], *lines[place + 1 :]]))
        yield f"line {place} doubled", _writes(b"".join([*lines[: place + 1], *lines[place:]]))
    yield "lines reversed", _writes(b"".join(reversed(lines)))
    yield "deeply nested", _writes(DEEP)
    yield "a byte that is not UTF-8", _writes(content[:10] + b"\xff" + content[10:])
    yield "a null byte", _writes(content[:10] + b"\0" + content[10:])


# The readers: what a user would do with the folder, as a digest of the result, or the answer that is not a success


def load(run: Path) -> "str | Answer":
    import unskew

    try:
        models = [unskew.load(run, name) for name in (None, "ccvr", "lda")]
    except unskew.UserError as error:
        return Answer(2, "", f"unskew: {error}")
    return digest(*(value.numpy().tobytes() for model in models for value in model.state_dict().values()))


def _by_command(*words: object, result: Callable[[Answer], str]) -> "str | Answer":
    answer = command(*words)
    return answer if answer.code else result(answer)


def calibrate(run: Path) -> "str | Answer":
    return _by_command("calibrate", run, "lda(0.5)", result=lambda _: digest(_calibrations(run)))


def analyse(run: Path) -> "str | Answer":
    figures = run / "figures"

    def values(_: Answer) -> str:
        return digest((figures / "skew.json").read_bytes(), (figures / "drift.json").read_bytes())

    return _by_command("analyse", run, "skew", "drift", result=values)


def compare(run: Path) -> "str | Answer":
    return _by_command("compare", run, "--format", "json", result=lambda answer: digest(_timeless(answer.out)))


def report(run: Path) -> "str | Answer":
    page = run / "report.html"
    return _by_command(
        "report", run, "--only", "skew", "--only", "norms", result=lambda _: digest(_timeless(page.read_text()))
    )


def resume(run: Path) -> "str | Answer":
    def values(_: Answer) -> str:
        result = json.loads((run / "result.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            del row["seconds"]
        during = (run / "during.jsonl").read_text()
        return digest(result["weights_sha256"], result["accuracy"], rows, during, _calibrations(run))

    return _by_command("resume", run, result=values)


def _calibrations(run: Path) -> list[tuple[str, float]]:
    result = json.loads((run / "result.json").read_text())
    return [(each["name"], each["accuracy"]) for each in result["calibrations"]]


def _timeless(text: str) -> str:
    """Without what differs from one time to the next: durations, dates."""
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?", "", text)
    return re.sub(r"[\d.]+ ?(ms|s|min)\b", "", text)


READERS: dict[str, Reader] = {
    "load": load, "calibrate": calibrate, "analyse": analyse, "compare": compare, "report": report,
}  # fmt: skip

READ_BY: dict[str, tuple[str, ...]] = {  # a file that is not here concerns all of them
    "calibration-": ("load",),
    "checkpoint/": (),
    "during.jsonl": ("report",),
    "figures/": ("report",),
    "metrics.jsonl": ("compare", "report"),
    "model.safetensors": ("load", "calibrate", "analyse"),
    "partition.npz": ("load", "calibrate", "analyse"),
}
