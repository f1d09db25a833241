"""Federated averaging on pfl-research, a rank of it: torchrun starts one for each core, of one thread.

    torchrun --nproc-per-node 2 peer_pfl.py DATA.npz TURNS

Pixels are normalised beforehand, nothing is augmented, nothing is evaluated. Runs in the environment of `make peers`.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from plain_network import read_clients, read_network
from turns import Turn

ENDLESS = 10**9


class Trained(torch.nn.Module):
    """The network with the two functions that pfl asks a module for."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def loss(self, images, labels, eval=False):
        return F.cross_entropy(self.network(images), labels)

    def metrics(self, images, labels, eval=True):
        return {}


class InTurn(TrainingProcessCallback):
    """A round whenever it is this program's turn; training ends when there are no more."""

    def __init__(self, turn):
        self.turn = turn

    def on_train_begin(self, *, model):
        self.turn.wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.turn.done()
        return not self.turn.wait(), Metrics()


def main(file, address):
    data = np.load(file)
    clients = read_clients(data)
    numbers = list(range(len(clients)))
    federated = FederatedDataset(
        lambda number: Dataset([*clients[number]], user_id=str(number)),
        get_user_sampler("minimize_reuse", numbers),
        user_id_to_weight={number: len(clients[number][1]) for number in numbers},
    )
    network = Trained(read_network(data)())
    model = PyTorchModel(
        network,
        lambda params, lr=0.01: torch.optim.SGD(params, lr, 0.9, weight_decay=1e-5),
        torch.optim.SGD(network.parameters(), 1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(ENDLESS, ENDLESS, len(clients), None),
        SimulatedBackend(training_data=federated, val_data=None),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.01, local_batch_size=64),
        NNEvalHyperParams(local_batch_size=1000),
        callbacks=[InTurn(Turn(address))],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
