"""FedDyn: each client's objective is changed so that its optimum is also the federation's."""

from dataclasses import replace

from unskew.core import tensors
from unskew.core.language import check_positive
from unskew.core.tensors import parameters
from unskew.core.types import Loss, Memory, RoundInfo, ServerOptimizer, Step, Tensors, Visited
from unskew.round.algorithm import Method
from unskew.round.server import apply_step, filled


def feddyn(alpha: float = 0.01) -> Method:
    """Adds terms that pull each client towards the federation's optimum.

    Client: ℓ(θ) − ⟨g_k, θ⟩ + α/2·‖θ − θ_global‖², then g_k ← g_k − α·(θ_k − θ_global), g_k = 0 at first.
    Server: h ← h − α·Σ n_k/n·(θ_k − θ_global) over the round's clients, n over all clients;
    θ ← Σ n_k·θ_k / Σ n_k − h/α. α does not damp the server: for any α, h/α is the sum of all updates so far, each
    weighted n_k/n.

    Departs from the paper: it weights clients equally; we weight them, and h, by their examples, so that h remains the
    mean of all g_k. This requires at most one visit per client and round and unmodified updates, so feddyn claims the
    sampler and the aggregate.

    Parameters
    ----------
    alpha
        The weight α of the penalty.

    Reference: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1.
    """
    check_positive("feddyn", alpha=alpha)

    def proximal(loss: Loss, step: Step) -> Loss:
        reference = [step.shared[name] for name in step.params]
        return loss.plus(alpha * tensors.half_squared_distance(list(step.params.values()), reference))

    def keep(visited: Visited) -> Tensors:
        before, after = tensors.under(visited.memory, "feddyn/"), {}
        for name in parameters(visited.model):
            update = visited.model[name] - visited.shared[name]
            after[name] = -alpha * update if not before else before[name] - alpha * update
        return after

    def update(params: Tensors, gradient: Tensors, memory: Tensors, info: RoundInfo) -> tuple[Tensors, Tensors]:
        h = {name: memory[f"h/{name}"] + alpha * info.turnout * g for name, g in gradient.items()}
        step = {name: g + h[name] / alpha for name, g in gradient.items()}
        return apply_step(params, step, 1.0), tensors.prefixed(h, "h/")

    return lambda algorithm: replace(
        algorithm,
        terms=(*algorithm.terms, proximal),
        correction=lambda shared, memory: {name: -g for name, g in tensors.under(memory, "feddyn/").items()},
        server=ServerOptimizer(lambda params: filled(params, "h/", 0.0), update),
        remember=(*algorithm.remember, Memory("feddyn", blank=parameters, keep=keep)),
        claims=("sampler", "aggregate"),
    )
