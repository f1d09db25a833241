"""A client answers a session once, in one agreement, and opens it one way; its record outlives processes."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from unskew.core.errors import StorageFailure, UserError
from unskew.privacy.sessions import NOTHING, SLOT, Record, Sessions, new_session

FIRST, SECOND = (number.to_bytes(8, "big") + bytes(24) for number in (1, 2))
AGREED, OTHER, ALL = b"a" * 32, b"o" * 32, b"s" * 32


def agree(sessions, client, session, agreement):
    sessions.change(client, Record.agreed, session, agreement)


def answer(sessions, client, session, agreement, visit):
    """Take part and answer, under masks with all members."""
    agree(sessions, client, session, agreement)
    sessions.change(client, Record.with_answer, session, agreement, ALL, visit)


@pytest.fixture
def sessions():
    opened = Sessions.temporary()
    yield opened
    opened.close()


def test_a_session_is_answered_once(sessions):
    answer(sessions, 3, FIRST, AGREED, 0)
    with pytest.raises(UserError, match=r"client 3 refuses: .* has already answered this visit"):
        answer(sessions, 3, FIRST, AGREED, 0)
    answer(sessions, 3, FIRST, AGREED, 1)  # another visit of the same client
    answer(sessions, 4, FIRST, AGREED, 0)
    answer(sessions, 3, SECOND, OTHER, 0)


def test_a_session_is_not_answered_before_it_was_agreed_to(sessions):
    for session in (FIRST, SECOND):
        with pytest.raises(UserError, match="client 3 refuses: it has not distributed its shares in this session"):
            sessions.change(3, Record.with_answer, session, AGREED, ALL, 0)
        answer(sessions, 3, session, AGREED, 0)


def test_a_session_is_answered_and_opened_under_masks_with_the_same_members(sessions):
    answer(sessions, 3, FIRST, AGREED, 0)
    with pytest.raises(UserError, match="client 3 refuses: it has answered or opened its shares for other members"):
        sessions.change(3, Record.with_answer, FIRST, AGREED, OTHER, 1)
    with pytest.raises(UserError, match="client 3 refuses: it has not answered in this session under masks with these"):
        sessions.change(3, Record.with_opening, FIRST, AGREED, OTHER, b"q" * 32, 0)
    sessions.change(3, Record.with_opening, FIRST, AGREED, ALL, b"q" * 32, 0)


def test_an_earlier_session_is_never_answered_again(sessions):
    answer(sessions, 0, SECOND, AGREED, 0)
    for take_part in (agree, lambda *question: answer(*question, 0)):
        with pytest.raises(UserError, match="client 0 refuses: it has already taken part in a later session"):
            take_part(sessions, 0, FIRST, AGREED)
    twin = SECOND[:8] + b"x" * 24
    with pytest.raises(UserError, match="a later session"):
        agree(sessions, 0, twin, AGREED)


def test_a_client_takes_part_in_one_agreement_a_session(sessions):
    agree(sessions, 0, FIRST, AGREED)
    agree(sessions, 0, FIRST, AGREED)
    with pytest.raises(UserError, match="another agreement of this session"):
        answer(sessions, 0, FIRST, OTHER, 0)


def test_a_session_is_opened_one_way_and_only_by_who_answered(sessions):
    with pytest.raises(UserError, match="it has not answered in this session"):
        sessions.change(0, Record.with_opening, FIRST, AGREED, ALL, b"q" * 32, 0)
    answer(sessions, 0, FIRST, AGREED, 0)
    sessions.change(0, Record.with_opening, FIRST, AGREED, ALL, b"q" * 32, 0)
    sessions.change(0, Record.with_opening, FIRST, AGREED, ALL, b"q" * 32, 0)  # the same question: the same answer
    with pytest.raises(UserError, match="with both a client could be unmasked"):
        sessions.change(0, Record.with_opening, FIRST, AGREED, ALL, b"r" * 32, 0)
    with pytest.raises(UserError, match="has already answered this visit"):
        answer(sessions, 0, FIRST, AGREED, 1)


def test_records_of_two_processes_join_to_what_both_did(sessions):
    for visit in (0, 3):
        other = Sessions.temporary()
        other.join(0, sessions.content(0))
        answer(other, 0, FIRST, AGREED, visit)
        sessions.join(0, other.content(0))
        other.close()
    for visit in (0, 3):
        with pytest.raises(UserError, match="has already answered this visit"):
            answer(sessions, 0, FIRST, AGREED, visit)
    sessions.change(0, Record.with_opening, FIRST, AGREED, ALL, b"q" * 32, 0)
    before = sessions.content(0)
    sessions.join(0, Record(FIRST, AGREED, 1).to_bytes())  # one that says less takes nothing back
    sessions.join(0, b"")
    assert sessions.content(0) == before
    for odd in (Record(FIRST, OTHER, 1), Record(FIRST, AGREED, 1, b"r" * 32), Record(FIRST, AGREED, 1, NOTHING, OTHER)):
        with pytest.raises(
            UserError, match=r"client 0 refuses: it (takes part in another|has answered or opened its shares)"
        ):
            sessions.join(0, odd.to_bytes())
    sessions.join(0, Record(SECOND, OTHER).to_bytes())
    with pytest.raises(UserError, match="a later session"):
        agree(sessions, 0, FIRST, AGREED)


def test_a_record_is_what_was_written(sessions):
    record = Record(FIRST, AGREED, 1 << 255 | 1, OTHER, ALL)
    assert Record.from_bytes(record.to_bytes()) == record
    assert len(record.to_bytes()) == SLOT
    assert Record.from_bytes(bytes(SLOT)) == Record.from_bytes(b"") == Record()
    assert Record().opened == NOTHING
    for damaged in (b"x" + record.to_bytes()[1:], record.to_bytes()[:100]):
        with pytest.raises(UserError, match="damaged"):
            Record.from_bytes(damaged)


def test_a_session_id_of_another_length_is_refused(sessions):
    with pytest.raises(UserError, match="a session id must be 32 bytes long, not 3"):
        agree(sessions, 0, b"abc", AGREED)


def test_session_numbers_grow():
    numbers = [new_session()[:8] for _ in range(3)]
    assert numbers == sorted(numbers)
    assert len({new_session() for _ in range(10)}) == 10


def test_a_record_in_a_file_is_there_when_it_is_opened_again_and_nobody_else_may_read_it(tmp_path):
    file = tmp_path / "sessions"
    first = Sessions.in_file(file)
    answer(first, 7, FIRST, AGREED, 0)
    first.close()
    again = Sessions.in_file(file)
    with pytest.raises(UserError, match=r"client 7 refuses: .* has already answered this visit"):
        answer(again, 7, FIRST, AGREED, 0)
    again.close()
    assert file.stat().st_mode & 0o777 == 0o600


def test_of_many_threads_that_answer_at_once_one_does(sessions):
    def answered(_):
        try:
            answer(sessions, 0, FIRST, AGREED, 0)
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(answered, range(32))) == 1


def started(file, client, then=""):
    """A process that answers for the client, and then does something else."""
    code = (
        "import sys, os; from pathlib import Path; from unskew.privacy.sessions import Record, Sessions\n"
        f"change = Sessions.in_file(Path({str(file)!r})).change\n"
        f"change({client}, Record.agreed, {FIRST!r}, {AGREED!r})\n"
        f"change({client}, Record.with_answer, {FIRST!r}, {AGREED!r}, {ALL!r}, 0); {then}"
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


@pytest.mark.heavy
def test_a_record_outlives_a_process_that_is_killed(tmp_path):
    assert started(tmp_path / "sessions", 7, "os.kill(os.getpid(), 9)").wait() == -9
    again = Sessions.in_file(tmp_path / "sessions")
    with pytest.raises(UserError, match=r"client 7 refuses: .* has already answered this visit"):
        answer(again, 7, FIRST, AGREED, 0)
    again.close()


@pytest.mark.heavy
def test_of_many_processes_that_answer_at_once_one_does(tmp_path):
    running = [started(tmp_path / "sessions", 0) for _ in range(3)]
    assert sorted(each.wait() for each in running) == [0, 1, 1]


def test_a_record_that_cannot_be_written_is_the_machines_failure(tmp_path):
    with pytest.raises(StorageFailure, match="cannot be saved"):
        Sessions.in_file(tmp_path / "nowhere" / "sessions")
    (tmp_path / "read-only").write_bytes(b"")
    closed = Sessions(os.open(tmp_path / "read-only", os.O_RDONLY))
    with pytest.raises(StorageFailure, match="cannot be saved"):
        answer(closed, 0, FIRST, AGREED, 0)
    closed.close()
