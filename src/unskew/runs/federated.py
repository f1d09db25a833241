"""A run whose clients are the nodes of a federation: waiting for them, agreeing with them, the run folder, resuming."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unskew.calibration.feasible import named
from unskew.core.context import neutral
from unskew.core.errors import UserError, brief, nearest
from unskew.core.images import ImageSet
from unskew.core.types import Engine, Local
from unskew.core.units import counted
from unskew.engines import EngineSetup
from unskew.engines.flower.agreement import Agreement
from unskew.engines.flower.engine import FederatedEngine
from unskew.engines.flower.exchange import Exchange
from unskew.engines.flower.members import Members
from unskew.engines.flower.post import Post
from unskew.engines.flower.session import Rules, Session
from unskew.engines.flower.template import Template
from unskew.engines.loop import Loop
from unskew.methods import parse_method
from unskew.runs import config as configs
from unskew.runs.config import CONFIG, NODES, Config
from unskew.runs.elsewhere import images_of, nodes_of
from unskew.runs.execute import Observer, execute
from unskew.runs.federation_file import FEDERATION, Terms, read_terms, terms_bytes
from unskew.runs.folder import create_run_folder, locked_folder
from unskew.runs.given import Given
from unskew.runs.manifest import read_sealed, start_manifest, write_sealed
from unskew.runs.prepare import Prepared, prepare
from unskew.runs.read_data import read_data
from unskew.runs.result import RESULT, Result, read_result
from unskew.runs.terms import agreed_terms, why_not, why_too_late
from unskew.runs.train import rehearse

TABLE_KEYS = ("deadline", "min-replies", "wait", "classes")  # of a recipe's table [federation]
BACK = 60.0  # seconds that a resumed run waits for the clients it began with; Flower's nodes come back within 20
SETTLE = 3.0  # seconds without a new node after which a federation of unknown size begins


@dataclass(frozen=True)
class Request:
    """What is asked of the federation: a recipe and its folder, or a folder to go on with, and the rules."""

    recipe: Path
    out: Path
    resume: bool = False
    rules: Rules = field(default_factory=Rules)
    classes: tuple[str, ...] = ()


@neutral()
def run_federated(exchange: Exchange, asked: Request, observe: Observer, say: Any) -> Result:
    """Train over the nodes that the exchange reaches; the run folder is like any other's."""
    config = _config(asked)
    before = read_terms(asked.out) if asked.resume else None
    terms = before or Terms(run=os.urandom(16).hex())
    post = Post(exchange, terms.run, terms.starts)
    session = Session(post, Members(remembered=dict(terms.clients)), asked.rules, say)
    own = None if config.data == NODES else read_data(config)
    if before is None:
        wanted = asked.classes or (own.classes if own else ())
        session.hold_back()
        _gather(session, config.clients or 0, asked.rules.wait)
        terms = agreed_terms(terms, [session.described[node] for node in sorted(session.described)], wanted, config)
    session.fits = lambda said: why_not(said, terms)
    session.admit_described()
    if before is not None:  # those that were there when the run began: with fewer the bits would differ
        _gather(session, sum(not known.late for known in terms.clients.values()), min(BACK, asked.rules.wait))
    terms = replace(terms, clients=dict(session.members.remembered), starts=terms.starts + 1)
    session.members.begun = True
    prepared = _prepared(config, terms, own, session)
    if prepared.algorithm.mechanism is not None:
        session.fits = lambda said: why_not(said, terms) or why_too_late(said, terms)
    path = asked.out
    if before is None:
        rehearse(prepared)
        create_run_folder(path)
    with locked_folder(path):
        if before is None:
            text = configs.to_toml(prepared.config).encode()
            start_manifest(path, {CONFIG: text, FEDERATION: terms_bytes(terms)})
        else:
            write_sealed(path, {FEDERATION: terms_bytes(terms)})

        def joined(members: Members) -> None:
            write_sealed(path, {FEDERATION: terms_bytes(replace(terms, clients=dict(members.remembered)))})

        session.joined = joined
        result = execute(prepared, path, observe)
        session.finish()
        return result


