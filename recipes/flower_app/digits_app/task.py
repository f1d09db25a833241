"""The network, the data and a node's training: what every Flower app has of its own."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Network(nn.Module):
    """An encoder and a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.classifier = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images [n, 64] to logits [n, 10]."""
        return self.classifier(self.encoder(images))


def digits(*, test: bool) -> tuple[Tensor, Tensor]:
    """Images [n, 64] and labels [n]; every fifth is for testing."""
    images, labels = load_digits(return_X_y=True)
    chosen = (torch.arange(len(labels)) % 5 == 4) == test
    return (torch.tensor(images).float() / 16)[chosen], torch.tensor(labels)[chosen]


def batches_of(node: int, nodes: int) -> list[tuple[Tensor, Tensor]]:
    """A node's own batches: sorted by label and dealt in two shards a node, so it holds a few of the ten digits."""
    images, labels = digits(test=False)
    shards = labels.argsort(stable=True).chunk(2 * nodes)
    own = torch.cat([shards[node], shards[node + nodes]])
    own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(node))]
    return [(images[some], labels[some]) for some in own.split(32)]


def train(model: Network, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Two epochs of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for images, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


def accuracy(model: Network) -> float:
    """On the test images."""
    images, labels = digits(test=True)
    return float((model(images).argmax(1) == labels).double().mean())
