"""What the nodes of a federation agree on before the first round, made of what each says of itself."""

import math
from collections.abc import Sequence
from dataclasses import replace

from unskew.core.errors import UserError
from unskew.core.units import counted
from unskew.engines.flower.agreement import Description
from unskew.runs.config import Config
from unskew.runs.federation_file import Terms


def agreed_terms(terms: Terms, said: Sequence[Description], classes: tuple[str, ...], config: Config) -> Terms:
    """The classes (those that were asked for, or all that a node has), the images' shape and their normalisation."""
    if not said:
        raise UserError("no node has described itself; look at the nodes' logs")
    shapes = [each.shape for each in said]
    shape = max(set(shapes), key=lambda each: (shapes.count(each), each))  # what most nodes have
    fitting = [each for each in said if each.shape == shape]
    mean, std = _pooled(fitting)
    return replace(
        terms,
        classes=classes or _union(fitting),
        shape=shape,
        mean=mean,
        std=std,
        augment=all(each.augment for each in fitting),
        augmentation=fitting[0].augmentation,
    )


def why_not(said: Description, terms: Terms) -> str | None:
    """Why a node's data do not fit what was agreed; None where they do."""
    if odd := [name for name in said.classes if name not in terms.classes]:
        return (
            f"it has the class {odd[0]!r}, which is not among the {counted(len(terms.classes), 'class')} agreed on "
            f"({', '.join(terms.classes[:5])}{', …' if len(terms.classes) > 5 else ''}); rename it, or list it in the "
            "recipe"
        )
    if said.shape != terms.shape:
        return (
            f"its images are {_shape(said.shape)}, the others' are {_shape(terms.shape)}; scale them to the same size"
        )
    if not any(facts.examples for facts in said.clients):
        return "it has no training images"
    return None


def why_too_late(said: Description, terms: Terms) -> str | None:
    """Why a node cannot join a run whose ε counts on a draw among the clients that it began with; None if it can."""
    late = [facts.name for facts in said.clients if facts.name not in terms.clients]
    return f"private-updates counts on the clients that the run began with, and {late[0]!r} is new" if late else None


def _union(said: Sequence[Description]) -> tuple[str, ...]:
    """The classes of all nodes: in their own order where all have the same, otherwise by name."""
    if len({each.classes for each in said}) == 1:
        return said[0].classes
    return tuple(sorted({name for each in said for name in each.classes}))


def _pooled(said: Sequence[Description]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of all nodes' pixels together, from each node's own and its number of examples."""
    if len({(each.mean, each.std) for each in said}) == 1:
        return said[0].mean, said[0].std
    sizes = [sum(facts.examples for facts in each.clients) for each in said]
    total = sum(sizes)
    mean, std = [], []
    for channel in range(len(said[0].mean)):
        middle = sum(n * each.mean[channel] for n, each in zip(sizes, said, strict=True)) / total
        square = sum(
            n * (each.std[channel] ** 2 + (each.mean[channel] - middle) ** 2)
            for n, each in zip(sizes, said, strict=True)
        )
        mean.append(middle)
        std.append(math.sqrt(square / total))
    return tuple(mean), tuple(std)


def _shape(shape: tuple[int, int, int]) -> str:
    return f"{shape[2]}x{shape[1]} with {counted(shape[0], 'channel')}"
