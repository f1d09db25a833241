"""The manifest: whatever is changed in a run folder is named, and no crash leaves a folder that is refused."""

import json
import os
import shutil
import threading
from contextlib import suppress

import pytest

from analysis.finished import SMALL, command, done, finished, images, refused, run, runs_of, unsealed
from unskew.core.errors import UserError
from unskew.core.files import part_beside
from unskew.runs import folder as folders
from unskew.runs import train
from unskew.runs.finished import FinishedRun
from unskew.runs.result import read_result
from unskew.runs.seals import examine

__all__ = ["finished", "run", "runs_of"]


class Killed(BaseException):
    """The process is gone: nothing after it is written."""


class KilledAt:
    """Stands for os.replace: from the given call on, the process is dead, before or after that replacement."""

    def __init__(self, monkeypatch, at, after):
        self.calls, self.at, self.after, self.replace = 0, at, after, os.replace
        monkeypatch.setattr(os, "replace", self)

    @property
    def dead(self):
        return self.calls >= self.at

    def __call__(self, source, target):
        if self.dead:
            raise Killed
        self.calls += 1
        if not self.dead or self.after:
            self.replace(source, target)
        if self.dead:
            raise Killed


# One folder


def test_what_is_written_is_read_and_what_is_changed_is_not(tmp_path):
    folders.start_manifest(tmp_path, {})
    folders.write_sealed(tmp_path, {"a": b"one", "figures/b.json": b"two"})
    assert folders.read_sealed(tmp_path, "a") == b"one"
    folders.require_sealed(tmp_path, "figures/b.json")
    (tmp_path / "a").write_bytes(b"other")
    with pytest.raises(folders.SealBroken, match=r"a was changed, .*restore it from a copy, or delete .*json"):
        folders.read_sealed(tmp_path, "a")
    (tmp_path / "a").unlink()
    (tmp_path / "c").write_bytes(b"three")
    for name in ("a", "c"):
        with pytest.raises(folders.SealBroken, match=f"{name} was changed, added or removed"):
            folders.require_sealed(tmp_path, name)
    assert folders.read_sealed(tmp_path, "nothing") is None
    (tmp_path / "figures" / "b.json").unlink()
    assert folders.read_sealed(tmp_path, "figures/b.json") is None  # it is made again
    folders.write_sealed(tmp_path, {"a": b"restored"})
    assert folders.read_sealed(tmp_path, "a") == b"restored"


def test_every_bit_of_the_manifest_counts(tmp_path):
    folders.start_manifest(tmp_path, {})
    folders.write_sealed(tmp_path, {"a": b"one"})
    whole = (tmp_path / folders.MANIFEST).read_bytes()
    for place in range(len(whole)):
        changed = bytes([whole[place] ^ 1 << place % 8])
        (tmp_path / folders.MANIFEST).write_bytes(whole[:place] + changed + whole[place + 1 :])
        with pytest.raises(folders.SealBroken, match=r"manifest\.json is damaged .*delete it to use the run directory"):
            folders.read_sealed(tmp_path, "a")
    for length in range(0, len(whole) - 1, 5):
        (tmp_path / folders.MANIFEST).write_bytes(whole[:length])
        with pytest.raises(folders.SealBroken, match="is damaged"):
            folders.require_sealed(tmp_path, "a")
    (tmp_path / folders.MANIFEST).write_bytes(b"[" * 100_000)
    with pytest.raises(folders.SealBroken, match="nested too deeply"):
        folders.read_manifest(tmp_path)


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_every_write_leaves_the_old_file_or_the_new_one_and_both_are_accepted(tmp_path, monkeypatch, after):
    old, new = {"a": b"a1", "b": b"b1"}, {"b": b"b2", "c": b"c2", "a": b"a2"}
    for at in range(1, 10):
        folder = tmp_path / str(at)
        folder.mkdir()
        folders.start_manifest(folder, old)
        with monkeypatch.context() as patch:
            killed = KilledAt(patch, at, after)
            try:
                folders.write_sealed(folder, new, grown={})
            except Killed:
                assert killed.calls == at
        for name in ("a", "b", "c"):
            assert folders.read_sealed(folder, name) in (old.get(name), new.get(name))
        folders.write_sealed(folder, {"d": b"more"})  # what the crash left open is settled
        manifest = folders.read_manifest(folder)
        assert manifest.coming == {}
        assert sorted(manifest.files) == sorted(name for name in "abcd" if (folder / name).exists())
        assert all(folders.read_sealed(folder, name) is not None for name in manifest.files)
        if not killed.dead:
            break
    assert at == 6  # manifest, three files, manifest: each of the five was cut off once


