"""``unskew federation demo``: a server and three nodes on this machine, from certificates to the report."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from unskew.console.plain import PlainConsole
from unskew.console.study import report
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.core.units import format_duration
from unskew.data import partition_files
from unskew.data.population import emd
from unskew.federation import network
from unskew.federation.folder import Federation, Node, read_node, toml
from unskew.federation.initialise import initialise
from unskew.federation.node import node_mark, socket_path
from unskew.federation.processes import WATCHER, Child, Group, marked
from unskew.federation.server import server_mark
from unskew.federation.submit import submit
from unskew.runs import config as configs
from unskew.runs.config import Config
from unskew.runs.folder import write_arrays
from unskew.runs.prepare import split
from unskew.runs.read_data import read_data

NODES = ("north", "south", "west")
CONNECT_SECONDS = 180.0

RECIPE = """# Three nodes that each hold a few of the ten digits; the calibration's statistics are added under masks.
data = "nodes"
clients = 3
method = "fedavg + ccvr + secure"
rounds = 5
evaluate_every = 5
epochs = 3
batch = 32
lr = 0.02
seed = 0
"""

out = PlainConsole()

Say = Callable[[str], None]


def demo(
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="A folder that is new or empty.")] = Path(
        "federation-demo"
    ),
) -> None:
    """Show a whole federation: a server and three nodes here, TLS, node keys, training, calibration, the report."""
    began = time.monotonic()

    def say(line: str) -> None:
        out.print(f"{time.monotonic() - began:5.1f} s  {line}", soft_wrap=True)

    federation = _prepared(folder, say)
    nodes = [read_node(federation.node(name)) for name in NODES]
    run = federation.path / "runs" / "demo"
    with Group(f"demo:{federation.path}", federation.path / "logs", federation.path) as group:
        _start(group, federation, nodes, say)
        submit(federation, federation.path / "recipe.toml", run, say)
        say("the run is finished; the server and the nodes are stopped")
    left = [number for mark in (server_mark(federation), *map(node_mark, nodes)) for number in marked(mark)]
    if left:
        raise UserError(f"still running: {left}; end them with: unskew federation stop {federation.path}")
    report([run])
    say(f"done in {format_duration(time.monotonic() - began)}: {run}")


def _prepared(folder: Path, say: Say) -> Federation:
    """Certificates, keys, and one skewed part of digits for each node."""
    federation = initialise(folder, nodes=NODES, port=network.free_pair()).federation
    say(f"{federation.path}: an authority, a certificate for the server, a key for each of {', '.join(NODES)}")
    config = configs.checked(Config(data="digits", partition="dirichlet(alpha=0.3)", clients=len(NODES), seed=0))
    images = read_data(config)
    drawn = split(config, images.examples)
    labels, classes = images.train.labels, len(images.classes)
    write_arrays(federation.path / "partition.npz", partition_files.to_arrays(drawn, labels, classes))
    say(f"digits are divided with {drawn.scheme}: EMD {emd(drawn.client, labels, classes):.2f}")
    for number, name in enumerate(NODES):
        node = read_node(federation.node(name))
        settings = {
            "name": name,
            "data": "digits",
            "partition": f"file:{federation.path / 'partition.npz'}",
            "client": [number],
            "folder": str(node.state),
            "socket": str(socket_path(node)),
        }
        write_whole(node.service_settings, toml(settings, "Made by unskew federation demo.").encode())
    write_whole(federation.path / "recipe.toml", RECIPE.encode())
    return federation


def _start(group: Group, federation: Federation, nodes: list[Node], say: Say) -> None:
    """The same commands that a person would type in four terminals."""
    heard: dict[str, list[str]] = {}
    children = [_watcher(group, "server", federation.path, heard, say)]
    children += [_watcher(group, f"node {node.settings.name}", node.path, heard, say) for node in nodes]
    end = time.monotonic() + CONNECT_SECONDS
    while not all(any(line.startswith("connected") for line in heard[child.name]) for child in children[1:]):
        for child in children:
            if child.code is not None:
                raise UserError(f"{child.name} ended with code {child.code}:\n{child.last_words()}")
        if time.monotonic() > end:
            raise UserError(f"not all nodes connected within {CONNECT_SECONDS:.0f} s; see {federation.path}")
        time.sleep(0.2)


def _watcher(group: Group, name: str, folder: Path, heard: dict[str, list[str]], say: Say) -> Child:
    lines = heard.setdefault(name, [])

    def hear(line: str) -> None:
        lines.append(line)
        if line.startswith(("ready", "connected")):
            say(f"{name}: {line}")

    command = [sys.executable, "-m", WATCHER.decode(), name.split()[0], str(folder)]
    return group.start(name, command, dict(os.environ), hear)
