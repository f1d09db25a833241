"""A node decides what it runs: its owner's policy holds, whatever the server asks."""

import hashlib
import re
from dataclasses import replace

import pytest
import torch

from nodes import RUN, VISIT, Asking, exchange_of, federated, first_state, make_node, make_nodes, refused
from unskew.calibration.covariances import Diagonal, Full, Shared
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.jobs import FixedPointMoments, Moments
from unskew.core.errors import UserError
from unskew.core.key import Key
from unskew.core.types import Visit
from unskew.engines.flower.node import NodeRun
from unskew.engines.flower.policy import Policy, commented, read_policy
from unskew.privacy.secure_sum import Masked, MaskKeys
from unskew.round import statistics
from unskew.round.client import Train
from unskew.round.evaluation import Evaluate
from unskew.round.jobs import encode_job

MOMENTS = encode_job(Moments(StatisticsRequest(form=Diagonal()).to_plain()))


def moments(**changes):
    return encode_job(Moments(StatisticsRequest(**{"form": Diagonal(), **changes}).to_plain()))


def asking_of(tmp_path, method="fedavg", **policy):
    said = []
    asking = Asking(make_node(tmp_path, 1, policy=Policy(**{"min_class": 1, **policy}), say=said.append), method)
    asking.said = said
    return asking


# The file


def test_the_commented_defaults_are_the_defaults(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(commented())
    assert read_policy(file) == Policy()
    file.write_text(commented().replace("# max_epsilon = 8.0", "max_epsilon = 3.5"))
    assert read_policy(file) == Policy(max_epsilon=3.5)


@pytest.mark.parametrize(("text", "wrong"), [
    ("method = ['fedavg']", "unknown key 'method'; did you mean 'methods'?"),
    ("methods = ['fedavgg']", "methods: 'fedavgg' is unknown; did you mean 'fedavg'?"),
    ("secure = ['everything']", "secure"), ("min_clients = 2", "min_clients: expected int >= 3"),
    ("max_message = 'much'", "max_message: expected int, got str"),
    ("[plugins]\n'os' = ''", "it does not have the form"),
    ("[plugins]\n'a:b' = 'abc'", "plugins: a:b needs the SHA-256"), ("methods = [", "Invalid"),
])  # fmt: skip
def test_a_mistake_in_a_policy_is_one_message(tmp_path, text, wrong):
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(wrong)) as error:
        read_policy(file)
    assert str(error.value).startswith(str(file))
    with pytest.raises(UserError, match="there is no policy"):
        read_policy(tmp_path / "nowhere.toml")


# What a run is


@pytest.mark.parametrize(("policy", "changes", "wrong"), [
    ({"methods": ("fedavg",)}, {"method": "scaffold"}, "'scaffold' is not allowed on this node"),
    ({}, {"method": "centralised"}, "'centralised' is not allowed on this node"),
    ({"calibrations": ("lda",)}, {"method": "fedavg + ccvr"}, "'ccvr' is not allowed"),
    ({"networks": ("lenet-64",)}, {"model": "tiny-cnn"}, "'tiny-cnn' is not allowed"),
    ({}, {"method": "available(file='/etc/passwd')"}, "available reads a file"),
    ({"secure": ("updates",)}, {"method": "fedavg + secure"}, "add secure(updates=true) to the method"),
    ({"secure": ("statistics",)}, {"method": "fedavg + lda"}, "add secure to the method"),
    ({"private": ("updates",)}, {"method": "private-updates"}, "add private-updates(release=true)"),
    ({"private": ("updates",)}, {"method": "private-updates(noise=0, release=true)"}, "with noise above 0"),
    ({"private": ("statistics",)}, {"method": "lda + private"}, "add private(release=true)"),
    ({"min_class": 5}, {"method": "lda + withhold(4)"}, "add withhold(5) to the method"),
    ({"min_class": 5}, {"method": "lda + secure"}, "add withhold(5) to the method"),
    ({"min_class": None}, {"method": "lda"}, "5 or more examples; add withhold(5) or secure to the method"),
    ({"min_class": None}, {"method": "lda + private(epsilon=1, release=true)"}, "5 or more examples; add secure to"),
    ({}, {"method": "ccvr(components=2)"}, "5 or more examples; add withhold(5)"),
    ({}, {"method": "ccvr(components=20) + withhold(5)"}, "20 components; the limit here is 8"),
    ({}, {"method": "lda(layers=9)"}, "9 layers; the limit here is 3"),
    ({}, {"model": "resnet-18", "shape": (1, 8, 4000)}, "its network takes images of"),
    ({"max_model": 1}, {"model": "resnet-18"}, "the limit here is 1 MB"),
])  # fmt: skip
def test_a_run_that_the_owner_does_not_allow_is_refused_before_it_begins(tmp_path, policy, changes, wrong):
    asking = asking_of(tmp_path, **policy)
    assert wrong in refused(asking.agree_on(changes))
    assert policy.keys() & {"secure", "networks", "private"} or asking.agree_on()["kind"] == "agreed"


