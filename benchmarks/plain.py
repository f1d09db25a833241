"""The yardstick: federated averaging as usually written in PyTorch. No part of the package but the augmentation.

With CORES and TURNS it does a round at every turn (`make peers`), else for every line on standard input.
"""

import copy
import sys

import numpy as np
import torch
import torch.nn.functional as F

from plain_network import read_clients, read_network
from turns import Turn
from unskew.data.augment import PAD, crop_and_flip


def train_client(model, images, labels, *, batch, augment, lr=0.01, momentum=0.9, weight_decay=1e-5):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    model.train()
    for rows in torch.randperm(len(labels)).split(batch):
        x, y = images[rows], labels[rows]
        if augment:
            shift = torch.randint(0, 2 * PAD + 1, (len(rows), 2), dtype=torch.uint8)
            x = crop_and_flip(x, shift, torch.rand(len(rows)) < 0.5)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def federated_round(server, clients, *, batch=64, augment=True):
    """One round of FedAvg over all clients' images and labels; the server's model becomes their weighted mean."""
    total = sum(len(labels) for _, labels in clients)
    mean = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
    for images, labels in clients:
        local = copy.deepcopy(server)
        train_client(local, images, labels, batch=batch, augment=augment)
        for name, value in local.state_dict().items():
            mean[name] += value * (len(labels) / total)
    server.load_state_dict(mean)


def serve(file):
    """Do a round for every line on standard input, which says with how many threads."""
    data = np.load(file)
    clients, server = read_clients(data), read_network(data)()
    print("ready", flush=True)
    for line in sys.stdin:
        torch.set_num_threads(int(line))
        federated_round(server, clients)
        print("done", flush=True)


def take_turns(file, cores, address):
    """Do a round at every turn, with one thread for each core and nothing augmented."""
    torch.set_num_threads(int(cores))
    data, turn = np.load(file), Turn(address)
    clients, server = read_clients(data), read_network(data)()
    while turn.wait():
        federated_round(server, clients, augment=False)
        turn.done()


if __name__ == "__main__":
    (take_turns if len(sys.argv) > 2 else serve)(*sys.argv[1:])
