"""Help texts: options in groups, examples, and suggestions for unknown options."""

import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import groupby
from operator import itemgetter

import click
import typer.core

GUIDE = "docs/reference/options.md"

GROUPS = {
    "Data": "data data-dir resize normalise augment augmentation validation cache-dir cache-disk cache-memory",
    "Clients": "partition partition-seed clients per-round on-failure",
    "Method": "method model pretrained train views start rounds patience monitor seed seeds",
    "Local training": "epochs steps batch lr momentum weight-decay schedule optimizer clip decay",
    "Engine": "engine workers device jobs checkpoint-seconds trust",
    "Output": "out report evaluate-every during baseline log json format help",
}
MANY = 20  # options; with fewer, a command lists them in one group

EXAMPLES = {
    "run": (
        ("a first run, two minutes", 'unskew run --method "fedavg + ccvr" --report'),
        ("a more skewed partition of CIFAR-10", 'unskew run --data cifar10 --partition "dirichlet(alpha=0.05)"'),
        ("two methods, three seeds each", 'unskew run --method fedavg --method "fedprox(0.1)" --seeds 0-2'),
        ("100 clients, 10 of them per round", "unskew run --clients 100 --per-round 10 --rounds 200"),
        ("your own photographs", "unskew run --data table:photos.csv --partition users"),
    ),
    "sweep": (
        ("learning rates, two seeds each", 'unskew sweep --over "lr=0.003,0.01,0.03" --seeds 0,1'),
        ("a knob of the method", 'unskew sweep --method fedprox --over "fedprox.mu=0.01,0.1,1"'),
    ),
    "calibrate": (("two calibrations of a finished run", 'unskew calibrate runs/a lda "ccvr(per_class=2000)"'),),
    "compare": (
        ("every finished run in a folder", "unskew compare runs"),
        ("for a paper", "unskew compare runs --format latex --columns method,accuracy"),
    ),
    "analyse": (
        ("every measure of a run", "unskew analyse runs/a"),
        ("accuracy curves for a column of a paper", "unskew analyse runs/a runs/b --format pdf --width 8.4cm --serif"),
    ),
    "report": (("one page that compares two runs", "unskew report runs/a runs/b --out comparison.html"),),
}

RENAMED = {  # our options, and their names in other programs
    "--data": "dataset data-set data-name",
    "--data-dir": "data-path data-root datadir root",
    "--clients": "num-clients n-clients n-parties num-users number-of-clients",
    "--per-round": "clients-per-round num-clients-per-round sample-clients cohort-size",
    "--method": "algorithm alg algo strategy aggregator fl-method",
    "--model": "net network arch architecture",
    "--rounds": "num-rounds comm-round comm-rounds global-rounds global-epochs n-rounds communication-rounds",
    "--epochs": "local-epochs local-ep num-epochs client-epochs",
    "--batch": "batch-size local-bs bs local-batch-size",
    "--lr": "learning-rate client-lr local-lr",
    "--weight-decay": "wd reg l2",
    "--schedule": "lr-schedule scheduler lr-scheduler",
    "--optimizer": "optim opt client-optimizer",
    "--clip": "clip-grad grad-clip max-norm",
    "--workers": "num-workers n-workers processes",
    "--seed": "random-seed init-seed",
    "--evaluate-every": "eval-every eval-interval test-every",
    "--out": "output output-dir out-dir save-dir logdir run-dir",
    "--log": "logger tracker",
    "--patience": "early-stopping",
}
SPELLED = {  # options of other programs, and how to write them here; {} is the value
    "alpha": '--partition "dirichlet(alpha={})"',
    "beta": '--partition "dirichlet(alpha={})"',
    "dirichlet": '--partition "dirichlet(alpha={})"',
    "concentration": '--partition "dirichlet(alpha={})"',
    "shards": '--partition "shards(per_client={})"',
    "iid": "--partition iid",
    "gpu": "--device cuda",
    "gpus": "--device cuda",
    "cuda": "--device cuda",
    "cpu": "--device cpu",
    "no-cuda": "--device cpu",
    "mu": '--method "fedprox(mu={})"',
    "server-momentum": '--method "fedavgm({})"',
    "fraction": "--per-round, a number of clients",
    "frac": "--per-round, a number of clients",
    "fraction-fit": "--per-round, a number of clients",
    "participation": "--per-round, a number of clients",
    "wandb": "--log wandb",
    "tensorboard": "--log tensorboard",
    "mlflow": "--log mlflow",
    "calibrate": '--method "fedavg + ccvr"',
    "ccvr": '--method "fedavg + ccvr"',
}
VALUES = {"alpha": "0.1", "beta": "0.1", "shards": "2", "mu": "0.01", "server-momentum": "0.9"}  # if none was given