def test_a_network_that_does_not_fit_in_memory_is_refused_before_it_is_made(tmp_path):
    """Its parameters would take 2.5 GB; nothing of them is allocated."""
    classes = tuple(map(str, range(300_000)))
    header = asking_of(tmp_path).agree_on({"model": "resnet-50", "classes": len(classes)}, classes=classes)
    assert "the limit here is 1,000 MB" in refused(header)


@pytest.mark.parametrize("number", [2**31 - 1, 10**6])
def test_a_server_cannot_make_a_node_allocate_by_a_clients_number(tmp_path, number):
    assert "it cannot be read" in refused(asking_of(tmp_path).agree_on(numbers={"node-1": number}))


def test_a_run_cannot_be_agreed_on_anew_without_its_masks(tmp_path):
    asking = asking_of(tmp_path, "fedavg + lda + secure").agree()
    wrong = "this run was agreed on with other settings"
    assert wrong in refused(asking.agree_on({"method": "fedavg + lda"}))
    assert "without masks" in refused(asking.job(MOMENTS)[0])
    asking.node = make_node(tmp_path, 1)  # a restart changes nothing, nor does the end of the run
    assert wrong in refused(asking.agree_on({"method": "fedavg + lda"}))
    asking.ask("finish")
    assert wrong in refused(asking.agree_on({"method": "fedavg + lda"}))
    asking.agree()


def test_a_plugin_is_allowed_with_the_content_that_it_had(tmp_path, monkeypatch):
    file = tmp_path / "own_methods.py"
    file.write_text("def plain(algorithm):\n    return algorithm\n")
    monkeypatch.syspath_prepend(tmp_path)
    asking = asking_of(tmp_path, plugins={"own_methods:plain": hashlib.sha256(file.read_bytes()).hexdigest()})
    content = file.read_text()
    file.write_text(content.replace("plain", "more"))
    assert "or its file has changed" in refused(asking.agree_on({"method": "own_methods:plain"}))
    file.write_text(content)
    assert asking.agree_on({"method": "own_methods:plain"})["kind"] == "agreed"


# What a job is


def keys(count):
    """The first job of a masked sum over so many clients."""
    return encode_job(MaskKeys(bytes(31) + b"1", count, Train(1), tuple((client, 0) for client in range(count))))


def few(take):
    return [replace(VISIT, weight=1.0, take=take)]


WORDS = FixedPointMoments(StatisticsRequest(form=Shared()).to_plain(), 10**9, 10**9, 24, 3)  # of no network's classes
RARE, CLIPPED = "leaves out other classes", "clips features to another length"


