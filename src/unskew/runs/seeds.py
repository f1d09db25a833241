"""One setting with several seeds: one run directory each; finished ones are kept, others resumed."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from os import PathLike
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from unskew import engines
from unskew.core.errors import UserError
from unskew.core.files import usable_path
from unskew.core.language import cut
from unskew.data.photographs import Say, silent
from unskew.runs import config as configs
from unskew.runs import train
from unskew.runs.config import CONFIG, Config
from unskew.runs.execute import Observer
from unskew.runs.folder import numbered_paths, require_blank
from unskew.runs.prepare import prepare
from unskew.runs.python_values import split_values
from unskew.runs.result import RESULT, Result, read_result


@dataclass(frozen=True)
class SeedSpread:
    """The mean of ``count`` values, and their sample deviation (n − 1), None for a single value."""

    mean: float
    deviation: float | None
    count: int

    def format(self, scale: float = 1.0, decimals: int = 2) -> str:
        """As people write it: ``91.23 ± 0.45``."""
        mean = f"{scale * self.mean:.{decimals}f}"
        return mean if self.deviation is None else f"{mean} ± {scale * self.deviation:.{decimals}f}"


def spread_over_seeds(values: Iterable[float | None]) -> SeedSpread | None:
    """The spread of the known, finite values; None if there are none."""
    known = [float(value) for value in values if value is not None and isfinite(value)]
    if not known:
        return None
    return SeedSpread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


DEPTH = 3  # levels of folders that are searched


def finished_runs(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The finished and the unfinished run directories below these paths; other paths count as finished runs."""
    finished, begun = list[Path](), list[Path]()
    for path in paths:
        inside = [] if (path / CONFIG).exists() or (path / RESULT).exists() else _runs_in(path)
        done = [run for run in inside if (run / RESULT).exists()]
        if inside and not done:
            raise UserError(f"{path} has no finished run; finish one with: unskew resume {inside[0]}")
        finished += [run for run in done if run not in finished] if inside else [path]
        begun += [run for run in inside if run not in done]
    return finished, begun


def _runs_in(path: Path) -> list[Path]:
    patterns = ["*/" * level + name for level in range(1, DEPTH + 1) for name in (CONFIG, RESULT)]
    runs = {file.parent.relative_to(path) for pattern in patterns for file in path.glob(pattern)}

    def number_parts(run: Path) -> list[tuple[int, str]]:  # seed2 comes before seed10
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,18})", str(run))]

    return [path / run for run in sorted(runs, key=number_parts) if not any(part[0] == "." for part in run.parts)]


MAX_SEEDS = 1000
NEW, BEGUN, FINISHED = "new", "begun", "finished"


@dataclass(frozen=True)
class SeedPlan:
    """The runs of one setting, in ``path/seed0``, ``path/seed1``, …"""

    path: Path
    base: Config
    options: dict[str, Any]
    states: dict[int, str]  # by seed: NEW | BEGUN | FINISHED
    trust: bool = False

    def complete(self, seed: int, observe: Observer | None = None) -> Result:
        """The result of one of the runs: read, resumed or trained."""
        run = self.path / f"seed{seed}"
        if self.states[seed] == FINISHED:
            return read_result(run)
        if self.states[seed] == BEGUN:
            options = {name: self.options.get(name) for name in ("data", "model", "method")}
            objects = {name: value for name, value in options.items() if not isinstance(value, str)}
            work = {name: self.options.get(name) for name in train.WORK}
            return train.resume(run, observe=observe, trust=self.trust, **work, **objects)
        return train.run(self.base, out=run, observe=observe, **{**self.options, "seed": seed})


@dataclass(frozen=True, repr=False)
class SeedRuns:
    """The result of ``unskew.run_seeds``: the results in the order of the seeds, and their folder."""

    path: Path
    results: tuple[Result, ...]

    @property
    def accuracy(self) -> SeedSpread | None:
        """Mean and deviation of the runs' accuracy."""
        return spread_over_seeds(result.accuracy for result in self.results)

    @property
    def calibrations(self) -> dict[str, SeedSpread | None]:
        """Mean and deviation of the accuracy after each calibration, over the runs that have it."""
        rows = [result.calibrations for result in self.results]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: spread_over_seeds(row[name].accuracy for row in rows if name in row) for name in names}

    def __repr__(self) -> str:
        spreads = {"accuracy": self.accuracy, **self.calibrations}
        scores = ", ".join(f"{name} {spread.format(100)} %" for name, spread in spreads.items() if spread)
        first = self.results[0]
        return f"<{len(self.results)} runs of {first.method} on {first.data}: {scores}; {self.path}>"


