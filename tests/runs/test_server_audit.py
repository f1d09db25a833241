"""The server's own record of a federated run: who was asked in each round, with which key, version and data."""

import json
from dataclasses import replace

import pytest

from analysis.finished import done, refused
from nodes import exchange_of, federated, make_nodes
from unskew.core.errors import UserError
from unskew.engines.flower.audit import AUDIT, read_audit, record_lines
from unskew.engines.flower.messages import Presence
from unskew.engines.flower.node import COMMITMENT, commit
from unskew.runs.federated import audit_file
from unskew.runs.prepare import FLOWER_BYTES, PROCESS_BYTES, REPLY_COPIES, SERVER_COPIES, Overview
from unskew.runs.seals import DAMAGED, UNCHANGED, examine

ROUNDS = 2


@pytest.fixture
def nodes(tmp_path):
    return make_nodes(tmp_path)


def presence(nodes):
    return {number: Presence(node.data.name, "", f"SHA256:{number}") for number, node in nodes.items()}


def test_every_exchange_names_its_nodes_their_keys_versions_data_and_bytes(tmp_path, nodes):
    exchange = exchange_of(nodes, presence=presence(nodes))
    federated(tmp_path, exchange, rounds=ROUNDS)
    rows = read_audit(tmp_path / "run" / AUDIT)
    trained = [row for row in rows if row["job"] == "train"]
    assert [row["round"] for row in trained] == [1, 2]
    for row in trained:
        assert [each["node"] for each in row["nodes"]] == ["node-0", "node-1", "node-2"]
        assert [each["key"] for each in row["nodes"]] == ["SHA256:100", "SHA256:101", "SHA256:102"]
        assert all(each["version"] and len(each["data"]) == 64 and each["left_out"] is None for each in row["nodes"])
        assert all(each["bytes_up"] > 1000 and each["bytes_down"] > 1000 for each in row["nodes"])
    up = sum(each["bytes_up"] for row in rows for each in row["nodes"])
    assert 0 < exchange.received - up < 2000  # but for the farewell
    lines = record_lines(rows)
    assert "submitted by unknown" in lines[0]
    assert "node node-1: key SHA256:101" in lines[2]


def test_every_reply_in_the_record_is_in_its_node_s_own_log(tmp_path, nodes):
    federated(tmp_path, exchange_of(nodes), rounds=1)
    said = [each for row in read_audit(tmp_path / "run" / AUDIT) for each in row["nodes"] if each["reply"]]
    assert said
    for each in said:
        left = {row["sha256"] for row in read_audit(tmp_path / each["node"] / AUDIT)}
        assert each["reply"] in left


def test_who_was_left_out_is_in_the_record_with_the_reason(tmp_path, nodes):
    def between(node, question, reply):
        return None if node == 101 and b'"job"' in question.header else reply

    federated(tmp_path, exchange_of(nodes, between=between), rounds=1, evaluate_every=2)
    first = next(row for row in read_audit(tmp_path / "run" / AUDIT) if row["job"] == "train")
    assert [each["left_out"] for each in first["nodes"]] == [None, "it did not answer within the deadline", None]
    assert first["nodes"][1]["reply"] is None


def test_the_name_of_a_node_s_data_says_whether_they_changed_and_nothing_else(tmp_path, nodes):
    data = nodes[100].data
    same = commit(tmp_path / "node-0" / COMMITMENT, data.sha256)
    assert same == commit(tmp_path / "node-0" / COMMITMENT, data.sha256)
    assert (tmp_path / "node-0" / COMMITMENT).stat().st_mode & 0o777 == 0o600
    assert same != commit(tmp_path / "other.key", data.sha256)  # who lacks the key cannot test a guess
    clients = (replace(data.clients[0], train=data.clients[0].train[1:]),)
    assert same != commit(tmp_path / "node-0" / COMMITMENT, replace(data, clients=clients).sha256)


def test_a_changed_record_is_noticed_by_audit_and_by_check(tmp_path, nodes):
    federated(tmp_path, exchange_of(nodes), rounds=2)
    run, file = tmp_path / "run", tmp_path / "run" / AUDIT
    assert {each.name: each.state for each in examine(run)}[AUDIT] == UNCHANGED
    lines = file.read_text().splitlines()
    row = json.loads(lines[0])
    row["nodes"][0]["bytes_up"] = 1
    file.write_text("\n".join([json.dumps(row), *lines[1:], ""]))
    with pytest.raises(UserError, match="line 2 does not follow line 1; the log was changed"):
        read_audit(file)
    assert {each.name: each.state for each in examine(run)}[AUDIT] == DAMAGED


def test_a_release_keeps_who_took_part_out_of_the_run_directory(tmp_path, nodes):
    method = "private-updates(clip=1, noise=1, delta=1e-5, release=true)"
    federated(tmp_path, exchange_of(nodes), rounds=1, method=method, normalise="half", evaluate_every=1)
    assert not (tmp_path / "run" / AUDIT).exists()
    assert audit_file(tmp_path / "run", released=True).stat().st_mode & 0o777 == 0o600
    assert len(read_audit(audit_file(tmp_path / "run", released=True))) >= 1


def test_the_command_audit_reads_a_run_directory_and_takes_no_key_for_it(tmp_path, nodes, capsys):
    federated(tmp_path, exchange_of(nodes), rounds=1)
    assert "node node-2: key unknown" in done(capsys, "federation", "audit", tmp_path / "run")
    message = refused(capsys, "federation", "audit", tmp_path / "run", "--key", "a.pub")
    assert "a receipt needs --key NAME.pub, and nothing else does" in message


def test_the_memory_announced_has_room_for_the_replies_of_a_round(tmp_path, nodes):
    seen = []
    federated(tmp_path, exchange_of(nodes), rounds=1, observe=seen.append)
    announced = next(event for event in seen if isinstance(event, Overview))
    assert len(announced.visits) == 3
    model = 4 * announced.parameters
    assert announced.memory_bytes > PROCESS_BYTES + FLOWER_BYTES + (8 + SERVER_COPIES + 3 * REPLY_COPIES) * model
