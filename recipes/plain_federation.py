"""Calibration for a federation that Unskew does not train: FedAvg by hand, in plain PyTorch, on scikit-learn's digits.

Ten clients hold two to four of the ten digits each. When training is over each of them writes one file, the class
statistics of its features. The server has the model and these files; it checks them, adds them up and makes the
classifier anew.

    python plain_federation.py            the clients, then the server
    python plain_federation.py server     the server alone, with the files that lie in federation/
"""
# ruff: noqa: T201, TID251  an outsider's program: it prints, and seeds as PyTorch's users do

import copy
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import unskew

FOLDER, CLIENTS, ROUNDS, EPOCHS, BATCH, RATE = Path("federation"), 10, 20, 2, 32, 0.05


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """Images [n, 64], labels [n], and which of them are for testing: every fifth."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images).float() / 16, torch.tensor(labels), torch.arange(len(labels)) % 5 == 4


def network() -> nn.Sequential:
    """Encoder and classifier."""
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    return nn.Sequential(encoder, nn.Linear(64, 10))


def trained(model: nn.Module, images: Tensor, labels: Tensor) -> nn.Module:
    """A copy of the model after a client's epochs on its own examples."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for some in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[some]), labels[some]).backward()
            optimizer.step()
    return model


def clients() -> None:
    """Train by FedAvg, then write model and statistics."""
    images, labels, test = digits()
    images, labels = images[~test], labels[~test]
    shards = labels.argsort(stable=True).chunk(2 * CLIENTS)  # sorted by label: a shard holds one digit or two
    own = [torch.cat([shards[client], shards[client + CLIENTS]]) for client in range(CLIENTS)]
    torch.manual_seed(0)
    model = network()
    for _ in range(ROUNDS):
        states = [trained(model, images[index], labels[index]).state_dict() for index in own]
        shares = [len(index) / len(labels) for index in own]
        model.load_state_dict(
            {name: sum(share * state[name] for share, state in zip(shares, states, strict=True)) for name in states[0]}
        )
    FOLDER.mkdir(exist_ok=True)
    save_file(model.state_dict(), FOLDER / "model.safetensors")
    for client, index in enumerate(own):
        batches = ((images[some], labels[some]) for some in index.split(BATCH))
        unskew.ClassStatistics.measure(model[0], batches, classes=10).save(FOLDER / f"client-{client}.safetensors")


def server() -> None:
    """Check and add up what the clients sent, calibrate, say what it gained."""
    images, labels, test = digits()
    model = network().eval()
    model.load_state_dict(load_file(FOLDER / "model.safetensors"))
    total = unskew.ClassStatistics.merged(map(unskew.ClassStatistics.load, sorted(FOLDER.glob("client-*"))))
    for name in ("before", "ccvr", "lda"):
        classifier = model[1] if name == "before" else unskew.calibrate(model[1], total, name)
        right = classifier(model[0](images[test])).argmax(1) == labels[test]
        print(f"{name:<7}{right.double().mean():.2%}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # such small steps gain nothing from a second core
    try:
        if sys.argv[1:] != ["server"]:
            clients()
        server()
    except unskew.UserError as error:
        sys.exit(f"the server stops: {error}")