def _config(asked: Request) -> Config:
    if not asked.resume:
        if (asked.out / CONFIG).exists():
            raise UserError(f"{asked.out} has a run already; choose another folder, or resume it")
        config = configs.read(asked.recipe)
    else:
        config = configs.read_run(asked.out)
        if read_sealed(asked.out, RESULT) is not None and not _uncalibrated(asked.out, config):
            raise UserError(f"{asked.out} is finished: it has a result.json")
    config = configs.checked(replace(config, on_failure="skip", partition=NODES, engine="auto"))
    if config.validation:
        raise UserError("--validation holds out training images, which are at the nodes; leave it out")
    return config


def _uncalibrated(path: Path, config: Config) -> bool:
    """Whether a finished run lacks a calibration that its method names: a client was missing when it was made."""
    algorithm, made = parse_method(config.method, Local()), read_result(path).calibrations
    return any(named(each, algorithm) not in made for each in algorithm.finish)


def _gather(session: Session, wanted: int, seconds: float) -> None:
    """Wait until so many clients have described themselves; with 0, until no new one comes any more.

    After ``seconds`` it goes on with those that came, if they are as many as a round needs.
    """
    exchange = session.post.exchange
    began, changed, known = exchange.now(), exchange.now(), -1
    least = max(1, session.rules.min_replies)
    told = False
    while exchange.now() - began < (seconds if known >= least else session.rules.wait):
        list(session.answers())
        clients = sum(len(said.clients) for said in session.described.values())
        if clients != known:
            known, changed = clients, exchange.now()
        settled = not session.post.waiting("describe") and exchange.now() - changed >= SETTLE
        if (wanted and clients >= wanted) or (not wanted and clients >= least and settled):
            return
        if not told:
            session.say(f"waiting for {counted(wanted or least, 'client')}, {seconds:,.0f} seconds at most")
            told = True
        exchange.pause(0.2)
    if known < least:
        raise UserError(
            f"only {counted(max(known, 0), 'client')} came within {session.rules.wait:,.0f} seconds, {least} are "
            "needed; start more nodes, or give a longer wait"
        )
    session.note(f"{known} of {wanted or known} clients came within {seconds:,.0f} seconds; others may join later")


def _prepared(config: Config, terms: Terms, own: ImageSet | None, session: Session) -> Prepared:
    def open_engine(setup: EngineSetup) -> Engine:
        images, frozen = prepared.images, prepared.frozen
        blueprint, views = setup.blueprint, prepared.config.views or 0
        agreement = Agreement(terms.run, blueprint, terms.classes, images.mean, images.std, {}, views)
        session.agree_on(agreement, frozen)
        template = Template(blueprint, images.mean, images.std, frozen)
        return FederatedEngine(session, Loop(setup.client_side()), template, prepared.algorithm.local.epochs)

    nodes = replace(nodes_of(terms, config), open_engine=open_engine)
    prepared = prepare(config, given=Given(data=images_of(terms, config, own), nodes=nodes))
    return prepared


def settings_of(run_config: Mapping[str, Any]) -> Request:
    """What Flower's run configuration asks for, over what the recipe's table says; 0, -1 and "" mean not given."""
    given = {name: value for name, value in run_config.items() if value and value != -1}
    if "out" not in given or not ("recipe" in given or "resume" in given):
        raise UserError("the run configuration needs recipe and out: absolute paths on the server's machine")
    recipe, out = Path(str(given.get("recipe", ""))), Path(str(given["out"]))
    table = configs.federation_table(recipe) if recipe.is_file() else {}
    if odd := [name for name in table if name not in TABLE_KEYS]:
        raise UserError(f"{recipe}: [federation] has no {brief(odd[0])}; {nearest(odd[0], TABLE_KEYS)}")
    values = {**table, **given}
    rules = Rules(
        deadline=_number(values, "deadline", Rules.deadline),
        min_replies=int(_number(values, "min-replies", Rules.min_replies, whole=True)),
        wait=_number(values, "wait", Rules.wait),
    )
    classes = values.get("classes", [])
    if not isinstance(classes, list) or not all(isinstance(each, str) for each in classes):
        raise UserError(f'classes must be a list of texts such as ["cat", "dog"], {brief(classes)} given')
    return Request(recipe, out, bool(given.get("resume", False)), rules, tuple(classes))


def _number(values: Mapping[str, Any], name: str, default: float, *, whole: bool = False) -> float:
    value = values.get(name, default)
    if not isinstance(value, int if whole else int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UserError(f"{name} must be {'a whole' if whole else 'a'} number above 0, {brief(value)} given")
    return float(value)
