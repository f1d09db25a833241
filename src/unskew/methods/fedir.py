"""FedIR: every client's loss is weighted towards the target distribution of classes."""

from dataclasses import replace

import torch
from torch import Tensor

from unskew.core.errors import UserError
from unskew.core.language import check_not_negative
from unskew.core.types import Loss, Statistic, Step, Tensors
from unskew.round.algorithm import Method


def fedir(target: str = "population", cap: float = 0.0, smooth: float = 0.0) -> Method:
    """Weights each example by how rare its class is on the client.

    Σ w·ℓ / Σ w over each mini-batch, w = p(y)/q_k(y), where p is the target and q_k the client's class shares. A class
    that a client does not have needs no weight there.

    Parameters
    ----------
    target
        p(y), which is sent to the clients. ``population`` sums the clients' label counts once before the first round:
        the server needs only their sum, but sees each client's counts unless sums are masked. ``uniform`` gives every
        class the same share; numbers such as "0.5 0.3 0.2" set your own target. With these two, q_k never leaves the
        client.
    cap
        Beyond the paper: the largest weight, min(w, cap). 0: no limit.
    smooth
        Beyond the paper: mixes the target into the client's shares, w = p/((1 − λ)·q_k + λ·p), so that no weight
        exceeds 1/λ. 0 is off, 1 is FedAvg.

    Reference: Hsu, Qi, Brown, "Federated Visual Classification with Real-World Data Distribution", ECCV 2020,
    eqs. (3) and (4). cap: Ionides, "Truncated Importance Sampling", 2008. smooth: Yamada et al., "Relative
    Density-Ratio Estimation for Robust Distribution Comparison", 2013.
    """
    check_not_negative("fedir", cap=cap)
    if not 0 <= smooth <= 1:
        raise ValueError(f"fedir(smooth={smooth:g}): smooth must be between 0 and 1")
    custom = None if target in ("population", "uniform") else _parse_shares(target)

    def init(model: Tensors) -> Tensors:
        classes = len(model["classifier/weight"])
        if custom is not None and len(custom) != classes:
            raise UserError(f"fedir(target=…): {len(custom)} shares for {classes} classes; give one share per class")
        shares = torch.full((classes,), 1 / classes, dtype=torch.float64) if custom is None else custom
        return {} if target == "population" else {"target": shares}

    def importance(loss: Loss, step: Step) -> Loss:
        shares = step.shared["sent/fedir/target"]
        if cap or smooth:
            local = step.counts.to(shares.dtype) / step.counts.sum()
            ratio = shares / ((1 - smooth) * local + smooth * shares)
            ratio = ratio.clamp(max=cap) if cap else ratio
        else:
            ratio = shares / step.counts  # p/q_k up to a factor, which cancels
        weight = ratio[step.labels]
        return replace(loss, weight=weight if loss.weight is None else loss.weight * weight)

    statistic = Statistic("fedir", init)
    if target == "population":
        statistic = replace(
            statistic,
            survey=lambda known: {"counts": known.counts.double()},
            surveyed=lambda sums: {"target": sums["counts"] / sums["counts"].sum()},
        )
    return lambda algorithm: replace(
        algorithm, terms=(*algorithm.terms, importance), statistics=(*algorithm.statistics, statistic)
    )


def _parse_shares(target: str) -> Tensor:
    try:
        values = torch.tensor([float(word) for word in target.replace(",", " ").split()], dtype=torch.float64)
    except ValueError:
        values = torch.zeros(0)
    shares = values / values.sum()
    if not len(values) or not bool(((values > 0) & (shares.float() > 0)).all()):  # sent in the model's dtype
        rule = 'give population, uniform, or a share above 0 for each class, such as "0.5 0.3 0.2"'
        raise ValueError(f"fedir(target={target}): {rule}")
    return shares
