"""Federated averaging on BlazeFL, in its threads or its processes, one for each core.

    python peer_blazefl.py DATA.npz CORES threads|processes TURNS

Pixels are normalised beforehand, nothing is augmented. A thread keeps its network from visit to visit; processes are
started anew for every round, which is BlazeFL's way, and find the examples in shared memory. Needs Python 3.14, and a
free-threaded build of it for threads that work side by side.
"""

import sys
import threading
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from blazefl.core import (
    ProcessPoolClientTrainer,
    SHMHandle,
    ThreadPoolClientTrainer,
    deserialize_model,
    serialize_model,
)

from plain_network import read_clients, read_network
from turns import Turn


@dataclass
class Package:
    weights: torch.Tensor | SHMHandle
    examples: int = 0


@cache
def made(kind, thread):
    return kind()


def train(kind, images, labels, weights):
    network = made(kind, threading.get_ident())
    deserialize_model(network, weights)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9, weight_decay=1e-5)
    for rows in torch.randperm(len(labels)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(network(images[rows]), labels[rows]).backward()
        optimizer.step()
    return Package(serialize_model(network), len(labels))


class Threads(ThreadPoolClientTrainer):
    def __init__(self, data, cores):
        self.num_parallels, self.device, self.device_count, self.cache = cores, "cpu", 0, []
        self.stop_event, self.clients, self.kind = threading.Event(), read_clients(data), read_network(data)

    def worker(self, cid, device, payload, stop_event):
        return train(self.kind, *self.clients[cid], payload.weights)


class Processes(ProcessPoolClientTrainer):
    def __init__(self, data, cores):
        self.num_parallels, self.device, self.device_count, self.cache = cores, "cpu", 0, []
        self.manager = torch.multiprocessing.Manager()
        self.stop_event, self.kind = self.manager.Event(), read_network(data)
        self.clients = [tuple(value.share_memory_() for value in client) for client in read_clients(data)]

    def get_client_config(self, cid):
        return self.kind, *self.clients[cid]

    def prepare_uplink_package_buffer(self):
        return Package(serialize_model(made(self.kind, 0)))

    def convert_buffer_to_uplink(self, buffer):
        return buffer

    @staticmethod
    def worker(config, payload, device, stop_event, *, shm_buffer=None):
        package = train(*config, payload.weights)
        shm_buffer.weights.copy_(package.weights)
        return Package(SHMHandle(), package.examples)


def main(file, cores, mode, address):
    torch.set_num_threads(1)
    data, turn = np.load(file), Turn(address)
    trainer = {"threads": Threads, "processes": Processes}[mode](data, int(cores))
    weights = serialize_model(trainer.kind())
    while turn.wait():
        trainer.local_process(Package(weights), list(range(len(trainer.clients))))
        total = sum(package.examples for package in trainer.cache)
        weights = torch.zeros_like(weights)
        for package in trainer.cache:
            weights.add_(package.weights, alpha=package.examples / total)
        trainer.cache = []
        turn.done()


if __name__ == "__main__":
    main(*sys.argv[1:])
