"""What clients minimise under moon, prototypes, fedir, clsprox and clsnorm, worked out a second time from the papers.

Single losses and their gradients are numpy lines; whole rounds are an ordinary PyTorch loop (``plainly``) that shares
the network, the key and the plan of batches with the package, and nothing else. Everything is float64.
"""

import copy
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from federation import federation
from unskew import methods, models
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import ImageSet, Loss, Split, Step
from unskew.data.batches import plan
from unskew.data.population import Partition, Population
from unskew.engines.blueprint import dataset
from unskew.round import driver
from unskew.round.client import objective
from unskew.round.evaluation import evaluate

CLOSE = 1e-10
HOLDS = ("0001112", "112222300", "33", "000122")  # the labels that each client holds
SGD = [{"momentum": 0.0, "weight_decay": 0.0}, {"momentum": 0.9, "weight_decay": 0.02}]
BOTH = pytest.mark.parametrize("sgd", SGD, ids=["plain", "momentum"])


# The federation


def small(method, holds=HOLDS, *, classes=4, side=4, model="tiny-cnn", seed=0, **local):
    """Random images of random brightness; client k holds the examples whose labels its text says, in that order."""
    labels = np.array([int(label) for held in holds for label in held])
    draw = Key(7).fold("images").numpy()
    pixels = draw.integers(0, 256, (len(labels), 1, side, side)) // draw.integers(1, 4, (len(labels), 1, 1, 1))
    split = Split(pixels.astype(np.uint8), labels)
    images = ImageSet("by hand", tuple("abcdefgh"[:classes]), split, split, (0.3,), (0.25,))
    settings = {"epochs": 2, "batch": 4, "lr": 0.1, "weight_decay": 0.0, **local}
    base = federation(method, sizes=[len(h) for h in holds], images=images, model=model, seed=seed, **settings)
    who = np.repeat(np.arange(len(holds)), [len(held) for held in holds]).astype(np.int32)
    population = Population.from_partition(Partition(who, len(holds), "by hand", 0))
    return replace(base, data=dataset(images, population))


# The same federation as a plain loop


def examples_of(fed, client):
    offsets = fed.data["population/offsets"]
    return fed.data["population/order"][offsets[client] : offsets[client + 1]].numpy()


def pictures(fed, index):
    mean, std = (fed.data[name].view(1, -1, 1, 1) for name in ("mean", "std"))
    return (fed.data["train/images"][index].double() / 255 - mean) / std, fed.data["train/labels"][index]


def network_of(fed, tensors=None):
    """The network with the server's weights, or those of the state's tensors."""
    network = models.build(fed.blueprint.model, fed.blueprint.shape, fed.blueprint.classes).double()
    tensors = fed.state().tensors if tensors is None else tensors
    network.load_state_dict({name.partition("/")[2]: value for name, value in tensors.items()})
    return network


def everyone(fed, number):
    clients = len(fed.data["population/offsets"]) - 1
    return [(client, 0, None, len(examples_of(fed, client))) for client in range(clients)]


def some(count):
    """``count`` clients without replacement, weighted by their examples."""

    def drawn(fed, number):
        key = fed.key.fold("round", number).fold("sample")
        clients = sorted(key.numpy().choice(len(everyone(fed, number)), count, replace=False).tolist())
        return [(client, 0, None, len(examples_of(fed, client))) for client in clients]

    return drawn


def virtual(count, size):
    """FedVC's visits: the owners of ``count`` examples, equally weighted."""

    def drawn(fed, number):
        owners = np.concatenate([[c] * n for c, _, _, n in everyone(fed, number)])
        key = fed.key.fold("round", number).fold("sample")
        seen = Counter()
        visits = []
        for client in sorted(owners[key.numpy().integers(0, len(owners), count)].tolist()):
            visits.append((client, seen[client], size, 1))
            seen[client] += 1
        return visits

    return drawn


