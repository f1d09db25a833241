"""Every method trains on a device as on the CPU, bit for bit, and finds its tensors where they belong."""

from dataclasses import replace

import pytest
import torch
from placed import SEEN, on, side_of, small

from federation import image_set, same, total
from unskew import models
from unskew.checks import QUICK
from unskew.core.key import Key
from unskew.core.types import Failure, Reply, ServerState, TestPart, Visit
from unskew.engines.blueprint import Blueprint
from unskew.engines.loop import Loop
from unskew.methods import METHODS
from unskew.models.conv_pool import ConvPool
from unskew.round import driver, statistics
from unskew.round.client import Survey, Train
from unskew.round.evaluation import Evaluate
from unskew.round.jobs import answer

CPU = torch.device("cpu")
JOBS = [Train(), Evaluate(by_image=True), Survey(), Train(1, ("norms", "drift", "model"))]


def all_on_cpu(state: ServerState) -> bool:
    return {value.device for value in (state.tensors | state.memory | state.sent).values()} == {CPU}


@pytest.mark.parametrize("name", [*METHODS, "moon + scaffold + fedir", "feddyn + moon + prototypes + clsnorm"])
def test_every_method_gives_the_same_bits_as_on_the_cpu(home, name):
    here = small(QUICK.get(name, name))
    state = on(home.device, here).run(3)
    assert all_on_cpu(state)
    assert same(state, here.run(3))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny-cnn", {"augment": True, "images": image_set(40, channels=3)}),
        ("outside_models:batch_norm", {}),
        ("outside_models:norms", {}),
        ("outside_models:constant", {"method": "moon"}),
        ("lenet-64", {}),
        ("simple-cnn", {"images": image_set(40, side=16), "method": "moon"}),
    ],
)
def test_every_kind_of_network_and_augmentation_gives_the_same_bits(home, model, options, monkeypatch):
    monkeypatch.setattr(ConvPool, "forward", ConvPool.plain)  # the CPU's own form of it rounds otherwise
    monkeypatch.setattr("unskew.round.client.build_passes", lambda network: None)
    here = small(model=model, **options)
    assert same(on(home.device, here).run(2), here.run(2))


def test_a_network_starts_with_the_same_weights_wherever_it_is(home):
    there = on(home.device, small())
    side = side_of(there)
    models.initialise(side.network, Key(3))
    assert {value.device for value in side.weights.values()} == {home.device}
    other = side_of(small())
    models.initialise(other.network, Key(3))
    assert all(torch.equal(value.cpu(), other.weights[name]) for name, value in side.weights.items())
    assert all_on_cpu(there.state())


def test_training_is_on_the_device_and_what_follows_it_on_the_cpu(home):
    SEEN.clear()
    on(home.device, small("placed:looking + fedir + prototypes")).run(3)
    for kind, where in (("term", home.device), ("correction", home.device), ("after", CPU)):
        seen = {name for slot, name, _ in SEEN if slot == kind}
        assert {(name, device) for slot, name, device in SEEN if slot == kind} == {(name, where) for name in seen}
        assert len(seen) > 10
    assert {"counts", "remembered model", "shared model", "step sent/prototypes/mean"} <= {name for _, name, _ in SEEN}
    assert {"survey counts", "features", "looking/params/classifier.bias"} <= {name for _, name, _ in SEEN}


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedir + fedprox", "feddyn"])
def test_more_steps_neither_make_the_host_wait_nor_copy_more_often(home, method):
    counts = []
    for epochs in (1, 1, 5):  # the first fills a cache
        before = home.waits.total(), home.arrivals
        on(home.device, small(method, epochs=epochs, augment=True)).run(1)
        counts.append((home.waits.total() - before[0], home.arrivals - before[1]))
    assert counts[1] == counts[2]
    assert min(counts[1]) > 0


def test_a_batch_may_be_asked_for_from_the_cpu(each_home):
    """As measures do, which draw which images they look at."""
    here = small(images=image_set(40, channels=3))
    index, flip = torch.tensor([3, 0, 5]), torch.tensor([True, False, True])
    shift = torch.tensor([[0, 8], [4, 4], [7, 1]], dtype=torch.uint8)
    for draws in ((), (shift, flip)):
        images, labels = side_of(here).train.batch(index, *draws)
        others, other_labels = side_of(on(each_home.device, here)).train.batch(index, *draws)
        assert others.device == other_labels.device == each_home.device
        assert torch.equal(images, others.cpu())
        assert torch.equal(labels, other_labels.cpu())


def test_what_the_server_sends_is_copied_once_a_round(home):
    side = side_of(on(home.device, small()))
    shared = {name: value.cpu() for name, value in side.weights.items()}
    first = side.received(shared)
    assert {value.device for value in first.values()} == {home.device}
    assert side.received(shared) is first
    arrived = home.arrivals
    side.load(shared, training=True)
    assert home.arrivals == arrived
    assert side.received(dict(shared)) is not first
    plain = side_of(small())
    assert plain.received(shared) is shared


def test_a_run_may_go_on_on_another_device(home, tmp_path):
    here = small("moon + scaffold")
    there = on(home.device, here)
    for name, first, second in (("a", here, there), ("b", there, here)):
        folder = tmp_path / name
        folder.mkdir()
        half = first.run(2, folder=folder, rounds_planned=4)
        assert same(second.run(4, state=half, folder=folder), here.run(4))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_sums_leave_a_client_on_the_cpu_and_are_those_of_the_cpu(home, job):
    here = small("fedir + prototypes")
    outcomes = []
    for each in (here, on(home.device, here)):
        state = each.state()
        engine = Loop(side_of(each))
        if isinstance(job, Train):
            state, _ = driver.survey(each.algorithm, engine, state, each.key)
        visits = [Visit(0, 2.0), Visit(1, 1.0)] if not isinstance(job, Evaluate) else [TestPart(0, 5)]
        outcome = total(engine, job, statistics.build_shared(state), visits, Key(1).fold("round", 1))
        assert not outcome.failures
        found = outcome.sums | {f"{n}/{name}": value for n, x in outcome.extra.items() for name, value in x.items()}
        assert {value.device for value in found.values()} == {CPU}
        outcomes.append(found)
    assert list(outcomes[0]) == list(outcomes[1])
    assert all(torch.equal(value, outcomes[1][name]) for name, value in outcomes[0].items())


def test_a_job_whose_sums_are_on_the_device_has_them_moved():
    from pretend import PretendDevice

    with PretendDevice("cuda:0"):
        there = torch.ones(2, dtype=torch.float64).to("cuda:0")
        done = answer(side_of(small()), lambda *given: Reply({"x": there}), {}, Visit(0, 1.0), Key(0))
        assert not isinstance(done, Failure)
        assert done.sums["x"].device == CPU


def test_a_blueprint_says_its_device_and_is_on_the_cpu_without_one():
    blueprint = small().blueprint
    assert blueprint.device == "cpu"
    there = replace(blueprint, device="cuda:1")
    assert Blueprint.from_json(there.to_json()) == there
