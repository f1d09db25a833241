"""A node checks whatever it is asked before it does anything, keeps what its clients need, and goes on."""

import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from nodes import (
    RUN,
    VISIT,
    Asking,
    first_state,
    loop_over,
    make_node,
    plain_visit,
    refused,
    slice_of_digits,
    train_round,
)
from unskew.core import tensors
from unskew.core.errors import UserError
from unskew.core.types import Split, Visit
from unskew.data.sources import load
from unskew.engines.flower.messages import Envelope, WireContext, restore, seal, unseal
from unskew.engines.flower.node import Node, NodeMemory, open_secret, read_node_data
from unskew.engines.flower.policy import Policy
from unskew.round import statistics
from unskew.round.client_memory import MemoryFormat, whole_model
from unskew.round.evaluation import Evaluate
from unskew.round.jobs import encode_job


@pytest.fixture
def asking(tmp_path):
    return Asking(make_node(tmp_path, 1)).agree()


@pytest.fixture
def storing(tmp_path):
    """A run whose method stores a memory of every visit that keeps one."""
    return Asking(make_node(tmp_path, 1), "scaffold").agree()


KEEPING = replace(VISIT, keep=True)


PLAIN_VISIT = plain_visit(VISIT)
CODE = {"type": "call", "function": "os:system", "options": "ls"}


def nested(depth):
    """A job inside so many others."""
    job = {"type": "train"}
    for _ in range(depth):
        job = {"type": "rounded", "inner": job, "members": 4}
    return job


def test_a_job_gives_what_one_process_gives(asking):
    header, came = asking.job()
    (result,) = header["results"]
    shared = statistics.build_shared(first_state())
    context = WireContext(shared, 435.0, result["factor"])
    pairs = zip(came, result["forms"], strict=True)
    sums = {name: restore(name, form, value, context) for (name, value), form in pairs}
    assert result["extra"] == 0
    expected = train_round(loop_over(), shared, [VISIT])
    assert tensors.sha256(sums) == tensors.sha256(expected.sums)


@pytest.mark.parametrize(("fields", "wrong"), [
    ({"kind": "erase"}, "its kind is unknown"), ({"kind": "_open"}, "its kind is unknown"),
    ({"kind": None}, "at `$.kind`"), ({"run": "../../etc/passwd"}, "at `$.run`"), ({"number": 1.5}, "at `$.number`"),
])  # fmt: skip
def test_a_message_that_is_none_is_refused(asking, fields, wrong):
    header, _ = unseal(asking.node.answer(seal({"kind": "describe", "run": RUN, "number": 77, **fields})))
    assert wrong in refused(header)


@pytest.mark.parametrize(("fields", "wrong"), [
    ({"visits": [Visit(0, 1.0)]}, "client 0 does not belong to this node"),
    ({"visits": [Visit(1, 436.0)]}, "client 1 cannot have weight 436"),
    ({"visits": [Visit(1, 0.0)]}, "at `$.visits[0].weight`"),
    ({"visits": [VISIT, VISIT]}, "the same visit twice"),
    ({"visits": []}, "at `$.visits`"),
    ({"visits": [replace(VISIT, take=0)]}, "at `$.visits[0].take`"),
    ({"visits": [replace(VISIT, ticket="x" * 65)]}, "at `$.visits[0].ticket`"),
    ({"key": [1.5]}, "at `$.key[0]`"),
    ({"keep": [3]}, "at `$.keep[0]`"),
    ({"visits": [{**PLAIN_VISIT, "parcel": "€"}]}, "at `$.visits[0].parcel`"),
    ({"visits": [{**PLAIN_VISIT, "parcel": "A" * (2**20 + 4)}]}, "at `$.visits[0].parcel`"),
    ({"visits": [{**PLAIN_VISIT, "keep": 1}]}, "at `$.visits[0].keep`"),
    ({"visits": ["client 1"]}, "at `$.visits[0]`"),
    ({"job": "train"}, "at `$.job`"),
    ({"job": {"type": "erase"}}, "no job is called 'erase'"),
    ({"job": {"type": "train", "round": "1"}}, "its job cannot be read: Expected `int`, got `str`"),
    ({"job": {"type": "moments"}}, "its job cannot be read: Object missing required field `request`"),
    ({"job": {"type": "rounded", "inner": {"type": "erase"}, "members": 4}}, "no job is called 'erase'"),
    ({"job": nested(400)}, "too deep"),
    ({"job": CODE}, "os:system is code that this node has not allowed"),
    ({"job": {**CODE, "function": "unittest.__main__:-"}}, "cannot be imported: it does not have the form"),
    ({"job": {"type": "rounded", "inner": CODE, "members": 4}}, "os:system is code that this node has not allowed"),
    ({"seed": "0"}, "at `$.seed`"),
])  # fmt: skip
def test_a_job_that_is_not_for_this_node_is_refused_and_the_next_one_done(asking, fields, wrong):
    header, _ = asking.job(**fields)
    assert wrong in refused(header)
    assert asking.job()[0]["kind"] == "done"


