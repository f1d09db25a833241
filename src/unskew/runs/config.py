"""A run's configuration: every option described once, read from a recipe, checked, written and fingerprinted."""

import hashlib
import json
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, get_args, get_type_hints

from unskew.core import language
from unskew.core.errors import UserError, brief, nearest
from unskew.core.files import read_content, usable_path, user_path
from unskew.core.key import Key
from unskew.core.language import MAX_COUNT
from unskew.core.machine import check_device_name
from unskew.core.plugins import plugins_in, unknown_plugins
from unskew.core.types import Local
from unskew.data.arrays import FUNCTION
from unskew.data.augment import NAMES as NORMALISATIONS
from unskew.data.batches import AUGMENTATIONS, RESIZED_CROP, SHIFT
from unskew.data.partition_files import make_file_absolute
from unskew.data.sources import SOURCES, is_function, make_absolute
from unskew.data.store import DISK, MEMORY, check_size
from unskew.engines import check_name
from unskew.models.finetune import parse_train
from unskew.models.pretrained import IMAGENET
from unskew.round.local_optimizers import DECAYS, parse_optimizer, parse_schedule
from unskew.runs.folder import MANIFEST, read_sealed

Value = str | int | float | bool


@dataclass(frozen=True)
class Option:
    """One option of a run; ``otherwise`` describes what is used if its default is None."""

    name: str
    kind: type
    default: Value | None
    help: str
    metavar: str | None = None
    otherwise: str = ""
    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    check: Callable[[str], None] | None = None  # raises a UserError for an invalid text
    decides: bool = True

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default, as the help shows it."""
        if self.default is None:
            return self.otherwise
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def limits(self) -> str:
        """The range of possible numbers, as text; empty if any value is."""
        least = [] if self.least is None else [f"{self.least:g} or more"]
        above = [] if self.above is None else [f"a number above {self.above:g}"]
        below = [] if self.below is None else ["less than " + ("2^63" if self.below == 2**63 else f"{self.below:g}")]
        return " and ".join(least + above + below)


def _option(default: Value | None, help: str, otherwise: str = "", **facts: Any) -> Any:
    return field(default=default, metadata={"help": help, "otherwise": otherwise, **facts})


_count = partial(_option, least=1, most=MAX_COUNT)
_work = partial(_option, decides=False)  # does not affect the result: how the work is done, or what is recorded


@dataclass(frozen=True)
class Config:
    """A run's configuration: a field for each option. ``None`` is filled in from the data or the machine."""

    data: str = _option(
        "digits",
        " | ".join(["digits", "cifar10", "…", *(s.spelling for s in SOURCES.values() if s.path), FUNCTION.name]),
        metavar="NAME",
    )
    data_dir: str | None = _work(
        None, "The folder of the published data sets.", "the variable UNSKEW_DATA", metavar="DIR"
    )
    cache_dir: str | None = _work(
        None,
        "Where decoded photographs and the features of a frozen part are cached.",
        "the variable UNSKEW_CACHE, or ~/.cache/unskew",
        metavar="DIR",
    )
    cache_disk: str = _work(DISK, "Disk space for decoded photographs.", metavar="SIZE", check=check_size("cache-disk"))
    cache_memory: str = _work(
        MEMORY,
        "Memory for decoded photographs, for this process and its workers together.",
        metavar="SIZE",
        check=check_size("cache-memory"),
    )
    partition: str = _option(
        "dirichlet(alpha=0.1)",
        "Which client holds which example: dirichlet(alpha=0.1) | iid | users | geo(max=1000) | file:FILE | … | "
        "package.module:function",
    )
    clients: int | None = _count(None, "Number of clients.", "10, or as many as the partition has")
    per_round: int | None = _count(None, "Clients per round.", "all")
    method: str = _option(
        "fedavg", '"fedavgm(0.9) + fedvc(256) + fedir + ccvr"; unskew methods lists them; also package.module:function'
    )
    model: str | None = _option(
        None,
        "simple-cnn | lenet-64 | tiny-cnn | resnet-18 | resnet-50 | mobilenet-v2 | efficientnet-lite0 | timm:NAME | "
        "package.module:function, which takes (shape, classes)",
        "the one that suits the images",
        metavar="NAME",
    )
    pretrained: str | None = _option(
        None,
        "Weights to start from: FILE.safetensors | FILE.pth | imagenet (efficientnet-lite0; an extra).",
        "none: drawn from the seed",
        metavar="FILE",
    )
    train: str = _option(
        "all",
        'What is trained: all | classifier | "last(2)"; the rest is frozen, and its output is stored.',
        check=parse_train,
    )
    resize: int | None = _count(None, "Scale the images to N×N pixels before the network.", "as they are", most=4096)
    normalise: str | None = _option(
        None,
        "How pixels are normalised: data | half | imagenet | lite. half is (x − 127.5) / 127.5, lite (x − 127) / 128.",
        "as the pretrained network expects, or by the data set's constants",
        metavar="NAME",
        choices=NORMALISATIONS,
    )
    views: int | None = _count(
        None,
        "Augmented views of each image to store behind a frozen part.",
        "none: only the plain image",
        most=81,  # an augmented view is one of 162 crops and flips
    )
    rounds: int = _count(20, "Number of rounds; 0 trains nothing and calibrates the initial model.", least=0)
    start: str | None = _option(
        None,
        "A calibration whose classifier training starts from: lda | ridge | ccvr | …",
        "the model's own classifier",
    )
    epochs: int = _count(5, "Local epochs: passes over a client's examples per round.")
    steps: int | None = _count(None, "Local steps per round, instead of --epochs.", "as many as --epochs needs")
    batch: int = _count(64, "Examples per step.")
    lr: float = _option(0.01, "The clients' learning rate.", above=0)
    momentum: float = _option(0.9, "The clients' momentum.", least=0, below=1)
    weight_decay: float = _option(1e-5, "The clients' weight decay.", least=0)
    schedule: str = _option(
        "constant",
        "The clients' learning rate over the rounds: constant | step(every=30, factor=0.1) | cosine(least=0, warmup=5)",
        check=parse_schedule,
    )
    optimizer: str = _option(
        "sgd",
        "The clients' optimizer: sgd (with --momentum) | adam(beta1=0.9, beta2=0.999, eps=1e-8) | adamw",
        check=parse_optimizer,
    )
    clip: float = _option(0.0, "Clip longer gradients to this norm; 0: no clipping.", least=0)
    decay: str = _option(
        "all", "What --weight-decay applies to: all parameters, or weights alone (no biases, no norms).", choices=DECAYS
    )
    patience: int | None = _count(
        None,
        "Stop after this many rounds without a better --monitor; the best round's model is the result.",
        "no stopping",
    )
    monitor: str = _option("accuracy", "What --patience watches.", choices=("accuracy", "loss"))
    augment: bool | None = _option(None, "Random crops and flips.", "as suits the data")
    augmentation: str = _option(
        "auto",
        "Which crops: shift by a few pixels, or a resized-crop; auto: a resized-crop for tables of photographs "
        "of 64 pixels or more.",
        metavar="NAME",
        choices=AUGMENTATIONS,
    )
    engine: str = _work(
        "auto", "auto | loop | pool | torchrun | package.module:function", metavar="NAME", check=check_name
    )
    workers: int | None = _count(None, "Worker processes of the pool.", "one for each core, or each GPU", decides=False)
    seed: int = _option(0, "The same seed gives the same weights.", least=0, below=2**63)
    partition_seed: int | None = _option(
        None, "The seed of the partition: one partition for all seeds.", "the seed", least=0, below=2**63
    )
    validation: float = _option(
        0.0,
        "Share of the training images to hold out; accuracy is then measured on them, never on the test images.",
        metavar="SHARE",
        least=0,
        below=1,
    )
    evaluate_every: int = _count(1, "Rounds between evaluations.")
    on_failure: str = _work(
        "stop", "What happens when a client fails: stop the run, or skip the client.", choices=("stop", "skip")
    )
    checkpoint_seconds: float = _work(
        10.0, "Time between checkpoints; 0: one after every round.", metavar="SECONDS", least=0
    )
    baseline: str | None = _work(
        None, "A finished run to compare the accuracy with, such as one of --method centralised.", "none", metavar="RUN"
    )
    during: str | None = _work(
        None, 'What to record while training: "silhouette(every=5) + norms + drift + model"', "nothing"
    )
    device: str = _work(
        "auto", "Where the clients compute: auto | cpu | cuda | cuda:N | mps", metavar="NAME", check=check_device_name
    )

    @property
    def data_key(self) -> Key:
        """The key of the partition and the validation split."""
        return Key(self.seed if self.partition_seed is None else self.partition_seed)

    def local(self) -> Local:
        """The clients' training settings."""
        settings = {setting.name: getattr(self, setting.name) for setting in fields(Local)}
        crops = RESIZED_CROP if self.augmentation == RESIZED_CROP else SHIFT
        return Local(**settings | {"augment": bool(self.augment), "augmentation": crops})


