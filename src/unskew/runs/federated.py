"""A run whose clients are the nodes of a federation: gather them, agree on terms, run and resume."""

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from unskew.calibration.federated import named
from unskew.core.errors import Missing, UserError
from unskew.core.files import json_object, record_from
from unskew.core.machine import neutral
from unskew.core.types import Engine, ImageSet, Local, Split
from unskew.core.units import counted
from unskew.data.population import Partition
from unskew.engines import EngineSetup
from unskew.engines.flower import engine as flower
from unskew.engines.flower.audit import AUDIT, AuditLog
from unskew.engines.flower.messages import Description, RunAgreement, Transport
from unskew.engines.flower.node import own_version
from unskew.engines.loop import Loop
from unskew.methods import parse_method, with_release
from unskew.runs import config as configs
from unskew.runs import folder as folders
from unskew.runs.config import CONFIG, NODES, Config
from unskew.runs.execute import Observer, execute
from unskew.runs.prepare import Prepared, prepare, read_data, rehearse
from unskew.runs.python_values import Nodes, PythonValues
from unskew.runs.result import RESULT, Result, read_result

FEDERATION = "federation.json"


@dataclass(frozen=True)
class FederationTerms:
    """What all nodes agreed on: classes, image shape and normalization. It is the content of federation.json."""

    run: str
    starts: int = 0
    classes: tuple[str, ...] = ()
    shape: tuple[int, int, int] = (0, 0, 0)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: bool = False
    augmentation: str = "auto"
    clients: tuple[flower.KnownClient, ...] = ()
    rules: dict[str, Any] = field(default_factory=dict)  # as in a recipe's [federation] table


def read_terms(path: Path) -> FederationTerms:
    """Read a run directory's federation.json."""
    content = folders.read_sealed(path, FEDERATION)
    if content is None:
        raise UserError(f"{path} is not the run directory of a federation: it has no {FEDERATION}")
    with folders.reading(path / FEDERATION):
        return record_from(FederationTerms, json_object(content, path / FEDERATION))


def agree_on_terms(terms: FederationTerms, nodes: Sequence[Description], classes: tuple[str, ...]) -> FederationTerms:
    """Choose the classes (those requested, or those of all nodes), the images' shape and their normalization."""
    sizes = [node.shape[1:] for node in nodes]
    size = max(set(sizes), key=lambda size: (sizes.count(size), size))  # the most common one
    shapes = [node.shape for node in nodes if node.shape[1:] == size]
    shape = max(set(shapes), key=lambda shape: (shapes.count(shape), shape))
    if shape[0] == 1 and (3, *size) in shapes:
        shape = 3, *size
    fitting = [_in_colour(node, shape) for node in nodes if _in_colour(node, shape).shape == shape]
    if not classes and len({node.classes for node in fitting}) == 1:
        classes = fitting[0].classes  # in the nodes' own order
    if not classes:
        classes = tuple(sorted({name for node in fitting for name in node.classes}))
        spelled: dict[str, str] = {}
        for name in classes:  # nobody means both "Normal" and "normal"
            plain = "".join(filter(str.isalnum, name.casefold())) or name
            if (other := spelled.setdefault(plain, name)) != name:
                holders = {label: node.node for node in reversed(fitting) for label in node.classes}
                raise UserError(
                    f"node {holders[other]} has a class {other!r} and node {holders[name]} a class {name!r}; rename "
                    "one of them, or, if they differ, list both under classes in the recipe's [federation] table"
                )
    (mean, std), augment = _pool_pixels(fitting), all(node.augment for node in fitting)
    agreed = replace(terms, classes=classes, shape=shape, mean=mean, std=std)
    return replace(agreed, augment=augment, augmentation=fitting[0].augmentation)


def _in_colour(node: Description, shape: tuple[int, int, int]) -> Description:
    """Describe the node's gray images as color images, if the others' are in color."""
    if node.shape[0] != 1 or shape[0] != 3:
        return node
    return replace(node, shape=(3, *node.shape[1:]), mean=3 * node.mean, std=3 * node.std)