def plainly(fed, rounds, loss, *, who=everyone, epochs=None):
    """After each round: the server's network and the pairs (client, its own network) of the round.

    ``loss(own, server, images, labels, client, r)`` is minimised, r = 0 … rounds − 1.
    """
    local = replace(fed.blueprint.local, epochs=epochs or fed.blueprint.local.epochs)
    server = network_of(fed)
    for r in range(rounds):
        visited, weights = [], []
        for client, repeat, take, weight in who(fed, r + 1):
            own = copy.deepcopy(server).train()
            knobs = {"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay}
            optimizer = torch.optim.SGD(own.parameters(), **knobs)
            key = fed.key.fold("round", r + 1).fold("client", client, repeat)
            batches = plan(examples_of(fed, client), take, local, key)
            for index, count in zip(batches.index, batches.counts, strict=True):
                optimizer.zero_grad()
                loss(own, server.eval(), *pictures(fed, index[:count]), client, r).backward()
                optimizer.step()
            visited.append((client, own))
            weights.append(weight)
        server = average([own for _, own in visited], weights)
        yield server, visited


def average(networks, weights):
    mean = copy.deepcopy(networks[0])
    several = [network.state_dict() for network in networks]
    total = {
        name: sum(w * state[name].double() for w, state in zip(weights, several, strict=True)) / sum(weights)
        for name in several[0]
    }
    whole = {name: v if several[0][name].is_floating_point() else v.round() for name, v in total.items()}
    mean.load_state_dict(whole)
    return mean


def distance(state, network):
    """The largest difference, buffers included."""
    found = {name.partition("/")[2]: value for name, value in state.tensors.items()}
    wanted = network.state_dict()
    assert found.keys() == wanted.keys()
    return max((found[name].double() - wanted[name].double()).abs().max().item() for name in wanted)


def identical(left, right):
    return all(torch.equal(left.tensors[name], right.tensors[name]) for name in right.tensors)


def cross_entropy(own, server, images, labels, client, r):
    return F.cross_entropy(own(images), labels)


def sim(left, right):
    """The cosine of each row."""
    return (left * right).sum(1) / (left.norm(dim=1) * right.norm(dim=1))


# A single mini-batch

FEATURES = np.array([[1.0, 2.0, -0.5], [0.3, -1.0, 0.8], [-0.6, 0.2, 1.5], [2.0, 0.1, 0.4]])
Y = np.array([0, 1, 2, 1])
WEIGHT = np.array([[0.2, -0.1, 0.4], [0.5, 0.3, -0.2], [-0.3, 0.6, 0.1]])


def step_of(features=FEATURES, *, shared=None, memory=None, counts=(1, 2, 1), encode=None):
    """The batch under the classifier WEIGHT: the step and its features, which know their gradient."""
    z = torch.tensor(features, requires_grad=True)
    shared = {name: torch.tensor(value) for name, value in (shared or {}).items()}
    encode = encode and {name: torch.tensor(value) for name, value in encode.items()}.__getitem__
    return Step(
        z, z @ torch.tensor(WEIGHT).t(), torch.tensor(Y), {}, shared, memory or {}, torch.tensor(counts), encode, None
    )


def loss_of(method, step):
    value = objective(methods.parse_method(method), step).value()
    return value.item(), torch.autograd.grad(value, step.features)[0].numpy()


def entropies(z):
    """Cross-entropy of each example [B], and its gradient by the features [B, d]."""
    scores = np.exp(z @ WEIGHT.T)
    p = scores / scores.sum(1, keepdims=True)
    return -np.log(p[np.arange(len(z)), Y]), (p - np.eye(3)[Y]) @ WEIGHT


def cosine(f, a):
    """cos(f, a) of two vectors, and its gradient by f: (a/‖a‖ − cos·f/‖f‖) / ‖f‖."""
    c = f @ a / np.sqrt((f @ f) * (a @ a))
    return c, (a / np.sqrt(a @ a) - c * f / np.sqrt(f @ f)) / np.sqrt(f @ f)


# MOON

GLOBAL = np.array([[0.9, 1.8, 0.0], [-0.3, 1.0, 0.5], [0.6, -0.2, 1.0], [1.0, 0.0, 0.0]])
PREVIOUS = np.array([[1.0, -2.0, 0.5], [0.3, -1.1, 0.8], [-0.6, 0.3, 1.4], [0.0, 1.0, 1.0]])


@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (5.0, 0.5), (0.3, 2.0)])
def test_moons_penalty_and_its_gradient_by_hand(mu, tau):
    values, gradients = entropies(FEATURES)
    wanted, slope = values.mean(), gradients / 4
    for i, f in enumerate(FEATURES):
        (near, d_near), (far, d_far) = cosine(f, GLOBAL[i]), cosine(f, PREVIOUS[i])
        share = np.exp(near / tau) / (np.exp(near / tau) + np.exp(far / tau))
        wanted += mu * -np.log(share) / 4
        slope[i] += mu * (1 - share) * (d_far - d_near) / tau / 4
    references = {"shared": GLOBAL, "moon": PREVIOUS}
    step = step_of(memory={"moon/": torch.zeros(1)}, encode=references)
    value, gradient = loss_of(f"moon(mu={mu}, tau={tau})", step)
    assert value == pytest.approx(wanted, abs=1e-13)
    np.testing.assert_allclose(gradient, slope, rtol=0, atol=1e-13)


