"""fedvc, scaffold, fednova, feddyn and centralised, worked out a second time from the papers: numpy on a linear model.

Nothing is shared with the package but the key and the plan of batches. θ is W and b side by side, [C, d + 1], float64.
"""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from test_objectives_golden import everyone, examples_of, some, virtual

from federation import federation, image_set, plain_sgd, remembered
from unskew import methods
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import EVERYONE
from unskew.data.batches import plan
from unskew.data.population import Population
from unskew.round import driver
from unskew.round.client import accumulated

CLOSE = 1e-10
SIZES = (13, 8, 3, 6, 2)  # with batches of 4 and two epochs: 8, 4, 2, 4 and 2 steps
SGD = [{"momentum": 0.0, "weight_decay": 0.0}, {"momentum": 0.9, "weight_decay": 0.02}]
BOTH = pytest.mark.parametrize("sgd", SGD, ids=["plain", "momentum"])
WHO = {"everyone": (None, everyone), "three of five": (3, some(3))}


# The federation


def small(method, sizes=SIZES, *, seed=0, **local):
    """Forty images of 2 × 2 pixels and three classes; eight of them, at SIZES, belong to nobody."""
    settings = {"batch": 4, "lr": 0.1, "weight_decay": 0.0, **local}
    images = image_set(40, classes=3, side=2)
    return federation(method, sizes=sizes, images=images, model="outside_models:linear", seed=seed, **settings)


@dataclass(frozen=True)
class Ran:
    state: object
    metrics: list
    kept: dict  # client -> what it remembers, by name


def ran(fed, rounds, per_round=None):
    engine = fed.open()
    per_round = per_round or engine.roster.clients
    try:
        every = list(driver.run(fed.algorithm, engine, fed.state(), fed.key, rounds=rounds, per_round=per_round))
        last = every[-1][0]
        return Ran(last, [metrics for _, metrics in every], remembered(engine, last))
    finally:
        engine.close()


def theta_of(tensors, under="params/"):
    return np.c_[tensors[f"{under}classifier.weight"].numpy(), tensors[f"{under}classifier.bias"].numpy()]


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=CLOSE)


# The same in numpy


def gradient(theta, x, y):
    """Of the mean cross-entropy of softmax(x·θᵀ)."""
    scores = np.exp(x @ theta.T)
    p = scores / scores.sum(1, keepdims=True)
    return (p - np.eye(len(theta))[y]).T @ x / len(x)


def pictures(fed, index):
    x = (fed.data["train/images"].numpy()[index] / 255 - 0.4) / 0.2
    return np.c_[x.reshape(len(index), -1), np.ones(len(index))], fed.data["train/labels"].numpy()[index]


def visit(fed, theta, number, client, repeat=0, take=None, *, more=0.0, alpha=0.0, epochs=None):
    """The client's θ after SGD from the server's, and its steps; ``more`` is added to each gradient, α pulls back."""
    local = replace(fed.blueprint.local, epochs=epochs or fed.blueprint.local.epochs)
    batches = plan(examples_of(fed, client), take, local, fed.key.fold("round", number).fold("client", client, repeat))
    w, v = theta.copy(), 0.0
    for index, count in zip(batches.index.numpy(), batches.counts, strict=True):
        g = gradient(w, *pictures(fed, index[:count])) + more + alpha * (w - theta)
        v = local.momentum * v + g + local.weight_decay * w
        w = w - local.lr * v
    return w, len(batches.counts)


def reach(steps, momentum):
    """‖a‖₁ by brute force: how far SGD with rate 1 goes on gradients that are all one."""
    x = v = 0.0
    for _ in range(steps):
        v = momentum * v + 1
        x += v
    return x


def sizes_of(fed):
    return [n for *_, n in everyone(fed, 0)]


def mean(weights, values):
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def plain_fedavg(fed, rounds, who=everyone, epochs=None):
    theta = theta_of(fed.state().tensors)
    for number in range(1, rounds + 1):
        visits = who(fed, number)
        theta = mean([w for *_, w in visits], [visit(fed, theta, number, *v[:3], epochs=epochs)[0] for v in visits])
    return theta


@BOTH
@pytest.mark.parametrize(("count", "who"), WHO.values(), ids=WHO)
def test_the_numpy_lines_are_fedavg(count, who, sgd):
    """The ruler itself."""
    fed = small("fedavg", **sgd)
    close(theta_of(fed.run(3, per_round=count).tensors), plain_fedavg(fed, 3, who))


