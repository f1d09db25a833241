"""Added statistics are those of the pooled features; measuring disturbs nobody; a stranger's file breaks nothing."""

import json
import tempfile
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from calibration.heads import same_statistics as same
from unskew.calibration import statistics
from unskew.calibration.covariances import pack
from unskew.calibration.statistics import ClassStatistics, check_statistics
from unskew.core.errors import UserError
from unskew.core.key import Key

C, D = 5, 3
FORMS = ("full", "diagonal", "shared", "low-rank(2)")
EXACT = ("full", "diagonal", "shared", f"low-rank({D})")  # what each can know of a covariance it knows exactly
HALVES = ("float16", "bfloat16", "float32")

splits = st.lists(st.tuples(st.integers(0, 3), st.integers(0, C - 1)), max_size=40)  # (client, class) of each example


def features_of(count, seed=0, width=D):
    """Features whose dimensions differ in mean and spread and hang together."""
    mixing = torch.randn(width, width, generator=Key(99).torch(), dtype=torch.float64)
    drawn = torch.randn(count, width, generator=Key(seed).torch(), dtype=torch.float64)
    return drawn @ mixing + torch.arange(width)


def labels_of(count, seed=0):
    return torch.randint(0, C, (count,), generator=Key(seed).fold("labels").torch())


def example(form="full", count=30):
    """Class 2 is nobody's."""
    labels = labels_of(count)
    return ClassStatistics.of_features(features_of(count), labels + (labels == 2).long(), C, form)


def close(left, right, relative=1e-10):
    """Alike but for rounding, relative to the largest entry."""
    assert left.about() == right.about()
    assert torch.equal(left.held, right.held)
    assert torch.equal(left.number, right.number)
    for name, value in right.sums.items():
        near(left.sums[name], value, relative)


def near(found, wanted, relative=1e-10):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0) <= relative * np.abs(wanted).max(initial=0)


def covariance_of(rows):
    """numpy's, divisor N − 1."""
    return np.atleast_2d(np.cov(rows.numpy(), rowvar=False))


def within_of(features, labels):
    """Around each class's own mean, divisor N − P."""
    held = labels.unique()
    around = torch.cat([features[labels == label] - features[labels == label].mean(0) for label in held])
    return (around.t() @ around / (len(labels) - len(held))).numpy()


@pytest.mark.parametrize("form", EXACT)
@settings(max_examples=25)
@given(rows=splits)
def test_the_sum_over_any_split_has_the_pooled_features_mean_and_covariance(form, rows):
    """Classes absent, classes held once, clients that hold nothing, one client alone."""
    features = features_of(len(rows), seed=len(rows))
    client, labels = (torch.tensor([row[place] for row in rows], dtype=torch.int64) for place in (0, 1))
    total = reduce(
        add, (ClassStatistics.of_features(features[client == k], labels[client == k], C, form) for k in range(4))
    )
    assert total.counts.tolist() == torch.bincount(labels, minlength=C).tolist()
    assert total.held.tolist() == sorted(set(labels.tolist()))
    for label in total.held.tolist():
        own = features[labels == label]
        near(total.mean(label), own.mean(0))
        if form != "shared" and len(own) > 1:
            whole = covariance_of(own)
            near(total.covariance(label), np.diag(np.diag(whole)) if form == "diagonal" else whole)
    if len(rows) > len(total.held):
        wanted = within_of(features, labels)
        near(total.within(), np.diag(np.diag(wanted)) if form == "diagonal" else wanted)
        if form == "shared":
            near(total.covariance(int(total.held[0])), wanted)