def plan_runs(
    recipe: str | PathLike[str] | None = None,
    *,
    methods: Sequence[str] = (),
    seeds: str | Iterable[int] | None = None,
    out: str | PathLike[str] | None = None,
    home: Path = Path(),
    say: Say = silent,
    trust: bool = False,
    **options: Any,
) -> list[SeedPlan]:
    """List the runs and their states, with a folder for each of several ``methods``; other content is refused."""
    engines.serve_rank_zero(options.get("engine"))
    base, listed = configs.read_recipe(Path(recipe), trust=trust) if recipe else (Config(), ())
    numbers = parse_seeds(listed if seeds is None else seeds)
    if options.get("seed") is not None:
        raise UserError("seed and seeds were both given; give seed for one run, or seeds for several")
    settings: dict[str, tuple[dict[str, Any], Config]] = {}  # by folder: the options, and the configuration
    for method in methods or (None,):
        chosen = options if method is None else {**options, "method": method}
        texts, values = split_values(chosen)
        config = configs.checked(configs.with_values(base, texts, "run"))
        filled = prepare(replace(config, seed=numbers[0]), values=values, say=say).config
        if any(config.method == other.method for _, other in settings.values()):
            raise UserError(f"--method {method} is given twice; give each method once")
        folder = "" if len(methods) < 2 else train.slug_of(filled.method)
        while folder in settings:
            folder += "-2"
        settings[folder] = (chosen, filled)

    def plan(path: Path) -> list[SeedPlan]:
        plans = []
        for folder, (chosen, config) in settings.items():
            names = [run.name[4:] for run in (path / folder).glob("seed*")]
            found = {*numbers, *(int(name) for name in names if name.isdigit())}
            states = {seed: progress_of(path / folder / f"seed{seed}", replace(config, seed=seed)) for seed in found}
            plans.append(SeedPlan(path / folder, base, dict(chosen), {seed: states[seed] for seed in numbers}, trust))
        return plans

    if out:
        return plan(home / usable_path(out))
    methods_text = " vs ".join(config.method for _, config in settings.values())
    name = train.slug(replace(filled, method=methods_text), seed=False)
    paths = numbered_paths(home / "runs", name)
    while True:
        with suppress(UserError):  # a folder of this name with other runs: take the next
            return plan(next(paths))


def parse_seeds(seeds: str | Iterable[int]) -> tuple[int, ...]:
    """``"0,1,2"``, ``"0-4"``, ``"0-2,7"`` or whole numbers, each once."""
    numbers: list[Any] = [] if isinstance(seeds, str) else list(seeds)
    for part in seeds.split(",") if isinstance(seeds, str) else ():
        match = re.fullmatch(r"\s*(\d{1,19})\s*(?:-\s*(\d{1,19})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise UserError(f"--seeds {cut(str(seeds))}: {cut(part)!r} is not a seed or a range; give 0,1,2 or 0-4")
        numbers += range(first, min(last, first + MAX_SEEDS) + 1)
    typed = [configs.checked(configs.with_values(Config(), {"seed": number}, "seeds")).seed for number in numbers]
    if not 0 < len(typed) <= MAX_SEEDS or len(set(typed)) < len(typed):
        raise UserError(f"seeds: give 1 to {MAX_SEEDS:,} different seeds, such as 0,1,2 or 0-4")
    return tuple(typed)


def progress_of(path: Path, config: Config) -> str:
    """NEW, BEGUN or FINISHED: the state of this configuration's run; a folder with other content is refused."""
    if not (path / CONFIG).exists():
        require_blank(path)
        return NEW
    existing = configs.read_run(path)
    if configs.fingerprint(existing) != configs.fingerprint(config):
        old, new = configs.deciding(existing), configs.deciding(config)
        differences = ", ".join(
            f"{name} is {old.get(name, 'unset')} there and {new.get(name, 'unset')} here"
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        )
        raise UserError(f"{path} contains a run with other settings: {differences}; choose another --out")
    return FINISHED if (path / RESULT).exists() else BEGUN


def describe_states(states: Sequence[str], what: str = "seeds") -> str:
    """How many runs there are, and how many of them are finished or begun."""
    counts = Counter(states)
    parts = [f"{counts[state]} {state}" for state in (FINISHED, BEGUN) if counts[state]]
    return f"{len(states)} {what}" + (f", {' and '.join(parts)} already" if parts else "")