# FedVC

UNEVEN = (0, 13, 8, 0, 0, 3, 6, 2, 0)  # some clients hold nothing


def population_of(fed):
    return Population(fed.data["population/order"].numpy(), fed.data["population/offsets"].numpy())


@BOTH
@pytest.mark.parametrize("epochs", [1, 3])
def test_fedvc_is_the_numpy_lines(epochs, sgd):
    """Clients of 2, 3, 6, 8 and 13 examples; every visit takes 6 and weighs the same."""
    fed, who = small(f"fedvc(size=6, epochs={epochs})", **sgd), virtual(7, 6)
    assert max(repeat for _, repeat, *_ in who(fed, 1)) > 0
    found = ran(fed, 3, per_round=7)
    close(theta_of(found.state.tensors), plain_fedavg(fed, 3, who, epochs=epochs))
    assert [m.examples for m in found.metrics] == [7 * 6 * epochs] * 3
    assert [m.batches_max for m in found.metrics] == [2 * epochs] * 3  # ⌈6/4⌉ steps an epoch


def test_departs_from_the_paper_fedvc_draws_clients_with_replacement_so_that_the_expected_update_is_exact():
    """Were every draw to come up once, each client would come just n_k times: E[mean Δ] = Σ n_k/n·Δ_k."""

    class EveryDrawOnce:
        def numpy(self):
            return self

        def integers(self, low, high, count):
            assert count == high - low
            return np.arange(low, high)[::-1]

    visits = methods.parse_method("fedvc").sampler(EveryDrawOnce(), population_of(small("fedvc", UNEVEN)).roster, 32)
    assert Counter(v.client for v in visits) == {k: n for k, n in enumerate(UNEVEN) if n}
    assert all(v.weight == 1 for v in visits)
    alone = methods.parse_method("fedvc").sampler(Key(0), population_of(small("fedvc", (5,))).roster, 4)
    assert [(v.client, v.repeat) for v in alone] == [(0, 0), (0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("held", [5, 6, 7, 13])
def test_a_visit_draws_without_replacement_if_the_client_holds_enough_and_with_otherwise(held):
    fed = small("fedvc(size=6, epochs=2)", (held,))
    (seen,) = methods.parse_method("fedvc(size=6, epochs=2)").sampler(Key(0), population_of(fed).roster, 1)
    batches = plan(examples_of(fed, 0), seen.take, replace(fed.blueprint.local, epochs=2), Key(1))
    rows = batches.index[batches.index >= 0].numpy().reshape(2, 6)
    assert sorted(rows[0]) == sorted(rows[1])  # what was drawn for the visit serves all its epochs
    assert set(rows[0]) <= set(examples_of(fed, 0).tolist())
    assert (len(set(rows[0].tolist())) == 6) == (held >= 6)


@pytest.mark.parametrize("text", ["fedvc(size=0)", "fedvc(epochs=0)"])
def test_fedvc_refuses_visits_without_examples(text):
    with pytest.raises(UserError, match="give a number above 0"):
        methods.parse_method(text)


# FedNova


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 100])
def test_the_norm_of_a_is_how_far_sgd_with_momentum_goes_on_unit_gradients(steps, momentum):
    assert accumulated(steps, momentum) == pytest.approx(reach(steps, momentum), rel=1e-11)


def plain_fednova(fed, rounds, who=everyone, mu=0.0):
    theta = theta_of(fed.state().tensors)
    for number in range(1, rounds + 1):
        visits = who(fed, number)
        share = np.array([w for *_, w in visits]) / sum(w for *_, w in visits)
        after, steps = zip(*(visit(fed, theta, number, *v[:3], alpha=mu) for v in visits), strict=True)
        a = np.array([reach(tau, fed.blueprint.local.momentum) for tau in steps])
        direction = sum(p * (theta - y) / length for p, y, length in zip(share, after, a, strict=True))
        theta = theta - (share * a).sum() * direction
    return theta


@BOTH
@pytest.mark.parametrize(("count", "who"), WHO.values(), ids=WHO)
def test_fednova_is_the_numpy_lines(count, who, sgd):
    fed = small("fednova", **sgd)
    close(theta_of(fed.run(3, per_round=count).tensors), plain_fednova(fed, 3, who))
    assert np.abs(plain_fednova(fed, 3, who) - plain_fedavg(fed, 3, who)).max() > 1e-3


