"""Texts that a user might type or paste, by hypothesis: methods, calibrations, partitions, options, recipes.

Every text is used for a real run on a handful of images. It either works, or is refused with one message before the
training; it is never a traceback, and never a long wait.
"""

import json
import math
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from faults.trials import SAME, Trial, command, refusal

CHUNK, CHUNKS = 50, 40  # texts of each kind are drawn in chunks, each with a seed of its own
SECONDS = 20  # for a text that works; the machine may be busy
NAMES = (
    *("fedavg", "fedprox", "moon", "clsprox", "clsnorm", "prototypes", "fedlc", "fedrs", "balanced", "fedir", "fedvc"),
    *("scaffold", "fednova", "feddyn", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "centralised"),
    *("ccvr", "uscc", "lda", "oracle", "fedeccr", "withhold", "secure", "private"),
)
SCHEMES = ("iid", "dirichlet", "dirichlet-client", "shards", "users", "file:x", "file:", "csv:x")
KNOBS = (
    "alpha",
    "mu",
    "lr",
    "tau",
    "per_class",
    "ridge",
    "epochs",
    "epsilon",
    "delta",
    "clip",
    "momentum",
    "size",
    "cap",
)
NUMBERS = (
    *("0", "1", "2", "-1", "0.5", "1e-3", "1e3", "1e999", "-1e999", "nan", "inf", "9223372036854775807"),
    *("9223372036854775808", "1e-400", "99999999999999999999999999", "true", "false", "none", "x", "''", '"', "1_000"),
    "0x10",
)
EVIL = ("", " ", "\0", "a\0b", "\ud800", "\u202e", "é" * 300, "(" * 5000, "+" * 5000, "a" * 100_000, "fedavg+" * 20_000)

counts = st.one_of(
    st.integers(-9, 300), st.integers(2**30, 2**70), st.integers(-(2**70), -10)
)  # between, sound and slow
numbers = st.one_of(st.sampled_from(NUMBERS), counts.map(str), st.floats().map(repr))
knobs = st.one_of(numbers, st.builds("{}={}".format, st.sampled_from(KNOBS), numbers))


def calls(names: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Texts that look like ``name(value, knob=value)``, one or several."""
    arguments = st.lists(knobs, max_size=3).map(", ".join)
    call = st.one_of(st.sampled_from(names), st.builds("{}({})".format, st.sampled_from(names), arguments))
    return st.one_of(call, call, st.lists(call, min_size=1, max_size=3).map(" + ".join))


anything = st.one_of(
    st.sampled_from(EVIL), st.text(max_size=40), st.text("fedavgm+(),=.0123456789e- '\"[]", max_size=30)
)
values = st.one_of(
    numbers,
    st.text(max_size=10).map(partial(json.dumps, ensure_ascii=True)),
    st.sampled_from(
        ("[]", "{}", "[1, 2]", "2026-11-16", "[" * 3000 + "]" * 3000, "{a=1}", '"""', "'\\'", "+1", "1e400")
    ),
)
OPTIONS = (
    *("data", "data_dir", "partition", "clients", "per_round", "method", "model", "batch", "lr", "momentum"),
    *("weight_decay", "augment", "engine", "seed", "evaluate_every", "on_failure", "checkpoint_seconds", "baseline"),
    *("during", "device", "unknown", "", "a.b"),
)  # without rounds, epochs and workers, of which a large number is sound and takes long


def text_trials(folder: Path, number: int) -> Iterator[Trial]:
    """Texts of every kind in turn."""
    draw = np.random.default_rng(0)
    file = folder / "few.npz"
    images, labels = draw.integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
    np.savez(file, x_train=images[:45], y_train=labels[:45], x_test=images[45:], y_test=labels[45:])
    recipe = st.lists(st.builds("{} = {}".format, st.sampled_from(OPTIONS), values), max_size=3).map("\n".join)
    kinds = {
        "--method": st.one_of(calls(NAMES), calls(NAMES), anything),
        "--partition": st.one_of(calls(SCHEMES), calls(SCHEMES), anything),
        "--out": anything,
        "--during": st.one_of(calls(("norms", "drift", "silhouette", "model")), anything),
        "recipe": st.one_of(recipe, recipe, anything),
    }
    _tried(folder, file, "--method", "fedavg")  # the first run also imports the package
    for chunk in range(CHUNKS):
        for kind, strategy in kinds.items():
            for text in examples(strategy, number * CHUNKS + chunk):
                yield Trial(f"{kind} {text[:200]!r}", partial(_tried, folder, file, kind, text))


def examples(strategy: st.SearchStrategy[str], number: int) -> list[str]:
    """The texts that hypothesis draws with this seed."""
    drawn: list[str] = []

    @seed(number)
    @settings(
        max_examples=CHUNK,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(text: str) -> None:
        drawn.append(text)

    collect()
    return drawn


def _tried(folder: Path, data: Path, kind: str, text: str) -> str:
    run, recipe = folder / "run", folder / "recipe.toml"
    shutil.rmtree(run, ignore_errors=True)
    options = {"--data": f"arrays:{data}", "--clients": "3", "--rounds": "1", "--epochs": "1", "--engine": "loop"}
    words: list[str] = ["run"]
    if kind == "recipe":
        recipe.write_bytes(f'data = "arrays:{data}"\nrounds = 1\nepochs = 1\n{text}\n'.encode(errors="surrogatepass"))
        words += [str(recipe), "--engine", "loop", "--out", str(run)]
    elif kind == "--out":
        words += [word for pair in options.items() for word in pair]
        words += ["--out", str(folder / "outs" / "x") + text[:100]]
    else:
        options |= {kind: text, "--out": str(run)}
        words += [f"{name}={value}" for name, value in options.items()]
    began = time.monotonic()
    answer = command(*words)
    seconds = time.monotonic() - began
    if answer.code:
        verdict = refusal(answer)
        if verdict == "refused" and (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size:
            return f"refused after the training: {answer.err[:200]}"
        return verdict if seconds < SECONDS / 4 else f"refused only after {seconds:.0f} s"
    if kind == "--out":
        return SAME
    result = json.loads((run / "result.json").read_text())
    if not all(math.isfinite(each["accuracy"]) for each in (result, *result["calibrations"])):
        return "an accuracy that is not a number"
    return SAME if seconds < SECONDS else f"it took {seconds:.0f} s"