@pytest.mark.parametrize(("method", "policy", "wrong", "asked", "done"), [
    ("lda", {"jobs": ("train",)}, "the job evaluate is not allowed on this node", {"job": encode_job(Evaluate())}, {}),
    ("lda", {"jobs": ("train",)}, "the job moments is not allowed on this node", {"job": MOMENTS}, {}),
    ("fedavg", {}, "the minimum here is 16", {"visits": few(1)}, {"visits": few(16)}),
    ("fedavg", {}, "the minimum here is 16", {"visits": few(15)}, {"visits": few(16)}),
    *(("lda + withhold(5)", {}, RARE, {"job": moments(form=Shared(), min_count=count)},
       {"job": moments(form=Shared(), min_count=5)}) for count in (0, 4, 6)),
    ("lda", {}, "its layout do not match", {"job": encode_job(WORDS)}, {}),
    *(("lda + private(clip=2)", {}, CLIPPED, {"job": moments(clip=clip)}, {"job": moments(clip=2.0)})
      for clip in (0.0, 3.0)),
    ("fedavg", {"secure": ("statistics",)}, "moments without the masks or the noise", {"job": MOMENTS}, {}),  # --start
    ("secure(updates=true)", {"min_clients": 5}, "a sum over 4 clients; the minimum here is 5", {"job": keys(4)},
     {"job": keys(5)}),
])  # fmt: skip
def test_a_job_that_the_owner_does_not_allow_is_refused(tmp_path, method, policy, wrong, asked, done):
    asking = asking_of(tmp_path, method, **policy).agree()
    assert wrong in refused(asking.job(**asked)[0])
    assert asking.job(**done)[0]["kind"] == "done"


@pytest.mark.parametrize(("steps", "batch", "allowed"), [(1, 1, False), (3, 5, False), (4, 4, True), (1, 500, True)])
def test_a_few_steps_on_a_few_examples_are_refused_like_a_few_examples(tmp_path, steps, batch, allowed):
    asking = asking_of(tmp_path)
    blueprint = asking.agreement.blueprint
    local = replace(blueprint.local, steps=steps, batch=batch)
    asking.agreement = replace(asking.agreement, blueprint=replace(blueprint, local=local))
    header, _ = asking.agree().job()
    assert header["kind"] == "done" if allowed else "the minimum here is 16" in refused(header)


@pytest.mark.parametrize("masked", [True, False])
def test_statistics_that_leave_out_other_examples_than_agreed_are_refused(tmp_path, masked):
    """The difference of two sums, one without classes of a single example, or with long features cut, is an example."""
    asking = asking_of(tmp_path, "fedavg + lda + secure" if masked else "fedavg + lda").agree()
    four = tuple((client, 0) for client in range(4))

    def job(**changes):
        request = StatisticsRequest(form=Shared(), **changes).to_plain()
        session = (bytes(31) + b"1", 3, FixedPointMoments(request, 10, 64, 24, 4), four)
        return encode_job(Masked(*session, (bytes(64),) * 4, (True,) * 4) if masked else Moments(request))

    header, _ = asking.job(job())
    assert header["kind"] == "done"  # what is missing in the masked one is the next check's business
    for changes in ({"min_count": 2}, {"clip": 3.0}):
        assert "was agreed on" in refused(asking.job(job(**changes))[0])
        assert asking.job(job(**changes), shared={})[1] == []  # nor under the model of an earlier job


def test_a_server_cannot_make_parts_of_one_example(tmp_path):
    """Centres that are chosen so that an example is alone in its part: the part stays at home."""
    open_one = asking_of(tmp_path / "open", "fedavg + ccvr(components=2)", min_part=1).agree()
    asking = asking_of(tmp_path, "fedavg + ccvr(components=2) + withhold(5)").agree()
    shared = statistics.build_shared(first_state(asking.method))
    whole = dict(asking.job(moments(min_count=5), shared=shared)[1])
    means = whole["stat/moments/sums"] / whole["stat/moments/number"].clamp(min=1)[:, None]
    centres = torch.stack([means.double(), 1.5 * means.double()], 1)  # the longest features of a class are alone
    came = dict(open_one.job(moments(components=2), shared=shared | {"centres": centres})[1])
    assert 1 <= float(came["stat/moments/number"][came["stat/moments/number"] > 0].min()) < 5
    header, came = asking.job(moments(components=2, min_count=5), shared=shared | {"centres": centres})
    counts = dict(came)["stat/moments/number"]
    assert header["kind"] == "done"
    assert float(counts[counts > 0].min()) >= 5
    for job, more, wrong in (
        (moments(components=2, min_count=0), {"centres": centres}, "5 or more examples"),
        (moments(components=3, min_count=5), {"centres": centres}, "3 parts of each class, which was not agreed on"),
        (moments(components=2, min_count=5), {"centres": centres[:, :1]}, "its centres or its layout do not match"),
        (moments(components=1, min_count=5), {"centres": centres}, "its centres or its layout do not match"),
        (moments(components=2, min_count=5), {}, "its centres or its layout do not match"),
    ):
        assert wrong in refused(asking.job(job, shared=shared | more)[0])


