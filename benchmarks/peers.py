"""`make peers`: rounds of Unskew, other frameworks and a plain loop on equal work, in turn, in one sitting.

Equal work: CIFAR-10, FedAvg, every client in every round, one epoch of SGD in batches of 64, one process of one thread
for each core (the plain loop: one process with a thread for each core). The peers' pixels are normalised beforehand and
nothing is augmented; Unskew normalises in every step, as it does for a user, and once more crops and flips as well.
The peers have environments of their own; BlazeFL, which needs Python 3.14, is left out where there is none.
CIFAR-10 is taken from UNSKEW_DATA; without it random images of its size stand in, since speed does not look at them.
"""

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from measure import Row, at_least, show_table
from rounds import random_images
from turns import Program, busy, cores
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.data.partition import partition_examples
from unskew.data.sources import load

HERE = Path(__file__).resolve().parent
PEERS = {
    "pfl": "pfl-research",
    "flower": "Flower",
    "threads": "BlazeFL, threads",
    "processes": "BlazeFL, processes",
    "plain": "a plain PyTorch loop",
}
MODULES = {
    "pfl": "pfl.model.pytorch", "flower": "flwr.simulation, ray", "threads": "blazefl.core", "processes": "blazefl.core"
}  # fmt: skip
BLAZEFL = ("threads", "processes")
CASES = ("large", "small", "resnet-18")
WANTED = {"idle": 1.5, "busy": 1.0}  # Unskew's speed against pfl-research's, with simple-cnn
FASTEST = "pfl"  # of the frameworks: the one that the bounds are about


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, default=HERE.parent / ".venv-peers", help="where the peers are")
    parser.add_argument("--blazefl", type=Path, default=HERE.parent / ".venv-blazefl", help="where BlazeFL is")
    parser.add_argument("--peers", nargs="+", choices=PEERS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--machine", nargs="+", choices=WANTED, default=list(WANTED), help="what else runs beside them")
    parser.add_argument("--turns", type=int, default=5, help="rounds of each with large clients; small ones: 5 times")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    options = parser.parse_args()
    if not options.peers:
        options.peers = list(PEERS)
        if reason := missing("threads", options):
            print(f"BlazeFL, which needs Python 3.14, is left out: {reason}", file=sys.stderr)
            options.peers = [peer for peer in PEERS if peer not in BLAZEFL]
    for peer in options.peers:
        if reason := missing(peer, options):
            sys.exit(f"{PEERS[peer]}: {reason}; remove that folder and run `make peers` again, or choose with --peers")
    images = cifar10()
    rows = (row for case in options.cases for row in measured(case, images, options))
    show_table(heading(images, options), rows, options.out)


def python_of(peer, options):
    return (options.blazefl if peer in BLAZEFL else options.environment) / "bin" / "python"


def missing(peer, options):
    """Why a peer cannot run; empty where it can."""
    if peer not in MODULES:
        return ""
    python = python_of(peer, options)
    if not python.exists():
        return f"{python} does not exist"
    done = subprocess.run([python, "-c", f"import {MODULES[peer]}"], capture_output=True, text=True)
    last = "".join(done.stderr.strip().splitlines()[-1:])
    return f"{python} cannot import it ({last})" if done.returncode else ""


def cifar10():
    folder = os.environ.get("UNSKEW_DATA")
    try:
        return load("cifar10", Path(folder) if folder else None)
    except UserError:
        return random_images(50_000)


def heading(images, options):
    return (
        f"{images.name} images, {cores()} cores ({platform.machine()}), medians of {options.turns} turns, with small "
        f"clients of {5 * options.turns}. Busy: one other process a core at the lowest priority."
    )


def measured(case, images, options):
    """The rows of a case: all programs are started once and take turns, first alone and then on a busy machine."""
    name, client = clients(case, images)
    model, wanted = ("resnet-18(norm=group)", {}) if case == "resnet-18" else ("simple-cnn", WANTED)
    turns = options.turns * (5 if case == "small" else 1)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = save(f"{folder}/data.npz", images, client, model)
        programs = {}
        for key, start in starts(file, options).items():
            programs[key] = stack.enter_context(contextlib.closing(Program(*start)))
        for machine in options.machine:
            with busy(cores()) if machine == "busy" else contextlib.nullcontext():
                speed = taken(programs, turns)
            yield from rows(f"{name}, {machine}", speed, int((client >= 0).sum()), wanted.get(machine))


def clients(case, images):
    """What a case is called, and the client of each example; −1: nobody's."""
    labels = images.train.labels
    if case == "large":
        found = partition_examples("dirichlet(alpha=0.5)", labels, clients=10, key=Key(0), classes=len(images.classes))
        return "10 large clients", found.client
    name, count, each = ("resnet-18, 8 clients of 64", 8, 64) if case == "resnet-18" else ("100 clients of 13", 100, 13)
    return name, np.where(np.arange(len(labels)) < count * each, np.arange(len(labels)) // each, -1)


def save(file, images, client, model):
    """The examples that somebody holds, for programs in other environments."""
    held = client >= 0
    arrays = {"images": images.train.images[held], "labels": images.train.labels[held], "client": client[held]}
    np.savez(file, mean=images.mean, std=images.std, model=model, **arrays)
    return file


def starts(file, options):
    """For each program its name, its command, its number of processes that take turns, its environment."""
    count = str(cores())
    ours = [sys.executable, str(HERE / "peer_unskew.py"), file, count]
    found = {
        "ours": ("Unskew", [*ours, "plain"], 1, dict(os.environ)),
        "augmented": ("Unskew, crops and flips", [*ours, "augmented"], 1, dict(os.environ)),
    }
    theirs = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "RAY_DISABLE_IMPORT_WARNING": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    commands = {
        "pfl": [python_of("pfl", options), *torchrun, HERE / "peer_pfl.py", file],
        "flower": [python_of("flower", options), "-c", "import peer_flower; peer_flower.main()", file, count],
        **{mode: [python_of(mode, options), HERE / "peer_blazefl.py", file, count, mode] for mode in BLAZEFL},
        "plain": [sys.executable, HERE / "plain.py", file, count],
    }
    for peer in options.peers:
        environment = dict(os.environ) if peer == "plain" else theirs
        found[peer] = (PEERS[peer], list(map(str, commands[peer])), cores() if peer == "pfl" else 1, environment)
    return found


def taken(programs, turns):
    """Each program's speed over so many turns, after one that does not count."""
    for turn in range(turns + 1):
        for program in programs.values():
            program.round(counts=turn > 0)
    return {key: program.speed() for key, program in programs.items()}


def rows(label, speed, examples, wanted):
    names = {"ours": "Unskew", "augmented": "Unskew, crops and flips", **PEERS}
    for key, value in speed.items():
        remark = f"{examples / value.processor:,.0f} in a second of processor time" if value.processor else ""
        yield Row(f"{label}: {names[key]}", examples / value.seconds, "examples/s", remark=remark)
    ours = speed["ours"]
    for key in (peer for peer in PEERS if peer in speed):
        ratio, title = speed[key].seconds / ours.seconds, f"{label}: Unskew / {PEERS[key]}"
        remark = f"{speed[key].processor / ours.processor:.2f} by processor time" if ours.processor else ""
        if key == FASTEST and wanted:
            yield at_least(title, ratio, "", wanted, remark)
        else:
            yield Row(title, ratio, "", remark=remark)


if __name__ == "__main__":
    main()