def test_proximal_terms_of_other_methods_do_not_change_the_norm_of_a():
    fed = small("fednova + fedprox(mu=0.7)", momentum=0.9)
    close(theta_of(fed.run(2).tensors), plain_fednova(fed, 2, mu=0.7))


# SCAFFOLD


def plain_scaffold(fed, rounds, who=everyone, *, epochs=None, length=reach, weigh=lambda n: n):
    """θ, c, and c_k of the clients that came. Option II; ``length(steps, m)`` is what x − y is divided by beside η."""
    local, sizes = fed.blueprint.local, [weigh(n) for n in sizes_of(fed)]
    theta, c, control = theta_of(fed.state().tensors), 0.0, {}
    for number in range(1, rounds + 1):
        visits, models_, fresh = who(fed, number), [], {}
        for client, repeat, take, _ in visits:
            own = control.get(client, 0.0)
            y, steps = visit(fed, theta, number, client, repeat, take, more=c - own, epochs=epochs)
            models_.append(y)
            fresh[client] = own - c + (theta - y) / (local.lr * length(steps, local.momentum))
        theta = mean([w for *_, w in visits], models_)
        c = c + sum(sizes[k] * (fresh[k] - control.get(k, 0.0)) for k in fresh) / sum(sizes)
        control |= fresh
    return theta, c, control


def controls(found):
    return {client: theta_of(kept, "scaffold/params/") for client, kept in found.kept.items()}


def compare_scaffold(found, wanted):
    theta, c, control = wanted
    close(theta_of(found.state.tensors), theta)
    close(theta_of(found.state.sent, "scaffold/params/"), c)
    assert controls(found).keys() == control.keys()
    for client, value in controls(found).items():
        close(value, control[client])


@BOTH
@pytest.mark.parametrize(("count", "who"), WHO.values(), ids=WHO)
def test_scaffold_is_the_numpy_lines(count, who, sgd):
    fed = small("scaffold", **sgd)
    compare_scaffold(ran(fed, 3, count), plain_scaffold(fed, 3, who))
    assert np.abs(plain_scaffold(fed, 3, who)[0] - plain_fedavg(fed, 3, who)).max() > 1e-3


@BOTH
def test_scaffold_with_fedvc_is_the_numpy_lines(sgd):
    """Clients come twice in a round: both visits use the c_k of the round before, the last one keeps."""
    fed, who = small("scaffold + fedvc(size=6)", **sgd), virtual(6, 6)
    assert max(repeat for number in (1, 2, 3) for _, repeat, *_ in who(fed, number)) > 0
    compare_scaffold(ran(fed, 3, 6), plain_scaffold(fed, 3, who, epochs=1))


@pytest.mark.parametrize("method", ["scaffold", "scaffold + fedvc(size=6)", "scaffold + fednova + fedavgm"])
def test_c_stays_the_mean_of_all_c_k_weighted_by_their_examples(method):
    """A client that never came has c_k = 0."""
    found = ran(small(method, momentum=0.9), 6, per_round=3)
    wanted = sum(SIZES[client] / sum(SIZES) * value for client, value in controls(found).items())
    assert np.abs(wanted).max() > 1e-2
    close(theta_of(found.state.sent, "scaffold/params/"), wanted)


def test_departs_from_the_paper_scaffold_weighs_clients_by_their_examples_in_c_too():
    """At equal sizes it is the paper's Algorithm 1, which weighs all alike; at others it is not."""

    def alike(n):
        return 1.0

    equal = small("scaffold", (6, 6, 6), momentum=0.0)
    compare_scaffold(ran(equal, 3, 2), plain_scaffold(equal, 3, some(2), weigh=alike))
    uneven = small("scaffold", momentum=0.0)
    there = plain_scaffold(uneven, 3, some(3), weigh=alike)[1]
    assert np.abs(theta_of(ran(uneven, 3, 3).state.sent, "scaffold/params/") - there).max() > 1e-3