@pytest.mark.parametrize("form", EXACT)
def test_features_far_from_zero_keep_their_covariance(form):
    """Mean 1e4, spread 1: Σzzᵀ is 1e8 times the scatter, so 2⁻⁵³ becomes 1e-8; in float32 nothing would be left."""
    features = torch.randn(2000, D, generator=Key(1).torch(), dtype=torch.float64) + 1e4
    labels = torch.arange(2000) % 2
    parts = [
        ClassStatistics.of_features(some, own, C, form)
        for some, own in zip(features.split(300), labels.split(300), strict=True)
    ]
    whole = within_of(features, labels) if form == "shared" else covariance_of(features[labels == 1])
    near(reduce(add, parts).covariance(1), np.diag(np.diag(whole)) if form == "diagonal" else whole, 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_addition_commutes_to_the_last_bit_and_associates_but_for_rounding(form):
    a, b, c = (
        ClassStatistics.of_features(features_of(n, n), labels_of(n, n) // (n // 5), C, form) for n in (7, 11, 20)
    )
    assert a.held.tolist() != b.held.tolist() != c.held.tolist()
    same(a + b, b + a)
    close((a + b) + c, a + (b + c), 1e-13)
    close((c + a) + b, (a + b) + c, 1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_a_client_that_holds_nothing_adds_nothing(form):
    a, nothing = example(form), ClassStatistics.empty(C, D, form)
    same(a + nothing, a)
    same(nothing + a, a)
    same(nothing + nothing, nothing)


def test_classes_that_nobody_holds_take_no_room_in_a_sum_either():
    """Of a million classes two are held; all of them would take 8·10⁶·64² bytes, 33 GB."""
    features, far = features_of(8, width=64), torch.arange(8) % 2 * 999_999
    one = ClassStatistics.of_features(features, far, 10**6)
    assert (one + one).number.tolist() == [8, 8]
    assert (one + one).size == one.size == 2 * (16 + 8 * 64 + 4 * 64 * 65)


def test_statistics_that_do_not_belong_together_are_refused_and_both_are_named():
    a = example()
    others = {
        "full over 6 classes of 3 features, 0 held": ClassStatistics.empty(6, D),
        "full over 5 classes of 4 features, 0 held": ClassStatistics.empty(C, 4),
        "diagonal over 5 classes of 3 features, 0 held": ClassStatistics.empty(C, D, "diagonal"),
        r"low-rank\(2\) over 5 classes of 3 features, 0 held": ClassStatistics.empty(C, D, "low-rank(2)"),
    }
    mine = "full over 5 classes of 3 features, 4 held"
    for words, other in others.items():
        with pytest.raises(UserError, match=f"these statistics cannot be added: {mine} and {words}"):
            a + other
        with pytest.raises(UserError, match=f"these statistics cannot be added: {words} and {mine}"):
            other + a
    with pytest.raises(UserError, match=r"low-rank\(2\) .* and low-rank\(1\)"):
        ClassStatistics.empty(C, D, "low-rank(2)") + ClassStatistics.empty(C, D, "low-rank(1)")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_features_of_a_short_type_are_taken_as_they_are_and_added_in_float64(form, dtype):
    features = features_of(30).to(getattr(torch, dtype))
    found = ClassStatistics.of_features(features, labels_of(30), C, form)
    same(found, ClassStatistics.of_features(features.double(), labels_of(30), C, form))


def test_the_order_of_examples_does_not_matter_and_given_tensors_stay_as_they_are():
    features, labels = features_of(30).requires_grad_(), labels_of(30)
    before = features.detach().clone(), labels.clone()
    found = ClassStatistics.of_features(features, labels, C)
    close(ClassStatistics.of_features(features.flip(0), labels.flip(0), C), found, 1e-13)
    assert torch.equal(features, before[0])
    assert torch.equal(labels, before[1])
    assert not any(value.requires_grad for value in found.tensors().values())


NAN, INF = float("nan"), float("inf")
WRONG = r"features must be real numbers \[n, d\] and labels whole numbers \[n\], not "
BROKEN_BATCHES = {
    "features are NaN": ([[1.0, NAN]], [0], "features contain NaN or infinity"),
    "features are infinite": ([[1.0, -INF]], [0], "features contain NaN or infinity"),
    "label too large": ([[1.0, 2.0]] * 2, [0, C], "labels must be in 0..4; these range from 0 to 5"),
    "label negative": ([[1.0, 2.0]] * 2, [-1, 3], "labels must be in 0..4; these range from -1 to 3"),
    "labels are floats": ([[1.0, 2.0]], [0.0], WRONG),
    "features are complex": ([[1.0, 2j]], [0], WRONG),
    "features are images": ([[[[1.0]]]], [0], WRONG),
    "more labels than features": ([[1.0, 2.0]], [0, 1], WRONG),
    "one number": (1.0, 0, WRONG),
}


@pytest.mark.parametrize("case", BROKEN_BATCHES)
def test_a_broken_batch_is_refused_in_one_clear_message(case):
    features, labels, words = BROKEN_BATCHES[case]
    features, labels = torch.tensor(features), torch.tensor(labels)
    with pytest.raises(UserError, match=words):
        ClassStatistics.of_features(features, labels, C)
    with pytest.raises(UserError, match=words):
        ClassStatistics.measure(nn.Identity(), [(features, labels)], C)


def test_what_nobody_can_know_is_refused_in_words():
    found = ClassStatistics.of_features(features_of(3), torch.tensor([0, 0, 4]), C)
    for label in (1, -1, 5):
        with pytest.raises(UserError, match=f"no client has class {label}; only 2 of 5 classes have examples"):
            found.mean(label)
    with pytest.raises(UserError, match="class 4 has one example; a covariance needs at least two"):
        found.covariance(4)
    for form in FORMS:
        single = ClassStatistics.of_features(features_of(2), torch.tensor([0, 4]), C, form)
        with pytest.raises(UserError, match="no class has two examples"):
            single.within()


@pytest.mark.parametrize("form", FORMS)
def test_statistics_of_no_examples_are_empty(form):
    found = ClassStatistics.of_features(torch.zeros(0, D), torch.zeros(0, dtype=torch.int64), C, form)
    same(found, ClassStatistics.empty(C, D, form))
    assert found.counts.tolist() == [0] * C
    assert found.width == D


# measuring


def in_batches(features, labels, size):
    """Batches of this size, an empty one before, between and after them."""
    for start in range(0, len(labels), size):
        yield features[:0], labels[:0]
        yield features[start : start + size], labels[start : start + size]
    yield features[:0], labels[:0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 7, 5000])
def test_streaming_is_the_statistics_of_all_features_at_once(form, size):
    """More examples than the buffer holds, but for single ones."""
    count = 300 if size == 1 else 2 * statistics.BUFFER + 100
    images, labels = features_of(count).reshape(count, D, 1, 1), labels_of(count)
    encoder = nn.Sequential(nn.Flatten(), nn.ReLU())
    found = ClassStatistics.measure(encoder, in_batches(images, labels, size), C, form=form)
    close(found, ClassStatistics.of_features(images.flatten(1).relu(), labels, C, form), 1e-12)


@pytest.mark.parametrize("buffer", [1, 10, 64])
def test_never_more_features_wait_than_the_buffer_and_a_batch(buffer, monkeypatch):
    seen, plain = [], ClassStatistics.of_features
    spy = staticmethod(lambda features, *rest: seen.append(len(features)) or plain(features, *rest))
    monkeypatch.setattr(ClassStatistics, "of_features", spy)
    monkeypatch.setattr(statistics, "BUFFER", buffer)
    features, labels = features_of(100), labels_of(100)
    found = ClassStatistics.measure(nn.Identity(), in_batches(features, labels, 7), C)
    assert sum(seen) == 100
    assert max(seen) < buffer + 7
    assert len(seen) <= 100 // buffer + 1
    close(found, plain(features, labels, C), 1e-12)


def test_memory_that_batches_share_is_no_trouble():
    """A loader that fills one buffer over and over, and an encoder that hands out its own."""
    features, labels = features_of(50), labels_of(50)
    image, label = torch.empty(1, D, dtype=torch.float64), torch.empty(1, dtype=torch.int64)

    def loader():
        for place in range(50):
            yield image.copy_(features[place : place + 1]), label.copy_(labels[place : place + 1])

    found = ClassStatistics.measure(nn.Identity(), loader(), C)
    close(found, ClassStatistics.of_features(features, labels, C), 1e-12)


def mixed_encoder():
    """Some parts train and some rest; in train mode it would drop out, and update its running mean and variance."""
    with torch.random.fork_rng(devices=[]):
        inner = nn.Sequential(nn.Linear(D, 4), nn.Dropout(0.5))
        encoder = nn.Sequential(inner, nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(4))
    encoder.train()
    inner[0].eval()
    encoder[3].eval()
    encoder[4].eval()
    return encoder


def parts_of(encoder):
    return [part.training for part in encoder.modules()]


def test_measuring_uses_eval_mode_and_leaves_the_encoder_as_it_was():
    encoder, features, labels = mixed_encoder(), features_of(30).float(), labels_of(30)
    modes, weights = parts_of(encoder), {name: value.clone() for name, value in encoder.state_dict().items()}
    assert len(set(modes)) == 2
    generator = torch.get_rng_state()
    found = ClassStatistics.measure(encoder, in_batches(features, labels, 8), C)
    assert torch.equal(torch.get_rng_state(), generator)
    assert parts_of(encoder) == modes
    assert all(torch.equal(value, weights[name]) for name, value in encoder.state_dict().items())
    assert all(value.grad is None and value.requires_grad for value in encoder.parameters())
    assert not any(value.requires_grad for value in found.tensors().values())
    assert torch.is_grad_enabled()
    with torch.no_grad():
        wanted = encoder.eval()(features)
    close(found, ClassStatistics.of_features(wanted, labels, C), 1e-5)  # float32 products, in other batches


@pytest.mark.parametrize("culprit", ["encoder", "batches", "features", "labels"])
def test_an_encoder_is_left_as_it_was_whoever_fails_midway(culprit):
    encoder, calls = mixed_encoder(), []
    modes = parts_of(encoder)

    def batches():
        for start in range(3):
            if culprit == "batches" and start == 1:
                raise ArithmeticError("midway")
            labels = labels_of(4) + (C if culprit == "labels" and start == 1 else 0)
            features = features_of(4).float()
            yield (features * NAN if culprit == "features" and start == 1 else features), labels

    def fail(module, given):
        calls.append(given)
        if culprit == "encoder" and len(calls) == 2:
            raise ArithmeticError("midway")

    encoder.register_forward_pre_hook(fail)
    with pytest.raises((ArithmeticError, UserError), match=r"midway|NaN|labels"):
        ClassStatistics.measure(encoder, batches(), C)
    assert parts_of(encoder) == modes
    assert torch.is_grad_enabled()


def test_empty_batches_alone_tell_the_width_and_no_batch_tells_nothing():
    nothing = (torch.zeros(0, D), torch.zeros(0, dtype=torch.int64))
    same(ClassStatistics.measure(nn.Identity(), [nothing, nothing], C), ClassStatistics.empty(C, D))
    with pytest.raises(UserError, match="at least one client or batch"):
        ClassStatistics.measure(nn.Identity(), [], C)


# all classes at once


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20)
@given(rows=splits)
def test_what_is_spread_out_over_all_classes_adds_up_entry_by_entry_and_is_gathered_again(form, rows):
    features = features_of(len(rows), seed=len(rows))
    client, labels = (torch.tensor([row[place] for row in rows], dtype=torch.int64) for place in (0, 1))
    parts = [ClassStatistics.of_features(features[client == k], labels[client == k], C, form) for k in range(4)]
    spread = [part.to_sums() for part in parts]
    shapes = {"number": (C,), **parts[0].form.shapes(C, D)}
    for part, wide in zip(parts, spread, strict=True):
        # in one order, by which engines add: a client that withholds everything must not stop the others
        assert [(name, tuple(value.shape)) for name, value in wide.items()] == list(shapes.items())
        assert all(value.dtype == torch.float64 for value in wide.values())
        absent = [label for label in range(C) if label not in part.held]
        assert not any(bool(wide[name][absent].any()) for name in ("number", "sums"))
        same(statistics.from_sums(wide, part.form), part)
    total = {name: sum(wide[name] for wide in spread) for name in shapes}
    close(statistics.from_sums(total, parts[0].form), reduce(add, parts), 1e-13)


# files


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [0, 1, 30])
def test_a_file_gives_back_what_was_saved_to_the_last_bit(form, count, tmp_path):
    path = tmp_path / "client 1.safetensors"
    given_ = example(form, count)
    given_.save(path)
    found = ClassStatistics.load(path)
    same(found, given_)
    assert found.form == given_.form
    assert found.to_bytes() == given_.to_bytes() == path.read_bytes()
    same(ClassStatistics.load(str(path)), given_)


