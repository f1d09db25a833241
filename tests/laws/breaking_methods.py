"""Methods that break one law each, most of them in round 2 and later, when memories and statistics exist."""

from dataclasses import replace

import torch

from unskew.core.types import Memory, ServerOptimizer, Statistic
from unskew.round.client_memory import whole_model

LARGE = 0.01  # a penalty's weight: enough to see, not enough to diverge


def _adding(**slots):
    """A method that appends one thing to each of these shared slots."""
    return lambda algorithm: replace(algorithm, **{name: (*getattr(algorithm, name), x) for name, x in slots.items()})


def _remembering(term):
    """A term, and a memory that is empty at a client's first visit."""
    return _adding(terms=term, remember=whole_model("breaking"))


# Order-dependent


def order_by_statistics():
    """Its penalty follows its place among the terms, once the server has sent something."""
    one = torch.ones((), dtype=torch.float64)
    statistic = Statistic("placed", measure=lambda visited: {"one": one}, fold=lambda sent, sums, info: {"one": one})

    def method(algorithm):
        place = len(algorithm.terms)

        def term(loss, step):
            sent = step.shared.get("sent/placed/one")
            return loss if sent is None else loss.plus(LARGE * place * sent * step.logits.square().mean())

        return replace(algorithm, terms=(*algorithm.terms, term), statistics=(*algorithm.statistics, statistic))

    return method


def greedy():
    """Throws other methods' terms away."""
    return lambda algorithm: replace(algorithm, terms=(lambda loss, step: loss,))


# Not what a term, a margin or a blend may do


def smoothing_term(amount: float = 0.1):
    """Label smoothing as a term: it mixes the whole loss, which is what the blend slot is for."""

    def term(loss, step):
        uniform = -step.logits.log_softmax(1).mean(1)
        return replace(loss, example=(1 - amount) * loss.example + amount * uniform)

    return _adding(terms=term)


def weight_thief():
    """Puts its weights in place of those of other methods."""
    return _adding(terms=lambda loss, step: replace(loss, weight=1.0 + step.labels.to(step.logits)))


def penalty_thief():
    """Drops the penalties of other methods once it remembers something."""

    def term(loss, step):
        return replace(loss, penalty=LARGE * step.logits.square().mean()) if step.memory else loss

    return _remembering(term)


def tall_margin():
    """A margin with one column too many rows."""
    return _adding(margin=lambda step: step.logits[:1])


def mean_blend():
    """A blend that gives one number for the batch."""
    return lambda algorithm: replace(algorithm, blend=lambda entropy, step: entropy.mean()[None])


# Randomness and state from elsewhere


def careless():
    """Draws from the global generator once it remembers something."""

    def term(loss, step):
        return loss.plus(LARGE * torch.rand(()) * step.logits.square().mean()) if step.memory else loss

    return _remembering(term)


def seeding():
    """Seeds the global generator in round 2, so that its draws are at least the same each time."""

    def term(loss, step):
        if not step.memory:
            return loss
        torch.manual_seed(0)
        return loss.plus(LARGE * torch.rand(()) * step.logits.square().mean())

    return _remembering(term)


def lasting():
    """Counts the steps of clients that remember something, over all runs of this process."""
    steps = []

    def term(loss, step):
        if not step.memory:
            return loss
        steps.append(1)
        return loss.plus(1e-4 * len(steps) * step.logits.square().mean())

    return _remembering(term)


def forgetful():
    """Keeps its server's velocity outside the state: resuming cannot know of it."""
    kept = {}

    def update(params, gradient, memory, info):
        if info.round == 1:
            kept.clear()
        for name, value in gradient.items():
            kept[name] = 0.9 * kept.get(name, 0) + value
        return {name: (value.double() - kept[name]).to(value.dtype) for name, value in params.items()}, memory

    return lambda algorithm: replace(algorithm, server=ServerOptimizer(lambda params: {}, update))


def counting():
    """Once clients remember something, counts the visits that this process has seen: two workers see half each."""
    visits = []

    def term(loss, step):
        return loss.plus(LARGE * len(visits) * step.logits.square().mean()) if step.memory else loss

    def keep(visited):
        if visited.memory:
            visits.append(visited.visit.client)
        return {"seen": torch.ones(1)}

    def method(algorithm):
        visits.clear()
        memory = Memory("counting", blank=lambda model: {"seen": torch.zeros(1)}, keep=keep)
        return replace(algorithm, terms=(*algorithm.terms, term), remember=(*algorithm.remember, memory))

    return method


# Growing


def growing_memory():
    """Keeps twice as much after every visit."""

    def keep(visited):
        return {"all": torch.zeros(1) if not visited.memory else torch.zeros(2 * len(visited.memory["growing/all"]))}

    memory = Memory("growing", blank=lambda model: {"all": torch.zeros(1)}, keep=keep)
    return _adding(remember=memory)


def growing_statistic():
    """Sends one number more every round."""

    def fold(sent, sums, info):
        return {f"round {info.round}": torch.zeros((), dtype=torch.float64)}

    statistic = Statistic("growing", fold=fold)
    return _adding(statistics=statistic)


def growing_server():
    """Keeps every update that it has seen."""

    def update(params, gradient, memory, info):
        kept = memory | {f"{info.round}/{name}": value for name, value in gradient.items()}
        return {name: (value.double() - gradient[name]).to(value.dtype) for name, value in params.items()}, kept

    return lambda algorithm: replace(algorithm, server=ServerOptimizer(lambda params: {}, update))


# Writing into arguments


def grabbing():
    """Writes into what the server sent, from a client's second visit on."""

    def term(loss, step):
        if step.memory:
            next(iter(step.shared.values())).mul_(1.001)
        return loss

    return _remembering(term)


def scribbling():
    """Writes into the client's own memory, which no state shows."""

    def term(loss, step):
        for value in step.memory.values():
            value.zero_()
        return loss

    return _remembering(term)


# Wrong types


def floating():
    """A statistic that is not a tensor."""
    statistic = Statistic("x", measure=lambda visited: {"y": 1.0})
    return _adding(statistics=statistic)


def folding():
    """A statistic whose fold raises."""
    statistic = Statistic("x", fold=lambda sent, sums, info: sums["nothing"])
    return _adding(statistics=statistic)


def twin():
    """Gives its memory the name of MOON's."""
    return _adding(remember=whole_model("moon"))