def test_moons_penalty_is_finite_where_all_features_are_zero():
    step = step_of(0 * FEATURES, memory={"moon/": torch.zeros(1)}, encode={"shared": GLOBAL, "moon": 0 * PREVIOUS})
    value, gradient = loss_of("moon", step)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_moons_penalty_stays_finite_at_a_small_temperature():
    """e^(1/τ) overflows at τ = 0.001; the penalty of feature and reference apart is then 2/τ."""
    step = step_of(GLOBAL, memory={"moon/": torch.zeros(1)}, encode={"shared": -GLOBAL, "moon": GLOBAL})
    value, gradient = loss_of("moon(tau=0.001)", step)
    assert value == pytest.approx(entropies(GLOBAL)[0].mean() + 2000, abs=1e-8)
    assert np.isfinite(gradient).all()


def moon(mu, tau, previous, *, mode="eval"):
    """Cross-entropy + μ·mean(−log(e^(near/τ) / (e^(near/τ) + e^(far/τ)))); ``previous`` holds the clients' models."""

    def loss(own, server, images, labels, client, r):
        z = own.encoder(images)
        value = F.cross_entropy(own.classifier(z), labels)
        if client not in previous:
            return value
        with torch.no_grad():
            there = server.encoder(images)
            before = copy.deepcopy(previous[client]).train(mode == "train").encoder(images)
        positive, negative = (sim(z, there) / tau).exp(), (sim(z, before) / tau).exp()
        return value - mu * (positive / (positive + negative)).log().mean()

    return loss


def plain_moon(fed, rounds, who, *, mu=2.0, tau=0.5, kept="own", mode="eval", epochs=None):
    """The server's network in the end; ``kept`` says which model a client contrasts with at its next visit."""
    previous, server = {}, None
    for server, visited in plainly(fed, rounds, moon(mu, tau, previous, mode=mode), who=who, epochs=epochs):
        rotated = [own for _, own in visited[1:] + visited[:1]]
        others = {"own": [own for _, own in visited], "server's": [server] * len(visited), "another's": rotated}
        first = dict(reversed(visited))
        previous.update(first if kept == "first" else zip([c for c, _ in visited], others[kept], strict=True))
    return server


