"""A member's part in a session: what it refuses, and that never both secrets of one member come out."""

import hashlib
import hmac
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.privacy.ciphers import add_stream, derived_key, exchanged, private_key
from unskew.privacy.masking import Agreement, Member, member_number, named, shares_needed, unmask

SESSION, ABOUT, WORDS = bytes(range(32)), "numbers", 50


def begun(count=5, threshold=None, session=SESSION):
    members = {number: Member(number, session, bytes([number]) * 32) for number in range(count)}
    publics = {number: member.public for number, member in members.items()}
    return members, Agreement(session, threshold or shares_needed(0.66, count), publics, ABOUT)


def vector_of(number):
    return np.arange(WORDS, dtype=np.uint64) * np.uint64(number + 1) - np.uint64(7)


def masked(member, agreement, sharing):
    vector = vector_of(member.number)
    member.mask(vector, agreement, sharing)
    return vector


def opened_by(members, agreement, sharing, answered, openers):
    boxes = {number: members[number].boxes(agreement) for number in sharing}
    return {
        number: members[number].opened(
            agreement, {other: boxes[other][number] for other in sharing if other != number}, sharing, answered
        )
        for number in openers
    }


@settings(max_examples=25)
@given(count=st.integers(2, 8), data=st.data())
def test_the_sum_of_those_who_answered_is_exact_whoever_drops_out_when(count, data):
    """After the keys, after the shares, or after the answers: with at least t left at each step."""
    threshold = data.draw(st.integers(count // 2 + 1, count))
    staying = data.draw(st.integers(threshold, count))
    sharing = sorted(data.draw(st.permutations(range(count)))[:staying])
    answered = sorted(data.draw(st.permutations(sharing))[: data.draw(st.integers(threshold, len(sharing)))])
    openers = sorted(data.draw(st.permutations(answered))[: data.draw(st.integers(threshold, len(answered)))])
    members, agreement = begun(count, threshold)
    total = np.sum([masked(members[number], agreement, sharing) for number in answered], axis=0, dtype=np.uint64)
    unmask(total, agreement, sharing, answered, opened_by(members, agreement, sharing, answered, openers))
    assert np.array_equal(total, np.sum([vector_of(number) for number in answered], axis=0, dtype=np.uint64))


def test_with_one_share_too_few_the_sum_stays_masked():
    members, agreement = begun(5, 4)
    total = np.sum([masked(members[number], agreement, range(5)) for number in range(5)], axis=0, dtype=np.uint64)
    opened = opened_by(members, agreement, range(5), range(5), range(3))
    with pytest.raises(UserError, match="3 clients opened their shares, but 4 must"):
        unmask(total, agreement, range(5), range(5), opened)


def test_a_vector_that_comes_late_stays_masked_though_its_key_was_put_together():
    """Client 2 seemed lost, its key is known to the server; its late vector still has its own mask."""
    members, agreement = begun(5)
    answered = [0, 1, 3, 4]
    late = masked(members[2], agreement, range(5))
    total = np.sum([masked(members[number], agreement, range(5)) for number in answered], axis=0, dtype=np.uint64)
    unmask(total, agreement, range(5), answered, opened_by(members, agreement, range(5), answered, answered))
    private = private_key(derived_key(members[2]._mask_secret, b"unskew mask key 1", SESSION))
    for other in answered:  # all that the server can take off
        add_stream(late, agreement.mask_key(private, 2, other), 1 if other < 2 else -1)
    assert np.count_nonzero(late == vector_of(2)) == 0


def test_what_a_member_opens_is_one_share_of_each_other_and_never_both():
    members, agreement = begun(5)
    answered = [0, 1, 3, 4]
    for shares in opened_by(members, agreement, range(5), answered, answered).values():
        assert sorted(shares) == [0, 1, 2, 3, 4]
        assert {len(share) for share in shares.values()} == {17}


def test_a_share_says_nothing_without_its_box_key():
    """What the server passes on is sealed: another member cannot open it, nor a changed one."""
    members, agreement = begun()
    boxes = {number: member.boxes(agreement) for number, member in members.items()}
    for wrong in (boxes[1][3], bytes([boxes[1][0][0] ^ 1]) + boxes[1][0][1:]):
        received = {number: boxes[number][0] for number in range(2, 5)} | {1: wrong}
        assert sorted(members[0].opened(agreement, received, range(5), range(5))) == [0, 2, 3, 4]
        with pytest.raises(UserError, match="the shares of client 1's secrets: the message was modified"):
            members[0].opened(agreement, dict.fromkeys(range(1, 5), wrong), range(5), range(5))


def test_the_mask_of_a_pair_is_chacha20_under_hkdf_of_the_shared_secret():
    """RFC 7748, section 6.1: two keys and their secret. RFC 5869 written out with hmac."""
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")  # public
    secret = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert exchanged(private_key(alice), bob, "test") == secret
    _, agreement = begun(2)
    pair = replace(agreement, publics={0: agreement.publics[0], 1: bob + agreement.publics[1][32:]})
    info = b"unskew mask 2 " + bytes(8) + (1).to_bytes(8, "big") + pair.digest
    extracted = hmac.digest(SESSION, secret, "sha256")
    assert pair.mask_key(private_key(alice), 0, 1) == hmac.digest(extracted, info + b"\x01", "sha256")


def test_members_that_were_told_different_things_share_no_mask():
    members, agreement = begun(4, 3)
    for told in (replace(agreement, about="other numbers"), replace(agreement, threshold=4)):
        assert told.digest != agreement.digest
        total = np.sum([masked(members[n], told if n == 2 else agreement, range(4)) for n in range(4)], axis=0,
                       dtype=np.uint64)  # fmt: skip
        unmask(total, agreement, range(4), range(4), opened_by(members, agreement, range(4), range(4), range(4)))
        assert not np.array_equal(total, np.sum([vector_of(n) for n in range(4)], axis=0, dtype=np.uint64))


def test_a_digest_is_over_all_of_the_agreement():
    """By hand, so that another implementation could take part."""
    _, agreement = begun(2, 2)
    content = (2).to_bytes(8, "big") * 2 + (32).to_bytes(8, "big") + SESSION
    content += b"".join(number.to_bytes(8, "big") + agreement.publics[number] for number in (0, 1)) + b"numbers"
    assert agreement.digest == hashlib.sha256(b"unskew agreement 1 " + content).digest()


def test_a_member_refuses_an_agreement_that_it_cannot_believe():
    members, agreement = begun(3)
    publics = agreement.publics
    broken = {
        "a public key does not belong to its member": [
            replace(agreement, publics={**publics, 0: publics[1]}),
            replace(agreement, publics={**publics, 2: publics[1]}),
            replace(agreement, publics={1: publics[1], 2: publics[2]}),
            replace(agreement, publics={**publics, 1: publics[0][32:] + publics[1][32:]}),
            replace(agreement, publics={**publics, 1: b"short"}),
        ],
        "more than half and at most all": [replace(agreement, threshold=number) for number in (0, 1, 4)],
    }
    for words, agreements in broken.items():
        for each in agreements:
            with pytest.raises(UserError, match=words):
                members[0].check(each)
    with pytest.raises(UserError, match="client 0 refuses the public key of client 1"):
        members[0].mask(vector_of(0), replace(agreement, publics={**publics, 1: bytes(32) + publics[1][:32]}), range(3))
    short = Member(0, b"1", bytes(32))
    with pytest.raises(UserError, match="the session id is too short"):
        short.check(Agreement(b"1", 2, {**publics, 0: short.public}, ABOUT))


def test_a_member_refuses_to_answer_or_open_for_too_few_or_for_strangers():
    members, agreement = begun(6, 4)
    boxes = {number: bytes(50) for number in range(6)}
    for sharing in ([0, 1, 2], [1, 2, 3, 4], [0, 1, 2, 9]):
        with pytest.raises(UserError, match=r"client 0 refuses: the server lists . of 6 members; at least 4 must"):
            members[0].mask(vector_of(0), agreement, sharing)
    for sharing, answered in [
        (range(6), [0, 1, 2]), (range(6), [1, 2, 3, 4]), ([0, 1, 2, 3], range(5)), (range(7), range(6)),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=r"client 0 refuses: .* members; at least 4 must"):
            members[0].opened(agreement, boxes, sharing, answered)


def test_a_wrong_share_of_a_dropped_members_key_is_noticed():
    members, agreement = begun(5)
    answered = [0, 1, 3, 4]
    opened = opened_by(members, agreement, range(5), answered, answered)
    opened[0][2] = bytes(16) + b"\x01"
    total = np.zeros(WORDS, np.uint64)
    with pytest.raises(UserError, match=r"client 2, which dropped out, do not yield its key|do not belong together"):
        unmask(total, agreement, range(5), answered, opened)
    opened[0][2] = b"short"
    with pytest.raises(UserError, match="a share of client 2 is refused"):
        unmask(total, agreement, range(5), answered, opened)


@pytest.mark.parametrize(("share", "members", "needed"), [
    (0.66, 3, 2), (0.66, 4, 3), (0.66, 6, 4), (0.66, 10, 7), (0.66, 100, 66), (1.0, 10, 10), (0.51, 10, 6),
    (0.501, 2, 2), (0.9, 1, 1),
])  # fmt: skip
def test_the_threshold_is_the_share_rounded_up_and_always_more_than_half(share, members, needed):
    assert shares_needed(share, members) == needed


def test_a_client_that_comes_twice_is_two_members():
    assert named(member_number(7)) == "client 7"
    assert named(member_number(7, 2)) == "client 7, visit 3"
