"""``unskew federation``: a real federation on Flower, from its certificates to its runs."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew.console.options import option, with_options
from unskew.console.progress import Json, out, print_json
from unskew.console.study import report
from unskew.core.errors import UserError
from unskew.core.files import read_content, read_json, write_whole
from unskew.core.units import counted, format_duration
from unskew.data import partition_files
from unskew.data.population import emd
from unskew.federation import folder as folders
from unskew.federation import network
from unskew.federation import server as federations
from unskew.federation.__main__ import watch
from unskew.federation.folder import FederationFolder, NodeFolder
from unskew.federation.node import PARTS, node_mark, socket_path
from unskew.federation.processes import WATCHER, ProcessGroup, Say, end_all
from unskew.federation.server import server_mark, submit
from unskew.runs import config as configs
from unskew.runs.checkpoint import roll_back
from unskew.runs.config import Config
from unskew.runs.federated import FEDERATION, audit_file, check_request, settings_of
from unskew.runs.folder import unused_path, write_arrays
from unskew.runs.prepare import make_partition, read_data
from unskew.runs.result import read_result, to_json

NODES = ("north", "south", "west")
CONNECT_SECONDS = 600.0  # a machine under load takes minutes to start four times PyTorch or Flower
STOP_SECONDS = 120.0

RECIPE = """# Three nodes that each hold a few of the ten digits; secure masks the calibration's statistics.
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

federation_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")]
Federation = Annotated[Path, option("The federation's folder.", "--federation", metavar="DIR")]
Recipe = Annotated[Path | None, typer.Argument(help="A TOML recipe (default: recipe.toml of the folder).")]


@federation_app.command()
def demo(
    folder: Annotated[Path, option("A new or empty folder.", "--out", metavar="DIR")] = Path("federation-demo"),
) -> None:
    """Demonstrate a federation on this machine: a server, three nodes, TLS, training, calibration, report."""
    began = time.monotonic()

    def say(line: str) -> None:
        out.say(f"{time.monotonic() - began:5.1f} s  {line}")

    federation = folders.initialise(folder, nodes=NODES, port=network.free_port(3))
    say(f"{federation.path}: authority, server certificate, and keys for {', '.join(NODES)}")
    config = configs.checked(Config(data="digits", partition="dirichlet(alpha=0.3)", clients=len(NODES), seed=0))
    images = read_data(config)
    drawn = make_partition(config, images.examples)
    labels, classes = images.train.labels, len(images.classes)
    write_arrays(federation.path / "partition.npz", partition_files.to_arrays(drawn, labels, classes))
    say(f"the digits are partitioned with {drawn.scheme}: EMD {emd(drawn.client, labels, classes):.2f}")
    nodes = [folders.read_node(federation.node(name)) for name in NODES]
    for number, node in enumerate(nodes):
        settings = {"data": "digits", "partition": f"file:{federation.path / 'partition.npz'}", "client": [number]}
        _write_service(node, settings, "Made by unskew federation demo.")
    write_whole(federation.path / "recipe.toml", RECIPE.encode())
    run = federation.path / "runs" / "demo"
    try:
        with ProcessGroup(f"demo:{federation.path}", federation.path / "logs", federation.path, STOP_SECONDS) as group:
            _start(group, federation, nodes, say)
            submit(federation, federation.path / "recipe.toml", run, say)
            say("the run has finished; stopping the server and the nodes")
    finally:
        for mark in (server_mark(federation), *map(node_mark, nodes)):  # those that a busy machine did not end in time
            end_all(mark)
    report(paths=[run])
    say(f"done in {format_duration(time.monotonic() - began)}: {run}")


def _write_service(node: NodeFolder, settings: dict[str, Any], header: str) -> None:
    """Write the settings of a node's service."""
    places = {"name": node.settings.name, "folder": str(node.state), "socket": str(socket_path(node))}
    write_whole(node.service_settings, folders.toml(settings | places, header).encode())


