"""The yardstick: federated averaging as usually written in PyTorch. No part of the package but the augmentation."""

import copy
import sys

import numpy as np
import torch
import torch.nn.functional as F

from plain_network import SimpleCNN
from unskew.data.augment import PAD, crop_and_flip


def train_client(model, images, labels, index, *, batch, augment, lr=0.01, momentum=0.9, weight_decay=1e-5):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    order = index[torch.randperm(len(index))]
    model.train()
    for rows in order.split(batch):
        x, y = images[rows], labels[rows]
        if augment:
            shift = torch.randint(0, 2 * PAD + 1, (len(rows), 2), dtype=torch.uint8)
            x = crop_and_flip(x, shift, torch.rand(len(rows)) < 0.5)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def federated_round(server, images, labels, clients, *, batch=64, augment=True):
    """One round of FedAvg over the clients' index tensors; the server's model is replaced by their weighted mean."""
    total = sum(len(index) for index in clients)
    mean = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
    for index in clients:
        local = copy.deepcopy(server)
        train_client(local, images, labels, index, batch=batch, augment=augment)
        for name, value in local.state_dict().items():
            mean[name] += value * (len(index) / total)
    server.load_state_dict(mean)


def serve(file):
    """Do a round for every line on standard input, which says with how many threads."""
    data = np.load(file)
    images = torch.from_numpy(data["images"]).float().div_(255)
    images -= torch.from_numpy(data["mean"]).float().view(1, -1, 1, 1)
    images /= torch.from_numpy(data["std"]).float().view(1, -1, 1, 1)
    labels, client = torch.from_numpy(data["labels"]), torch.from_numpy(data["client"])
    clients = [torch.nonzero(client == number)[:, 0] for number in range(int(client.max()) + 1)]
    server = SimpleCNN()
    print("ready", flush=True)
    for line in sys.stdin:
        torch.set_num_threads(int(line))
        federated_round(server, images, labels, clients)
        print("done", flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