class HelpfulCommand(typer.core.TyperCommand):
    """A command whose help groups its options and ends with examples."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, then the options of each group."""
        ranks = {f"--{name}": (group, name) for group, names in GROUPS.items() for name in names.split()}
        order = [("Arguments", ""), ("Options", ""), *ranks.values()]
        records: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            rank = ("Arguments" if isinstance(parameter, click.Argument) else "Options", "")
            if rank[0] == "Options" and len(self.params) > MANY:
                rank = ranks.get(parameter.opts[0], rank)
            if record := parameter.get_help_record(ctx):
                records.setdefault(rank, []).append(record)
        for group, several in groupby(sorted(records, key=order.index), key=itemgetter(0)):
            with formatter.section(group):
                formatter.write_dl([record for rank in several for record in records[rank]])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        examples = EXAMPLES.get(ctx.command_path.removeprefix("unskew "), ())
        if not examples:
            return
        with formatter.section("Examples"):
            for title, command in examples:
                formatter.write(f"  # {title}\n  {command}\n")
        formatter.write(f"\nMore: {GUIDE}\n")


def suggest_option(error: click.NoSuchOption, arguments: Sequence[str]) -> str:
    """Suggest an option for another program's name, a method's knob or a misspelling."""
    flag = error.option_name
    parameters, path = (error.ctx.command.params, error.ctx.command_path) if error.ctx else ([], "unskew")
    flags = [own for parameter in parameters for own in (*parameter.opts, *parameter.secondary_opts)]
    argument = next((text for text in arguments if text.partition("=")[0] == flag), flag)
    if not flag.startswith("--"):  # click reads -lr as -l and -r
        argument = next((text for text in arguments if text.startswith(flag) and not text.startswith("--")), flag)
        flag = f"-{argument.partition('=')[0]}"
    name = flag.removeprefix("--").lower().replace("_", "-")
    at = list(arguments).index(argument) + 1 if argument in arguments else len(arguments)
    value = argument.partition("=")[2] or (arguments[at] if at < len(arguments) else "")
    value = "" if value.startswith("--") else value
    shown = f"no such option: {argument.partition('=')[0]}"
    renamed = next((own for own, others in RENAMED.items() if name in others.split()), None)
    if f"--{name}" in flags:
        renamed = f"--{name}"
    if renamed in flags:
        return f"{shown}; did you mean {renamed}{f' {shlex.quote(value)}' if value else ''}?"
    if name in SPELLED and "--method" in flags:
        return f"{shown}; did you mean {SPELLED[name].format(value or VALUES.get(name, 'X'))}?"
    if "--method" in flags and (knob := _find_knob(name.replace("-", "_"), value)):
        return f"{shown}; did you mean {knob}?"
    near = get_close_matches(f"--{name}", flags, n=1, cutoff=0.7)
    return f"{shown}; did you mean {near[0]}?" if near else f"{shown} (see {path} --help)"


def _find_knob(name: str, value: str) -> str:
    """The first method with a knob of this name, as --method; empty if there is none."""
    from unskew.methods import describe  # imports torch

    for method in describe():
        if any(knob.partition(":")[0] == name for knob in method.knobs):
            return f'--method "{method.name}({name}={value or "X"})"'
    return ""