@BOTH
@pytest.mark.parametrize("model", ["tiny-cnn", "outside_models:batch_norm"])
def test_moon_is_the_plain_loop_where_two_of_four_clients_come(model, sgd):
    """Clients come again after one round, after two, or for the first time in a later one."""
    fed = small("moon(mu=2)", model=model, **sgd)
    visits = [[client for client, *_ in some(2)(fed, number)] for number in (1, 2, 3)]
    assert any(set(a) & set(b) for a, b in pairwise(visits))
    assert set(visits[1] + visits[2]) - set(visits[0])
    assert distance(fed.run(3, per_round=2), plain_moon(fed, 3, some(2))) < CLOSE


@pytest.mark.parametrize("wrong", [{"kept": "server's"}, {"kept": "another's"}, {"mode": "train"}, {"tau": 1.0}])
def test_another_reference_than_the_clients_own_last_model_in_eval_mode_would_be_seen(wrong):
    fed = small("moon(mu=2)", model="outside_models:batch_norm")
    assert distance(fed.run(2), plain_moon(fed, 2, everyone)) < CLOSE
    assert distance(fed.run(2), plain_moon(fed, 2, everyone, **wrong)) > 1e-5


def test_where_the_paper_is_silent_a_clients_first_visit_has_no_moon_term():
    first, plain = (small(m, model="outside_models:batch_norm").run(1) for m in ("moon(mu=5)", "fedavg"))
    assert identical(first, plain)


def test_where_the_paper_is_silent_two_visits_in_one_round_both_see_the_model_that_the_round_before_left():
    fed = small("moon(mu=2) + fedvc(size=6)", ("0001112", "1122223"))
    visits = virtual(4, 6)
    assert any(repeat for _, repeat, *_ in visits(fed, 1))
    assert any(repeat for _, repeat, *_ in visits(fed, 2))
    found = fed.run(3, per_round=4)
    assert distance(found, plain_moon(fed, 3, visits, epochs=1)) < CLOSE
    assert distance(found, plain_moon(fed, 3, visits, epochs=1, kept="first")) > 1e-6


# Prototype contrast

PROTOTYPES = np.array([[0.5, 1.0, 0.2], [1.0, -0.4, 0.3], [-0.2, 0.1, 0.9]])


def contrast(z, known, tau, own):
    """L_pc of each example, and its gradient by the features: Algorithm 1, line 16; eq. (1)'s sum without ``own``."""
    values, gradients = np.zeros(len(z)), np.zeros_like(z)
    for i, (f, y) in enumerate(zip(z, Y, strict=True)):
        compared = [k for k in range(3) if known[k] and (own or k != y)]
        if not compared:
            continue
        right, slope = cosine(f, PROTOTYPES[y])
        pairs = [cosine(f, PROTOTYPES[k]) for k in compared]
        total = sum(np.exp(c / tau) for c, _ in pairs)
        values[i] = -np.log(np.exp(right / tau) / total)
        gradients[i] = sum(np.exp(c / tau) / total * d for c, d in pairs) / tau - slope / tau
    return values, gradients


def sent(known, share):
    return {
        "sent/prototypes/mean": PROTOTYPES * np.array(known, float)[:, None],
        "sent/prototypes/known": np.array(known, float),
        "sent/prototypes/share": np.array(share),
    }