OPTIONS: dict[str, Option] = {}
for item in fields(Config):
    declared = get_type_hints(Config)[item.name]
    kind = (get_args(declared) or (declared,))[0]
    metavar = "|".join(item.metadata.get("choices", ())) or {int: "N", float: "X", str: "TEXT"}.get(kind)
    OPTIONS[item.name] = Option(item.name, kind, getattr(Config, item.name), **{"metavar": metavar, **item.metadata})

# Part of fingerprints and settings even at their defaults. Do not add new options: existing fingerprints would change.
ALWAYS_LISTED = (
    "data", "data_dir", "partition", "clients", "per_round", "method", "model", "rounds", "epochs", "batch", "lr",
    "momentum", "weight_decay", "augment", "engine", "workers", "seed", "evaluate_every", "on_failure",
    "checkpoint_seconds", "baseline", "during",
)  # fmt: skip


CONFIG = "config.toml"
SEEDS = "seeds"  # in a recipe: several runs
TABLE = "federation"  # in a recipe: the table of options that only a federation has
NODES = "nodes"  # as data or partition: those of the nodes of a federation
HEADER = "# What this run was asked for, resolved. `unskew run` with this file repeats it."  # part of every fingerprint
SHA256 = "?sha256="  # before the hash of pretrained weights
FROM_PYTHON = "python:"  # before the description of a value passed from Python