def test_which_of_its_own_test_images_are_right_a_node_does_not_say(asking):
    header, came = asking.job(encode_job(Evaluate(by_image=True)))
    assert header["results"][0]["extra"] == 0
    assert [name for name, _ in came] == ["metric/loss", "metric/right", "metric/total"]


def with_changed(change):
    shared = tensors.copy(statistics.build_shared(first_state()))
    change(shared)
    return shared


@pytest.mark.parametrize(("change", "wrong"), [
    (lambda shared: shared.pop("params/classifier.bias"), "not the agreed network"),
    (lambda shared: shared.update({"params/more": torch.zeros(1)}), "not the agreed network"),
    (lambda shared: shared.update({"params/classifier.bias": torch.zeros(9)}), "not the agreed network"),
    (lambda shared: shared["params/classifier.bias"].fill_(float("nan")), "NaN or infinity"),
])  # fmt: skip
def test_a_model_that_is_not_the_one_agreed_on_is_refused(asking, change, wrong):
    header, _ = asking.job(shared=with_changed(change))
    assert wrong in refused(header)


def test_a_message_that_is_sent_again_is_refused_also_after_a_restart(tmp_path):
    asking = Asking(make_node(tmp_path, 1)).agree()
    envelope = seal({"kind": "describe", "run": RUN, "number": 50})
    assert unseal(asking.node.answer(envelope))[0]["kind"] == "described"
    for node in (asking.node, make_node(tmp_path, 1)):
        assert "replayed: message 50" in refused(unseal(node.answer(envelope))[0])


def test_an_oversized_message_is_refused(tmp_path):
    node, too_many = make_node(tmp_path, 1, policy=Policy(max_message=1)), torch.zeros(250_001)
    header, _ = unseal(node.answer(seal({"kind": "describe", "run": RUN, "number": 1}, [("x", too_many)])))
    assert "oversized" in refused(header)


def test_bytes_that_are_no_message_are_refused(asking):
    for envelope in (Envelope(b""), Envelope(b"\x00" * 100), Envelope(b"{}", b"x")):
        assert unseal(asking.node.answer(envelope))[0]["kind"] == "refused"


@pytest.mark.parametrize(("changes", "wrong"), [
    ({"method": "os.path:join"}, "os.path:join is code that this node has not allowed"),
    ({"model": "torch.hub:load(1)"}, "torch.hub:load is code"),
    ({"model": "this:-"}, "'this:-' cannot be imported: it does not have the form"),
    ({"method": "fedavg + mailbox::x"}, "'mailbox::x' cannot be imported: it does not have the form"),
    ({"model": "unittest.__main__:-"}, "cannot be imported: it does not have the form"),
    ({"method": "no-such-method"}, "no-such-method"),
    ({"model": "no-such-net"}, "no-such-net"),
])  # fmt: skip
def test_code_that_the_node_has_not_allowed_is_refused(tmp_path, changes, wrong):
    assert wrong in refused(Asking(make_node(tmp_path, 1)).agree_on(changes))