def test_what_was_loaded_does_not_change_with_its_file(tmp_path):
    path = tmp_path / "some"
    example().save(path)
    found = ClassStatistics.load(path)
    (found + found).save(path)
    same(found, example())
    path.write_bytes(b"")
    same(found, example())


def test_a_file_that_is_not_there_or_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not contain class statistics .*: .*No such file"):
        ClassStatistics.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"it is a folder"):
        ClassStatistics.load(tmp_path)
    with pytest.raises(UserError, match=r"cannot be written: Is a directory"):
        example().save(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/some cannot be written"):
        example().save(tmp_path / "file" / "some")
    example().save(tmp_path / "new folder" / "some")
    same(ClassStatistics.load(tmp_path / "new folder" / "some"), example())


@pytest.mark.parametrize("form", FORMS)
def test_sums_that_their_squares_do_not_allow_are_refused(tmp_path, form):
    found = example(form)
    values = found.tensors() | {"sums": found.sums["sums"] * 1e6}
    with pytest.raises(UserError, match=r"odd are inconsistent: the sums are too large for the sums of squares"):
        ClassStatistics.load(written(tmp_path / "odd", values, form=form))


def written(path, tensors, **about):
    words = {"statistics": 2, "classes": C, "form": "full"} | about
    path.write_bytes(save(tensors, metadata={"unskew": json.dumps(words)}))
    return path


def changed(form="full", about=None, **tensors):
    """Makes a good file's tensors, some of them changed, and what it says of them; None leaves a tensor out."""

    def make():
        good = dict(example(form).tensors())
        for name, change in tensors.items():
            good[name] = change(good[name].clone()) if name in good else change
        return {name: value for name, value in good.items() if value is not None}, {"form": form} | (about or {})

    return make


def at(*place, value):
    def change(tensor):
        tensor[place] = value
        return tensor

    return change


def only(value):
    return lambda _: value


PAIRS = "each class needs a label and a count"
COUNTS, CLASSES = "counts must be from 1 to", "the number of classes must be from 1 to"
FALSE = {
    "a tensor too many": (changed(more=torch.zeros(1)), "they contain held, more, number, second, sums instead of"),
    "a tensor missing": (changed(second=only(None)), "they contain held, number, sums instead of held, number, second"),
    "another form's tensors": (changed("diagonal", {"form": "shared"}), "instead of held, number, second, sums"),
    "sums in float32": (changed(sums=lambda v: v.float()), "sums must be float64"),
    "counts in int32": (changed(number=lambda v: v.int()), PAIRS),
    "labels in a table": (changed(held=lambda v: v[None]), PAIRS),
    "a count missing": (changed(number=lambda v: v[1:].clone()), PAIRS),
    "a row missing": (changed(sums=lambda v: v[1:].clone()), r"sums has the shape \(3, 3\), expected \(4, 3\)"),
    "no triangle": (changed(second=lambda v: v[:, 1:].clone()), r"\(4, 5\), expected \(4, 6\)"),
    "sums in one row": (changed(sums=lambda v: v.flatten()), "must have a row for each class"),
    "sums of no features": (changed(sums=lambda v: v[:, :0].clone()), "there are 0 features"),
    "a sketch of another rank": (changed("low-rank(2)", {"form": "low-rank(1)"}), r"expected \(4, 3, 1\)"),
    "count 0": (changed(number=at(1, value=0)), COUNTS),
    "a count that overflows": (changed(number=at(0, value=2**62)), COUNTS),
    "NaN sums": (changed(sums=at(1, 2, value=NAN)), "sums contains NaN or infinity"),
    "NaN sketch": (changed("low-rank(2)", sketch=at(0, 0, 0, value=NAN)), "sketch contains NaN or infinity"),
    "negative": (changed(second=at(1, 5, value=-1.0)), "squares must not be negative"),
    "negative, shared": (changed("shared", second=at(5, value=-1.0)), "squares must not be negative"),
    "negative squares": (changed("diagonal", squares=at(0, 1, value=-1e-9)), "squares must not be negative"),
    "labels descend": (changed(held=lambda v: v.flip(0)), "labels must ascend from 0 to 4"),
    "a label of C": (changed(held=at(3, value=C)), "labels must ascend"),
    "no classes": (changed(about={"classes": 0}), CLASSES),
    "more classes than an int64": (changed(about={"classes": 10**30}), CLASSES),
    "classes are true": (changed(about={"classes": True}), CLASSES),
}

FOREIGN = {
    "rank 0": ({"form": "low-rank(0)"}, "give a whole number from 1"),
    "a rank without end": ({"form": f"low-rank({'9' * 400})"}, "too large"),
    "an unknown form": ({"form": "fool"}, "no covariance form is called 'fool'"),
    "a form that is a list": ({"form": ["full"]}, "no covariance form"),
    "a later version": ({"statistics": 3}, "version 3"),
}


@pytest.mark.parametrize("case", FALSE)
def test_statistics_that_cannot_be_true_are_refused_in_their_files_name(case, tmp_path):
    make, words = FALSE[case]
    tensors, about = make()
    path = written(tmp_path / "stranger", tensors, **about)
    with pytest.raises(UserError, match=rf"the statistics of \S*stranger are rejected: .*{words}"):
        ClassStatistics.load(path)


@pytest.mark.parametrize("case", FOREIGN)
def test_a_description_of_another_kind_is_refused_in_its_files_name(case, tmp_path):
    about, words = FOREIGN[case]
    path = written(tmp_path / "stranger", example().tensors(), **about)
    with pytest.raises(
        UserError, match=rf"\S*stranger does not contain class statistics of this version: .*{words}"
    ) as caught:
        ClassStatistics.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [None, {"unskew": "full"}, {"unskew": "[1, 5]"}, {"unskew": "{}"}, {"unskew": '{"statistics": 2, "classes": 5}'},
     {"unskew": "[" * 100_000}, {"unskew": "9" * 10_000}],
)  # fmt: skip
def test_metadata_that_is_missing_or_somebody_elses_is_refused_in_its_files_name(metadata, tmp_path):
    path = tmp_path / "stranger"
    path.write_bytes(save(example().tensors(), metadata=metadata))
    with pytest.raises(UserError, match=r"\S*stranger does not contain class statistics of this version"):
        ClassStatistics.load(path)