def test_two_writers_lose_nothing_of_each_other_and_readers_never_see_a_difference(tmp_path):
    folders.start_manifest(tmp_path, {})
    folders.write_sealed(tmp_path, {"shared": b"0"})
    failures = []

    def guarded(work):
        try:
            work()
        except BaseException as error:  # noqa: BLE001  whatever it was, the test fails with it
            failures.append(error)

    def write(name):
        for number in range(15):
            folders.write_sealed(tmp_path, {f"{name}-{number}": name.encode(), "shared": f"{name}{number}".encode()})

    def read():
        while any(writer.is_alive() for writer in writers):
            folders.read_sealed(tmp_path, "shared")
            folders.require_sealed(tmp_path, "shared")

    writers = [threading.Thread(target=guarded, args=(lambda name=name: write(name),)) for name in "xy"]
    reader = threading.Thread(target=guarded, args=(read,))
    for thread in (*writers, reader):
        thread.start()
    for thread in (*writers, reader):
        thread.join()
    assert failures == []
    assert len(folders.read_manifest(tmp_path).files) == 31


# A whole run


def test_a_run_killed_at_any_write_is_never_refused_and_ends_the_same(runs_of, tmp_path, monkeypatch):
    options = {"rounds": 2, "method": "fedavg + lda", "during": "norms", "checkpoint_seconds": 0.0}
    whole = runs_of(**options)
    given = {**SMALL, **options, "data": f"arrays:{images(whole.parent)}"}
    want = contents(whole)
    for at in range(1, 40):
        place = tmp_path / str(at)
        with monkeypatch.context() as patch:
            killed = KilledAt(patch, at, after=at % 2 == 0)
            with suppress(Killed):
                train.run(out=place, **given)
        if killed.dead and not (place / "result.json").exists():
            if (place / "config.toml").exists():
                train.resume(place)
            else:
                with pytest.raises(UserError, match=r"not a run directory.*unskew run --out"):
                    train.resume(place)
                train.run(out=place, **given)
        FinishedRun(place).close()
        assert contents(place) == want
        assert not [each for each in examine(place) if each.state == "damaged"]
        if not killed.dead:
            break
    else:
        raise AssertionError("the run was never let alone")


def contents(run):
    """What does not depend on the clock."""
    values = json.loads((run / "result.json").read_text())
    for row in values["calibrations"]:
        row.pop("seconds")
    files = [folders.read_sealed(run, name) for name in ("during.jsonl", "config.toml")]
    return {name: value for name, value in values.items() if "second" not in name}, files


def test_all_that_decides_a_result_is_named_in_the_manifest(run, capsys):
    done(capsys, "analyse", run, "skew")
    assert sorted(folders.read_manifest(run).files) == sorted([
        "config.toml", "partition.npz", *folders.GROWING, "result.json", "model.safetensors", "figures/skew.json",
        "clients.npz", "model.json",
        *(folders.calibration_file(run, name).name for name in read_result(run).calibrations),
    ])  # fmt: skip


def drop_line(file):
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:1] + lines[2:]))


def replaced(old, new):
    def change(file):
        content = file.read_bytes()
        assert old in content
        file.write_bytes(content.replace(old, new, 1))

    return change