@pytest.mark.parametrize(("changes", "wrong"), [
    ({"layers": 4}, "4 layers; the limit here is 3"),
    ({"expand": 10**6}, "1,000,000 expand; the limit here is 4,096"),
    ({"expand": 4096, "form": Full()}, "the limit here is 500 MB"),
    ({"components": 10**5}, "100,000 components; the limit here is 8"),
    ({"layers": 0}, "its request cannot be read"),
    ({"clip": -1.0}, "its request cannot be read"),
    ({"min_count": -1}, "its request cannot be read"),
])  # fmt: skip
def test_statistics_that_are_too_large_are_refused_before_they_are_measured(tmp_path, changes, wrong):
    asking = asking_of(tmp_path, "fedavg + lda", max_statistics=500).agree()
    assert wrong in refused(asking.job(moments(**changes))[0])


# ε


def test_a_budget_is_kept_across_runs_and_restarts(tmp_path):
    policy = {"max_epsilon": 5.0}
    asking = asking_of(tmp_path, "fedavg + lda + private(epsilon=2, release=true)", **policy).agree()
    job = moments(clip=10.0)
    assert asking.job(job)[0]["kind"] == "done"
    assert asking.job(job)[0]["kind"] == "done"
    wrong = "this node's budget of ε = 5 is spent: all runs would reach 6"
    assert wrong in refused(asking.job(job)[0])
    asking.node = make_node(tmp_path, 1, policy=Policy(min_class=1, **policy))
    assert wrong in refused(asking.job(job)[0])
    assert "an update without noise, but this node has a budget of ε = 5" in refused(asking.job()[0])


def test_rounds_spend_what_the_accountant_says(tmp_path):
    method = "private-updates(clip=1, noise=2, release=true)"
    asking = asking_of(tmp_path, method, max_epsilon=3.0).agree()
    visit = Visit(1, 1.0)
    spent = []
    while (header := asking.job(visits=[visit])[0])["kind"] == "done":
        spent.append(header)
        assert len(spent) < 20
    assert "budget of ε = 3 is spent" in header["reason"]
    assert len(spent) == 1 or len(spent) == 2


def test_statistics_that_are_masked_need_no_least_count_and_masked_noise_is_enough_by_itself(tmp_path):
    assert asking_of(tmp_path, min_class=None).agree_on({"method": "fedavg + lda + secure"})["kind"] == "agreed"
    both = "fedavg + lda + secure + private(epsilon=1, release=true)"
    assert asking_of(tmp_path / "b", min_class=5).agree_on({"method": both})["kind"] == "agreed"
    assert asking_of(tmp_path / "c", min_class=None).agree_on({"method": "lda + withhold(5)"})["kind"] == "agreed"


# What leaves, told beforehand


def test_what_will_leave_is_told_before_the_first_round(tmp_path):
    asking = asking_of(tmp_path, "scaffold + fedir + ccvr").agree()
    said = "\n".join(asking.said)
    assert (
        "will leave this node: each round, an update of the model: 13,706 numbers, 54.8 kB, and its loss; not masked"
        in said
    )
    assert "what the method measures: scaffold" in said
    assert "once, before the first round, a survey" in said
    assert "accuracy: the number of test images" in said
    assert "for ccvr, class statistics (full, " in said
    assert "even one with a single example" in said
    assert "; not masked; no noise" in said
    asking.said.clear()
    asking.agree()
    assert asking.said == []
    other = asking_of(tmp_path / "b", "fedavg + lda + withhold(5) + secure(updates=true) + private(epsilon=2)").agree()
    said = "\n".join(other.said)
    assert "masked: the server sees only the sum over clients" in said
    assert "without classes of fewer than 5 examples; masked; noise on the sum, ε = 2" in said


# Disk