PLUGGABLE = ("data", "partition", "method", "model", "start", "engine")  # options that may name plug-ins

MAX_RECIPE = 1_000_000  # bytes

_KINDS: dict[type, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    bool: (bool, "true or false"),
    str: (str | PathLike, "text"),
}


def read(path: Path) -> Config:
    """A recipe: a TOML file whose keys are the options of ``unskew run``."""
    return read_recipe(path)[0]


def read_recipe(path: Path, *, trust: bool = False) -> tuple[Config, tuple[Any, ...]]:
    """A recipe and its ``seeds``, unchecked; plug-ins of a run directory's config.toml need ``trust``."""
    content = read_content(path, MAX_RECIPE)
    if content is None:
        raise UserError(f"the recipe {path} does not exist")
    table = _table(content, path)
    table.pop(TABLE, None)
    seeds = table.pop(SEEDS, [])
    if not isinstance(seeds, list) or (seeds and "seed" in table):
        raise UserError(f"{path}: give either seed for one run, or a list such as {SEEDS} = [0, 1, 2] for several")
    config = with_values(Config(), table, str(path))
    if not trust and (content.startswith(HEADER[:40].encode()) or (path.parent / MANIFEST).exists()):
        _check_plugins(config, path)
    return config, tuple(seeds)


def federation_table(path: Path) -> Any:
    """A recipe's table for federations, unchecked; empty if it has none."""
    return _table(read_content(path, MAX_RECIPE) or b"", path).get(TABLE, {})


def read_run(path: Path) -> Config:
    """The configuration of a run directory."""
    content = read_sealed(path, CONFIG)
    if content is None:
        raise UserError(f"{path} is not a run directory: it has no {CONFIG}; start one with: unskew run --out {path}")
    return with_values(Config(), _table(content, path / CONFIG), str(path / CONFIG))


def read_own_run(path: Path, *, trust: bool = False, only: tuple[str, ...] = PLUGGABLE) -> Config:
    """The configuration of a run directory whose plug-ins are about to run; unknown ones need ``trust``."""
    config = read_run(path)
    if not trust:
        _check_plugins(config, path, only)
    return config


def plugin_texts(config: Config) -> dict[str, str]:
    """The texts that name plug-ins, by option."""
    files = {"data": not is_function(config.data), "partition": config.partition.strip().startswith("file:")}
    texts = {name: getattr(config, name) or "" for name in PLUGGABLE if not files.get(name)}
    return {name: text for name, text in texts.items() if not from_python(text) and plugins_in(text)}


def _check_plugins(config: Config, path: Path, only: tuple[str, ...] = PLUGGABLE) -> None:
    texts = plugin_texts(config).items()
    if unknown := [f"{name} {call}" for name, text in texts if name in only for call in unknown_plugins(text)]:
        problem = f"{path} uses code that has never been used on this machine: {', '.join(unknown)}"
        raise UserError(f"{problem}; if you trust its author, give --trust (from Python: trust=True)")


def _table(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"the recipe {path} is not TOML: {error}") from error


