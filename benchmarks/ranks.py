"""Two ranks of torchrun against a pool of two workers, on the same clients, in turns.

Both are opened by one process, which torchrun starts beside another: ``python -m torch.distributed.run … ranks.py``.
"""

import json
import subprocess
import sys

import rounds
from measure import Row, at_least, medians
from unskew import engines
from unskew.core.types import Local

RANKS = 2
WORK = {"10 large clients": (rounds.ten_large, 1), "100 clients of 13": (rounds.hundred_small, 3)}


def suite(repeats):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), __file__, str(repeats)]
    done = subprocess.run(command, cwd=sys.path[0], stdout=subprocess.PIPE, text=True, check=True)
    rows = []
    for name, speed in json.loads(done.stdout).items():
        rows += [Row(f"{name}: {engine}", value, "examples/s") for engine, value in speed.items()]
        ratio = speed["torchrun, 2 ranks"] / speed["pool, 2 workers"]
        rows.append(at_least(f"{name}: torchrun / pool", ratio, "", 0.9, "2 ranks, 2 workers"))
    return rows


def measured(images, repeats):
    """Examples a second, by the work and the engine."""
    found = {}
    for name, (population_of, turns) in WORK.items():
        population = population_of(images)
        both = {
            f"{engine}, {count}": rounds.Federation(images, population, Local(epochs=1, augment=True), engine, RANKS)
            for engine, count in (("pool", "2 workers"), ("torchrun", "2 ranks"))
        }
        seconds = medians({name: each.round for name, each in both.items()}, turns * repeats)
        for each in both.values():
            each.engine.close()
        found[name] = {name: len(population.order) / value for name, value in seconds.items()}
    return found


if __name__ == "__main__":
    engines.serve_rank_zero("torchrun")
    from run import cifar10

    print(json.dumps(measured(cifar10(), int(sys.argv[1]))))
