"""Masks cancel exactly, one client's vector is noise, and what cannot be added up is refused in its client's name."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.calibration.protection import Layout
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.privacy import ciphers
from unskew.privacy.masking import Agreement, Masking, secure_sum, shares_needed, unmasked_sum

C, D = 5, 3
FORMS = ("full", "diagonal", "shared", "low-rank(2)")
LAYOUT = Layout.of(C, D)
SESSION = bytes(range(32))


def statistics_of(client, form="full", count=20, classes=C):
    """A client with its own few classes: the last class is nobody's, and client 3 holds nothing."""
    generator = Key(client).fold("client").torch()
    count = 0 if client == 3 else count
    features = torch.randn(count, D, generator=generator) * 3
    labels = torch.randint(0, max(1, min(client + 1, classes - 1)), (count,), generator=generator)
    return ClassStatistics.of_features(features, labels, classes, form)


def callables(held):
    return {client: lambda value=value: value for client, value in held.items()}


def exchanged(held, layout, session=SESSION, least=2):
    """The clients' maskings, what they agreed on, what they sealed for each other, and their vectors."""
    maskings = {client: Masking.new(client, session) for client in held}
    publics = {client: masking.public for client, masking in maskings.items()}
    agreement = Agreement(session, shares_needed(0.66, len(held)), publics, layout.about())
    boxes = {client: masking.boxes(agreement, least=least) for client, masking in maskings.items()}
    vectors = {c: maskings[c].masked(held[c], layout, held) for c in held}
    return maskings, agreement, boxes, vectors


def opened_by(maskings, boxes, answered):
    return {
        client: maskings[client].opened({o: boxes[o][client] for o in maskings if o != client}, answered)
        for client in answered
    }


def same(left, right):
    assert left.about() == right.about()
    for name, value in left.tensors().items():
        assert torch.equal(value, right.tensors()[name]), name


@settings(max_examples=25)
@given(form=st.sampled_from(FORMS), clients=st.integers(2, 6), data=st.data())
def test_masks_cancel_exactly_whoever_drops_out(form, clients, data):
    """The sum over those who stayed is that of their rounded vectors, integer for integer."""
    staying = data.draw(st.sets(st.integers(0, clients - 1), min_size=shares_needed(0.51, clients)))
    layout = Layout.of(C, D, form)
    held = {client: statistics_of(client, form) for client in range(clients)}
    found = secure_sum(callables(held), layout, dropped=held.keys() - staying, threshold=0.51, least=2)
    plain = sum(layout.quantise(held[client], len(staying), "test") for client in staying)
    assert torch.equal(layout.quantise(found, 1, "test"), plain)
    same(found, layout.statistics(plain, "test"))


@settings(max_examples=15)
@given(form=st.sampled_from(FORMS), clients=st.integers(2, 6), bits=st.integers(4, 40))
def test_the_sum_is_the_plain_sum_but_for_half_a_step_a_client(form, clients, bits):
    held = {client: statistics_of(client, form) for client in range(clients)}
    found = secure_sum(callables(held), Layout.of(C, D, form, bits=bits), least=2)
    plain = held[0]
    for client in range(1, clients):
        plain = plain + held[client]
    assert torch.equal(found.held, plain.held)
    assert torch.equal(found.number, plain.number)
    for name, value in plain.sums.items():
        assert float((found.sums[name] - value).abs().max()) <= clients * 2.0**-bits / 2 + 1e-11


@settings(max_examples=15)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=D, max_size=D), bits=st.integers(0, 30))
def test_rounding_is_to_the_nearest_step(values, bits):
    found = Layout.of(1, D, "diagonal", bits=bits).quantise(one_class(values), 3, "test")
    assert found[1 : 1 + D].tolist() == [round(value * 2**bits) for value in values]


def test_a_single_masked_vector_looks_uniform():
    """A vector of zeros: its bytes are spread as if by chance (mean ± 7 standard errors), and so is what one peer's
    mask leaves; nothing of the counts shows."""
    layout = Layout.of(100, 10)
    held = {client: ClassStatistics.empty(100, 10) for client in range(3)}
    for vector in exchanged(held, layout)[3].values():
        content = np.frombuffer(vector.numpy().tobytes(), dtype=np.uint8).astype(float)
        assert len(content) == layout.bytes
        error = (256**2 - 1) ** 0.5 / 12**0.5 / len(content) ** 0.5
        assert abs(content.mean() - 127.5) < 7 * error
        assert abs(content.var() / ((256**2 - 1) / 12) - 1) < 7 * (0.8 / len(content)) ** 0.5
        counts = np.bincount(content.astype(int), minlength=256)
        assert abs(((counts - counts.mean()) ** 2 / counts.mean()).sum() - 255) < 8 * (2 * 255) ** 0.5


