"""What left a node is on record, line by line, and a receipt of it can be verified."""

import hashlib
import json
import stat

import pytest

from nodes import RUN, Asking, exchange_of, federated, make_node, make_nodes
from unskew.core.errors import UserError
from unskew.engines.flower.audit import FIRST, AuditLog, make_receipt, read_audit, receipt_lines, verify_receipt
from unskew.federation.network import make_node_key
from unskew.round.evaluation import Evaluate
from unskew.round.jobs import encode_job


def test_every_reply_with_results_is_on_record_before_it_leaves(tmp_path):
    asking = Asking(make_node(tmp_path, 1)).agree()
    file = tmp_path / "node-1" / "audit.jsonl"
    replies = []
    answer = asking.node.answer

    def listen(envelope):
        replies.append(answer(envelope))
        rows = read_audit(file)
        assert rows[-1]["sha256"] == hashlib.sha256(replies[-1].header).hexdigest()
        assert rows[-1]["bytes"] == len(replies[-1])
        return replies[-1]

    asking.node.answer = listen
    _, came = asking.job()
    asking.job(encode_job(Evaluate()))
    trained, evaluated = read_audit(file)
    assert (trained["run"], trained["job"], trained["work"], trained["round"]) == (RUN, "train", "train", 1)
    assert trained["sums"] == [[name, str(value.dtype)[6:], list(value.shape)] for name, value in came]
    assert (trained["clients"], trained["members"], trained["epsilon"]) == ([1], None, None)
    assert evaluated["job"] == "evaluate"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_refused_does_not_leave_and_is_not_on_record(tmp_path):
    asking = Asking(make_node(tmp_path, 1)).agree()
    asking.job({"type": "erase"})
    assert (tmp_path / "node-1" / "audit.jsonl").read_bytes() == b""


def test_nothing_leaves_that_cannot_be_recorded(tmp_path, monkeypatch):
    asking = Asking(make_node(tmp_path, 1)).agree()

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    header, came = asking.job()
    monkeypatch.undo()
    assert header["kind"] == "refused"
    assert "audit.jsonl cannot be written, so no reply is sent or used: No space left on device" in header["reason"]
    assert came == []


def test_a_description_is_on_record_once(tmp_path):
    asking = Asking(make_node(tmp_path, 1))
    for _ in range(3):
        asking.ask("describe")
    (row,) = read_audit(tmp_path / "node-1" / "audit.jsonl")
    assert row["job"] == "describe"


def entry(number):
    return {"run": RUN, "job": "train", "round": number, "bytes": 10, "members": None, "epsilon": None}


def test_a_line_that_a_crash_cut_short_is_removed_and_the_log_goes_on(tmp_path):
    file = tmp_path / "audit.jsonl"
    AuditLog(file).append(entry(1))
    with file.open("ab") as log:
        log.write(b'{"time": "half')
    AuditLog(file).append(entry(2))
    assert [row["round"] for row in read_audit(file)] == [1, 2]
    assert read_audit(file)[0]["previous"] == FIRST


@pytest.mark.parametrize("change", ["a line is changed", "a line is removed", "two lines change places"])
def test_a_changed_log_is_noticed(tmp_path, change):
    file = tmp_path / "audit.jsonl"
    log = AuditLog(file)
    for number in range(4):
        log.append(entry(number))
    lines = file.read_bytes().splitlines(keepends=True)
    if change == "a line is changed":
        lines[1] = lines[1].replace(b'"bytes":10', b'"bytes":11')
    elif change == "a line is removed":
        del lines[1]
    else:
        lines[1], lines[2] = lines[2], lines[1]
    file.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"does not follow line .*; the log was changed"):
        read_audit(file)


def test_a_receipt_is_signed_with_the_nodes_key(tmp_path):
    key = make_node_key()
    (tmp_path / "node.key").write_bytes(key.private)
    nodes = make_nodes(tmp_path)
    federated(tmp_path, exchange_of(nodes), method="fedavg + lda + secure")
    receipt = make_receipt(tmp_path / "node-1" / "audit.jsonl", "node-1", tmp_path / "node.key")
    verify_receipt(json.loads(json.dumps(receipt)), key.public)
    (run,) = receipt["runs"]
    masks = ("mask-keys", "mask-shares", "masked", "mask-survivors", "mask-openings")
    assert run["jobs"] == {"describe": 1, "train": 2, **dict.fromkeys(masks, 1)}
    assert run["rounds"] == 2
    first, second = receipt_lines(receipt)
    assert first.startswith("node node-1: 8 messages left, as of ")
    assert "2 × train" in second
    assert "not all masked, no ε promised" in second
    changes = ({"lines": 9}, {"node": "node-2"}, {"runs": []}, {"signature": "?"}, {"signature": None})
    broken = [({**receipt, **change}, key.public) for change in changes]
    for given, public in (*broken, ({}, key.public), (receipt, make_node_key().public)):
        with pytest.raises(UserError, match="not signed with this key, or was changed since"):
            verify_receipt(given, public)


def test_a_masked_round_is_recorded_with_its_members_and_epsilon_of_noise(tmp_path):
    method = "fedavg + private-updates(clip=1, noise=4, release=true) + secure(updates=true)"
    federated(tmp_path, exchange_of(make_nodes(tmp_path)), method=method, evaluate_every=2)
    rows = read_audit(tmp_path / "node-0" / "audit.jsonl")
    masked = [row for row in rows if (row["job"], row.get("work")) == ("masked", "train")]
    assert [row["members"] for row in masked] == [3, 3]
    assert 0 < masked[0]["epsilon"] < masked[1]["epsilon"]
    assert masked[0]["unit"] == "client"
    assert {name for name, _, _ in masked[0]["sums"]} > {"check", "weight"}