def test_a_server_cannot_fill_the_disk_with_memories(tmp_path):
    """It names every memory as one that a checkpoint needs; the node stops at the owner's limit."""
    asking = asking_of(tmp_path, "scaffold", max_disk=1).agree()
    tickets, reason = [], None
    for _ in range(50):
        header, _ = asking.job(visits=[replace(VISIT, keep=True)], keep=tickets)
        if header["kind"] == "refused":
            reason = header["reason"]
            break
        tickets.append(header["results"][0]["ticket"])
    assert reason == "this node's disk quota for runs, 1 MB, is used up (max_disk)"
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.state")) < 10**6


def test_a_server_cannot_make_a_node_plan_visits_that_do_not_fit_in_memory(tmp_path, monkeypatch):
    """One such visit is refused before it is planned; two in one message must be as well."""
    asking = asking_of(tmp_path).agree()
    monkeypatch.setattr("unskew.round.client.plan", lambda *given: pytest.fail("it was planned"))
    monkeypatch.setattr("unskew.engines.flower.node.physical_memory", lambda: 10**9)
    monkeypatch.setattr("unskew.data.batches.physical_memory", lambda: 10**9)
    header, sent = asking.job(visits=[Visit(1, 1.0, take=10**9, repeat=repeat) for repeat in range(2)])
    assert ["before training" in fields["failure"] for fields in header["results"]] == [True, True]
    assert sent == []


@pytest.mark.parametrize(("megabytes", "visits"), [(1, 100), (1000, 1600)])
def test_a_server_cannot_make_a_node_collect_a_reply_without_end(tmp_path, monkeypatch, megabytes, visits):
    """Each visit's update has the size of the model, in 13 tensors; a message may ask for 100,000 visits."""
    asking, done = asking_of(tmp_path, max_message=megabytes).agree(), []
    whole = NodeRun._visit_client
    update = whole(asking.node._runs[RUN], Train(1), statistics.build_shared(first_state()), VISIT, Key(0))
    monkeypatch.setattr(NodeRun, "_visit_client", lambda *given: done.append(1) or update)
    header, _ = asking.job(visits=[Visit(1, 1.0, take=16, repeat=repeat) for repeat in range(visits)])
    assert f"the reply to its visits would take more than {megabytes:,} MB or 20,000" in refused(header)
    assert len(done) < visits


def test_a_server_cannot_begin_runs_without_end(tmp_path):
    asking = asking_of(tmp_path, max_runs=3)
    kinds = []
    for number in range(5):
        run = f"{number:032x}"
        asking.agreement = replace(asking.agreement, run=run)
        header, _ = asking.ask("agree", run=run, agreement=asking.agreement.to_json())
        kinds.append(header["kind"])
    assert kinds == ["agreed"] * 3 + ["refused"] * 2
    assert "this node has 3 unfinished runs" in header["reason"]


def test_messages_of_runs_that_never_begin_leave_a_bounded_trace(tmp_path, monkeypatch):
    monkeypatch.setattr("unskew.engines.flower.node.ENDED_RUNS", 10)
    asking = asking_of(tmp_path)
    for number in range(50):
        assert asking.ask("describe", run=f"{number:032x}")[0]["kind"] == "described"
    assert len(list((tmp_path / "node-1" / "runs").iterdir())) <= 10
    assert len(asking.node._seen) <= 10


# A whole run under a strict policy


def test_a_run_under_a_strict_policy_gives_the_bits_of_any_other(tmp_path):
    strict = Policy(
        methods=("fedavg",), calibrations=("lda",), networks=("tiny-cnn",), secure=("statistics", "updates"),
        min_class=5,
    )  # fmt: skip
    nodes = {100 + number: make_node(tmp_path / "a", number, policy=strict) for number in range(3)}
    method = "fedavg + lda + secure(updates=true) + withhold(5)"
    (tmp_path / "b").mkdir()
    ours = federated(tmp_path / "a", exchange_of(nodes), method=method, model="tiny-cnn")
    theirs = federated(tmp_path / "b", exchange_of(make_nodes(tmp_path / "b")), method=method, model="tiny-cnn")
    assert ours.weights_sha256 == theirs.weights_sha256
    accuracy = {name: each.accuracy for name, each in ours.calibrations.items()}
    assert accuracy == {name: each.accuracy for name, each in theirs.calibrations.items()}
    assert len(accuracy) == 1
