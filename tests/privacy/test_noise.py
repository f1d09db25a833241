"""One example moves the statistics by no more than is said, and the noise is as large as that needs."""

import math
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.calibration.calibrate import calibrate
from unskew.calibration.covariances import pack, packed_diagonal
from unskew.calibration.protection import SENSITIVITY, Guarantee, Layout, add_noise, clip_features, drop_small_classes
from unskew.calibration.statistics import ClassStatistics, check_statistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.privacy.noise import GRID_BITS, add_gaussian, normal, raise_deviation

accounting = pytest.importorskip("dp_accounting")

C, D = 4, 3
FORMS = ("full", "diagonal", "shared")


def features_of(seed, count, scale=3.0, classes=C, width=D):
    generator = Key(seed).fold("features").torch()
    features = torch.randn(count, width, generator=generator, dtype=torch.float64) * scale
    return features, torch.randint(0, classes, (count,), generator=generator)


def large(form, number=1_000_000, classes=C, width=D, radius=2.0):
    """Statistics of so many examples a class that noise cannot make a variance negative, nor a class small."""
    square = number * radius**2 / (2 * width)
    sums = {"sums": torch.zeros(classes, width, dtype=torch.float64)}
    if form == "diagonal":
        sums["squares"] = torch.full((classes, width), square, dtype=torch.float64)
    else:
        second = square * pack(torch.eye(width, dtype=torch.float64))
        sums["second"] = classes * second if form == "shared" else second.repeat(classes, 1)
    empty = ClassStatistics.empty(classes, width, form)
    return replace(empty, held=torch.arange(classes), number=torch.full((classes,), number), sums=sums)


def add_noise_quietly(*arguments, **knobs):
    """add_noise, where it is no news that classes are dropped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return add_noise(*arguments, **knobs)


def in_units_of_noise(statistics, radius):
    """The statistics for all classes as one vector whose noise has the standard deviation sigma in every entry.

    Of a symmetric matrix: its diagonal, and its upper triangle times √2, since the noise there is smaller by as much.
    """
    parts = [statistics.counts.double()]
    for name, value in statistics.sums.items():
        power = 1 if name == "sums" else 2
        if name == "second":
            value = 2**0.5 * value
            value[..., packed_diagonal(statistics.width)] = statistics.squares()
        if str(statistics.form) == "shared" and name == "second":
            parts.append(value.flatten() / radius**power)
        else:
            whole = torch.zeros(statistics.classes, value.shape[-1], dtype=torch.float64)
            parts.append(whole.index_copy(0, statistics.held, value).flatten() / radius**power)
    return torch.cat(parts)


@settings(max_examples=40)
@given(
    form=st.sampled_from(FORMS), seed=st.integers(0, 10**6), count=st.integers(0, 8),
    radius=st.floats(0.01, 100), scale=st.sampled_from([0.01, 1.0, 100.0]),
)  # fmt: skip
def test_one_example_more_moves_the_statistics_by_the_sensitivity_at_most(form, seed, count, radius, scale):
    """Any data set, any of its examples left out: the distance in units of the noise, by brute force."""
    features, labels = features_of(seed, count + 1, scale)
    features = clip_features(features, radius)
    whole = in_units_of_noise(ClassStatistics.of_features(features, labels, C, form), radius)
    for left_out in range(count + 1):
        rest = torch.arange(count + 1) != left_out
        neighbour = ClassStatistics.of_features(features[rest], labels[rest], C, form)
        assert float((whole - in_units_of_noise(neighbour, radius)).norm()) <= SENSITIVITY * (1 + 1e-9)


def test_the_sensitivity_is_reached():
    """By an example of length R; a smaller noise would not do."""
    for form in FORMS:
        one = ClassStatistics.of_features(torch.tensor([[0.0, 5.0, 0.0]]), torch.tensor([1]), C, form)
        assert float(in_units_of_noise(one, 5.0).norm()) == pytest.approx(SENSITIVITY, rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("steps", "width"), [(26, 64), (160, 256), (10**6, 64)])  # of z²; R is 0.01, 0.05, 2
def test_the_sensitivity_holds_after_the_worst_rounding_of_a_secure_sum(form, steps, width):
    """The other examples' sums are such that every entry is rounded a whole step away; 0.999·R was not short enough."""
    layout = Layout.of(1, width, form)
    step = 2.0**-layout.bits
    radius = math.sqrt(step * steps * width) * (1 + 1e-9) / 0.999

    def moved(length):
        whole = step * math.floor(length**2 / width / step)
        entry = math.sqrt(whole) * (1 + 1e-10)  # its square is whole steps and a bit
        feature = torch.full((1, width), entry, dtype=torch.float64)
        one = ClassStatistics.of_features(feature, torch.tensor([0]), 1, form)

        def base(value):  # half a step above whole steps, less half of that bit, which makes it cross to the next step
            return step * (1000.5 - (value / step).frac() / 2)

        others = {name: base(value) for name, value in one.sums.items()}
        without = replace(one, sums=others)
        both = replace(one, number=one.number + 1, sums={name: others[name] + one.sums[name] for name in others})
        left, right = (layout.statistics(layout.quantise(each, 2, "a"), "a") for each in (both, without))
        return float((in_units_of_noise(left, radius) - in_units_of_noise(right, radius)).norm())

    assert moved(layout.shorter(radius)) <= SENSITIVITY
    if steps < 1000 and form != "diagonal":
        assert moved(0.999 * radius) > SENSITIVITY  # what was done before


