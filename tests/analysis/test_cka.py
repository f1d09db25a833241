"""CKA by its laws: what it must not notice, what it must, and that batches change nothing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.finished import finished_run, undisturbed
from unskew.analysis import cka
from unskew.analysis.cka import Exact, Kernels, Similarity, kernel
from unskew.core.errors import Missing, UserError
from unskew.core.key import Key


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=Key(seed).fold("features").torch(), dtype=torch.float64).to(dtype)


def related(n=60, d=7, e=5):
    """Features of two models that see some of the same."""
    x = drawn(n, d)
    return x, x[:, :e] @ drawn(e, e, seed=1) + 0.7 * drawn(n, e, seed=2)


def rotation(d):
    return torch.linalg.qr(drawn(d, d, seed=9))[0]


def plain(x, y):
    """The definition by Gram matrices: tr(KHLH) / √(tr(KHKH)·tr(LHLH)), in NumPy; ours multiplies features instead."""
    n = len(x)
    centre = np.eye(n) - 1 / n
    k, m = (centre @ (z.numpy() @ z.numpy().T) @ centre for z in (x, y))
    return np.sum(k * m) / math.sqrt(np.sum(k * k) * np.sum(m * m))


def batched(sums, models, sizes):
    start = 0
    for size in sizes:
        some = [each[start : start + size] for each in models]
        sums.add(some if isinstance(sums, Exact) else [kernel(each) for each in some])
        start += size
    assert start == len(models[0])
    return sums.value()


def cka_of(x, y):
    """Ours, of all images at once."""
    return float(batched(Exact(), [x, y], [len(x)])[0, 1])


def sizes_of(n, batch):
    return [min(batch, n - start) for start in range(0, n, batch)]


# The definition


def test_cka_does_not_notice_rotation_scale_or_shift():
    x, y = related()
    there = cka_of(x, y)
    assert 0.05 < there < 0.95
    assert there == pytest.approx(plain(x, y), abs=1e-12)
    assert cka_of(x @ rotation(7), 3.5 * y @ rotation(5) + 11) == pytest.approx(there, abs=1e-12)
    assert cka_of(x, -0.01 * x @ rotation(7)) == pytest.approx(1, abs=1e-12)


# Batch by batch, exactly


@settings(max_examples=40)
@given(
    n=st.integers(2, 40), batch=st.integers(1, 41), mean=st.sampled_from([0.0, 1.0, -1e4, 1e4]), seed=st.integers(0, 50)
)
def test_batches_of_any_size_give_the_plain(n, batch, mean, seed):
    """With a mean of 10⁴ products are 10⁸ times what is left of them: sums that were not shifted lose eight digits."""
    models = [drawn(n, d, seed=seed + d) + mean for d in (3, 5, 4)]
    models[2] = models[0] @ drawn(3, 4, seed=7) + 0.1 * models[2]
    found = batched(Exact(), models, sizes_of(n, batch))
    for i, x in enumerate(models):
        for j, y in enumerate(models):
            assert found[i, j] == pytest.approx(plain(x - x.mean(0), y - y.mean(0)), abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", [[7], [3, 3, 1], [1] * 7])
def test_features_that_do_not_vary_are_like_none_and_no_nan(dtype, sizes):
    """A dead layer puts out its bias, such as 0.1, of which the mean of three is not 0.1."""
    constant = torch.full((7, 4), 0.1, dtype=dtype)
    found = batched(Exact(), [constant, drawn(7, 3, dtype=dtype), constant * 1e4], sizes)
    assert not found.isnan().any()
    wanted = torch.zeros(3, 3, dtype=torch.float64)
    wanted[1, 1] = 1
    assert torch.allclose(found, wanted, atol=1e-6)


def test_what_is_kept_does_not_grow_with_the_images():
    """Of k models with d features: d sums and d² products a pair."""
    sums = Exact()

    def kept():
        return sum(each.numel() for each in [*sums._shift, *sums._sums, *sums._products.values()])

    sums.add([drawn(5, 6), drawn(5, 4)])
    first = kept()
    assert first == 2 * (6 + 4) + 6 * 6 + 6 * 4 + 4 * 4
    for seed in range(20):
        sums.add([drawn(50, 6, seed=seed), drawn(50, 4, seed=seed)])
    assert kept() == first


# Batch by batch, without bias


def unbiased_hsic(x, y):
    """Song et al. 2012, equation 5, entry by entry: 1/(n(n − 3))·[tr(K̃L̃) + ΣK̃ΣL̃/((n − 1)(n − 2)) − 2/(n − 2)·1ᵀK̃L̃1]."""
    n = len(x)
    k, m = ([[0.0 if i == j else float(z[i] @ z[j]) for j in range(n)] for i in range(n)] for z in (x, y))
    trace = sum(k[i][j] * m[j][i] for i in range(n) for j in range(n))
    sums = sum(map(sum, k)) * sum(map(sum, m)) / ((n - 1) * (n - 2))
    both = sum(k[i][j] * m[j][h] for i in range(n) for j in range(n) for h in range(n))
    return (trace + sums - 2 / (n - 2) * both) / (n * (n - 3))


def test_the_unbiased_form_is_the_published_one():
    """Nguyen et al. 2021, equation 3: HSIC averaged over the batches, then the ratio."""
    x, y = related(21)
    cuts = [slice(0, 8), slice(8, 16), slice(16, 21)]
    hsic = {
        pair: sum(unbiased_hsic(pair_x[cut], pair_y[cut]) for cut in cuts)
        for pair, (pair_x, pair_y) in {"xy": (x, y), "xx": (x, x), "yy": (y, y)}.items()
    }
    found = batched(Kernels(2), [x, y], [8, 8, 5])
    assert found[0, 1] == pytest.approx(hsic["xy"] / math.sqrt(hsic["xx"] * hsic["yy"]), rel=1e-10)
    assert found[0, 1] == found[1, 0]
    assert found.diagonal() == pytest.approx(torch.ones(2), abs=1e-12)


def test_the_unbiased_form_comes_near_the_exact_one_on_many_images():
    x, y = related(4000)
    exact, estimated = (float(batched(form, [x, y], sizes_of(4000, 500))[0, 1]) for form in (Exact(), Kernels(2)))
    assert estimated == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@given(seed=st.integers(0, 30))
def test_features_that_do_not_vary_are_like_none_in_the_unbiased_form_too(dtype, seed):
    constant = (10 * drawn(1, 4, seed=seed, dtype=dtype)).repeat(12, 1)
    found = batched(Kernels(2), [constant, drawn(12, 3, dtype=dtype), 3 * constant], [7, 5])
    wanted = torch.zeros(3, 3, dtype=torch.float64)
    wanted[1, 1] = 1
    assert torch.allclose(found, wanted, atol=1e-6), found


@given(seed=st.integers(0, 200), n=st.integers(4, 30), d=st.sampled_from([1, 3, 90]))
def test_kernels_of_all_images_at_once_give_the_plain(seed, n, d):
    x, y = drawn(n, d, seed=seed) + 5, drawn(n, 2, seed=seed + 1000)
    found = batched(Kernels(1), [x, y], [n])
    assert float(found[0, 1]) == pytest.approx(plain(x, y), abs=1e-10)
    assert found.diagonal().tolist() == pytest.approx([1, 1])


# Of a run


def test_layers_stand_in_the_order_of_the_network_and_clients_are_those_of_the_next_round(finished):
    with finished_run(finished) as opened, undisturbed():
        found = cka.take_cka(opened)
        coming = opened.algorithm.sampler(opened.key.fold("round", 4, "sample"), opened.engine.roster, 4)
    assert found.layers == ["conv1", "conv2", "fc1", "classifier"]
    assert found.clients == [str(visit.client) for visit in coming]
    assert (found.round, found.images) == (3, 120)


@pytest.mark.parametrize("activated", [False, True])
def test_pairs_are_the_definition_on_outputs_found_without_hooks(finished, monkeypatch, activated):
    """Layer by layer by hand, all 120 images at once; an activated output is what enters the next layer."""
    monkeypatch.setattr(cka, "WIDE", 5000)
    monkeypatch.setattr(cka, "IMAGES_AT_ONCE", 50)
    with finished_run(finished) as opened:
        found = cka.take_cka(opened, images=120, activated=activated)
        network, images = opened.side.network, opened.side.test.batch(torch.arange(120))[0]
        outputs = []
        for model in opened.local_models(3).values():
            opened.side.load(model, training=False)
            x, before, after = images, [], []
            with torch.no_grad():
                for name, part in network.encoder.named_children():
                    if name in ("conv2", "fc1"):
                        before.append(x.flatten(1).double())
                    x = part(x)
                    if name in ("conv1", "conv2", "fc1"):
                        after.append(x.flatten(1).double())
                own = [*before, x.double()] if activated else after
                outputs.append([*own, network.classifier(x).double()])
    assert (found.estimated, found.activated) == ([], activated)
    assert found.layers == ["conv1", "conv2", "fc1", "classifier"]
    assert ("after the activation" in cka.CKA.draw(found)[0].title) == activated
    for layer, (table, mean) in enumerate(zip(found.pairs, found.means, strict=True)):
        for i, one in enumerate(outputs):
            for j, other in enumerate(outputs):
                assert table[i][j] == pytest.approx(plain(one[layer], other[layer]), abs=1e-5)
        apart = [value for i, row in enumerate(table) for j, value in enumerate(row) if i != j]
        assert mean == pytest.approx(sum(apart) / len(apart), abs=1e-12)
        assert max(map(max, table)) <= 1 + 1e-6


def test_fewer_clients_are_taken_evenly(finished):
    with finished_run(finished) as opened:
        all_of_them = list(opened.local_models(0))
        assert cka.take_cka(opened, clients=2, round=0).clients == [str(all_of_them[0]), str(all_of_them[-1])]


def test_fewer_than_two_clients_or_four_images_compare_nothing(finished, runs_of):
    for run, knobs in ((finished, {"clients": 1}), (finished, {"images": 3}), (runs_of(per_round=1), {})):
        with finished_run(run) as opened, pytest.raises(Missing, match="at least two clients on at least four images"):
            cka.take_cka(opened, **knobs)


@pytest.mark.parametrize("number", [4, -2])
def test_a_round_that_never_was_is_refused(finished, number):
    with finished_run(finished) as opened, pytest.raises(UserError, match=f"round {number}: the run has rounds 1 to 3"):
        cka.take_cka(opened, round=number)


def test_layers_wider_than_the_limit_are_estimated_and_said_to_be(finished, monkeypatch):
    with finished_run(finished) as opened:
        monkeypatch.setattr(cka, "WIDE", 1024)  # conv1 has 16·8·8 = 1024 outputs, conv2 32·4·4 = 512, fc1 64
        exact = cka.take_cka(opened)
        monkeypatch.setattr(cka, "WIDE", 511)
        small = cka.take_cka(opened)
        monkeypatch.setattr(cka, "AT_ONCE", 10)
        monkeypatch.setattr(cka, "IMAGES_AT_ONCE", 60)
        found = cka.take_cka(opened)
    assert (exact.estimated, small.estimated, found.estimated) == ([], [], ["conv1", "conv2"])
    assert torch.tensor(small.pairs).sub(torch.tensor(exact.pairs)).abs().max() < 1e-4  # all at once: the same
    assert torch.tensor(found.pairs[2:]).sub(torch.tensor(exact.pairs[2:])).abs().max() < 1e-4
    assert found.means[0] == pytest.approx(exact.means[0], abs=0.05)


def test_networks_that_work_otherwise_in_training_are_looked_at_as_they_are_used(runs_of):
    """BatchNorm takes the batch's own mean in training, and would move its buffers: 120 images at once or 40."""
    with (
        finished_run(runs_of(model="outside_models:batch_norm", rounds=1)) as opened,
        pytest.MonkeyPatch.context() as m,
    ):
        whole = cka.take_cka(opened)
        opened.side.network.train()
        m.setattr(cka, "IMAGES_AT_ONCE", 40)
        m.setattr(cka, "WIDE", 5000)
        parts = cka.take_cka(opened)
        m.setattr(cka, "IMAGES_AT_ONCE", 500)
        once = cka.take_cka(opened)
    assert parts.layers == whole.layers == ["0", "classifier"]
    for left, right in zip(parts.pairs, once.pairs, strict=True):
        assert torch.allclose(torch.tensor(left), torch.tensor(right), atol=1e-6)


