"""A message that is sent again is refused, also after the node was started again."""

import pytest

from unskew.core.errors import UserError
from unskew.engines.codec import BadMessage
from unskew.engines.flower.messages import REMEMBERED, STARTS, Seen


def test_a_number_is_taken_once_in_whatever_order(tmp_path):
    seen = Seen(tmp_path / "seen.json")
    for number in (5, 3, 4):
        seen.take(number)
    for number in (3, 4, 5):
        with pytest.raises(BadMessage, match=f"replayed: message {number}"):
            seen.take(number)
    seen.take(6)


def test_a_restart_forgets_nothing(tmp_path):
    Seen(tmp_path / "seen.json").take(7)
    again = Seen(tmp_path / "seen.json")
    with pytest.raises(BadMessage, match="replayed"):
        again.take(7)
    again.take(8)


def test_what_is_too_old_to_be_remembered_is_refused(tmp_path):
    seen = Seen(tmp_path / "seen.json")
    for number in range(1, REMEMBERED + 2):
        seen.take(number)
    with pytest.raises(BadMessage, match="replayed"):
        seen.take(0)


def test_after_the_server_was_started_again_its_earlier_messages_are_refused(tmp_path):
    seen = Seen(tmp_path / "seen.json")
    seen.take(9)
    seen.take(STARTS)
    with pytest.raises(BadMessage, match="replayed: message 10"):
        seen.take(10)
    seen.take(STARTS + 1)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'[0, ["a"]]', b"[0, [1"])
def test_a_damaged_file_is_a_message_with_a_way_out(tmp_path, content):
    (tmp_path / "seen.json").write_bytes(content)
    with pytest.raises(UserError, match="is damaged; delete the folder"):
        Seen(tmp_path / "seen.json")