def test_a_radius_too_short_for_the_fixed_point_is_refused_with_one_that_is_not():
    layout = Layout.of(10, 256)
    with pytest.raises(
        UserError, match=r"clip=0.001 is too small for a secure sum of 256 features in steps of 2\^-24: ro"
    ):
        layout.shorter(0.001)
    for form in FORMS:
        layout = Layout.of(10, 256, form)
        with pytest.raises(UserError, match="give clip=") as said:
            layout.shorter(1e-6)
        least = float(str(said.value).split("give clip=")[1].split(" ")[0])
        assert layout.shorter(1.05 * least) >= 0.49 * least
    assert 9.999 < Layout.of(10, 256).shorter(10.0) < 10.0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-6), (1.0, 1e-5)])
def test_sigma_is_what_the_accountant_of_privacy_losses_finds(epsilon, delta):
    """dp_accounting's PLD accountant, which knows nothing of the closed form, for noise / sensitivity."""
    ratio = Guarantee.of(2.0, epsilon, delta).sigma / SENSITIVITY
    accountant = accounting.pld.PLDAccountant().compose(accounting.GaussianDpEvent(ratio))
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=1e-4)
    assert accounting.get_epsilon_gaussian(ratio, delta) <= epsilon


@given(epsilon=st.floats(1e-3, 100), more=st.floats(1.01, 10), delta=st.floats(1e-12, 0.1), radius=st.floats(1e-3, 1e3))
def test_sigma_falls_with_epsilon_and_with_delta_and_is_counted_in_radii(epsilon, more, delta, radius):
    sigma = Guarantee.of(radius, epsilon, delta).sigma
    assert Guarantee.of(radius, epsilon * more, delta).sigma < sigma
    assert Guarantee.of(radius, epsilon, min(delta * more, 0.99)).sigma < sigma
    assert Guarantee.of(2 * radius, epsilon, delta).sigma == sigma


def test_the_noise_is_gaussian():
    """200 000 draws: moments, and shares beyond 1, 2 and 3 standard deviations, all within 5 standard errors."""
    drawn = normal((200_000,), Key(0), "test")
    assert abs(float(drawn.mean())) < 5 / 200_000**0.5
    assert abs(float(drawn.square().mean()) - 1) < 5 * (2 / 200_000) ** 0.5
    assert abs(float((drawn**3).mean())) < 5 * (15 / 200_000) ** 0.5
    for beyond, share in ((1, 0.317311), (2, 0.0455003), (3, 0.0026998)):
        assert abs(float((drawn.abs() > beyond).double().mean()) - share) < 5 * (share / 200_000) ** 0.5


