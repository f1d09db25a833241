"""Unskew's own rounds, in turn with its peers': `python peer_unskew.py DATA.npz CORES AUGMENT TURNS`."""

import sys

import numpy as np

from rounds import Federation
from turns import Turn
from unskew.core.types import ImageSet, Local, Split
from unskew.data.population import Partition, Population


def main(file, cores, augment, address):
    data = np.load(file)
    split = Split(data["images"], data["labels"])
    classes = tuple(map(str, range(10)))
    images = ImageSet("peers", classes, split, split, tuple(data["mean"]), tuple(data["std"]), augment=True)
    client = data["client"]
    population = Population.from_partition(Partition(client, int(client.max()) + 1, "peers", 0))
    local = Local(epochs=1, augment=augment == "augmented")
    federation = Federation(images, population, local, "pool", workers=int(cores), model=str(data["model"]))
    turn = Turn(address)
    while turn.wait():
        federation.round()
        turn.done()
    federation.engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
