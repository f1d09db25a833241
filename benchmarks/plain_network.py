"""The networks of every program that Unskew is compared with, as usually written in PyTorch."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn


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


class Block(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.GroupNorm(width // 16, width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.GroupNorm(width // 16, width)
        shortcut = (nn.Conv2d(inputs, width, 1, stride, bias=False), nn.GroupNorm(width // 16, width))
        self.shortcut = nn.Sequential(*shortcut) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """With group norm, 16 channels a group, and the first layer for small pictures: `resnet-18(norm=group)`."""

    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(4, 64), nn.ReLU())
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.Sequential(*(Block(a, b, b // a) for a, b in itertools.pairwise(widths)))
        self.classifier = nn.Linear(512, classes)

    def forward(self, x):
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


def read_network(data):
    """The class of the network that the arrays name."""
    return {"simple-cnn": SimpleCNN, "resnet-18(norm=group)": ResNet18}[str(data["model"])]


def read_clients(data):
    """Each client's images, normalised beforehand, and labels."""
    images = torch.from_numpy(data["images"]).float().div_(255)
    images -= torch.from_numpy(data["mean"]).float().view(1, -1, 1, 1)
    images /= torch.from_numpy(data["std"]).float().view(1, -1, 1, 1)
    labels, client = torch.from_numpy(data["labels"]), torch.from_numpy(data["client"])
    rows = [torch.nonzero(client == number)[:, 0] for number in range(int(client.max()) + 1)]
    return [(images[each], labels[each]) for each in rows]
