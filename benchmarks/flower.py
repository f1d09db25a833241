"""What our protocol adds to a round over Flower: messages made, checked and read, in one process, no network."""

import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from measure import Row, at_most, medians
from unskew import engines, models
from unskew.core import tensors
from unskew.core.key import Key
from unskew.core.types import Local, Split, Visit
from unskew.data.population import Population
from unskew.engines.blueprint import Blueprint, dataset
from unskew.engines.flower.engine import FederatedEngine, Members, Rules, Session, Template
from unskew.engines.flower.messages import RunAgreement, read_header
from unskew.engines.flower.node import Node, NodeData, OwnClient
from unskew.methods import parse_method
from unskew.round import driver
from unskew.round.client import Train
from unskew.round.jobs import add

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from nodes import exchange_of

NODES, EXAMPLES = 3, 1000


def suite(images, repeats):
    """Rounds of three nodes with 1,000 images each, simple-cnn: the loop and the federation in turns."""
    images = replace(
        images, train=Split(images.train.images[: NODES * EXAMPLES], images.train.labels[: NODES * EXAMPLES])
    )
    blueprint = Blueprint("fedavg", "simple-cnn", images.shape, len(images.classes), Local(epochs=1))
    order = np.arange(NODES * EXAMPLES, dtype=np.int32)
    population = Population(order, np.arange(NODES + 1, dtype=np.int64) * EXAMPLES)
    loop = engines.open_engine("loop", engines.EngineSetup(blueprint, dataset(images, population)))
    network = blueprint.network()
    models.initialise(network, Key(0))
    state = driver.start(parse_method("fedavg", blueprint.local), tensors.of_module(network))
    with tempfile.TemporaryDirectory() as folder:
        federated, exchange = _federation(images, blueprint, Path(folder))
        wire = _counting(exchange)
        seconds = _in_turns({"loop": loop, "federation": federated}, state, repeats)
    loop.close()
    sent = tensors.count_bytes(state.tensors) * NODES * (repeats + 1)
    model = f"{tensors.count_bytes(state.tensors) / 1e6:.1f} MB"
    added = seconds["federation"] - seconds["loop"]
    remark = f"processor time, medians; a model of {model}, 1 epoch; without Flower itself"
    return [
        Row("3 nodes of 1,000 images, simple-cnn: a round in one process", seconds["loop"], "s", remark=remark),
        Row("what our messages add to it, for each node", 1000 * added / NODES, "ms"),
        at_most("what our messages add to it", 100 * added / seconds["loop"], "%", 5),
        at_most("bytes down / bytes of the tensors", wire["down"] / sent, "", 1.02),
        at_most("bytes up / bytes of the tensors, as float32", wire["up"] / sent, "", 1.02),
    ]


def _federation(images, blueprint, folder):
    nodes = {}
    for number in range(NODES):
        rows = np.arange(number * EXAMPLES, (number + 1) * EXAMPLES)
        data = NodeData(f"node-{number}", images, (OwnClient(f"node-{number}", number, rows, rows[:0]),))
        nodes[number + 1] = Node(data, folder / f"node-{number}")
    exchange = exchange_of(nodes)
    session = Session(exchange, os.urandom(16).hex(), 0, Members(), Rules())
    for _ in range(2):
        list(session.answers())
    session.agree_on(RunAgreement(session.run, blueprint, images.classes, images.mean, images.std, {}), {})
    template = Template(blueprint, images.mean, images.std, {})
    return FederatedEngine(session, None, template, blueprint.local), exchange


def _counting(exchange):
    wire = {"down": 0, "up": 0}

    def between(node, question, reply):
        if read_header(question)["kind"] == "job":
            wire["down"] += len(question)
            wire["up"] += len(reply)
        return reply

    exchange.between = between
    return wire


def _in_turns(variants, state, repeats):
    """Median processor seconds of a round, after one that does not count."""
    visits = [Visit(client, float(EXAMPLES)) for client in range(NODES)]

    def rounds(engine):
        for turn in count():
            outcome = add(engine.visit(Train(turn + 1), state.tensors, visits, Key(0).fold("round", turn)), visits)
            if outcome.failures:
                raise RuntimeError(outcome.failures[0].reason)
            yield

    return medians(
        {name: partial(next, rounds(engine)) for name, engine in variants.items()}, repeats, time.process_time
    )