def test_labels_that_ascend_only_because_their_differences_overflow_are_refused():
    around = torch.tensor([3, 2**62, 2**63 - 1, -(2**63), -(2**62), -1, 2])
    assert bool((around.diff() > 0).all())
    values = {"held": around, "number": torch.ones_like(around)}
    sums = {name: torch.zeros(7, D, dtype=torch.float64) for name in ("sums", "squares")}
    with pytest.raises(UserError, match="labels must ascend"):
        check_statistics(C, ClassStatistics.empty(C, D, "diagonal").form, values | sums, "client 7")


def test_a_pooled_moment_of_nobody_must_be_one_too():
    nobody = ClassStatistics.empty(C, D, "shared")
    for value, words in ((-1.0, "must not be negative"), (NAN, "NaN")):
        broken = pack(torch.diag(torch.full((D,), value, dtype=torch.float64)))
        with pytest.raises(UserError, match=words):
            check_statistics(C, nobody.form, {**nobody.tensors(), "second": broken}, "client 7")


def header(path, shapes, form, data=b""):
    """A file written by hand: tensors of no bytes may claim any shape."""
    about = {"unskew": json.dumps({"statistics": 2, "classes": C, "form": form})}
    words = {"__metadata__": about} | {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in shapes.items()
    }
    text = json.dumps(words).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