# In words


def similarity(*means, layers=("conv1", "fc1", "classifier")):
    table = [[1.0, 0.5], [0.5, 1.0]]
    return Similarity(3, 10, [0, 2], list(layers), [table] * len(means), list(means), [])


def test_the_least_similar_layer_is_named():
    assert cka.CKA.findings(similarity(0.9, 0.8, 0.4)) == [
        "The least similar layer across clients is the classifier (CKA 0.40); the most similar is conv1 (0.90). With "
        "depth, similarity falls at every step."
    ]
    assert cka.CKA.findings(similarity(0.9, 0.2, 0.4)) == [
        "The least similar layer across clients is fc1 (CKA 0.20), not the classifier (0.40); the most similar is "
        "conv1 (0.90). With depth, similarity falls at 1 of 2 steps."
    ]


def uneven(offsets, gap):
    """Two layers of as many clients as offsets: the second is less alike by ``gap``, and by more at some clients."""
    first = 0.6 + 0.0 * np.add.outer(offsets, offsets)
    second = first - gap - np.add.outer(offsets, offsets)
    apart = ~np.eye(len(offsets), dtype=bool)
    tables = [np.where(apart, each, 1.0) for each in (first, second)]
    means = [float(each[apart].mean()) for each in tables]
    return Similarity(
        3, 10, list(range(len(offsets))), ["fc1", "classifier"], [t.tolist() for t in tables], means, []
    )  # fmt: skip