def why_not(node: Description, terms: FederationTerms) -> str | None:
    """Why a node's data do not fit the terms; None if they do."""
    if _in_colour(node, terms.shape).shape != terms.shape:
        return f"its images are {_shape(node.shape)}, but the others' are {_shape(terms.shape)}; scale them to match"
    agreed = set(terms.classes)
    if (unknown := next((name for name in node.classes if name not in agreed), None)) is not None:
        return f"its class {unknown!r} is not among those agreed on; rename it, or list it in the recipe"
    return None if any(facts.examples for facts in node.clients) else "it has no training images"


NARROW = 8.0  # of the deviations that most nodes have: a pooled one that is so many times smaller is not used


def _pool_pixels(nodes: Sequence[Description]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """All nodes' mean and deviation, without nodes that claim many examples with almost no deviation."""
    if len({(node.mean, node.std) for node in nodes}) == 1:
        return nodes[0].mean, nodes[0].std
    mean, std = _pool_all(nodes)
    usual = np.median([node.std for node in nodes], axis=0)
    if any(NARROW * pooled < most for pooled, most in zip(std, usual, strict=True)):
        return _pool_all([node for node in nodes if bool(np.all(NARROW * np.array(node.std) >= usual))])
    return mean, std


def _pool_all(nodes: Sequence[Description]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    sizes = [sum(facts.examples for facts in node.clients) for node in nodes]
    pooled = []
    for channel in range(len(nodes[0].mean)):
        parts = [(size, node.mean[channel], node.std[channel]) for size, node in zip(sizes, nodes, strict=True)]
        middle = sum(size * mean for size, mean, _ in parts) / sum(sizes)
        square = sum(size * (std**2 + (mean - middle) ** 2) for size, mean, std in parts)
        pooled.append((middle, math.sqrt(square / sum(sizes))))
    mean, std = zip(*pooled, strict=True)
    return mean, std


def describe_oddities(nodes: Sequence[Description], terms: FederationTerms) -> list[str]:
    """Notes on nodes whose description changes the run for everybody; the operator may want to look at them."""
    notes = []
    agreed, holders = set(terms.classes), Counter(name for node in nodes for name in node.classes)
    for node in nodes:
        if any(NARROW * own < pooled for own, pooled in zip(node.std, terms.std, strict=False)):
            deviations = f"a deviation of {min(node.std):.2g}; all nodes' is {min(terms.std):.2g}"
            notes.append(f"node {node.node}: its images are almost uniform, with {deviations}")
        own = sum(holders[name] == 1 for name in node.classes)
        others = len(holders) - own
        if 0 < others < own and agreed.issuperset(node.classes):
            notes.append(
                f"node {node.node} has {own:,} classes that no other node has, the others have {others:,} together; "
                "the network predicts all of them; to decide yourself, list classes in the recipe's [federation] table"
            )
    return notes


def _shape(shape: tuple[int, int, int]) -> str:
    return f"{shape[2]}x{shape[1]} with {counted(shape[0], 'channel')}"


def images_of(terms: FederationTerms, config: Config, own: ImageSet | None) -> ImageSet:
    """The server's image set: no training images, and its own test images if it has any."""
    empty = Split(np.zeros((0, *terms.shape), np.uint8), np.zeros(0, np.int64))
    test = empty
    if own is not None:
        number = {name: label for label, name in enumerate(terms.classes)}
        if own.shape != terms.shape or not number.keys() >= set(own.classes):
            raise UserError(
                f"the server's test images ({config.data}, {_shape(own.shape)}) must have the shape and classes of the "
                f'nodes\' images ({_shape(terms.shape)}); change them, or give data = "{NODES}"'
            )
        numbers = np.array([number[name] for name in own.classes], np.int64)
        test = Split(own.test.images, numbers[own.test.labels], own.test.rows)
    name = config.data if own else "the nodes' images"
    return ImageSet(name, terms.classes, empty, test, mean=terms.mean, std=terms.std, augment=terms.augment)


def _disconnected(setup: EngineSetup) -> Engine:
    raise Missing("the clients of this run are nodes of a federation, which are only connected during the run")


def nodes_of(
    terms: FederationTerms, config: Config, open_engine: Callable[[EngineSetup], Engine] = _disconnected
) -> Nodes:
    """The clients at the start of the run and their sizes, and the engine that reaches them."""
    roster = flower.roster_of(known for known in terms.clients if not known.late)
    client = np.repeat(np.arange(roster.clients, dtype=np.int32), roster.sizes)
    return Nodes(Partition(client, roster.clients, NODES, config.seed), open_engine)


BACK = 60.0  # seconds that a resumed run waits for its first clients; Flower's nodes reconnect within 20
SETTLE = 3.0  # seconds without a new node after which a federation of unknown size begins


@dataclass(frozen=True)
class FederatedRequest:
    """A run to train: a recipe and its run directory, or a run directory to resume, and the rules."""

    recipe: Path
    out: Path
    resume: bool = False
    rules: flower.Rules = field(default_factory=flower.Rules)
    classes: tuple[str, ...] = ()
    check: bool = False  # only ask the nodes to describe their data
    submitter: str = ""


def check_nodes(exchange: Transport, request: FederatedRequest, say: Callable[[str], None]) -> None:
    """Ask every node to describe its data, and report whether they fit the others' and the recipe."""
    session, config, own, terms = _open_session(exchange, request, None, say)
    nodes, terms = _agree(session, config, request, own, terms)
    for node in nodes:
        examples, test = (sum(getattr(facts, name) for facts in node.clients) for name in ("examples", "test"))
        say(
            f"node {node.node}: {counted(len(node.clients), 'client')}, {examples:,} training and {test:,} test images "
            f"of {_shape(node.shape)}, {counted(len(node.classes), 'class')}: {_first_names(node.classes)}"
        )
    images_of(terms, config, own)  # refuses test images that do not fit
    say(f"agreed: {_shape(terms.shape)}, {counted(len(terms.classes), 'class')}")
    for line in describe_oddities(nodes, terms):
        say(line)
    for node in nodes:
        held = set(node.classes)
        if missing := [name for name in terms.classes if name not in held]:
            say(f"node {node.node} lacks {_first_names(missing)}")
    session.finish()
    if rejected := [f"node {node.node}: {reason}" for node in nodes if (reason := why_not(node, terms))]:
        raise UserError(f"{len(rejected)} of {counted(len(nodes), 'node')} cannot take part; {'; '.join(rejected)}")
    say(f"all {counted(len(nodes), 'node')} can take part")


def _open_session(
    exchange: Transport, request: FederatedRequest, before: FederationTerms | None, say: Callable[[str], None]
) -> tuple[flower.Session, Config, ImageSet | None, FederationTerms]:
    config = check_request(request)
    terms = before or FederationTerms(run=os.urandom(16).hex())
    members = flower.Members(remembered={known.name: known for known in terms.clients})
    session = flower.Session(exchange, terms.run, terms.starts, members, request.rules, say)
    return session, config, None if config.data == NODES else read_data(config), terms


def _agree(
    session: flower.Session, config: Config, request: FederatedRequest, own: ImageSet | None, terms: FederationTerms
) -> tuple[list[Description], FederationTerms]:
    session.open = False
    until = session.exchange.now() + request.rules.wait
    _gather(session, config.clients or 0, until, lambda: sum(len(node.clients) for node in session.described.values()))
    nodes = [session.described[node] for node in sorted(session.described)]
    return nodes, agree_on_terms(terms, nodes, request.classes or (own.classes if own else ()))


def _first_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}"


@neutral()
def run_federated(exchange: Transport, request: FederatedRequest, observe: Observer, say: Any) -> Result:
    """Train with the nodes that the exchange reaches."""
    before = read_terms(request.out) if request.resume else None
    session, config, own, terms = _open_session(exchange, request, before, say)
    if before is None:
        clients, until = config.clients or 0, exchange.now() + request.rules.wait
        nodes, terms = _agree(session, config, request, own, terms)
        for line in describe_oddities(nodes, terms):
            session.note(line)
    else:  # wait for the clients that the run began with: fewer would change the result
        clients = sum(not known.late for known in terms.clients)
        until = exchange.now() + min(BACK, request.rules.wait)
    session.fits = lambda node: why_not(node, terms)
    session.admit_described()
    if clients or len(session.members.by_number) < request.rules.min_replies:
        _gather(session, clients, until, lambda: len(session.members.by_number))
    rules = {name.replace("_", "-"): value for name, value in asdict(request.rules).items()}
    joined = tuple(session.members.remembered.values())
    terms = replace(terms, clients=joined, starts=terms.starts + 1, rules=rules)
    session.members.begun = True
    prepared = _prepared(config, terms, own, session)
    if prepared.algorithm.mechanism is not None:
        names = set(session.members.remembered)

        def fits(node: Description) -> str | None:
            late = next((facts.name for facts in node.clients if facts.name not in names), None)
            reason = f"with private-updates the clients must be those that the run began with, but {late!r} is new"
            return why_not(node, terms) or (None if late is None else reason)

        session.fits = fits
    path = request.out
    if before is None:
        rehearse(prepared)
        folders.create_run_folder(path)

    def write_terms(**changes: Any) -> None:
        folders.write_sealed(path, {FEDERATION: folders.json_bytes(asdict(replace(terms, **changes)))})

    with folders.locked_folder(path):
        if before is None:
            text = configs.to_toml(prepared.config).encode()
            folders.start_manifest(path, {CONFIG: text, FEDERATION: folders.json_bytes(asdict(terms))})
        else:
            write_terms()
        session.joined = lambda members: write_terms(clients=tuple(members.remembered.values()))
        log, start = AuditLog(audit_file(path, released=prepared.algorithm.released)), terms.starts - 1
        about = {"run": terms.run, "start": start, "submitter": request.submitter or None, "version": own_version()}
        session.record = lambda entry: log.append({**about, **entry})
        result = execute(prepared, path, observe)
        if result.released:  # published without numbers of examples and the nodes' pixel statistics
            known = tuple(replace(client, examples=1) for client in session.members.remembered.values())
            half = (0.5,) * len(terms.mean)
            write_terms(clients=known, mean=half, std=half)
        session.finish()
    if result.history and not any(row.get("clients", "void" not in row) for row in result.history):
        reason = next((row["void"] for row in reversed(result.history) if row.get("void")), "no client took part")
        raise UserError(f"no round was valid, so the model is still the initial one: {reason}")
    return result


def audit_file(path: Path, *, released: bool = False) -> Path:
    """The server's audit log of a run; for a release it is outside the run directory, which others may read."""
    return path.with_name(f"{path.name}.{AUDIT}") if released else path / AUDIT


def check_request(request: FederatedRequest) -> Config:
    """Read and check the configuration before any node is contacted."""
    if not request.resume:
        folders.require_blank(request.out)
        config = configs.read(request.recipe)
        parse_method(config.method, Local())
        config = replace(config, method=with_release(config.method))
    else:
        config = configs.read_own_run(request.out)
        if folders.read_sealed(request.out, RESULT) is not None:  # a calibration may have failed for lack of a client
            algorithm, done = parse_method(config.method, Local()), read_result(request.out).calibrations
            if all(named(finisher, algorithm) in done for finisher in algorithm.finish):
                raise UserError(f"{request.out} is finished: it has a result.json; start another run")
    config = configs.checked(replace(config, on_failure="skip", partition=NODES, engine="auto"))
    if (least := request.rules.min_replies) > (config.per_round or math.inf):
        raise UserError(f"min-replies {least} is more than --per-round {config.per_round}; change one")
    if config.validation:
        raise UserError("--validation holds out training images, which only the nodes have; leave it out")
    return config


def _gather(session: flower.Session, wanted: int, until: float, count: Callable[[], int]) -> None:
    """Wait for ``wanted`` clients (0: until no more join), after ``until`` only for as many as a round needs."""
    exchange, least = session.exchange, max(1, session.rules.min_replies)
    began = changed = exchange.now()
    last = began + session.rules.wait  # for the minimum that a round needs
    known, announced = -1, False
    while exchange.now() < (until if known >= least else max(until, last)):
        list(session.answers())
        if (clients := count()) != known:
            known, changed = clients, exchange.now()
        settled = not session.waiting("describe") and exchange.now() - changed >= SETTLE
        if (wanted and clients >= wanted) or (not wanted and clients >= least and settled):
            return
        if not announced:
            session.say(f"waiting for {counted(wanted or least, 'client')}, {until - began:,.0f} seconds at most")
            announced = True
        exchange.pause(0.2)
    waited = f"{exchange.now() - began:,.0f} seconds"
    if known < least:
        reasons = "".join(f"; {line}" for line in session.notes if " is left out: " in line)
        joined = counted(max(known, 0), "client")
        raise UserError(f"only {joined} joined within {waited}; start {least} or more, or give a longer wait{reasons}")
    session.note(f"{known} of {wanted or known} clients joined within {waited}; others may join later")


def _prepared(config: Config, terms: FederationTerms, own: ImageSet | None, session: flower.Session) -> Prepared:
    def open_engine(setup: EngineSetup) -> Engine:
        images, frozen, blueprint = prepared.images, prepared.frozen, setup.blueprint
        numbers, views = (images.mean, images.std), prepared.config.views or 0
        session.agree_on(RunAgreement(terms.run, blueprint, terms.classes, *numbers, {}, views), frozen)
        template = flower.Template(blueprint, *numbers, frozen)
        return flower.FederatedEngine(session, Loop(setup.client_side()), template, prepared.algorithm.local)

    nodes = nodes_of(terms, config, open_engine)
    prepared = prepare(config, values=PythonValues(data=images_of(terms, config, own), nodes=nodes))
    return prepared


Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class FederationTable(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A recipe's [federation] table."""

    deadline: Positive = flower.Rules.deadline
    min_replies: Annotated[int, msgspec.Meta(ge=1)] = flower.Rules.min_replies
    wait: Positive = flower.Rules.wait
    classes: tuple[str, ...] = ()


def settings_of(run_config: Mapping[str, Any]) -> FederatedRequest:
    """Read Flower's run configuration, which overrides the recipe's table; 0, -1 and "" mean unset."""
    options = {name: value for name, value in run_config.items() if value and value != -1}
    if "out" not in options or not ("recipe" in options or "resume" in options):
        raise UserError("the run configuration must set recipe and out to absolute paths on the server's machine")
    recipe, out, resume = Path(str(options.get("recipe", ""))), Path(str(options["out"])), "resume" in options
    table: Any = read_terms(out).rules if resume else configs.federation_table(recipe) if recipe.is_file() else {}
    if isinstance(table, dict):
        table |= {name: options[name] for name in FederationTable.__struct_encode_fields__ if name in options}
    try:
        settings = msgspec.convert(table, FederationTable)
    except msgspec.ValidationError as error:
        raise UserError(f"{recipe}: the [federation] table is invalid: {error}") from error
    rules = flower.Rules(settings.deadline, settings.min_replies, settings.wait)
    submitter = str(options.get("submitter", ""))
    return FederatedRequest(recipe, out, resume, rules, settings.classes, bool(options.get("check")), submitter)