@pytest.mark.parametrize("known", [(1, 1, 1), (1, 0, 1), (0, 1, 0)], ids=["all known", "two known", "one known"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("tau", "scale", "share"), [(0.5, 1.0, 0.75), (1.0, 0.1, 0.75), (0.5, 0.1, 0.25)])
def test_the_prototype_loss_and_its_gradient_by_hand_also_where_the_paper_is_silent(tau, scale, share, own, known):
    """Classes without a prototype stay out of the sum, and their examples have plain cross-entropy.

    A single prototype has nothing to be told from: −log 1 = 0, and no gradient, NaN least of all.
    """
    (l_ce, d_ce), (l_pc, d_pc) = entropies(FEATURES), contrast(FEATURES, known, tau, own)
    text = f"prototypes(tau={tau}, scale={scale}, own={str(own).lower()})"
    value, gradient = loss_of(text, step_of(shared=sent(known, share)))
    share = np.where(np.array(known)[Y] > 0, share, 0.0)
    assert value == pytest.approx((share * scale * l_pc + (1 - share) * l_ce).mean(), abs=1e-13)
    wanted = (share * scale)[:, None] * d_pc + (1 - share)[:, None] * d_ce
    np.testing.assert_allclose(gradient, wanted / 4, rtol=0, atol=1e-13)


def test_departs_from_the_paper_the_prototype_loss_has_a_minus_sign_and_the_own_class_in_its_denominator():
    """A feature on its prototype has the least loss, which is above 0; eq. (1) as printed would have it the largest."""
    shared = sent((1, 1, 1), 1.0)
    on, off = PROTOTYPES[Y] * 3.0, PROTOTYPES[(Y + 1) % 3]
    near, far = (loss_of("prototypes", step_of(features, shared=shared))[0] for features in (on, off))
    assert 0 < near < far


def plain_prototypes(fed, rounds, who=everyone, *, tau=0.5, scale=1.0, own=True, epochs=None):
    """The server's network and the global prototypes {class: [d]} after each round, example by example."""
    prototypes = {}

    def loss(network, server, images, labels, client, r):
        alpha, features = 1 - r / rounds, network.encoder(images)
        values = []
        for f, logits, y in zip(features, network.classifier(features), labels.tolist(), strict=True):
            value = -(logits[y] - logits.logsumexp(0))
            if y in prototypes:
                near = {k: ((f @ z) / (f.norm() * z.norm()) / tau).exp() for k, z in prototypes.items()}
                below = sum(near[k] for k in near if own or k != y)
                value = alpha * scale * -(near[y] / below).log() + (1 - alpha) * value
            values.append(value)
        return sum(values) / len(values)

    for server, visited in plainly(fed, rounds, loss, who=who, epochs=epochs):
        prototypes.update(means_over_clients([local_prototypes(fed, client, network) for client, network in visited]))
        yield server, dict(prototypes)


def local_prototypes(fed, client, network, examples=None):
    examples = examples_of(fed, client).tolist() if examples is None else examples
    images, labels = pictures(fed, torch.tensor(examples))
    with torch.no_grad():
        features = copy.deepcopy(network).eval().encoder(images)
    return {k: features[labels == k].mean(0) for k in set(labels.tolist())}


def means_over_clients(locals_):
    held = {k for local in locals_ for k in local}
    return {k: torch.stack([local[k] for local in locals_ if k in local]).mean(0) for k in held}


def compare_prototypes(state, wanted):
    known = set(state.sent["prototypes/known"].nonzero().flatten().tolist())
    assert known == wanted.keys()
    for k, mean in wanted.items():
        torch.testing.assert_close(state.sent["prototypes/mean"][k], mean, rtol=0, atol=CLOSE)


@BOTH
@pytest.mark.parametrize("knobs", [{}, {"own": False, "tau": 1.0, "scale": 0.1}], ids=["default", "knobs"])
def test_three_rounds_of_prototypes_are_the_plain_loop(knobs, sgd):
    text = ", ".join(f"{knob}={str(value).lower()}" for knob, value in knobs.items())
    fed = small(f"prototypes({text})" if text else "prototypes", **sgd)
    for state, (server, prototypes) in zip(fed.states(3), plain_prototypes(fed, 3, **knobs), strict=True):
        assert distance(state, server) < CLOSE
        compare_prototypes(state, prototypes)


def test_a_class_that_nobody_held_in_a_round_keeps_its_old_prototype_and_one_never_held_has_none():
    fed = small("prototypes", ("0011", "1122", "0033"), classes=5, seed=8)  # clients 1, 2, 1
    assert [some(1)(fed, number)[0][0] for number in (1, 2, 3)] == [1, 2, 1]
    found = list(fed.states(3, per_round=1))
    for state, (server, prototypes) in zip(found, plain_prototypes(fed, 3, some(1)), strict=True):
        assert distance(state, server) < CLOSE
        compare_prototypes(state, prototypes)
    assert torch.equal(found[0].sent["prototypes/mean"][1:3], found[1].sent["prototypes/mean"][1:3])
    assert not found[-1].sent["prototypes/known"][4]


def test_a_prototype_is_the_mean_feature_after_training_in_eval_mode_without_augmentation():
    """One client: the server's model is its own."""
    fed = small("prototypes", ("000112",), side=8, model="outside_models:batch_norm", augment=True)
    state = fed.run(1)
    compare_prototypes(state, local_prototypes(fed, 0, network_of(fed, state.tensors)))
    with torch.no_grad():
        raw = network_of(fed, state.tensors).train().encoder(pictures(fed, torch.arange(6))[0])
    assert (raw[:3].mean(0) - state.sent["prototypes/mean"][0]).abs().max() > 1e-3


def test_departs_from_the_paper_a_global_prototype_is_the_plain_mean_over_the_clients_that_saw_the_class():
    """Class 0: five examples here, one there; the two means count the same, and the third client not at all."""
    fed = small("prototypes", ("00000", "01", "11"))
    ((_, visited),) = plainly(fed, 1, cross_entropy)
    locals_ = [local_prototypes(fed, client, network) for client, network in visited]
    found = fed.run(1).sent["prototypes/mean"][0]
    torch.testing.assert_close(found, (locals_[0][0] + locals_[1][0]) / 2, rtol=0, atol=CLOSE)
    assert (found - (5 * locals_[0][0] + locals_[1][0]) / 6).abs().max() > 1e-4


def test_under_fedvc_a_prototype_is_of_the_examples_that_the_visit_drew_each_once():
    """Two visits to one client count as two."""
    fed, who = small("prototypes + fedvc(size=6)", ("00011122", "123")), virtual(3, 6)
    ((_, visited),) = plainly(fed, 1, cross_entropy, who=who, epochs=1)
    locals_ = []
    for (client, repeat, size, _), (_, network) in zip(who(fed, 1), visited, strict=True):
        key, local = fed.key.fold("round", 1).fold("client", client, repeat), replace(fed.blueprint.local, epochs=1)
        drawn = set(plan(examples_of(fed, client), size, local, key).index.flatten().tolist()) - {-1}
        locals_.append(local_prototypes(fed, client, network, sorted(drawn)))
    assert [client for client, *_ in who(fed, 1)] == [0, 0, 1]
    compare_prototypes(fed.run(1, per_round=3), means_over_clients(locals_))


def test_no_gradient_flows_into_prototypes():
    assert not any(value.requires_grad for state in small("prototypes").states(2) for value in state.sent.values())


# FedIR


@pytest.mark.parametrize(
    ("knobs", "weights"),
    [
        ("cap=0", [0.5 / 0.1, 0.3 / 0.4, 0.2 / 0.5]),
        ("cap=2", [2, 0.75, 0.4]),
        ("cap=0.5", [0.5, 0.5, 0.4]),
        ("smooth=0.25", [0.5 / (0.075 + 0.125), 0.3 / (0.3 + 0.075), 0.2 / (0.375 + 0.05)]),
        ("smooth=0.25, cap=1", [1, 0.3 / 0.375, 0.2 / 0.425]),
        ("smooth=1", [1, 1, 1]),
    ],
)
def test_fedirs_weights_and_their_gradient_by_hand(knobs, weights):
    """Client: 1, 4 and 5 of ten examples; cap is min(w, cap), smooth mixes the target into the client's shares."""
    each = np.array(weights)[Y]
    values, gradients = entropies(FEATURES)
    step = step_of(shared={"sent/fedir/target": np.array([0.5, 0.3, 0.2])}, counts=(1, 4, 5))
    value, gradient = loss_of(f'fedir("0.5 0.3 0.2", {knobs})', step)
    assert value == pytest.approx((each * values).sum() / each.sum(), abs=1e-13)
    np.testing.assert_allclose(gradient, each[:, None] * gradients / each.sum(), rtol=0, atol=1e-13)


def test_fedirs_weights_multiply_those_that_are_there_already():
    (importance,) = methods.parse_method("fedir(uniform)").terms
    step = step_of(shared={"sent/fedir/target": np.array([1.0, 1.0, 1.0]) / 3}, counts=(1, 4, 5))
    given = Loss(torch.tensor(entropies(FEATURES)[0]), torch.tensor([2.0, 3.0, 5.0, 7.0]).double())
    weights = np.array([2, 3, 5, 7]) / np.array([1, 4, 5])[Y]
    wanted = (weights * entropies(FEATURES)[0]).sum() / weights.sum()
    assert importance(given, step).value().item() == pytest.approx(wanted, abs=1e-13)


def plain_fedir(fed, rounds, target, who=everyone, epochs=None):
    def loss(own, server, images, labels, client, r):
        held = fed.data["train/labels"][examples_of(fed, client)].tolist()
        weights = torch.tensor([target[y] / (held.count(y) / len(held)) for y in labels.tolist()], dtype=torch.float64)
        each = torch.stack([F.cross_entropy(own(images)[i], labels[i]) for i in range(len(labels))])
        return (weights * each).sum() / weights.sum()

    return [server for server, _ in plainly(fed, rounds, loss, who=who, epochs=epochs)][-1]


ALL = "".join(HOLDS)
TARGETS = {
    "fedir": [ALL.count(label) / len(ALL) for label in "0123"],
    "fedir(uniform)": [0.25] * 4,
    'fedir("0.4 0.3 0.2 0.1")': [0.4, 0.3, 0.2, 0.1],
    'fedir("4, 3, 2, 1")': [0.4, 0.3, 0.2, 0.1],  # any scale: it cancels
}


@BOTH
@pytest.mark.parametrize("method", TARGETS)
def test_fedir_is_the_plain_loop_with_each_target(method, sgd):
    """Every client lacks a class, and the third holds one alone: its weights are all alike."""
    fed = small(method, **sgd)
    assert distance(fed.run(2), plain_fedir(fed, 2, TARGETS[method])) < CLOSE


@pytest.mark.parametrize("method", TARGETS)
def test_fedirs_target_is_sent_as_shares(method):
    found = small(method).run(1).sent["fedir/target"]
    np.testing.assert_allclose(found.numpy(), TARGETS[method], rtol=0, atol=1e-15)


def test_fedirs_population_is_asked_though_few_clients_come():
    fed = small("fedir")
    assert distance(fed.run(2, per_round=2), plain_fedir(fed, 2, TARGETS["fedir"], some(2))) < CLOSE


@pytest.mark.parametrize("method", ["fedir", "fedir(uniform)"])
def test_a_class_that_nobody_holds_needs_no_weight(method):
    fed = small(method, ("0012", "1112"), classes=5)
    target = [2 / 8, 4 / 8, 2 / 8] if method == "fedir" else [1, 1, 1]
    assert distance(fed.run(2), plain_fedir(fed, 2, target)) < CLOSE


def test_fedir_counts_the_clients_own_shares_not_those_of_the_visit():
    """Under fedvc a visit draws 4 of 9 examples; q_k is of the nine."""
    fed = small("fedir + fedvc(size=4)", ("001112223",))
    plain = plain_fedir(fed, 2, [2 / 9, 3 / 9, 3 / 9, 1 / 9], virtual(2, 4), epochs=1)
    assert distance(fed.run(2, per_round=2), plain) < CLOSE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fedir(cap=-1)", "cap must be 0 or more"),
        ("fedir(smooth=1.5)", "smooth must be between 0 and 1"),
        *(
            (f"fedir({target})", "give population, uniform, or a share above 0 for each class")
            for target in ('"0.5 0 0.3 0.2"', '"0.5 nan 0.3 0.2"', '"0.5 0.3 0.2 inf"', "everybody", '""')
        ),
        ('fedir("0.5 0.3 0.2")', "3 shares for 4 classes"),
    ],
)
def test_fedir_refuses_limits_and_targets_that_are_none(text, said):
    with pytest.raises(UserError, match=said):
        small(text).state()


