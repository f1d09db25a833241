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

SPELLED = {  # how to write here what other programs call by these names; {} is the value
    '--partition "dirichlet(alpha={})"': "alpha beta dirichlet concentration",
    '--partition "shards(per_client={})"': "shards",
    "--partition iid": "iid",
    "--device cuda": "gpu gpus cuda",
    "--device cpu": "cpu no-cuda",
    '--method "fedprox(mu={})"': "mu",
    '--method "fedavgm({})"': "server-momentum",
    '--method "fedavg + ccvr"': "calibrate ccvr",
    "--method {}": "algorithm alg algo strategy aggregator",
    "--model {}": "net network arch architecture",
    "--data {}": "dataset data-name",
    "--clients {}": "num-clients n-clients n-parties num-users",
    "--per-round {}": "clients-per-round cohort-size fraction frac fraction-fit participation",
    "--rounds {}": "num-rounds comm-round comm-rounds global-rounds global-epochs",
    "--epochs {}": "local-epochs local-ep num-epochs client-epochs",
    "--batch {}": "batch-size bs local-bs",
    "--lr {}": "lr learning-rate client-lr local-lr",
    "--weight-decay {}": "wd reg l2",
    "--workers {}": "num-workers processes",
    "--out {}": "output output-dir save-dir logdir",
    "--log wandb": "wandb",
    "--log tensorboard": "tensorboard",
    "--log mlflow": "mlflow",
}


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
    at = next((at for at, text in enumerate(arguments) if text.startswith(flag)), 0)  # click reads -lr as -l and -r
    argument, _, value = arguments[at].partition("=")
    following = arguments[at + 1] if at + 1 < len(arguments) else ""
    value = value or ("X" if following.startswith("-") or not following else shlex.quote(following))
    name = argument.lstrip("-").lower().replace("_", "-")
    spelled = [text for text, names in SPELLED.items() if name in names.split() and text.split()[0] in flags]
    if not spelled and "--method" in flags and (knob := _find_knob(name.replace("-", "_"), value)):
        spelled = [knob]
    near = [text.format(value) for text in spelled] or get_close_matches(f"--{name}", flags, n=1, cutoff=0.7)
    return f"no such option: {argument}" + (f"; did you mean {near[0]}?" if near else f" (see {path} --help)")


def _find_knob(name: str, value: str) -> str:
    """The first method with a knob of this name, as --method; empty if there is none."""
    from unskew.methods import describe  # imports torch

    for method in describe():
        if any(knob.partition(":")[0] == name for knob in method.knobs):
            return f'--method "{method.name}({name}={value})"'
    return ""
