"""Small federations on a pretended device, and methods that look where their tensors are."""

from dataclasses import replace

import torch

from federation import federation
from unskew.core.types import Memory, Statistic
from unskew.engines.blueprint import build

SIZES = (12, 9, 1, 7)


def small(method="fedavg", **options):
    """A federation of a few steps in float32; one of its clients has a single example."""
    return federation(method, **{"sizes": SIZES, "dtype": "float32", "epochs": 1, "batch": 8, **options})


def on(device, federated):
    """The same federation, its clients on another device."""
    return replace(federated, blueprint=replace(federated.blueprint, device=name_of(device)))


def name_of(device):
    """The device as ``--device`` takes it: there is one mps, and it has no number."""
    return "mps" if str(device).startswith("mps") else str(device)


def side_of(federated):
    """What a client's side of the federation has."""
    return build(federated.blueprint, federated.data)


SEEN = []  # (what, its device) of everything that ``looking`` was given


def looking():
    """A method that changes nothing and writes down where everything is that a method may look at."""

    def term(loss, step):
        given = {
            "features": step.features, "logits": step.logits, "labels": step.labels, "counts": step.counts,
            "shared model": step.encode("shared"), "example": loss.example,
        }  # fmt: skip
        given |= {f"step {name}": value for name, value in (step.params | step.shared | step.memory).items()}
        if step.memory:
            given["remembered model"] = step.encode("looking")
        SEEN.extend(("term", name, value.device) for name, value in given.items())
        return loss

    def correction(shared, memory):
        SEEN.extend(("correction", name, value.device) for name, value in (shared | memory).items())
        return {name: torch.zeros_like(value) for name, value in shared.items() if name.startswith("params/")}

    def after(visited):
        SEEN.append(("after", "counts", visited.counts.device))
        for values in (visited.shared, visited.memory, visited.model):
            SEEN.extend(("after", name, value.device) for name, value in values.items())
        for features, labels in visited.features():
            SEEN.extend((("after", "features", features.device), ("after", "labels", labels.device)))
        return {"seen": torch.ones((), dtype=torch.float64)}

    def survey(known):
        SEEN.append(("after", "survey counts", known.counts.device))
        return {"counts": known.counts.double()}

    statistic = Statistic(
        "looking", measure=after, fold=lambda sent, sums, moment: sums, survey=survey, surveyed=lambda sums: sums
    )
    memory = Memory("looking", blank=lambda model: model, keep=lambda visited: dict(visited.model))
    return lambda algorithm: replace(
        algorithm,
        terms=(*algorithm.terms, term),
        correction=correction,
        statistics=(*algorithm.statistics, statistic),
        remember=(*algorithm.remember, memory),
    )