def test_a_layer_is_called_least_similar_only_where_other_clients_would_not_change_that():
    even = uneven(np.zeros(6), 0.02)
    assert cka.differ_clearly(even, 1, 0)
    assert "The least similar layer across clients is the classifier" in cka.CKA.findings(even)[0]
    mixed = uneven(np.array([0.2, -0.2, 0.1, -0.1, 0.05, -0.05]), 0.02)
    assert not cka.differ_clearly(mixed, 1, 0)
    (said,) = cka.CKA.findings(mixed)
    assert said.startswith(
        "The least similar layers across clients are the classifier (0.580) and fc1 (0.600), statistically tied"
    )


def test_the_jackknife_is_its_plain():
    draw = Key(5).numpy()
    tables = draw.uniform(0.3, 0.9, (2, 7, 7))
    tables = (tables + tables.transpose(0, 2, 1)) / 2
    keep = ~np.eye(7, dtype=bool)
    gap = tables[0] - tables[1]
    without = [gap[np.ix_(rest, rest)][~np.eye(6, dtype=bool)].mean() for rest in
               ([c for c in range(7) if c != out] for out in range(7))]  # fmt: skip
    error = np.sqrt(6 / 7 * np.square(without - np.mean(without)).sum())
    for shift in (1.9, 2.1):  # standard errors between the two
        moved = tables[0] - gap[keep].mean() + shift * error
        means = [float(each[keep].mean()) for each in (tables[1], moved)]
        both = Similarity(3, 10, list(range(7)), ["a", "b"], [tables[1].tolist(), moved.tolist()], means, [])
        assert means[1] - means[0] == pytest.approx(shift * error)
        assert cka.differ_clearly(both, 0, 1) == (shift > 2)


def test_a_network_of_one_layer_is_not_said_to_fall():
    (said,) = cka.CKA.findings(similarity(0.4, layers=("classifier",)))
    assert "not the classifier" not in said
    assert "falls" not in said


def test_a_picture_for_the_means_and_one_a_layer():
    charts = cka.CKA.draw(similarity(0.9, 0.8, 0.4))
    assert [chart.name for chart in charts] == ["cka-means", "cka-conv1", "cka-fc1", "cka-classifier"]
    assert "0.900" in charts[0].alt
    assert charts[1].marks[0].tips[0][1] == "conv1, clients 0 and 2: 0.500"