@pytest.mark.parametrize("form", FORMS)
def test_the_noise_on_each_part_is_as_large_as_promised(form):
    """In units of the noise every entry has the standard deviation sigma, independent of every other."""
    classes, width, radius = 30, 12, 2.0
    plain = large(form, classes=classes, width=width)
    sigma = Guarantee.of(radius, 1.0, 1e-5).sigma
    found = [add_noise(plain, radius, 1.0, 1e-5, Key(seed)) for seed in range(4)]
    noise = torch.stack([in_units_of_noise(each, radius) - in_units_of_noise(plain, radius) for each in found])
    parts = {"counts": noise[:, :classes], "sums": noise[:, classes : classes * (1 + width)],
             "second": noise[:, classes * (1 + width) :]}  # fmt: skip
    for part in parts.values():
        assert abs(float(part.std()) / sigma - 1) < 5 / (2 * part.numel()) ** 0.5
        assert abs(float(part.mean()) / sigma) < 5 / part.numel() ** 0.5
        assert abs(float((part[0] * part[1]).mean()) / sigma**2) < 5 / part[0].numel() ** 0.5


def test_a_key_repeats_the_noise_and_without_one_it_is_never_the_same():
    plain = large("full")
    first, second = (add_noise(plain, 2.0, 1.0, 1e-5, Key(7)) for _ in range(2))
    assert all(torch.equal(value, second.tensors()[name]) for name, value in first.tensors().items())
    other = add_noise(plain, 2.0, 1.0, 1e-5, Key(8))
    unseeded = [add_noise(plain, 2.0, 1.0, 1e-5) for _ in range(2)]
    for left, right in ((first, other), (first, unseeded[0]), tuple(unseeded)):
        assert not bool((left.sums["sums"] == right.sums["sums"]).any())


def hidden(statistics, clear):
    """The noise of a release on counts and sums, in its own unit, as one who knows the clear sums would find it."""
    return (statistics.sums["sums"] - clear.sums["sums"]) / statistics.noise.sums


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("one", "other"), [
    ({"epsilon": 1.0}, {"epsilon": 8.0}),
    ({"delta": 1e-5}, {"delta": 1e-6}),
    ({"radius": 2.0}, {"radius": 3.0}),
    ({"threshold": 1.0}, {"threshold": 2.0}),
])  # fmt: skip
def test_the_clear_sums_do_not_come_out_by_subtraction(form, one, other):
    """Two releases with one key: were their draws the same, clear = (σ₂·a − σ₁·b) / (σ₂ − σ₁) to the last bits."""
    plain, usual = large(form, width=40), {"radius": 2.0, "epsilon": 1.0, "delta": 1e-5}
    left, right = (add_noise(plain, **{**usual, **knobs}, key=Key(7)) for knobs in (one, other))
    assert abs(float((hidden(left, plain) * hidden(right, plain)).mean())) < 5 / 160**0.5
    sizes = left.noise.sums, right.noise.sums
    if sizes[0] != sizes[1]:
        guess = (sizes[1] * left.sums["sums"] - sizes[0] * right.sums["sums"]) / (sizes[1] - sizes[0])
        assert float((guess - plain.sums["sums"]).abs().max()) > 0.5 * min(sizes)


def test_the_statistics_of_one_example_less_get_another_draw():
    features, labels = features_of(0, 4000)
    features = clip_features(features, 2.0)
    whole, less = (ClassStatistics.of_features(features[n:], labels[n:], C) for n in (0, 1))
    left, right = (add_noise(each, 2.0, 8.0, 1e-5, Key(7)) for each in (whole, less))
    shown, true = left.sums["sums"] - right.sums["sums"], whole.sums["sums"] - less.sums["sums"]
    assert float((shown - true).abs().min()) > 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_a_class_that_nobody_holds_gets_noise_like_any_other(form):
    """Of 60 classes without examples about half have a noisy count of 1 or more, and then sums of noise."""
    found = add_noise_quietly(ClassStatistics.empty(60, D, form), 1.0, 0.1, 1e-5, Key(1), threshold=1)
    assert 15 < len(found.held) < 45
    assert bool((found.number >= 1).all())
    assert bool((found.sums["sums"] != 0).all())
    check_statistics(60, found.form, found.tensors(), "test")