# The classifier alone


def plain_clsprox(mu):
    def loss(own, server, images, labels, client, r):
        pairs = zip(own.classifier.parameters(), server.classifier.parameters(), strict=True)
        return F.cross_entropy(own(images), labels) + mu / 2 * sum((p - q.detach()).square().sum() for p, q in pairs)

    return loss


@BOTH
def test_clsprox_is_the_plain_loop(sgd):
    fed = small("clsprox(mu=0.7)", **sgd)
    assert distance(fed.run(2), [server for server, _ in plainly(fed, 2, plain_clsprox(0.7))][-1]) < CLOSE


def normed(own, server, images, labels, client, r):
    z = own.encoder(images)
    rows = own.classifier.weight
    logits = torch.stack([z @ row / row.square().sum().sqrt() for row in rows], 1)
    return F.cross_entropy(logits, labels)


@BOTH
@pytest.mark.parametrize("model", ["tiny-cnn", "outside_models:batch_norm"])
def test_clsnorm_is_the_plain_loop(model, sgd):
    """The bias has no gradient: weight decay alone moves it."""
    fed = small("clsnorm", model=model, **sgd)

    def loss(own, *rest):
        return normed(own, *rest) + 0 * own.classifier.bias.sum()

    server = [server for server, _ in plainly(fed, 2, loss)][-1]
    assert distance(fed.run(2), server) < CLOSE


