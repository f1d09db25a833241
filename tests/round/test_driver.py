"""A round and its line of metrics, worked out by hand on a tiny federation; evaluation against a direct computation."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from federation import federation, image_set
from unskew.core import tensors
from unskew.core.errors import ClientFailure
from unskew.core.key import Key
from unskew.core.types import Visit
from unskew.engines.blueprint import build
from unskew.round import client, driver, evaluation
from unskew.round.evaluation import evaluate

SIZES = (5, 0, 3, 1)


def one_round(small, state=None, per_round=9, **options):
    engine = small.open()
    return driver.run_round(small.algorithm, engine, state or small.state(), small.key, per_round=per_round, **options)


def logits_of(small, state, part="test", index=slice(None)):
    """Logits under the state's model and the labels, without any of the round's code."""
    network = build(small.blueprint, small.data).network
    network.load_state_dict({name.partition("/")[2]: value for name, value in state.tensors.items()})
    pixels = small.data[f"{part}/images"][index].double() / 255
    mean, std = (small.data[name].view(1, -1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        return network.eval()((pixels - mean) / std), small.data[f"{part}/labels"][index]


def own_loss(small, state, which):
    """A client's mean cross-entropy."""
    examples = build(small.blueprint, small.data).population.examples(which)
    return F.cross_entropy(*logits_of(small, state, "train", torch.from_numpy(examples.astype("int64")))).item()


def test_the_numbers_of_a_round():
    """Clients of 5, 3 and 1 examples, 2 epochs, batch 2: 2·⌈5/2⌉ = 6 steps for the largest, 2·9 = 18 examples."""
    small = federation(sizes=SIZES, images=image_set(12), epochs=2, batch=2)
    state, row = one_round(small)
    size = sum(value.numel() * 8 for value in state.tensors.values())
    assert (state.round, row.round) == (1, 1)
    assert (row.clients, row.examples, row.batches_max) == (3, 18, 6)
    assert row.bytes_up == row.bytes_down == 3 * size
    assert row.seconds > 0
    assert (row.failures, row.accuracy, row.loss) == ((), None, None)


def test_the_training_loss_is_the_mean_over_all_examples_seen():
    """With a rate of 0 the model stands still, so every step sees the first one's loss."""
    small = federation(sizes=SIZES, images=image_set(12), epochs=3, batch=2, lr=0.0, weight_decay=0.0)
    state, row = one_round(small)
    by_hand = (5 * own_loss(small, state, 0) + 3 * own_loss(small, state, 2) + own_loss(small, state, 3)) / 9
    assert row.train_loss == pytest.approx(by_hand, rel=1e-12)


def test_the_training_loss_is_taken_before_each_step():
    """One client, one example, two steps: the mean of the loss at the start and the loss after one step."""
    images = image_set(12)
    once = federation(sizes=(1,), images=images, epochs=1, momentum=0.0)
    twice = federation(sizes=(1,), images=images, epochs=2, momentum=0.0)
    after, first = one_round(once)
    _, both = one_round(twice)
    assert first.train_loss == pytest.approx(own_loss(once, once.state(), 0), rel=1e-12)
    assert both.train_loss == pytest.approx((first.train_loss + own_loss(once, after, 0)) / 2, rel=1e-12)


def test_the_largest_number_of_batches_is_that_of_the_largest_client_that_came():
    small = federation(sizes=(40, 2, 2, 2), images=image_set(46), epochs=1, batch=2)
    rows = [one_round(replace(small, key=Key(seed)), per_round=1)[1] for seed in range(12)]
    assert {(row.examples, row.batches_max) for row in rows} == {(2, 1), (40, 20)}


def test_rounds_go_on_from_where_the_state_stands():
    small = federation(sizes=SIZES, images=image_set(12))
    engine = small.open()
    rows = list(driver.run(small.algorithm, engine, small.state(), small.key, rounds=3, per_round=2))
    assert [(state.round, row.round) for state, row in rows] == [(1, 1), (2, 2), (3, 3)]
    assert list(driver.run(small.algorithm, engine, rows[-1][0], small.key, rounds=3, per_round=2)) == []
    assert len(list(driver.run(small.algorithm, engine, rows[0][0], small.key, rounds=3, per_round=2))) == 2


