"""An algorithm whose every function is watched: what it changes in place, and what its parts do to the loss."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unskew.core.types import Blend, Loss, Margin, ServerOptimizer, Step, Term
from unskew.round.algorithm import Algorithm

Report = Callable[[str], None]

CLOSE = 1e-9  # how far two numbers of a loss may differ and count as one


def watching_arguments(algorithm: Algorithm, report: Report) -> Algorithm:
    """The same algorithm; each function that changes a tensor of its arguments in place is reported."""

    def watch(function: Any, what: str) -> Any:
        return None if function is None else _watched(function, what, report)

    return replace(
        algorithm,
        margin=tuple(watch(margin, "margin") for margin in algorithm.margin),
        blend=watch(algorithm.blend, "blend"),
        terms=tuple(watch(term, "term") for term in algorithm.terms),
        head=watch(algorithm.head, "head"),
        correction=watch(algorithm.correction, "correction"),
        aggregate=watch(algorithm.aggregate, "aggregate"),
        server=ServerOptimizer(algorithm.server.init, watch(algorithm.server.update, "server update")),
        statistics=tuple(
            replace(s, measure=watch(s.measure, f"measure of {s.name}"), fold=watch(s.fold, f"fold of {s.name}"))
            for s in algorithm.statistics
        ),
        remember=tuple(replace(m, keep=watch(m.keep, f"keep of {m.name}")) for m in algorithm.remember),
    )  # fmt: skip


def watching_loss(algorithm: Algorithm, report: Report) -> Algorithm:
    """The same algorithm; margins, blends and terms that do what another slot is for are reported."""
    return replace(
        algorithm,
        margin=tuple(_shaped_margin(margin, report) for margin in algorithm.margin),
        blend=algorithm.blend and _shaped_blend(algorithm.blend, report),
        terms=tuple(_checked_term(term, report) for term in algorithm.terms),
    )


def _watched(function: Callable[..., Any], what: str, report: Report) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        before = [(name, value, value.detach().clone()) for name, value in _tensors("", arguments)]
        result = function(*arguments)
        for name, value, copy in before:
            if not torch.equal(value, copy):
                report(f"the {what} changes {name} in place")
        return result

    return call


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside a value, with a name that says where."""
    if isinstance(value, Tensor):
        yield name or "its argument", value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(f"{name}[{key!r}]", inner)
    elif isinstance(value, tuple):
        for inner in value:
            yield from _tensors(name, inner)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _tensors(f"{type(value).__name__.lower()}.{each.name}", getattr(value, each.name))


def _shaped_margin(margin: Margin, report: Report) -> Margin:
    def call(step: Step) -> Tensor:
        added, shape = margin(step), step.logits.shape
        if added.shape not in (shape, shape[1:]):
            report(
                f"a margin of shape {list(added.shape)} does not fit logits of shape {list(shape)}; give [B, C] or [C]"
            )
        return added

    return call


def _shaped_blend(blend: Blend, report: Report) -> Blend:
    def call(entropy: Tensor, step: Step) -> Tensor:
        blended = blend(entropy, step)
        if blended.shape != entropy.shape:
            report(f"the blend gives shape {list(blended.shape)} for {len(entropy)} examples; give one loss for each")
        return blended

    return call


def _checked_term(term: Term, report: Report) -> Term:
    """Called once as it is, and once on a loss that already has weights and a penalty."""

    def call(loss: Loss, step: Step) -> Loss:
        alone = term(Loss(loss.example), step)
        weight = torch.arange(1, len(loss.example) + 1).to(loss.example)
        penalty = loss.example.new_tensor(0.75)
        after = term(Loss(loss.example, weight, penalty), step)
        if not (torch.equal(after.example, loss.example) and torch.equal(alone.example, loss.example)):
            report("a term changes the loss of each example; claim the blend slot for that")
        if not _close(after.weight, weight if alone.weight is None else weight * alone.weight):
            report("a term drops or replaces the weights that were there; multiply them by its own")
        if not _close(after.penalty, penalty if alone.penalty is None else penalty + alone.penalty):
            report("a term drops or replaces the penalty that was there; add its own with loss.plus(…)")
        return term(loss, step)

    return call


def _close(value: Tensor | None, expected: Tensor) -> bool:
    return value is not None and torch.allclose(value, expected, rtol=CLOSE, atol=CLOSE)