def test_two_clients_with_the_same_statistics_send_different_vectors_and_so_does_one_in_two_sessions():
    layout, held = Layout.of(C, D), {client: statistics_of(1) for client in range(3)}
    first, second = (exchanged(held, layout, session)[3] for session in (SESSION, b"another session!" * 2))
    assert not bool((first[0] == first[1]).any())
    assert not bool((first[0] == second[0]).any())


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_the_sum_stays_masked_where_a_vector_is_missing_that_all_say_has_come(missing):
    """What is left carries the masks that the others share with the missing one."""
    maskings, agreement, boxes, vectors = exchanged({client: statistics_of(client) for client in range(4)}, LAYOUT)
    opened = opened_by(maskings, boxes, vectors)
    lost = torch.zeros_like(vectors.pop(missing))
    with pytest.raises(UserError, match="do not cancel"):
        unmasked_sum({**vectors, missing: lost}, agreement, maskings, opened, LAYOUT)


def test_a_session_is_answered_once_in_one_agreement_and_opened_one_way():
    held = {client: statistics_of(client) for client in range(5)}
    maskings, agreement, boxes, vectors = exchanged(held, LAYOUT)
    with pytest.raises(UserError, match="has already answered this visit"):
        maskings[1].masked(statistics_of(1), LAYOUT, held)
    with pytest.raises(UserError, match="it takes part in another agreement"):
        maskings[1].boxes(replace(agreement, threshold=5))
    received = {other: boxes[other][1] for other in held if other != 1}
    maskings[1].opened(received, vectors)
    with pytest.raises(UserError, match="with both a client could be unmasked"):
        maskings[1].opened(received, [0, 1, 2, 4])


def test_nothing_is_answered_before_shares_are_out_and_nothing_opened_before_an_answer():
    early = Masking.new(0, SESSION)
    with pytest.raises(UserError, match=r"client 0 refuses: it has not distributed its shares \(boxes\)"):
        early.masked(statistics_of(0), LAYOUT, range(3))
    others = {client: Masking.new(client, SESSION) for client in (1, 2)} | {0: early}
    publics = {client: masking.public for client, masking in others.items()}
    early.boxes(Agreement(SESSION, 2, publics, LAYOUT.about()))
    with pytest.raises(UserError, match="it has not answered in this session"):
        early.opened({}, range(3))


def test_a_client_that_leaves_after_its_answer_is_in_the_sum_all_the_same():
    held = {client: statistics_of(client) for client in range(4)}
    maskings, agreement, boxes, vectors = exchanged(held, LAYOUT)
    opened = opened_by(maskings, boxes, vectors)
    del opened[2]
    same(unmasked_sum(vectors, agreement, held, opened, LAYOUT), secure_sum(callables(held), LAYOUT))
    del opened[0]
    with pytest.raises(UserError, match="2 clients opened their shares, but 3 must"):
        unmasked_sum(vectors, agreement, held, opened, LAYOUT)


def test_another_layout_than_the_agreed_one_is_refused():
    maskings = {client: Masking.new(client, SESSION) for client in range(3)}
    publics = {client: masking.public for client, masking in maskings.items()}
    maskings[0].boxes(Agreement(SESSION, 2, publics, LAYOUT.about()))
    with pytest.raises(UserError, match=r"client 0 refuses to answer: the agreed layout was full .* 2\^-24"):
        maskings[0].masked(statistics_of(0), Layout.of(C, D, bits=20), publics)


def test_a_mask_starts_as_the_standard_has_it():
    """RFC 8439, appendix A.1, test vector 1: key, nonce and counter zero."""
    assert masked_zeros(3).tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1a"


def test_a_mask_made_in_chunks_is_the_same_stream(monkeypatch):
    whole = masked_zeros(100)
    monkeypatch.setattr(ciphers, "CHUNK", 7)
    assert np.array_equal(masked_zeros(100), whole)


def test_the_sum_over_clients_that_hold_nothing_holds_nothing():
    for form in FORMS:
        found = secure_sum(callables({c: ClassStatistics.empty(C, D, form) for c in range(3)}), Layout.of(C, D, form))
        assert len(found.held) == 0


