"""What each method costs beside FedAvg: a step of training, the round's end, the memory of FedVC's draws."""

import numpy as np
import torch

from measure import Row, at_most, medians
from rounds import Federation
from unskew.core.key import Key
from unskew.core.types import Local
from unskew.data.batches import plan
from unskew.data.population import Partition, Population

CLIENTS, HELD = 4, 640  # 10 steps of 64 a client and epoch

STEP_BOUNDS = {
    "fedprox": 1.1,
    "clsprox": 1.1,
    "clsnorm": 1.1,
    "fedir": 1.1,
    "fedlc": 1.1,
    "fedrs": 1.1,
    "balanced": 1.1,
    "moon": 1.9,
    "scaffold": None,
    "feddyn": None,
    "fednova": None,
    "fedavgm": None,
}


def steps(images, repeats):
    """A round of each method against FedAvg's, in turns; the second visit and later, when memories are there."""
    owner = np.full(len(images.train), -1, np.int32)
    owner[: CLIENTS * HELD] = np.repeat(np.arange(CLIENTS), HELD)
    population = Population.from_partition(Partition(owner, CLIENTS, "blocks", 0))
    local = Local(epochs=2, augment=True)
    names = ["fedavg", *STEP_BOUNDS, "prototypes", f"fedvc({HELD}, epochs=2)"]
    federations = {name: Federation(images, population, local, "loop", method=name) for name in names}
    for federation in federations.values():
        federation.round()
    variants = {name: federation.round for name, federation in federations.items()}
    forward = _forward_pass(federations["fedavg"].side)
    seconds = medians(variants | {"forward": forward}, repeats)
    base = seconds["fedavg"]
    rows = [Row("a step of fedavg", 1000 * base / (CLIENTS * 2 * HELD / 64), "ms", remark="batch 64, crops and flips")]
    for name, bound in STEP_BOUNDS.items():
        rows.append(_bounded(f"a step of {name} / fedavg", seconds[name] / base, bound))
    pass_share = CLIENTS * seconds["forward"]
    rows.append(
        _bounded("a step of prototypes / fedavg", (seconds["prototypes"] - pass_share) / base, 1.15,
                 f"without the forward pass at its end, {pass_share / base:.2f} of the round here")
    )  # fmt: skip
    rows.append(_bounded("a step of fedvc / fedavg", seconds[names[-1]] / base, None, "as many examples a visit"))
    drawn = plan(population.examples(0), 256, Local(epochs=1), Key(0))
    share = drawn.index.numel() * drawn.index.element_size() / images.train.images[:256].nbytes
    rows.append(at_most("fedvc: bytes drawn / bytes of the images", share, "", 0.01, "row numbers only"))
    return rows


def _bounded(name, value, bound, remark=""):
    return Row(name, value, "", remark=remark) if bound is None else at_most(name, value, "", bound, remark)


def _forward_pass(side):
    """One pass over a client's examples without gradient, as the end of a visit with prototypes makes it."""

    def work():
        torch.set_num_threads(1)
        side.network.eval()
        for index in torch.arange(HELD).split(500):
            with torch.no_grad():
                side.network.encoder(side.train.batch(index)[0])

    return work