CHANGES = {
    "a calibration copied over another": (
        "calibration-lda.safetensors",
        lambda file: shutil.copy(file.parent / "calibration-lda-layers-2.safetensors", file),
        [["analyse", "confusion"]],
    ),
    "another rate": ("config.toml", replaced(b"lr = 0.05", b"lr = 0.06"), [["analyse", "drift"], ["calibrate", "lda"]]),
    "a round less": ("metrics.jsonl", drop_line, [["compare"], ["report"], ["analyse", "curves"]]),
    "a record less": ("during.jsonl", drop_line, [["analyse", "norms"]]),
    "accuracy NaN": (
        "result.json", replaced(b'"accuracy": 0.', b'"accuracy": NaN, "x": 0.'), [["compare"], ["report"]],
    ),
    "another accuracy": (
        "result.json", replaced(b'"accuracy": 0.', b'"accuracy": 0.9'), [["compare"], ["calibrate", "lda"]],
    ),
    "integers for floats": (
        "model.safetensors", replaced(b'"F32"', b'"I32"'), [["calibrate", "lda"], ["analyse", "norms"]],
    ),
    "another client": (
        "partition.npz", lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x"),
        [["calibrate", "lda"], ["analyse", "skew"]],
    ),
    "another figure": ("figures/skew.json", replaced(b'"emd": ', b'"emd": 1'), [["report", "--only", "skew"]]),
    "no calibration": ("calibration-lda.safetensors", os.unlink, [["analyse", "confusion"]]),
    "no metrics": ("metrics.jsonl", os.unlink, [["compare"], ["report"]]),
    "no result": ("result.json", os.unlink, [["compare"], ["resume"]]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_named_in_one_sentence(run, capsys, change):
    name, damage, commands = CHANGES[change]
    if name.startswith("figures"):
        done(capsys, "analyse", run, "skew")
    damage(run / name)
    for verb, *words in commands:
        message = refused(capsys, verb, run, *words)
        assert f"{run / name} " in message
        assert "restore it from a copy" in message
        assert message.count("\n") == 1
    assert f"{run / name} " in refused(capsys, "check", run)


# Folders that are not sealed


def test_a_folder_without_a_manifest_works_and_a_note_says_so(run, capsys):
    unsealed(run)
    for words in (
        ["calibrate", run, "lda"],
        ["analyse", run, "skew"],
        ["report", run, "--only", "skew"],
        ["compare", run],
    ):
        code, _, error = command(capsys, *words)
        assert code == 0
        assert error == f"note: {run} is not sealed: it has no manifest.json, so changed files may go unnoticed\n"
    assert not (run / folders.MANIFEST).exists()


def test_check_tells_what_is_sealed_and_seals(run, capsys):
    said = done(capsys, "check", run)
    assert "result.json" in said
    assert f"{run}: " in said.splitlines()[-1]
    assert "damaged" not in said
    unsealed(run)
    said = done(capsys, "check", run)
    assert "unskew check" in said
    assert "not sealed" in said
    assert "files as they are" in done(capsys, "check", run, "--seal")
    assert "clients.npz" in folders.read_manifest(run).files
    done(capsys, "check", run)
    (run / "result.json").write_text("{}")
    before = (run / folders.MANIFEST).read_bytes()
    assert "nothing was sealed" in refused(capsys, "check", run, "--seal")
    assert (run / folders.MANIFEST).read_bytes() == before
    assert "is not a run directory" in refused(capsys, "check", run.parent)


# What a kill leaves behind


def test_a_folder_with_locks_and_parts_alone_counts_as_empty(tmp_path, runs_of):
    place = tmp_path / "run"
    place.mkdir()
    (place / ".lock").touch()
    dead = part_beside(place / "config.toml")
    dead = dead.with_name(dead.name.replace(f".{os.getpid()}.part", ".4194305.part"))  # above any process's number
    dead.touch()
    with pytest.raises(UserError, match=f"{place} is not a run directory"):
        train.resume(place)
    train.run(out=place, data=f"arrays:{images(runs_of(rounds=1).parent)}", **{**SMALL, "rounds": 1})
    assert not list(place.rglob("*.part"))
    with pytest.raises(UserError, match="is finished"):
        train.resume(place)