@pytest.mark.parametrize("form", FORMS)
def test_classes_below_the_threshold_are_dropped_with_a_note(form):
    features, labels = features_of(0, 4000)
    labels[labels == 2] = 1  # no client has class 2
    plain = ClassStatistics.of_features(clip_features(features, 3.0), labels, C, form)
    threshold = f"{4 * Guarantee.of(3.0, 1.0, 1e-5).sigma:.4g}"
    with pytest.warns(UserWarning, match=f"1 of 4 classes are dropped: their noisy counts are below {threshold}"):
        found = add_noise(plain, 3.0, 1.0, 1e-5, Key(0))
    assert found.held.tolist() == [0, 1, 3]
    with pytest.warns(UserWarning, match="4 of 4 classes are dropped"):
        assert len(add_noise(plain, 3.0, 1.0, 1e-5, Key(0), threshold=1e6).held) == 0


@settings(max_examples=30)
@given(form=st.sampled_from(FORMS), seed=st.integers(0, 1000), count=st.integers(0, 40), epsilon=st.floats(0.05, 50))
def test_what_is_released_can_be_true(form, seed, count, epsilon):
    """Counts of 1 or more, no negative variance: whatever reads statistics can read these."""
    features, labels = features_of(seed, count)
    plain = ClassStatistics.of_features(clip_features(features, 2.0), labels, C, form)
    before = {name: value.clone() for name, value in plain.tensors().items()}
    found = add_noise_quietly(plain, 2.0, epsilon, 1e-5, Key(seed), threshold=1)
    check_statistics(C, found.form, found.tensors(), "test")
    assert all(torch.equal(value, plain.tensors()[name]) for name, value in before.items())
    if int(found.number.sum()) > len(found.held):
        assert float(torch.linalg.eigvalsh(found.within()).min()) >= -1e-9 * float(found.squares().max())


@pytest.mark.parametrize(("form", "method"), [("full", "ccvr(per_class=50, epochs=1)"), ("shared", "lda")])
def test_a_classifier_can_be_made_of_what_is_released(form, method):
    features, labels = features_of(0, 2000)
    features[torch.arange(2000), labels % D] += 5.0 * (1 + labels // D)
    plain = ClassStatistics.of_features(clip_features(features, 12.0), labels, C, form)
    made = calibrate(torch.nn.Linear(D, C), add_noise(plain, 12.0, 1.0, 1e-6, Key(0)), method)
    assert bool(made(features.float()).isfinite().all())


def test_much_privacy_budget_leaves_the_statistics_as_they_are():
    features, labels = features_of(0, 4000)
    plain = ClassStatistics.of_features(clip_features(features, 2.0), labels, C)
    found = add_noise(plain, 2.0, 1e6, 1e-5, Key(0))
    assert torch.equal(found.counts, plain.counts)
    for label in range(C):
        assert torch.allclose(found.mean(label), plain.mean(label), atol=1e-4)
        assert torch.allclose(found.covariance(label), plain.covariance(label), atol=1e-4)


@given(
    seed=st.integers(0, 10**6), radius=st.floats(0.01, 100), dtype=st.sampled_from(["float16", "float32", "float64"])
)
def test_clipped_features_are_never_longer_and_short_ones_stay_as_they_are(seed, radius, dtype):
    features = features_of(seed, 50)[0].to(getattr(torch, dtype)) * radius / 5
    found = clip_features(features, radius)
    length = features.double().norm(dim=1)
    assert found.dtype == features.dtype
    assert float(found.double().norm(dim=1).max()) <= radius
    assert torch.equal(found[length <= radius], features[length <= radius])
    long = length > radius
    straight = torch.nn.functional.cosine_similarity(found[long].double(), features[long].double())
    assert bool((found[long].double().norm(dim=1) > 0.99 * radius).all())
    assert bool((straight > 0.999).all())


def test_clipping_leaves_zero_and_nothing_alone():
    assert torch.equal(clip_features(torch.zeros(2, 3), 1.0), torch.zeros(2, 3))
    assert clip_features(torch.zeros(0, 3), 1.0).shape == (0, 3)


@pytest.mark.parametrize("form", ["full", "diagonal", "low-rank(2)"])
def test_classes_below_the_minimum_count_stay_at_home(form):
    labels = torch.tensor([0] * 5 + [1] * 2 + [3] * 3)
    features = features_of(0, 10)[0]
    whole = ClassStatistics.of_features(features, labels, C, form)
    found, home = drop_small_classes(whole, 3)
    wanted = ClassStatistics.of_features(features[labels != 1], labels[labels != 1], C, form)
    assert home == (1,)
    assert all(torch.equal(value, wanted.tensors()[name]) for name, value in found.tensors().items())
    assert drop_small_classes(whole, 1) == (whole, ())
    nothing, everything = drop_small_classes(whole, 6)
    assert everything == (0, 1, 3)
    assert nothing.about() == ClassStatistics.empty(C, D, form).about()


def test_of_a_pooled_second_moment_no_class_can_stay_at_home():
    labels = torch.tensor([0] * 5 + [1] * 2)
    whole = ClassStatistics.of_features(features_of(0, 7)[0], labels, C, "shared")
    with pytest.raises(UserError, match="class 1 cannot be removed"):
        drop_small_classes(whole, 3)
    assert drop_small_classes(whole, 2) == (whole, ())
    nothing, home = drop_small_classes(whole, 6)
    assert home == (0, 1)
    assert not bool(nothing.sums["second"].any())


@pytest.mark.parametrize("form", FORMS)
def test_features_that_were_not_clipped_are_refused(form):
    features, labels = features_of(0, 100)
    with pytest.raises(UserError, match=r"longer than 1.0; call clip_features\(features, 1.0\) first"):
        add_noise(ClassStatistics.of_features(features, labels, C, form), 1.0, 1.0, 1e-5)


def test_what_cannot_be_promised_is_refused():
    plain = large("full")
    for knobs in ({"radius": 0.0}, {"radius": float("nan")}, {"epsilon": 0.0}, {"epsilon": float("inf")},
                  {"delta": 0.0}, {"delta": 1.0}):  # fmt: skip
        with pytest.raises(UserError, match=f"{next(iter(knobs))}="):
            add_noise(plain, **{"radius": 2.0, "epsilon": 1.0, "delta": 1e-5, **knobs})
    with pytest.raises(UserError, match="low-rank"):
        add_noise(ClassStatistics.empty(C, D, "low-rank(2)"), 1.0, 1.0, 1e-5)
    with pytest.raises(UserError, match="NaN"):
        add_noise(replace(plain, sums={**plain.sums, "sums": plain.sums["sums"] * float("nan")}), 2.0, 1.0, 1e-5)
    with pytest.raises(UserError, match="NaN"):
        clip_features(torch.full((1, 2), float("nan")), 1.0)
    with pytest.raises(UserError, match="radius=-1"):
        clip_features(torch.zeros(1, 2), -1)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r'dp_accounting is not installed; pip install "unskew\[privacy\]"'):
        Guarantee.of(1.0, 1.0, 1e-5)