EMPTY = {"held": ("I64", [0]), "number": ("I64", [0])}


@pytest.mark.parametrize(
    ("form", "sums"),
    [
        ("diagonal", {"sums": ("F64", [0, 10**12]), "squares": ("F64", [0, 10**12])}),
        ("diagonal", {"sums": ("F64", [0, 2**63]), "squares": ("F64", [0, 2**63])}),
        ("diagonal", {"sums": ("F64", [0, 3, 3]), "squares": ("F64", [0, 3])}),
        ("diagonal", {"sums": ("F4", [0, 3]), "squares": ("F64", [0, 3])}),
        ("diagonal", {"sums": ("C64", [0, 3]), "squares": ("F64", [0, 3])}),
        ("diagonal", {"sums": ("F128", [0, 3]), "squares": ("F64", [0, 3])}),
        ("full", {"sums": ("F64", [0, 10**9]), "second": ("F64", [0, 10**9 * (10**9 + 1) // 2])}),
        ("low-rank(4)", {"sums": ("F64", [0, 3]), "squares": ("F64", [0, 3]), "sketch": ("F64", [0, 3, 4])}),
        (f"low-rank({10**12})", {"sums": ("F64", [0, 3]), "squares": ("F64", [0, 3]), "sketch": ("F64", [0, 3, 1])}),
    ],
)
def test_a_header_that_asks_for_more_than_its_file_holds_is_refused_and_no_memory_taken(form, sums, tmp_path):
    with pytest.raises(UserError, match="stranger"):
        ClassStatistics.load(header(tmp_path / "stranger", EMPTY | sums, form))


def test_a_file_cut_off_anywhere_is_refused_in_its_name(tmp_path):
    whole, path = example("diagonal").to_bytes(), tmp_path / "stranger"
    for length in (*range(0, len(whole), 11), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="stranger does not contain class statistics"):
            ClassStatistics.load(path)


@settings(max_examples=100)
@given(form=st.sampled_from(FORMS), place=st.integers(0, 10**4), bits=st.integers(1, 255))
def test_a_damaged_byte_is_refused_or_gives_statistics_that_can_be_true(form, place, bits):
    content = bytearray(example(form).to_bytes())
    content[place % len(content)] ^= bits
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stranger"
        path.write_bytes(content)
        try:
            found = ClassStatistics.load(path)
        except UserError as error:
            found, said = None, str(error)
    if found is None:
        assert "stranger" in said
        return
    check_statistics(found.classes, found.form, found.tensors(), "test")
    assert int(found.counts.sum()) == int(found.number.sum())
    same(found + ClassStatistics.empty(found.classes, found.width, found.form), found)
