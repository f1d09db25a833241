"""The yardstick: federated averaging as usually written in PyTorch. No part of the package but the augmentation."""

import copy
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from unskew.data.augment import PAD, crop_and_flip


class SimpleCNN(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 84)
        self.fc4 = nn.Linear(84, 256)
        self.classifier = nn.Linear(256, classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.flatten(1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        return self.classifier(self.fc4(x))


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