def test_a_vector_weighs_what_was_said_before_whatever_its_client_holds():
    for form in FORMS:
        layout = Layout.of(C, D, form)
        for client in (1, 3):
            assert 8 * len(layout.quantise(statistics_of(client, form), 3, "test")) == layout.bytes
    assert Layout.of(1203, 1280).bytes == 8 * (1203 + 1203 * 1280 + 1203 * 1280 * 1281 // 2)


def test_each_client_is_measured_once_and_one_that_dropped_out_never():
    calls = []
    clients = {c: lambda c=c: calls.append(c) or statistics_of(c) for c in range(5)}
    secure_sum(clients, Layout.of(C, D), dropped=[2])
    assert sorted(calls) == [0, 1, 3, 4]


def test_the_largest_sum_that_fits_is_exact_and_one_step_more_is_refused():
    """Three clients, no binary places: each may send (2⁶³ − 1) // 3, and its float64 neighbours lie 512 apart."""
    layout, limit = Layout.of(1, D, "diagonal", bits=0), (2**63 - 1) // 3
    most = float(limit - limit % 512)
    assert int(most) <= limit < int(most + 512)
    held = {client: one_class([most, -most, 0.0]) for client in range(3)}
    assert secure_sum(callables(held), layout).sums["sums"].tolist() == [[float(3 * int(most)), -3 * most, 0.0]]
    for value in (most + 512, -most - 512, 1e300):
        with pytest.raises(UserError, match=r"client 1 are rejected: an entry of sums reaches .* use fewer bits"):
            secure_sum(callables({**held, 1: one_class([0.0, value, 0.0])}), layout)


def test_counts_without_bounds_are_refused():
    many = replace(one_class([0.0] * D), number=torch.tensor([2**40]))
    with pytest.raises(UserError, match="client 0 are rejected: a class has more than"):
        secure_sum(callables(dict.fromkeys(range(3), many)), Layout.of(1, D, "diagonal"))


def test_statistics_that_cannot_be_true_are_refused_in_their_clients_name():
    good = statistics_of(2)
    broken = {
        "contains NaN": replace(good, sums={**good.sums, "sums": good.sums["sums"] * float("nan")}),
        "counts must be": replace(good, number=-torch.ones_like(good.number)),
        "the shape": replace(good, sums={**good.sums, "second": good.sums["second"][:1]}),
        "expected full": statistics_of(2, "diagonal"),
        "over 6 classes": statistics_of(2, classes=6),
    }
    for words, value in broken.items():
        clients = callables({0: statistics_of(0), 1: statistics_of(1), 7: value})
        with pytest.raises(UserError, match=f"client 7 are rejected: .*{words}"):
            secure_sum(clients, Layout.of(C, D))


def test_a_vector_of_the_wrong_kind_is_refused_in_its_clients_name():
    maskings, agreement, boxes, vectors = exchanged({client: statistics_of(client) for client in range(3)}, LAYOUT)
    opened = opened_by(maskings, boxes, vectors)
    for broken in (vectors[1][:-1], vectors[1].double()):
        with pytest.raises(UserError, match="the vector of client 1 is not int64"):
            unmasked_sum({**vectors, 1: broken}, agreement, maskings, opened, LAYOUT)


def test_too_few_clients_are_refused_by_server_and_clients():
    clients = callables({client: statistics_of(client) for client in range(5)})
    with pytest.raises(UserError, match="a sum over 2 clients would reveal too much"):
        secure_sum(clients, LAYOUT, dropped=[1, 2, 3])
    with pytest.raises(UserError, match="client 0 refuses: the server lists 3 of 5 members; at least 4 must"):
        secure_sum(clients, LAYOUT, dropped=[1, 2])
    two = [Masking.new(client, SESSION) for client in range(2)]
    with pytest.raises(UserError, match="a sum over 2 clients would reveal too much"):
        two[0].boxes(Agreement(SESSION, 2, {each.client: each.public for each in two}, LAYOUT.about()))


def test_a_layout_says_what_it_cannot_be():
    for arguments, bits, message in (
        ((0, 3), 24, "0 classes"),
        ((3, 0), 24, "0 features"),
        ((3, 3), 53, "53 bits"),
        ((3, 3, "round"), 24, "no covariance form is called 'round'"),
    ):
        with pytest.raises(UserError, match=message):
            Layout.of(*arguments, bits=bits)


def test_without_the_package_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UserError, match=r'pip install "unskew\[privacy\]"'):
        assert Masking.new(0, SESSION).public


def one_class(sums):
    """Statistics of one class, diagonal, with these sums."""
    sums = torch.tensor([sums], dtype=torch.float64)
    none = ClassStatistics.empty(1, D, "diagonal")
    one = torch.ones(1, dtype=torch.int64)
    return replace(none, held=one * 0, number=one, sums={"sums": sums, "squares": torch.zeros_like(sums)})


def masked_zeros(words):
    """A vector of zeros and the stream of a key of zeros."""
    vector = np.zeros(words, dtype=np.uint64)
    ciphers.add_stream(vector, bytes(32), 1)
    return vector
