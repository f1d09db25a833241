"""The options of a run, each described once: command line, recipe check, fingerprint and docs follow from here."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_type_hints

from unskew.core.machine import check_device_name
from unskew.core.text import MAX_COUNT
from unskew.core.types import Local
from unskew.data.augment import NAMES as NORMALISATIONS
from unskew.data.batches import AUGMENTATIONS, RESIZED_CROP, SHIFT
from unskew.data.tables import DISK, MEMORY, check_size
from unskew.engines import check_name
from unskew.models.finetune import check_train
from unskew.round.local_optimizers import DECAYS, check_optimizer, check_schedule

Value = str | int | float | bool

MONITORS = ("accuracy", "loss")
FAILURE_POLICIES = ("stop", "skip")
MAX_SIDE = 4096  # pixels that images are scaled to
MAX_VIEWS = 81  # an augmented view is one of 162 crops and flips


@dataclass(frozen=True)
class Option:
    """One option of a run.

    ``default`` is None where the data or the machine decides; ``otherwise`` then says in words what is taken. An option
    that does not ``decide`` the result may differ between a run and its resumption. ``added_later`` marks options that
    older checkpoints do not know: their default leaves the fingerprint as it was.
    """

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
    check: Callable[[str], None] | None = None  # raises a UserError for a text that is not possible
    decides: bool = True
    added_later: bool = False

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def default_text(self) -> str:
        """The default, in words."""
        if self.default is None:
            return self.otherwise
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def limits(self) -> str:
        """The numbers that are possible, in words; empty where any value is."""
        parts = []
        if self.least is not None:
            parts.append(f"{self.least:g} or more")
        if self.above is not None:
            parts.append(f"a number above {self.above:g}")
        if self.below is not None:
            parts.append("less than 2^63" if self.below == 2**63 else f"less than {self.below:g}")
        return " and ".join(parts)


def _option(default: Value | None, help: str, **facts: Any) -> Any:
    return field(default=default, metadata={"option": {"help": help, **facts}})


def _count(default: int | None, help: str, **facts: Any) -> Any:
    return _option(default, help, metavar="N", least=1, most=MAX_COUNT, **facts)


def _work(default: Value | None, help: str, **facts: Any) -> Any:
    """How the work is done, or what is looked at: nothing that decides the result."""
    return _option(default, help, decides=False, **facts)


@dataclass(frozen=True)
class Config:
    """A run's configuration: a field for each option. ``None`` is filled in from the data or the machine."""

    data: str = _option(
        "digits",
        "digits | cifar10 | … | folder:DIR | table:FILE.csv | arrays:FILE.npz | package.module:function",
        metavar="NAME",
    )
    data_dir: str | None = _work(
        None, "The folder of the published data sets.", metavar="DIR", otherwise="the variable UNSKEW_DATA"
    )
    cache_dir: str | None = _work(
        None, "Where decoded photographs and the features of a frozen part are kept.", metavar="DIR",
        otherwise="the variable UNSKEW_CACHE, or ~/.cache/unskew", added_later=True,
    )  # fmt: skip
    cache_disk: str = _work(
        DISK, "What decoded photographs may take on disk.", metavar="SIZE", check=check_size("cache-disk"),
        added_later=True,
    )  # fmt: skip
    cache_memory: str = _work(
        MEMORY, "What decoded photographs may take in memory: in this process, and in its workers together.",
        metavar="SIZE", check=check_size("cache-memory"), added_later=True,
    )  # fmt: skip
    partition: str = _option(
        "dirichlet(alpha=0.1)",
        "Which client holds which example: dirichlet(alpha=0.1) | iid | users | geo(max=1000) | file:FILE | … | "
        "package.module:function",
        metavar="TEXT",
    )
    clients: int | None = _count(None, "How many clients.", otherwise="10, or what the partition says")
    per_round: int | None = _count(None, "How many clients come to each round.", otherwise="all")
    method: str = _option(
        "fedavg",
        '"fedavgm(0.9) + fedvc(256) + fedir + ccvr"; unskew methods lists them; also package.module:function',
        metavar="TEXT",
    )
    model: str | None = _option(
        None,
        "simple-cnn | lenet-64 | tiny-cnn | resnet-18 | resnet-50 | mobilenet-v2 | efficientnet-lite0 | "
        "package.module:function, which takes (shape, classes)",
        metavar="NAME",
        otherwise="the one that suits the images",
    )
    pretrained: str | None = _option(
        None, "Weights to start from: FILE.safetensors | FILE.pth | imagenet (efficientnet-lite0; an extra).",
        metavar="FILE", otherwise="none: drawn from the seed", added_later=True,
    )  # fmt: skip
    train: str = _option(
        "all", 'What is trained: all | classifier | "last(2)"; the rest is frozen, and its output is stored.',
        metavar="TEXT", check=check_train, added_later=True,
    )  # fmt: skip
    resize: int | None = _option(
        None, "Scale the images to N×N pixels before the network.", metavar="N", least=1, most=MAX_SIDE,
        otherwise="as they are", added_later=True,
    )  # fmt: skip
    normalise: str | None = _option(
        None, "How pixels are normalised: data | imagenet | lite, which is (x − 127) / 128.", metavar="NAME",
        otherwise="as the pretrained network expects, or as the data set says", choices=NORMALISATIONS,
        added_later=True,
    )  # fmt: skip
    views: int | None = _option(
        None, "How many augmented views of each image are stored behind a frozen part.", metavar="N", least=1,
        most=MAX_VIEWS, otherwise="none: only the plain image", added_later=True,
    )  # fmt: skip
    rounds: int = _option(
        20, "How many rounds; 0 trains nothing and calibrates the initial model.", metavar="N", least=0, most=MAX_COUNT
    )
    start: str | None = _option(
        None, "A calibration whose classifier training starts from: lda | ridge | ccvr | …", metavar="TEXT",
        otherwise="the model's own classifier", added_later=True,
    )  # fmt: skip
    epochs: int = _count(5, "How often a client passes over its examples in a round.")
    batch: int = _count(64, "How many examples make a step.")
    lr: float = _option(0.01, "The clients' learning rate.", metavar="X", above=0)
    momentum: float = _option(0.9, "The clients' momentum.", metavar="X", least=0, below=1)
    weight_decay: float = _option(1e-5, "The clients' weight decay.", metavar="X", least=0)
    schedule: str = _option(
        "constant",
        "The clients' rate over the rounds: constant | step(every=30, factor=0.1) | cosine(least=0, warmup=5)",
        metavar="TEXT", check=check_schedule, added_later=True,
    )  # fmt: skip
    optimizer: str = _option(
        "sgd", "How clients step: sgd (with --momentum) | adam(beta1=0.9, beta2=0.999, eps=1e-8) | adamw",
        metavar="TEXT", check=check_optimizer, added_later=True,
    )  # fmt: skip
    clip: float = _option(
        0.0, "The longest gradient that is used as it is, longer ones are scaled down to it; 0: none is.",
        metavar="X", least=0, added_later=True,
    )  # fmt: skip
    decay: str = _option(
        "all", "What --weight-decay shrinks: all parameters, or weights alone (no biases, no norms).",
        metavar="|".join(DECAYS), choices=DECAYS, added_later=True,
    )  # fmt: skip
    patience: int | None = _count(
        None, "Stop after this many rounds without a better --monitor; the best round's model is the result.",
        otherwise="no stopping", added_later=True,
    )  # fmt: skip
    monitor: str = _option(
        "accuracy", "What --patience watches.", metavar="|".join(MONITORS), choices=MONITORS, added_later=True
    )
    augment: bool | None = _option(None, "Random crops and flips.", otherwise="as suits the data")
    augmentation: str = _option(
        "auto", "Which crops: shift by a few pixels, or a resized-crop; auto: a resized-crop for tables of photographs "
        "of 64 pixels or more.", metavar="NAME", choices=AUGMENTATIONS, added_later=True,
    )  # fmt: skip
    engine: str = _work(
        "auto", "auto | loop | pool | torchrun | package.module:function", metavar="NAME", check=check_name
    )
    workers: int | None = _count(
        None, "Processes of the pool.", otherwise="one for each core, or each GPU", decides=False
    )
    seed: int = _option(0, "The same seed gives the same weights.", metavar="N", least=0, below=2**63)
    validation: float = _option(
        0.0,
        "The share of the training images that is held out; accuracy is then measured on it, never on the test images.",
        metavar="SHARE", least=0, below=1, added_later=True,
    )  # fmt: skip
    evaluate_every: int = _count(1, "Rounds between evaluations.")
    on_failure: str = _work(
        "stop", "What happens when a client fails: stop the run, or skip the client.", metavar="stop|skip",
        choices=FAILURE_POLICIES,
    )  # fmt: skip
    checkpoint_seconds: float = _work(
        10.0, "Time between checkpoints; 0: one after every round.", metavar="SECONDS", least=0
    )
    baseline: str | None = _work(
        None, "A finished run to compare the accuracy with, such as one of --method centralised.", metavar="RUN",
        otherwise="none",
    )  # fmt: skip
    during: str | None = _work(
        None, 'What to record while training: "silhouette(every=5) + norms + drift + model"', metavar="TEXT",
        otherwise="nothing",
    )  # fmt: skip
    device: str = _work(
        "auto", "Where the clients compute: auto | cpu | cuda | cuda:N | mps", metavar="NAME", check=check_device_name,
        added_later=True,
    )  # fmt: skip

    def local(self) -> Local:
        """The clients' training settings."""
        return Local(
            self.epochs, self.batch, self.lr, self.momentum, self.weight_decay, bool(self.augment), self.schedule,
            self.optimizer, self.clip, self.decay, RESIZED_CROP if self.augmentation == RESIZED_CROP else SHIFT,
        )  # fmt: skip


def _described() -> dict[str, Option]:
    types = get_type_hints(Config)
    options = {}
    for each in fields(Config):
        kinds = get_args(types[each.name]) if isinstance(types[each.name], UnionType) else (types[each.name],)
        options[each.name] = Option(each.name, kinds[0], getattr(Config, each.name), **each.metadata["option"])
    return options


OPTIONS: dict[str, Option] = _described()