def test_whatever_goes_wrong_inside_the_node_goes_on(asking, monkeypatch):
    def broken(*given):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("unskew.engines.flower.node.NodeRun.work", broken)
    assert refused(asking.job()[0]) == "ZeroDivisionError: division by zero"
    monkeypatch.undo()
    assert asking.job()[0]["kind"] == "done"


@pytest.mark.parametrize("raised", ["SystemExit(0)", "KeyboardInterrupt", "GeneratorExit", "BaseException('odd')"])
@pytest.mark.parametrize("when", ["imported", "called"])
def test_a_plugin_cannot_end_the_node(tmp_path, monkeypatch, raised, when):
    """The owner allowed it; it is still not the plug-in that decides when the node ends."""
    name = f"ending_{when}_{abs(hash(raised))}"
    line = f"raise {raised}"
    (tmp_path / f"{name}.py").write_text(line if when == "imported" else f"def f(*given):\n    {line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    asking = Asking(make_node(tmp_path, 1, policy=Policy(plugins={f"{name}:f": ""}))).agree()
    header, _ = asking.job({"type": "call", "function": f"{name}:f", "options": None})
    reason = header["results"][0]["failure"] if header["kind"] == "done" else refused(header)
    assert raised.partition("(")[0] in reason
    assert asking.job()[0]["kind"] == "done"


def test_runs_that_were_left_long_ago_are_removed(tmp_path):
    Asking(make_node(tmp_path, 1)).agree()
    place = tmp_path / "node-1" / "runs" / RUN
    make_node(tmp_path, 1)
    assert place.exists()
    for file in place.iterdir():
        os.utime(file, (0, 0))
    make_node(tmp_path, 1)
    assert not place.exists()


def test_code_that_the_node_has_allowed_is_used(tmp_path):
    name = "outside_methods:raises"
    asking = Asking(make_node(tmp_path, 1, policy=Policy(plugins={name: ""})))
    assert asking.agree_on({"method": f"{name}(9)"})["kind"] == "agreed"


def test_a_node_with_a_class_that_was_not_agreed_on_refuses(tmp_path):
    asking = Asking(make_node(tmp_path, 1))
    classes = tuple(f"class {number}" for number in range(10))
    assert "has the class '0', which was not agreed on" in refused(asking.agree_on(classes=classes))
    for numbers in ({"other": 1}, {"node-1": 2}):
        assert "is for other clients" in refused(asking.agree_on(numbers=numbers))


def test_a_server_cannot_test_which_classes_a_node_has_images_of(tmp_path):
    """It leaves one class out of what it agrees on, in a new run each time: the answers are alike."""
    data = slice_of_digits(1)
    part = data.images.train
    one_class = Split(part.images, np.full_like(part.labels, 3))
    images = replace(data.images, train=one_class, test=one_class)
    asking = Asking(Node(replace(data, images=images), tmp_path))
    reasons = set()
    for left_out in asking.agreement.classes:
        classes = tuple(name for name in asking.agreement.classes if name != left_out)
        reasons.add(refused(asking.agree_on({"classes": 9}, classes=classes)).replace(repr(left_out), "it"))
    assert reasons == {"node node-1 has the class it, which was not agreed on"}


def test_labels_follow_the_classes_agreed_on():
    images = load("digits", None)
    data = slice_of_digits(1)
    turned = replace(Asking(None).agreement, classes=images.classes[::-1])
    fitted, _, _ = data.fit(turned)
    assert fitted.train.labels.tolist() == (9 - images.train.labels).tolist()


def test_a_job_before_an_agreement_is_answered_with_unknown(tmp_path):
    assert Asking(make_node(tmp_path, 1)).job()[0]["kind"] == "unknown"


def test_the_secret_of_a_run_is_made_once_only_its_owner_reads_it_and_it_goes_with_the_run(tmp_path):
    asking = Asking(make_node(tmp_path, 1)).agree()
    file = tmp_path / "node-1" / "runs" / RUN / "secret"
    first = file.read_bytes()
    assert len(first) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    asking.node = make_node(tmp_path, 1)
    asking.agree()
    assert file.read_bytes() == first
    file.write_bytes(b"short")
    asking.node = make_node(tmp_path, 1)
    assert "is damaged; delete it" in refused(asking.agree_on())
    asking.ask("finish")
    assert not file.exists()
    assert not file.with_name("sessions").exists()


def test_a_secret_without_its_record_is_not_used_again(tmp_path):
    first, sessions = open_secret(tmp_path)
    sessions.close()
    again, sessions = open_secret(tmp_path)
    sessions.close()
    assert again == first
    (tmp_path / "sessions").unlink()
    assert open_secret(tmp_path)[0] != first


# Memories


def memories(tmp_path):
    return sorted(file.name for file in (tmp_path / "node-1" / "runs" / RUN / "memories").iterdir())


def test_memories_stay_while_the_server_refers_to_them(storing, tmp_path):

    def visited(ticket, keep=()):
        header, _ = storing.job(visits=[replace(KEEPING, ticket=ticket)], keep=list(keep))
        return header["results"][0]["ticket"]

    first = visited(None)
    second = visited(first)
    third = visited(second, keep=[first])  # a checkpoint refers to the first
    assert memories(tmp_path) == ["1.0.state", "1.1.state", "1.2.state"]
    visited(third, keep=[first])
    assert memories(tmp_path) == ["1.0.state", "1.2.state", "1.3.state"]
    storing.job(encode_job(Evaluate()))  # keeps nothing, removes nothing
    assert len(memories(tmp_path)) == 3
    storing.ask("finish")
    assert not (tmp_path / "node-1" / "runs" / RUN / "memories").exists()


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_memory_that_is_missing_or_damaged_is_begun_anew_and_that_is_said(storing, tmp_path, damage):
    header, _ = storing.job(visits=[KEEPING])
    ticket = header["results"][0]["ticket"]
    file = tmp_path / "node-1" / "runs" / RUN / "memories" / "1.0.state"
    content = bytearray(file.read_bytes())
    content[100] ^= damage == "changed"
    file.write_bytes(content[: -1 if damage == "cut" else None])
    if damage == "missing":
        file.unlink()
    header, came = storing.job(visits=[replace(KEEPING, ticket=ticket)])
    assert header["results"][0]["anew"] is True
    assert header["results"][0]["ticket"] == f"1.1-{header['results'][0]['ticket'][-8:]}"
    first, first_came = storing.job(visits=[KEEPING])
    assert "anew" not in first["results"][0]
    assert all(torch.equal(left, right) for (_, left), (_, right) in zip(came, first_came, strict=True))


def test_a_full_disk_fails_the_visit_and_not_the_node(storing, monkeypatch):

    def full(path, content):
        raise UserError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr("unskew.engines.flower.node.write_whole", full)
    header, _ = storing.job(visits=[KEEPING])
    assert "No space left on device" in header["results"][0]["failure"]
    monkeypatch.undo()
    header, _ = storing.job(visits=[KEEPING])
    assert header["results"][0]["ticket"].startswith("1.1-")


@pytest.mark.heavy
def test_a_kill_while_a_memory_is_written_leaves_the_one_before(tmp_path):
    """A process writes the same memory again and again until it is killed with kill -9."""
    program = f"""
import sys, torch
from pathlib import Path
from unskew.core.types import Split, Visit
from unskew.engines.flower.node import NodeMemory
from unskew.round.client_memory import MemoryFormat, whole_model
model = {{"params/w": torch.zeros(100_000)}}
memory = NodeMemory(Path({str(tmp_path)!r}), MemoryFormat([whole_model("own")], model), b"secret")
number, ticket = 0, None
while True:
    visit = memory.assign(Visit(0, 1.0, ticket=ticket, keep=True))
    memory.clear([visit], [])
    ticket = memory.write(visit.slot, {{"own/params/w": torch.full((100_000,), float(number))}})
    print(number, ticket, flush=True)
    number += 1
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(5)]
        time.sleep(0.01)
        process.kill()
        lines += process.stdout.readlines()
    number, ticket = [line for line in lines if line.endswith("\n")][-1].split()
    memory = NodeMemory(tmp_path, MemoryFormat([whole_model("own")], {"params/w": torch.zeros(100_000)}), b"secret")
    kept = memory.recall(Visit(0, 1.0, ticket=ticket))
    assert not memory.lost
    assert set(kept["own/params/w"].tolist()) == {float(number)}
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".part")]


# What a node brings


def test_a_nodes_own_data_are_one_client_named_as_the_node(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 255, (12, 8, 8), np.uint8), "y_train": np.arange(12) % 3,
        "x_test": rng.integers(0, 255, (6, 8, 8), np.uint8), "y_test": np.arange(6) % 3,
    }  # fmt: skip
    np.savez(tmp_path / "own.npz", **arrays)
    data = read_node_data("hospital", f"arrays:{tmp_path / 'own.npz'}")
    facts = data.describe().clients
    assert json.loads(json.dumps([asdict(each) for each in facts])) == [
        {"name": "hospital", "number": None, "examples": 12, "test": 6}
    ]


def test_the_slices_of_a_set_are_a_partition_of_its_images_and_of_its_test_images():
    slices = [slice_of_digits(number).clients[0] for number in range(3)]
    assert sorted(np.concatenate([each.train for each in slices]).tolist()) == list(range(1438))
    assert sorted(np.concatenate([each.test for each in slices]).tolist()) == list(range(359))


@pytest.mark.parametrize(("source", "wrong"), [
    ({"data": "digits", "clients": (0,)}, "give partition and client together"),
    ({"data": "digits", "partition": "iid", "of": 3}, "give partition and client together"),
    ({"data": "digits", "partition": "iid", "of": 3, "clients": (3,)}, "give distinct numbers from 0 to 2"),
    ({"data": "digits", "partition": "iid", "of": 3, "clients": (1, 1)}, "give distinct numbers from 0 to 2"),
    ({"data": "nothing"}, "no data set is called"),
])  # fmt: skip
def test_a_source_that_cannot_be_is_refused(source, wrong):
    with pytest.raises(UserError, match=wrong):
        read_node_data("hospital", **source)


def test_a_node_may_bring_several_clients(tmp_path):
    data = read_node_data("many", "digits", partition="iid", of=4, clients=(3, 1))
    assert [(each.name, each.number) for each in data.describe().clients] == [("many-3", 3), ("many-1", 1)]
    agreement = replace(Asking(None).agreement, numbers={"many-3": 3, "many-1": 1})
    _, population, tests = data.fit(agreement)
    assert population.offsets.tolist() == [0, 0, 360, 360, 719]
    assert sorted(tests) == [1, 3]
    node = Node(data, tmp_path / "many")
    asking = Asking(node)
    asking.agreement = agreement
    asking.agree()
    header, _ = asking.job(encode_job(Evaluate()), visits=[Visit(1, 1.0), Visit(3, 1.0)])
    assert [each["client"] for each in header["results"]] == [1, 3]


def test_a_run_does_not_go_on_with_data_that_changed_while_the_node_was_down(tmp_path):
    data, folder = slice_of_digits(1), tmp_path / "node"
    before = Asking(Node(data, folder)).agree()
    again = Asking(Node(slice_of_digits(1), folder))
    again.number = before.number
    assert again.job()[0]["kind"] == "done"
    train = data.images.train
    images = train.images.copy()
    images[0] = images[0][..., ::-1]  # as many images as before
    changed = replace(data, images=replace(data.images, train=replace(train, images=images)))
    last = Asking(Node(changed, folder))
    last.number = again.number
    header, _ = last.job()
    assert "data have changed since the run began" in refused(header)
    assert data.sha256 not in str(header)


def test_a_job_that_a_later_one_overtook_is_not_done_and_costs_no_memory(storing):
    """The server gave up on the first and asked again; Flower may deliver the second one first."""
    storing.number += 1
    header, _ = storing.job(visits=[KEEPING])
    assert header["kind"] == "done"
    storing.number -= 2
    assert "overtaken: the server has sent another message since message 2" in refused(storing.job(visits=[KEEPING])[0])
    storing.number += 1
    again, _ = storing.job(visits=[replace(KEEPING, ticket=header["results"][0]["ticket"])])
    assert again["kind"] == "done"
    assert "anew" not in again["results"][0]
