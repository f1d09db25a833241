"""Law 9: what a set of runs gives, written down before a change and compared after it, on one machine.

    python benchmarks/same_results.py write before.json
    python benchmarks/same_results.py write after.json
    python benchmarks/same_results.py compare before.json after.json

The set covers every method, calibration, protection, engine, recording and partition on the embedded digits, a network
with BatchNorm, and every measure: about a minute. It uses the public names of unskew alone, so that it runs on any
version: ``PYTHONPATH=/path/to/another/src`` takes that one. Seconds are left out.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np

import unskew

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # outside_models

BASE = {"rounds": 3, "epochs": 1, "lr": 0.02, "checkpoint_seconds": 0, "engine": "loop"}
METHODS = [
    "fedavg", "fedprox(0.1)", "moon", "clsprox(0.1)", "clsnorm", "prototypes", "prototypes(own=false)", "fedir",
    "fedvc(64)", "scaffold", "fednova", "feddyn", "fedavgm(0.5)", "fedavgm(0.5, damped=true)", "fedadam", "fedyogi",
    "fedadagrad(0.01)", "fedlc", "fedrs", "balanced", "centralised", "fedavgm(0.9) + fedvc(64) + fedir",
    "moon + clsprox + scaffold", "feddyn + clsnorm", "moon(mu=2) + fedvc(32)",
]  # fmt: skip
CALIBRATIONS = [
    "ccvr", "ccvr(per_class=100, relu=true, tukey=0.5)", "ccvr(per_class=100, proportional=true)",
    "ccvr(per_class=100, covariance=diagonal)", "ccvr(per_class=100, covariance=shared)",
    'ccvr(per_class=100, covariance="low-rank(8)")', "ccvr(per_class=100, layers=2)",
    "ccvr(per_class=100, components=3)", "uscc", "lda", "lda(layers=2, expand=50)", "oracle(epochs=3)",
    "oracle(per_class=20, epochs=3)", "ccvr(per_class=100) + secure", "lda + secure",
    "ccvr(per_class=100) + withhold(3)", "ccvr(per_class=100) + private", "lda + private + secure",
    "ccvr(per_class=50, components=2) + secure",
]  # fmt: skip
PARTITIONS = [
    "iid", "shards(per_client=2)", "dirichlet(alpha=0.5)", "dirichlet(alpha=0.1, cap=true)",
    "dirichlet-client(alpha=0.5)", "dirichlet-client(alpha=0)",
]  # fmt: skip
MEASURES = [
    "skew", "cka", "cka(clients=3, round=0)", "norms", "norms(round=1)", "drift", "drift(round=0)", "separability",
    "projection", "confusion", "inversion",
]  # fmt: skip


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def described(result):
    """All of a run that must not change: hashes, metrics, calibrations, what was recorded."""
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    recorded = result.path / "during.jsonl"
    return {
        "weights": result.weights_sha256,
        "figures": [result.accuracy, result.loss, result.emd, result.bytes_up, result.bytes_down],
        "metrics": [{key: value for key, value in row.items() if key != "seconds"} for row in rows],
        "partition": result.partition_hash,
        "model": sha256((result.path / "model.safetensors").read_bytes()),
        "calibrations": {c.name: [c.accuracy, c.loss, c.bytes_up] for c in result.calibrations.values()},
        "calibrated": {f.name: sha256(f.read_bytes()) for f in sorted(result.path.glob("calibration-*"))},
        "recorded": sha256(recorded.read_bytes()) if recorded.exists() else None,
        "states": [f.name for f in sorted(result.path.glob("states/*"))],
    }


def own_arrays(folder):
    draw = np.random.default_rng(0)
    images = {part: draw.integers(0, 256, (count, 20, 20, 3), dtype=np.uint8) for part, count in SIZES.items()}
    users = np.array([f"u{number}" for number in draw.integers(0, 7, SIZES["train"])])
    labels = {f"y_{part}": np.arange(count) % 4 for part, count in SIZES.items()}
    np.savez(folder / "own.npz", **{f"x_{part}": x for part, x in images.items()}, **labels, users=users)
    return folder / "own.npz"


SIZES = {"train": 300, "test": 40}


def the_set(folder):
    done = {}

    def run(name, **options):
        result = unskew.run(out=folder / f"run-{len(done)}", **{**BASE, **options})
        done[name] = described(result)
        print(name, result.weights_sha256[:12], f"{result.accuracy:.4f}", flush=True)
        return result

    for method in METHODS:
        run(f"method {method}", method=method)
    run("pool", method="moon + scaffold", engine="pool", workers=2)
    run("pool, secure", method="fedir + ccvr(per_class=50) + secure", engine="pool", workers=2)
    run("auto", engine="auto")
    run("fedeccr", method="fedeccr")
    run("few clients", method="scaffold + fedir", clients=20, per_round=5, rounds=5)
    run("fedvc, few", method="fedvc(32) + fedavgm(0.9)", clients=20, per_round=5, rounds=5, evaluate_every=2)
    for partition in PARTITIONS:
        run(f"partition {partition}", partition=partition)
    (folder / "kept.npz").write_bytes((folder / "run-0" / "partition.npz").read_bytes())
    run("partition file", partition=f"file:{folder / 'kept.npz'}")
    arrays = own_arrays(folder)
    run("arrays, users", data=f"arrays:{arrays}", partition="users", augment=True)
    run("lenet-64", data=f"arrays:{arrays}", model="lenet-64", clients=3, rounds=1)
    run("BatchNorm", model="outside_models:batch_norm", method="fedavgm(0.9)")
    run("recorded", method="prototypes", during="silhouette + norms(every=2) + drift + model(every=1)")
    run("recorded, pool", method="moon", during="norms + drift", engine="pool", workers=2)
    whole = run("calibrated", method="fedavg + ccvr")
    for source in CALIBRATIONS:
        result = unskew.calibrate_run(whole.path, source)
    done["calibrations"] = described(result)
    kept = run("moon, states kept", method="moon + lda", rounds=4, during="model(every=2)")
    for path, measures in ((whole.path, MEASURES), (kept.path, ["cka", "norms(round=1)", "drift"])):
        for name, measured in unskew.analyse(path, *measures).items():
            values = json.dumps(asdict(measured.values), sort_keys=True)
            done[f"measure {name} of {path.name}"] = sha256(values.encode())
    return done


def compare(before, after):
    """Print what differs; how many do."""
    left, right = (json.loads(path.read_text()) for path in (before, after))
    odd = [name for name in left | right if left.get(name) != right.get(name)]
    for name in odd:
        old, new = left.get(name), right.get(name)
        keys = [key for key in old | new if old.get(key) != new.get(key)] if isinstance(old, dict) and new else []
        print(f"DIFFERS {name}: {', '.join(keys) or f'{old} -> {new}'}")
    print(f"{len(left | right) - len(odd)} of {len(left | right)} are the same")
    return len(odd)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write").add_argument("file", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        sys.exit(bool(compare(options.before, options.after)))
    with tempfile.TemporaryDirectory() as folder:
        options.file.write_text(json.dumps(the_set(Path(folder)), indent=1))


if __name__ == "__main__":
    main()