def _start(group: ProcessGroup, federation: FederationFolder, nodes: list[NodeFolder], say: Say) -> None:
    """Start the server and the nodes as in four terminals, and wait until all nodes are connected."""
    missing = {f"node {node.settings.name}" for node in nodes}
    folders = {"server": federation.path, **{f"node {node.settings.name}": node.path for node in nodes}}
    children = []
    for name, folder in folders.items():

        def hear(line: str, name: str = name) -> None:
            if line.startswith(("ready", "connected")):
                say(f"{name}: {line}")
            if line.startswith("connected"):
                missing.discard(name)

        command = [sys.executable, "-P", "-m", WATCHER.decode(), name.split()[0], str(folder)]
        children.append(group.start(name, command, dict(os.environ), hear))
    end = time.monotonic() + CONNECT_SECONDS
    while missing:
        for child in children:
            if child.code is not None:
                raise UserError(f"{child.name} ended with code {child.code}:\n{child.log_end()}")
        if time.monotonic() > end:
            raise UserError(f"not all nodes connected within {CONNECT_SECONDS:.0f} s; see {federation.path}")
        time.sleep(0.2)


@federation_app.command()
def init(
    folder: Folder,
    node: Annotated[list[str] | None, option("A node whose key is created here; repeatable.", metavar="NAME")] = None,
    key: Annotated[
        list[str] | None,
        option("The public key of a node that created its own key; repeatable.", metavar="NAME=FILE.pub"),
    ] = None,
    host: Annotated[str | None, option("Name or address at which nodes reach the server (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, option("The port that nodes connect to (default: 8000).")] = None,
    renew: Annotated[bool, option("Make a new certificate for the server.", "--renew")] = False,
    renew_authority: Annotated[
        bool,
        option(
            "Make a new authority; once every node has its ca.crt, --renew ends the trust in the old one.",
            "--renew-authority",
        ),
    ] = False,
) -> None:
    """Create a federation's folder with certificates and node keys, or add nodes to one."""
    keys = {name: Path(file) for name, _, file in (text.partition("=") for text in key or [])}
    if "" in keys or Path() in keys.values():
        raise UserError("--key: give NAME=FILE.pub")
    nodes, authority = node or [], {"renew": renew, "renew_authority": renew_authority}
    new = not (folder / folders.FEDERATION).exists()
    federation = folders.initialise(folder, nodes=nodes, keys=keys, host=host, port=port, **authority)
    path, settings = federation.path, federation.settings
    if new:
        out.say(f"{path}: a federation at {settings.host}:{settings.port}")
    elif renew:
        out.say("the server has a new certificate; a running server uses it within a second")
    elif renew_authority:
        renewal = f"unskew federation init {path} --renew"
        out.say(f"copy {federation.authority} to every node as ca.crt, then run: {renewal}")
    for name in (*nodes, *keys):
        out.say(f"node {name}: copy {federation.node(name)} to its machine, where its node.key belongs")
    out.say(
        f"add a node with: unskew federation init {path} --node NAME",
        "start each node on its machine with: unskew federation node NAME --data …",
        f"start the server with: unskew federation server {path}",
    )


@federation_app.command()
def server(folder: Folder = Path()) -> None:
    """Run the server until Ctrl-C."""
    watch(["server", str(folder)])


@federation_app.command()
@with_options(
    ["data", "data_dir", "partition", "clients", "seed", "device"],
    default="as last time, or none",
    texts={"clients": "How many clients --partition has.", "seed": "The seed of --partition, the same on every node."},
)
def node(
    options: dict[str, Any],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The node's folder, as created by init on the server.")],
    client: Annotated[
        list[int] | None, option("The part of --partition that this node holds, from 0; repeatable.", metavar="N")
    ] = None,
    plugin: Annotated[
        list[str] | None,
        option("Code on this node that runs may use; repeatable.", metavar="package.module:function"),
    ] = None,
    part: Annotated[
        str, option("both | service (the part with the data) | supernode (the part with the connection).")
    ] = PARTS[0],
    socket: Annotated[
        Path | None,
        option("The socket between the two parts, if they run as two users; it is remembered.", metavar="FILE"),
    ] = None,
    write_policy: Annotated[
        bool, option("Write a commented policy.toml with the defaults, and exit.", "--write-policy")
    ] = False,
    check_policy: Annotated[
        bool, option("Check policy.toml, print what differs from the defaults, and exit.", "--check-policy")
    ] = False,
) -> None:
    """Run a node until Ctrl-C: it trains on its own data, which never leave it."""
    target = folders.read_node(folder)
    if write_policy or check_policy:
        from unskew.engines.flower.policy import POLICY, Policy, commented, read_policy

        file = target.path / POLICY
        if write_policy and file.exists():
            raise UserError(f"{file} already exists; remove it first, or check it with --check-policy")
        if write_policy:
            write_whole(file, commented().encode())
            out.say(f"written to {file}; edit it, then check it with --check-policy")
            return
        found, default = vars(read_policy(file)), vars(Policy())
        out.say(*(f"{name}: {value}" for name, value in found.items() if value != default[name]))
        out.say(f"{file} is valid; restart the node to use it")
        return
    if socket is not None:
        target = NodeFolder(target.path, replace(target.settings, socket=str(socket.absolute())))
        folders.write_settings(target.path / folders.NODE, target.settings)
    given = {**options, "client": client, "plugins": plugin}
    if any(value is not None for value in given.values()):
        if "data" not in options:
            wanted = "a folder, a table or arrays of this node, or the name of a data set"
            raise UserError(f"--data is missing; give {wanted}")
        config = configs.checked(configs.with_values(Config(), options, "federation node"))
        settings = {name: getattr(config, name) for name in options}
        settings |= {"data_dir": config.data_dir, "client": client, "plugins": plugin}
        _write_service(target, settings, folders.MADE.replace("init", "node"))
    watch(["node", str(target.path), part])


@federation_app.command("run")
def run_(
    recipe: Recipe = None,
    folder: Federation = Path(),
    place: Annotated[
        Path | None, option("The run directory (default: runs/<recipe> in the federation's folder).", "--out")
    ] = None,
    resume: Annotated[Path | None, option("Continue this run instead of starting a recipe.", metavar="RUN")] = None,
    back_to: Annotated[
        int | None, option("With --resume: continue after this round, in a new directory.", metavar="ROUND")
    ] = None,
    deadline: Annotated[float | None, option("Seconds that a round waits for its nodes (default: 600).")] = None,
    min_replies: Annotated[int | None, option("The fewest replies that a round needs to count (default: 1).")] = None,
    wait: Annotated[float | None, option("Seconds to wait for more nodes if there are too few (default: 600).")] = None,
    page: Annotated[bool, option("Write the report too, as unskew report does.", "--report")] = False,
    as_json: Json = False,
) -> None:
    """Train, evaluate and calibrate across the nodes; run this on the server's machine."""
    federation = folders.read_federation(folder)
    if resume is None and back_to is not None:
        raise UserError("--back-to needs --resume RUN, the run to roll back")
    if resume is not None and (recipe is not None or (place is not None and back_to is None)):
        raise UserError("--resume continues a run with its own settings; leave out the recipe and --out")
    if resume is not None and back_to is not None:
        place = place or unused_path(resume.parent, f"{resume.name}-from-{back_to}")
        roll_back(resume, back_to, place)
        resume = place
    chosen = recipe or federation.path / "recipe.toml"
    target = (resume or place or unused_path(federation.path / "runs", chosen.stem)).absolute()
    asked = {"recipe": "" if resume else str(chosen.absolute()), "out": str(target), "resume": resume is not None}
    check_request(settings_of(asked))  # report a mistake before anything is submitted
    again = f"continue it with: unskew federation run --federation {federation.path} --resume {target}"
    terms: dict[str, Any] = {"deadline": deadline, "min_replies": min_replies, "wait": wait}
    recipe = resume / configs.CONFIG if resume else chosen
    try:
        submit(federation, recipe, target, out.say, resume=resume is not None, **terms)
    except KeyboardInterrupt:
        out.say(f"the run was stopped; {again}")
        raise
    except UserError as error:
        begun = (target / configs.CONFIG).exists() and not (target / "result.json").exists()
        raise UserError(f"{error}; {again}" if begun else str(error)) from error
    out.say(f"written to {target}")
    if page:
        report(paths=[target])
    if as_json:
        print_json({"run": target, **to_json(read_result(target))})


@federation_app.command()
def check(
    recipe: Recipe = None,
    folder: Federation = Path(),
    wait: Annotated[float, option("Seconds to wait for the nodes.")] = 60.0,
) -> None:
    """Ask every node what it has, and report whether it fits; nothing is trained."""
    federation = folders.read_federation(folder)
    chosen = recipe or federation.path / "recipe.toml"
    target = unused_path(federation.path / "runs", "check").absolute()  # nothing is written there
    check_request(settings_of({"recipe": str(chosen.absolute()), "out": str(target)}))
    submit(federation, chosen, target, out.say, check=True, wait=wait)


@federation_app.command()
def status(folder: Folder = Path(), as_json: Json = False) -> None:
    """Report the state of the server, its nodes and its last runs."""
    federation = folders.read_federation(folder)
    now = federations.status(federation)
    if as_json:
        print_json(now)
        return
    state = "running" if now["running"] else "starting, or not responding" if now["processes"] else "not running"
    valid = f"its certificate is valid for {now['certificate_days']:.0f} days"
    out.say(f"server {now['address']}: {state}, {counted(now['processes'], 'program')}; {valid}")
    for one in now["nodes"]:
        seconds, state = one["seconds_since_heard"], "online" if one["online"] else "offline"
        heard = "never" if seconds is None else f"{format_duration(seconds)} ago"
        local = f"; {counted(one['processes'], 'program')} here" if one["processes"] else ""
        out.say(f"node {one['name']}: {state}, last heard from {heard}{local}")
    for one in now["flower_runs"]:
        out.say(f"run {one['id']}: {one['status']}, {format_duration(one['seconds'])}")
    if (run := now["run"]) is not None:
        progress = f"{run['state']}, round {run['round']} of {run['rounds']}"
        written = f"last written {format_duration(run['seconds'])} ago"
        out.say(f"{run['directory']}: {progress}, {written}; {run['method']}")


@federation_app.command()
def audit(
    place: Annotated[
        Path, typer.Argument(metavar="DIR|RUN|RECEIPT", help="A node's folder, a run directory, or a receipt.")
    ],
    key: Annotated[Path | None, option("The node's registered key, to verify a receipt.", metavar="NAME.pub")] = None,
    receipt: Annotated[
        Path | None, option("Write a receipt to this file, signed with the node's key.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Report what left a node, write or verify a signed receipt of it, or list what a run asked of each node."""
    from unskew.engines.flower import audit as audits

    found: Any
    is_run = (place / FEDERATION).exists()
    if (key is None) != place.is_dir() or (receipt is not None and (is_run or not place.is_dir())):
        raise UserError(
            "--receipt works only on a node's folder; a receipt needs --key NAME.pub, and nothing else does"
        )
    if is_run:
        logs = [audit_file(place.absolute(), released=released) for released in (False, True)]
        found = audits.read_audit(logs[logs[1].exists()])
        lines = audits.record_lines(found)
    elif place.is_dir():
        target = folders.read_node(place)
        found = audits.make_receipt(target.state / audits.AUDIT, target.settings.name, target.key)
        lines = audits.receipt_lines(found)
        if receipt is not None:
            write_whole(receipt, json.dumps(found, indent=1).encode())
    else:
        found = read_json(place)
        audits.verify_receipt(found, read_content(key, 2**16) or b"" if key else b"")
        lines = [f"signed with {key} and not changed since", *audits.receipt_lines(found)]
    out.say(*lines)
    if as_json:
        print_json(found)


@federation_app.command()
def stop(folder: Folder = Path()) -> None:
    """Stop the server and the nodes of this folder on this machine."""
    ended = federations.stop(folder)
    for name, count in ended.items():
        out.say(f"{name}: stopped, {counted(count, 'program')}")
    if not ended:
        out.print("nothing was running")
