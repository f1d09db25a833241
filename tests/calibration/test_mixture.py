"""K-means over a federation is k-means on the pooled features, whoever holds them."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.heads import normal
from unskew.calibration.covariances import Gaussians
from unskew.calibration.jobs import PASSES, by_part, find_centres, move_centres
from unskew.calibration.statistics import ClassStatistics
from unskew.core.key import Key

C, K, D = 3, 2, 4
KEY = Key(3)


def examples(count=60, seed=0):
    """Class 1 is nobody's."""
    labels = 2 * (torch.arange(count) % 2)
    return normal(count, D, seed=seed) + labels[:, None], labels


def asked(features, labels, clients, components=K, form="diagonal"):
    """What clients answer under given centres, added up; ``clients`` [n] says who holds which example."""

    def ask(centres):
        relabel, parts = by_part(centres), []
        for client in sorted(set(clients.tolist())):
            own = features[clients == client], labels[clients == client]
            parts.append(ClassStatistics.of_features(own[0], relabel(*own), C * components, form))
        return ClassStatistics.merged(parts)

    return ask


def lloyd(centres, features, labels):
    """One pass of Lloyd's algorithm in numpy, class by class, on all features at once."""
    made = centres.numpy().copy()
    for label in range(C):
        own = features[labels == label].numpy()
        if not len(own):
            continue
        nearest = ((own[:, None] - centres[label].numpy()) ** 2).sum(2).argmin(1)
        for part in range(centres.shape[1]):
            if (nearest == part).any():
                made[label, part] = own[nearest == part].mean(0)
    return made


@settings(max_examples=30)
@given(owners=st.lists(st.integers(0, 4), min_size=60, max_size=60), components=st.integers(1, 4))
def test_moved_centres_are_lloyds_on_the_pooled_features_for_any_split_into_clients(owners, components):
    features, labels = examples()
    centres = normal(C, components, D, seed=5)
    ask = asked(features, labels, torch.tensor(owners), components)
    for _ in range(3):
        wanted = lloyd(centres, features, labels)
        centres = move_centres(centres, ask(centres))
        assert np.allclose(centres, wanted, rtol=0, atol=1e-12)


def test_a_centre_that_nothing_is_near_to_stays_and_so_do_those_of_absent_classes():
    features, labels = examples()
    centres = normal(C, K, D, seed=5)
    centres[0, 1] = 1e6
    found = move_centres(centres, asked(features, labels, labels)(centres))
    assert torch.equal(found[0, 1], centres[0, 1])
    assert torch.equal(found[1], centres[1])
    assert not torch.equal(found[2], centres[2])


def test_a_feature_belongs_to_the_nearest_centre_of_its_own_class():
    centres = torch.zeros(C, 3, 1, dtype=torch.float64)
    centres[0, :, 0] = torch.tensor([0.0, 10, 20])
    centres[2, :, 0] = torch.tensor([9.0, 0, -9])
    features = torch.tensor([[1.0], [9], [19], [8], [-8], [1]])
    labels = torch.tensor([0, 0, 0, 2, 2, 2])
    assert by_part(centres)(features, labels).tolist() == [0, 1, 2, 6, 8, 7]
    assert labels.tolist() == [0, 0, 0, 2, 2, 2]


def test_no_feature_and_one_component_are_no_trouble():
    centres = normal(C, K, D)
    assert by_part(centres)(torch.zeros(0, D), torch.zeros(0, dtype=torch.int64)).tolist() == []
    features, labels = examples()
    assert torch.equal(by_part(centres[:, :1])(features, labels), labels)


def test_far_from_zero_the_nearest_is_still_the_nearest():
    """‖x‖² + ‖c‖² − 2xᵀc would lose the difference to rounding."""
    features, labels = examples(200)
    centres = normal(C, K, D, seed=5) + torch.arange(C)[:, None, None]
    near, far = (by_part(centres + shift)(features + shift, labels) for shift in (0, 2.0**26))
    assert torch.equal(near, far)


def test_how_features_are_cut_into_batches_does_not_matter():
    features, labels = examples(200)
    relabel = by_part(normal(C, 5, D, seed=5))
    whole = relabel(features, labels)
    for size in (1, 7, 30, 199):  # below 25 rows PyTorch may measure otherwise
        parts = [relabel(*some) for some in zip(features.split(size), labels.split(size), strict=True)]
        assert torch.equal(torch.cat(parts), whole)


def test_centres_begin_at_virtual_features_and_are_asked_for_so_many_passes():
    features, labels = examples()
    whole = ClassStatistics.of_features(features, labels, C)
    seen, ask = [], asked(features, labels, labels)

    def watched(centres):
        seen.append(centres.clone())
        return ask(centres)

    found = find_centres(whole, K, watched, KEY)
    assert len(seen) == PASSES
    for place, label in ((0, 0), (1, 2)):
        assert torch.equal(seen[0][label], Gaussians(whole).draw(place, K, KEY.fold("centres"))[0])
    assert not bool((torch.cdist(seen[0].flatten(0, 1), features) < 1e-9).any())  # nobody's own feature
    assert torch.equal(seen[0][1], torch.zeros(K, D))
    for before, after in zip(seen, [*seen[1:], found], strict=True):
        assert np.allclose(after, lloyd(before, features, labels), rtol=0, atol=1e-12)


def test_a_key_names_the_centres_and_nobody_is_disturbed():
    features, labels = examples()
    whole, ask = ClassStatistics.of_features(features, labels, C), asked(features, labels, labels)
    state = torch.random.get_rng_state()
    one, again, other = (find_centres(whole, K, ask, key) for key in (KEY, KEY, Key(4)))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), state)