def test_clsnorm_evaluates_with_unit_rows_and_as_used_gives_a_model_whose_plain_forward_does_too():
    fed = small("clsnorm", momentum=0.9)
    state = fed.run(2)
    network, used = network_of(fed, state.tensors), network_of(fed, driver.as_used(fed.algorithm, state.tensors))
    images, labels = pictures(fed, torch.arange(len(ALL)))  # the test images are the same
    with torch.no_grad():
        z, phi = network.encoder(images).numpy(), network.classifier.weight.numpy()
        logits = z @ (phi / np.sqrt((phi**2).sum(1, keepdims=True))).T
        np.testing.assert_allclose(used(images).numpy(), logits, rtol=0, atol=1e-13)
        assert (network(images).numpy() - logits).__abs__().max() > 1e-2
    assert torch.equal(used.classifier.bias, torch.zeros(4).double())

    loss = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(ALL)), labels])
    accuracy = np.mean(logits.argmax(1) == labels.numpy())
    for method, model in (("clsnorm", state.tensors), ("fedavg", driver.as_used(fed.algorithm, state.tensors))):
        other = fed.with_method(method)
        engine = other.open()
        found = evaluate(engine, model, len(ALL), Key(0))
        assert found.loss == pytest.approx(loss, abs=1e-13)
        assert found.accuracy == accuracy


def test_a_model_whose_classifier_is_used_as_it_is_is_given_as_it_is():
    state = small("fedavg").state()
    assert driver.as_used(small("fedavg").algorithm, state.tensors) is state.tensors


def test_the_plain_loop_is_fedavg():
    """The ruler itself: without a term it gives what the golden tests of FedAvg hold."""
    for sgd in SGD:
        fed = small("fedavg", model="outside_models:batch_norm", **sgd)
        assert distance(fed.run(2), [server for server, _ in plainly(fed, 2, cross_entropy)][-1]) < CLOSE
