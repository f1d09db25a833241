"""FedVC: virtual clients of equal size."""

from dataclasses import replace
from itertools import groupby

import numpy as np

from unskew.core.key import Key
from unskew.core.language import check_positive
from unskew.core.types import Roster, Visit
from unskew.round.algorithm import Method


def fedvc(size: int = 256, epochs: int = 1) -> Method:
    """Makes every visit use the same number of examples.

    Large clients are split and small ones repeated: K visits per round, each to a client sampled with probability
    n_k/n. It resamples exactly N_VC = ``size`` of its examples, without replacement if it has that many and with
    otherwise, takes N_VC/B steps, and has the weight 1/K. A client may be visited twice in a round; its visits draw
    different examples. Only indices are drawn, no image is copied.

    Departs from the paper: it leaves open whether a client may be drawn twice; we draw with replacement, so that the
    expected update is Σ n_k/n·Δ_k exactly.

    Parameters
    ----------
    size
        The number of examples of a visit, N_VC.
    epochs
        Passes over these examples, instead of --epochs; --steps replaces both. The paper uses one.

    Reference: Hsu, Qi, Brown, "Federated Visual Classification with Real-World Data Distribution", ECCV 2020,
    section 5.3 and Algorithm 1.
    """
    check_positive("fedvc", size=size, epochs=epochs)

    def by_size(key: Key, roster: Roster, per_round: int) -> list[Visit]:
        drawn = key.numpy().integers(0, roster.examples, per_round)  # an example each: its owner is visited
        clients = np.sort(np.searchsorted(roster.ends, drawn, side="right")).tolist()
        repeats = (repeat for _, group in groupby(clients) for repeat, _ in enumerate(group))
        return [Visit(client, 1.0, take=size, repeat=n) for client, n in zip(clients, repeats, strict=True)]

    return lambda algorithm: replace(algorithm, sampler=by_size, local=replace(algorithm.local, epochs=epochs))
