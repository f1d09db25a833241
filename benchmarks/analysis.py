"""What looking at a run costs: CKA of all layers, the default report, in seconds and in memory."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import unskew
from measure import Row, at_most

CLIENTS, EPOCHS = 10, 5


def suite(images):
    """All rows: a run of ten clients, looked at by the commands that a user has."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        unskew.run(
            data=_data(images, Path(folder)), data_dir=os.environ.get("UNSKEW_DATA"), clients=CLIENTS, rounds=1,
            epochs=EPOCHS, method="fedavg + ccvr", model="simple-cnn", partition="dirichlet(alpha=0.1)", out=run,
        )  # fmt: skip
        cka, cka_memory = _watched("analyse", run, "cka")
        report, report_memory = _watched("report", run, "--again")
        again, _ = _watched("report", run)
        values = json.loads((run / "figures" / "cka.json").read_text())["values"]
        size = (run / "report.html").stat().st_size / 1e6
    layers = f"{len(values['layers'])} layers, {len(values['clients'])} clients, {values['images']:,} images"
    return [
        at_most("unskew analyse RUN cka, local models trained again", cka, "s", 60, layers),
        at_most("its memory, workers included", cka_memory, "GB", 2),
        at_most("unskew report RUN, every measure taken", report, "s", 60, "t-SNE of 2,000 images included"),
        at_most("its memory, workers included", report_memory, "GB", 2),
        Row("unskew report RUN again, from what was stored", again, "s"),
        Row("the page", size, "MB"),
    ]


def _data(images, folder):
    if images.name == "cifar10":
        return "cifar10"
    file = folder / "images.npz"
    np.savez(file, x_train=images.train.images, y_train=images.train.labels, x_test=images.test.images,
             y_test=images.test.labels)  # fmt: skip
    return f"arrays:{file}"


def _watched(*words):
    """Seconds and the most memory in GB that the command and its workers held at one time."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "unskew", *map(str, words)], stdout=subprocess.DEVNULL)
    most = 0

    def watch():
        nonlocal most
        while process.poll() is None:
            most = max(most, _held(process.pid))
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    if process.wait() != 0:
        raise RuntimeError(f"unskew {' '.join(map(str, words))} failed")
    seconds = time.perf_counter() - began
    watcher.join()
    return seconds, most / 1e9


def _held(parent):
    """Bytes of the process and its children; what they share counts once."""
    pids = [parent]
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            pids.append(int(status.parent.name))
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total