def test_the_noise_of_a_release_is_whole_steps_of_a_grid_whatever_the_value():
    """Two sums that differ in their lowest bits must not be told apart by the bits of what is released."""
    for value in (0.1, 0.1 + 2.0**-50, 1 / 3):
        steps = add_gaussian(torch.full((1000,), value, dtype=torch.float64), 0.75, None) / 2.0 ** -(1 + GRID_BITS)
        assert torch.equal(steps, steps.round())
    kept = add_gaussian(torch.zeros(8, dtype=torch.float64), 0.75, Key(0), "x")
    assert torch.equal(kept, 0.75 * normal((8,), Key(0), "x"))  # a study's noise has not changed


@pytest.mark.parametrize("deviation", [1e-6, 0.999999, 1.0, 12345.6])
def test_the_noise_of_a_release_has_the_deviation_that_was_asked_for(deviation):
    noise = add_gaussian(torch.zeros(20_000, dtype=torch.float64), deviation, None)
    assert float(noise.std()) == pytest.approx(deviation, rel=0.03)  # 6 standard errors
    assert abs(float(noise.mean())) < 6 * deviation / 20_000**0.5


def test_rounding_to_the_grid_is_paid_for_with_more_noise():
    """Worst case: every one of d numbers moves by a step more than the contribution itself does."""
    deviation, sensitivity, count = 8.0, 2.0, 10**6
    raised = raise_deviation(deviation, sensitivity, count)
    step = 2.0 ** (3 - GRID_BITS)
    assert deviation / sensitivity <= raised / (sensitivity + 2 * step * count**0.5)
    assert raised < 1.002 * deviation