@BOTH
def test_departs_from_the_paper_scaffold_divides_by_the_norm_of_a_where_there_is_momentum(sgd):
    """At a rate so small that the gradient stays what it is, c_k is that gradient; by K steps it is up to 1/(1 − m)."""
    fed = small("scaffold", (8,), epochs=20, batch=8, lr=1e-7, **sgd)
    start = theta_of(fed.state().tensors)
    slope = gradient(start, *pictures(fed, examples_of(fed, 0))) + sgd["weight_decay"] * start
    np.testing.assert_allclose(controls(ran(fed, 1))[0], slope, rtol=1e-4)
    by_steps = plain_scaffold(fed, 1, length=lambda steps, momentum: steps)[2][0]
    factor = reach(20, sgd["momentum"]) / 20
    np.testing.assert_allclose(by_steps, factor * slope, rtol=1e-4)
    assert factor == 1 if sgd["momentum"] == 0 else 5 < factor < 10


# FedDyn


def plain_feddyn(fed, rounds, who=everyone, *, alpha, weigh=lambda n: n):
    """θ, h, and g_k of the clients that came."""
    sizes = [weigh(n) for n in sizes_of(fed)]
    theta, h, past = theta_of(fed.state().tensors), 0.0, {}
    for number in range(1, rounds + 1):
        came = [client for client, *_ in who(fed, number)]
        after = {k: visit(fed, theta, number, k, more=-past.get(k, 0.0), alpha=alpha)[0] for k in came}
        for k in came:
            past[k] = past.get(k, 0.0) - alpha * (after[k] - theta)
        h = h - alpha * sum(sizes[k] * (after[k] - theta) for k in came) / sum(sizes)
        theta = mean([sizes[k] for k in came], [after[k] for k in came]) - h / alpha
    return theta, h, past


def compare_feddyn(found, wanted):
    theta, h, past = wanted
    close(theta_of(found.state.tensors), theta)
    close(theta_of(found.state.memory, "h/params/"), h)
    assert found.kept.keys() == past.keys()
    for client, kept in found.kept.items():
        close(theta_of(kept, "feddyn/params/"), past[client])


@BOTH
@pytest.mark.parametrize("alpha", [0.01, 0.7])
@pytest.mark.parametrize(("count", "who"), WHO.values(), ids=WHO)
def test_feddyn_is_the_numpy_lines(count, who, alpha, sgd):
    fed = small(f"feddyn(alpha={alpha})", **sgd)
    compare_feddyn(ran(fed, 3, count), plain_feddyn(fed, 3, who, alpha=alpha))


def test_departs_from_the_paper_feddyn_weighs_clients_by_their_examples_in_h_too():
    """At equal sizes it is the paper's Algorithm 1 (h by 1/m, θ by 1/|P|); at others it is not."""

    def alike(n):
        return 1.0

    equal = small("feddyn(alpha=0.3)", (6, 6, 6))
    compare_feddyn(ran(equal, 3, 2), plain_feddyn(equal, 3, some(2), alpha=0.3, weigh=alike))
    uneven = small("feddyn(alpha=0.3)")
    there = plain_feddyn(uneven, 3, some(3), alpha=0.3, weigh=alike)[0]
    assert np.abs(theta_of(ran(uneven, 3, 3).state.tensors) - there).max() > 1e-3


# Centralised


@BOTH
@pytest.mark.parametrize(("count", "share"), [(None, None), (2, 2 / 5)], ids=["all", "two of five"])
def test_centralised_is_plain_sgd_on_the_pooled_data_bit_for_bit(count, share, sgd):
    """The momentum starts from zero in each round, as a client's does."""
    fed = federation("centralised", images=image_set(130), dtype="float32", **sgd)  # 30 images belong to nobody
    found, wanted = fed.run(3, per_round=count).tensors, plain_sgd(fed, 3, fused=True, client=EVERYONE, share=share)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_centralised_has_the_budget_of_as_many_clients_and_sends_nothing(count):
    """32 examples over five clients, two epochs: K/5 of them, drawn anew each round."""
    for m in ran(small("centralised"), 2, count).metrics:
        assert m.examples == 2 * round(32 * count / 5)
        assert m.batches_max == 2 * -(-round(32 * count / 5) // 4)
        assert (m.clients, m.bytes_up, m.bytes_down) == (1, 0, 0)


def test_centralised_has_fedavgs_budget_where_some_clients_hold_nothing():
    found, plain = (ran(small(m, (6, 6, 0, 0)), 2, 2).metrics for m in ("centralised", "fedavg"))
    assert [m.examples for m in found] == [m.examples for m in plain]