def test_the_state_before_the_first_round_has_memory_of_its_own():
    small = federation("fedavgm(0.9)", sizes=SIZES, images=image_set(12))
    model = small.state().tensors
    state = driver.start(small.algorithm, model)
    model["params/classifier.bias"].fill_(99)
    assert not bool((state.tensors["params/classifier.bias"] == 99).any())
    assert set(state.memory) == {f"velocity/{name}" for name in model}
    assert all(not value.any() for value in state.memory.values())


# Buffers


def trained_alone(small, state, number):
    """Each client's own model after its visit, with its weight."""
    side = build(small.blueprint, small.data)
    found = []
    for which in range(side.population.clients):
        key = small.key.fold("round", number).fold("client", which, 0)
        size = side.population.roster.size(which)
        client.Train()(side, state.tensors, Visit(which, float(size)), key)
        found.append((size, tensors.copy(tensors.of_module(side.network))))
    return found


@pytest.mark.parametrize("method", ["fedavgm(0.9)", "fedadam", "fedavg(lr=0.5)", "fednova"])
def test_buffers_are_averaged_plainly_whatever_the_server_does(method):
    """Also in the third round, when momentum would have pushed a running variance far off; counts are rounded."""
    small = federation(method, sizes=(9, 2, 4), images=image_set(15), model="outside_models:batch_norm", batch=4)
    state = small.state()
    for number in (1, 2, 3):
        alone = trained_alone(small, state, number)
        before = state
        state, _ = one_round(small, state)
        total = sum(size for size, _ in alone)
        for name, value in state.tensors.items():
            mean = sum(size * model[name].double() for size, model in alone) / total
            if name.startswith("params/"):
                if number > 1:
                    assert (value - mean).abs().max() > 1e-6  # the server does something to parameters
            elif name.endswith("num_batches_tracked"):
                assert value.dtype == torch.int64
                assert value.item() == round(mean.item())
                assert value.item() > before.tensors[name].item()
            else:
                assert (value - mean).abs().max() < 1e-14
                assert not torch.equal(value, before.tensors[name])
    assert bool((state.tensors["buffers/encoder.1.running_var"] > 0).all())
    assert not any("buffers" in name for name in state.memory)


# Evaluation


@pytest.mark.parametrize("model", ["tiny-cnn", "outside_models:batch_norm"])
@pytest.mark.parametrize("chunk", [1, 7, 40, 500])
def test_accuracy_and_loss_are_the_direct_ones_whatever_the_chunks(monkeypatch, chunk, model):
    small = federation(model=model, images=image_set(120))
    state = small.run(2)
    monkeypatch.setattr(evaluation, "IMAGES_AT_ONCE", chunk)
    engine = small.open()
    found = evaluate(engine, state.tensors, len(small.data["test/labels"]), small.key)
    logits, labels = logits_of(small, state)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    assert found.accuracy == accuracy
    assert found.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-12)
    assert 0.3 < accuracy < 1  # something was learnt, not all: a wrong count would show


def test_evaluation_leaves_the_model_alone_and_draws_nothing():
    small = federation(model="outside_models:batch_norm")
    engine = small.open()
    state = small.state()
    before = tensors.sha256(state.tensors)
    found = {evaluate(engine, state.tensors, 30, Key(seed)) for seed in range(2)}
    assert len(found) == 1
    assert tensors.sha256(state.tensors) == before


def test_a_model_that_is_not_a_number_is_not_evaluated():
    small = federation()
    engine = small.open()
    broken = {name: torch.full_like(value, float("nan")) for name, value in small.state().tensors.items()}
    with pytest.raises(ClientFailure, match=r"the model on the test images, job evaluate: .*NaN or infinity"):
        evaluate(engine, broken, 30, small.key)