def with_values(config: Config, values: Mapping[str, Any], where: str) -> Config:
    """The configuration with these values; types are checked, and keys may be written with dashes."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        key = str(name).replace("-", "_")
        if key not in OPTIONS:
            raise UserError(f"{where}: no option is called {brief(name)}; {nearest(key, OPTIONS)}")
        option = OPTIONS[key]
        kind, described = _KINDS[option.kind]
        unset = option.default is None and (value is None or (isinstance(value, str) and not value))
        if not unset and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
            raise UserError(f"{where}: {key} must be {described}, not {brief(value)}")
        try:
            changes[key] = None if unset else option.kind(value)  # NumPy's numbers and paths too
        except OverflowError as error:
            raise UserError(f"{where}: {key} is too large") from error
    if changes.get("steps") is not None:
        if changes.get("epochs") is not None:
            raise UserError(f"{where}: epochs and steps are both given; give one or the other")
        changes["epochs"] = OPTIONS["epochs"].default  # unused, and left out of config.toml
    elif "epochs" in changes:
        changes["steps"] = None
    return replace(config, **changes)


def checked(config: Config) -> Config:
    """Check every value, and make the paths absolute."""
    for option in OPTIONS.values():
        flag, value = option.flag, getattr(config, option.name)
        if value is None:
            continue
        if isinstance(value, str) and not from_python(value):
            check_text(flag, value)
        if option.choices and value not in option.choices:
            raise UserError(f"{flag} {language.cut(value)}: {nearest(value, option.choices)}")
        if option.check is not None:
            option.check(value)
        if option.kind in (int, float):
            least, most = (-math.inf if option.least is None else option.least), option.most or math.inf
            above, below = (-math.inf if option.above is None else option.above), option.below or math.inf
            if not (least <= value <= most and above < value < below):
                limit = f"; the limit is {most:,}" if option.most else ""
                raise UserError(f"{flag} {value}: give {option.limits}{limit}")
    folder = config.data_dir or os.environ.get("UNSKEW_DATA")
    check_text("--data-dir (or UNSKEW_DATA)", folder or "")
    weights, separator, sha256 = (config.pretrained or "").partition(SHA256)
    if weights not in ("", IMAGENET):
        weights = str(usable_path(user_path(weights)).absolute())
    return replace(
        config,
        data=make_absolute(config.data),
        partition=make_file_absolute(config.partition),
        data_dir=str(Path(folder).absolute()) if folder else None,
        pretrained=f"{weights}{separator}{sha256}" if weights else None,
        cache_dir=str(user_path(config.cache_dir).absolute()) if config.cache_dir else None,
        baseline=str(usable_path(config.baseline).absolute()) if config.baseline else None,
    )


def check_text(name: str, value: str) -> None:
    """Refuse a text that config.toml cannot contain."""
    with suppress(UnicodeEncodeError):
        value.encode()
        if len(value) <= language.MAX_TEXT and "\0" not in value:
            return
    problem = f"is not UTF-8, contains null bytes, or has too many characters; the limit is {language.MAX_TEXT:,}"
    raise UserError(f"{name} {brief(value)} {problem}")


def to_toml(config: Config) -> str:
    """The configuration as a recipe; an option that is None is left out."""
    described = ", ".join(described_options(config))
    header = f"# What this run was asked for, resolved. Values given from Python are only described: {described}."
    used = {name: value for name, value in vars(config).items() if name != "epochs" or config.steps is None}
    return _recipe(header if described else HEADER, used)


def _recipe(header: str, values: Mapping[str, Any]) -> str:
    def spell(value: Value) -> str:  # TOML's strings are JSON's, but for the character DEL
        quoted = isinstance(value, str)
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if quoted else language.spell(value)

    given = [f"{name} = {spell(value)}\n" for name, value in values.items() if value is not None]
    return f"{header}\n{''.join(given)}"


def described_options(config: Config) -> list[str]:
    """The options passed from Python, without which the configuration cannot repeat the run."""
    return [name for name in OPTIONS if from_python(getattr(config, name))]


def fingerprint(config: Config) -> str:
    """SHA-256 over the options that decide the result; the others count as if they had their defaults."""
    values = vars(config) | {name: option.default for name, option in OPTIONS.items() if not option.decides}
    return hashlib.sha256(_recipe(HEADER, _listed(values)).encode()).hexdigest()


def deciding(config: Config) -> dict[str, Value]:
    """The options that decide the result; None and most defaults are left out."""
    listed = _listed(vars(config)).items()
    values = {name: value for name, value in listed if OPTIONS[name].decides and value is not None}
    if config.steps is not None:
        del values["epochs"]
    return values


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in ALWAYS_LISTED or value != OPTIONS[name].default}


def from_python(value: Any) -> bool:
    """Whether a text only describes a value that was passed from Python."""
    return isinstance(value, str) and value.startswith(FROM_PYTHON)
