"""Federated averaging on Flower's simulator: a server and one actor for each core, of one thread.

    python -c "import peer_flower; peer_flower.main()" DATA.npz CORES TURNS

It is imported and not run, so that the actors import it too: what it has read then stays with an actor from visit to
visit. Pixels are normalised beforehand, nothing is augmented. Runs in the environment of `make peers`.
"""

import os
import sys
import time
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from plain_network import read_clients, read_network
from turns import Turn

DATA, TURNS = "UNSKEW_PEER_DATA", "UNSKEW_PEER_TURNS"  # variables: the actors are other processes

client_app, server_app = ClientApp(), ServerApp()


@cache
def held():
    """Each client's images and labels, and the network that all of them train in: once a process."""
    torch.set_num_threads(1)
    data = np.load(os.environ[DATA])
    return read_clients(data), read_network(data)()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    clients, network = held()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = clients[context.node_config["partition-id"]]
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9, weight_decay=1e-5)
    for rows in torch.randperm(len(labels)).split(64):
        optimizer.zero_grad()
        F.cross_entropy(network(images[rows]), labels[rows]).backward()
        optimizer.step()
    answer = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"examples": len(labels)})}
    return Message(RecordDict(answer), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    while len(nodes := list(grid.get_node_ids())) < _clients():
        time.sleep(0.1)
    model, turn = read_network(np.load(os.environ[DATA]))().state_dict(), Turn(os.environ[TURNS])
    while turn.wait():
        content = RecordDict({"arrays": ArrayRecord(model)})
        asked = [Message(content=content, message_type="train", dst_node_id=node) for node in nodes]
        answers = list(grid.send_and_receive(asked))
        if failed := [answer.error for answer in answers if answer.has_error()]:
            raise RuntimeError(failed[0])
        models = [answer.content["arrays"].to_torch_state_dict() for answer in answers]
        examples = [answer.content["metrics"]["examples"] for answer in answers]
        shares = [count / sum(examples) for count in examples]
        model = {name: sum(share * each[name] for share, each in zip(shares, models, strict=True)) for name in model}
        turn.done()


def _clients():
    return int(np.load(os.environ[DATA])["client"].max()) + 1


def main():
    file, cores, address = sys.argv[1:]
    os.environ |= {DATA: file, TURNS: address}
    torch.set_num_threads(1)
    run_simulation(
        server_app,
        client_app,
        num_supernodes=_clients(),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": int(cores)},
        },
    )
