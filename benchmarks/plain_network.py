"""simple-cnn as usually written in PyTorch: the network of every program that Unskew is compared with."""

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


def read_clients(data):
    """Each client's images, normalised beforehand, and labels, from the arrays that ``save_clients`` wrote."""
    images = torch.from_numpy(data["images"]).float().div_(255)
    images -= torch.from_numpy(data["mean"]).float().view(1, -1, 1, 1)
    images /= torch.from_numpy(data["std"]).float().view(1, -1, 1, 1)
    labels, client = torch.from_numpy(data["labels"]), torch.from_numpy(data["client"])
    rows = [torch.nonzero(client == number)[:, 0] for number in range(int(client.max()) + 1)]
    return [(images[each], labels[each]) for each in rows]
