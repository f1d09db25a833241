"""Storage and surroundings that fail: every fault is performed, and what follows is the same bits or one message."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import unskew
from faults.storage import Disk, short_writes
from unskew.core.errors import UserError
from unskew.runs.journal import LineFile, Mark, read_during

OPTIONS = {"clients": 4, "partition": "iid", "rounds": 4, "epochs": 1, "lr": 0.05, "engine": "loop",
           "checkpoint_seconds": 0.0, "during": "norms + drift"}  # fmt: skip


def test_a_line_is_written_whole_though_the_system_takes_it_in_pieces(tmp_path):
    lines = LineFile(tmp_path / "metrics.jsonl", Mark())
    with short_writes(np.random.default_rng(0)):
        for number in range(20):
            lines.append({"round": number})
    assert [row["round"] for row in lines.rows()] == list(range(20))
    lines.close()


def test_a_new_file_is_named_on_the_disk_before_a_checkpoint_counts_on_it(tmp_path):
    """Else a power failure leaves a checkpoint and no metrics.jsonl."""
    place = tmp_path / "place"
    place.mkdir()
    disk = Disk(place, tmp_path / "held")
    with disk.watched():
        unskew.run(out=place / "run", method="moon", **OPTIONS)
    for moment in disk.moments:
        run = moment.named[disk.root].get("run") if disk.root in moment.named else None
        named = moment.named.get(run, {})
        inside = moment.named.get(named.get("checkpoint"), {})
        if "state.safetensors" in inside:
            assert {"metrics.jsonl", "during.jsonl", "config.toml"} <= set(named)
            assert "memories.bin" in inside
    assert "state.safetensors" in inside, "the last moment is after the last checkpoint"


def test_a_lock_that_is_a_named_pipe_is_refused(tmp_path):
    run = tmp_path / "run"
    unskew.run(out=run, **OPTIONS)
    for name in (".lock", ".manifest.lock"):
        (run / name).unlink()
        os.mkfifo(run / name)
        with pytest.raises(UserError, match=rf"{re.escape(name)} cannot be locked: it is not a plain file; delete it"):
            unskew.calibrate_run(run, "lda")
        (run / name).unlink()


def test_a_deleted_working_directory_is_one_message(tmp_path):
    """From the command line, and from Python."""
    gone = "import os, sys, tempfile; here = tempfile.mkdtemp(); os.chdir(here); os.rmdir(here); "
    command = gone + "sys.argv = ['unskew', 'run', '--rounds', '1']; from unskew.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "unskew: the working directory was deleted; change to another one\n")
    call = f"import unskew; unskew.run\n{gone}\ntry: unskew.run()\nexcept unskew.UserError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("the working directory was deleted; change to another one\n", "")


@pytest.mark.parametrize("during", ["drift", "norms"])
def test_rounded_updates_are_recorded_as_plain_ones_are(during, tmp_path):
    names = [unskew.run(out=tmp_path / method, method=method, **OPTIONS | {"during": during}).path
             for method in ("fedavg", "fedavg + rounded")]  # fmt: skip
    plain, rounded = ([row[during]["clients"] for row in read_during(path)] for path in names)
    assert plain == rounded
    assert all(len(clients) == 4 for clients in rounded)
