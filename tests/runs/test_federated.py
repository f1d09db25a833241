"""A run over nodes: the same weights as one process, an ordinary run folder, and going on after a kill."""

import json
import time

import numpy as np
import pytest

import unskew
from nodes import OPTIONS, PARTITION, exchange_of, federated, make_node, make_nodes, reply_with
from unskew.analysis import analyse
from unskew.core.errors import Missing, UserError
from unskew.engines.flower.engine import Rules
from unskew.engines.flower.messages import ClientFacts, Description, read_header
from unskew.engines.flower.node import Node, read_node_data
from unskew.report.write import make_report
from unskew.runs import execute
from unskew.runs import federated as federations
from unskew.runs.checkpoint import CHECKPOINT, earlier_checkpoints, keep_checkpoint, roll_back
from unskew.runs.federated import FederatedRequest, check_nodes, settings_of
from unskew.runs.finished import calibrate_run, load
from unskew.runs.journal import read_during, read_metrics
from unskew.runs.result import read_result
from unskew.runs.seals import UNCHANGED, examine


def loop(tmp_path, **options):
    chosen = {**OPTIONS, "partition": PARTITION, "engine": "loop", **options}
    return unskew.run(out=tmp_path / "loop", **chosen)


def accuracies(result):
    return {name: each.accuracy for name, each in result.calibrations.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"method": "fedavgm(0.9) + fedvc(64) + fedir + ccvr"},
        {"method": "moon"},
        {"method": "scaffold"},
        {"method": "fedeccr"},
        {"method": "fedavg + lda + secure", "clients": 4, "rounds": 1},
        {"method": "fedavg + lda", "train": "classifier"},
        {"method": "fedavg + lda", "train": "last(2)", "views": 2},
        {"during": "norms + drift", "start": "lda", "lr": 0.01},
        {"during": "norms + drift", "method": "fedvc(64)", "rounds": 4},  # two visits a round
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_nodes_give_the_weights_and_recordings_of_one_process(tmp_path, options):
    ours = federated(tmp_path, exchange_of(make_nodes(tmp_path, options.get("clients", 3))), **options)
    theirs = loop(tmp_path, **options)
    assert ours.weights_sha256 == theirs.weights_sha256
    assert (ours.accuracy, ours.loss) == (theirs.accuracy, theirs.loss)
    assert accuracies(ours) == accuracies(theirs)
    assert [row["train_loss"] for row in ours.history] == [row["train_loss"] for row in theirs.history]
    assert not any("failures" in row for row in ours.history)
    assert read_during(tmp_path / "run") == read_during(tmp_path / "loop")


@pytest.mark.parametrize(("method", "sent"), [("fedavg", 1.0), ("scaffold", 1.5)])
def test_the_bytes_on_the_wire_are_those_that_the_metrics_tell(tmp_path, method, sent):
    exchange = exchange_of(make_nodes(tmp_path))
    sizes = {}

    def between(node, question, reply):
        if read_header(question)["kind"] == "job":
            for name, envelope in (("down", question), ("up", reply)):
                sizes[name] = sizes.get(name, 0) + len(envelope)
        return reply

    exchange.between = between
    result = federated(tmp_path, exchange, method=method, model="simple-cnn", resize=16, rounds=1)
    assert result.bytes_down <= sizes["down"] <= 1.02 * result.bytes_down
    assert sent * result.bytes_up <= sizes["up"] <= 1.02 * sent * result.bytes_up  # scaffold's sums are float64


def test_without_test_images_on_the_server_the_nodes_own_are_asked(tmp_path):
    ours = federated(tmp_path, exchange_of(make_nodes(tmp_path)), data="nodes", method="fedavg + lda")
    theirs = loop(tmp_path, method="fedavg + lda")
    assert ours.weights_sha256 == theirs.weights_sha256
    assert ours.accuracy == theirs.accuracy  # the test images are dealt out to the nodes: together they are all
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-12)
    assert accuracies(ours) == accuracies(theirs)
    assert ours.measured_on == "the nodes' own test images"


def test_the_run_folder_is_sealed_and_can_be_loaded_and_studied(tmp_path):
    result = federated(tmp_path, exchange_of(make_nodes(tmp_path)), method="fedavg + lda")
    path = tmp_path / "run"
    assert {each.name: each.state for each in examine(path)}["federation.json"] == UNCHANGED
    assert read_result(path) == result
    assert result.emd is None
    assert "EMD unknown" in str(result)
    load(path, "lda")
    assert analyse(path, "confusion")
    with pytest.raises(Missing, match="only the nodes of the federation know"):
        analyse(path, "skew")
    with pytest.raises(UserError, match="add the calibration to the recipe's method"):
        calibrate_run(path, "ccvr")
    with pytest.raises(UserError, match="is finished: it has a result"):
        unskew.resume(path)


def test_a_resumed_run_waits_for_the_clients_it_began_with(tmp_path):
    nodes, options = make_nodes(tmp_path), {"rounds": 3, "checkpoint_seconds": 0}
    with pytest.raises(Stop):
        federated(tmp_path, exchange_of(nodes), observe=stop_after(1), **options)
    exchange, slow = exchange_of(nodes), nodes[101]
    del exchange.answers[101]
    pause = exchange.pause

    def pausing(seconds):
        pause(seconds)
        if exchange.now() > 20:
            exchange.answers[101] = slow.answer

    exchange.pause = pausing
    result = federated(tmp_path, exchange, resume=True, **options)
    assert result.weights_sha256 == loop(tmp_path, **options).weights_sha256


def test_a_calibration_that_misses_a_client_ends_the_run_and_a_resumed_one_makes_it(tmp_path):
    exchange, away = exchange_of(make_nodes(tmp_path)), {}

    def observe(event):
        if getattr(event, "round", None) == 2:
            away[101] = exchange.answers.pop(101)
            exchange.pause(5)

    options = {"method": "fedavg + lda", "rounds": 2}
    with pytest.raises(UserError, match=r"node-1 is not connected; the run finished without .*; to add it, resume"):
        federated(tmp_path, exchange, observe=observe, rules=Rules(wait=30), **options)
    assert read_result(tmp_path / "run").calibrations == {}
    exchange.answers.update(away)
    exchange.pause(5)
    result = federated(tmp_path, exchange, resume=True, **options)
    theirs = loop(tmp_path, **options)
    assert result.weights_sha256 == theirs.weights_sha256
    assert accuracies(result) == accuracies(theirs)
    assert {each.state for each in examine(tmp_path / "run")} == {UNCHANGED}
    with pytest.raises(UserError, match="is finished"):
        federated(tmp_path, exchange, resume=True, **options)


class Stop(Exception):
    pass


def stop_after(number):
    def observe(event):
        if getattr(event, "round", None) == number:
            raise Stop

    return observe


@pytest.mark.parametrize("method", ["scaffold", "fedavgm(0.9)"])
def test_a_server_that_was_stopped_goes_on_to_the_same_bits(tmp_path, method):
    nodes = make_nodes(tmp_path)
    options = {"method": method, "rounds": 4, "checkpoint_seconds": 0}
    with pytest.raises(Stop):
        federated(tmp_path, exchange_of(nodes), observe=stop_after(2), **options)
    again = {100 + number: make_node(tmp_path, number) for number in range(3)}
    result = federated(tmp_path, exchange_of(again), resume=True, **options)
    assert result.weights_sha256 == loop(tmp_path, **options).weights_sha256
    assert json.loads((tmp_path / "run" / "federation.json").read_text())["starts"] == 2
    with pytest.raises(UserError, match="is finished"):
        federated(tmp_path, exchange_of(again), resume=True, **options)


def test_a_server_that_was_killed_before_its_checkpoint_finds_the_memories_that_the_last_one_refers_to(
    tmp_path, monkeypatch
):
    nodes, options = make_nodes(tmp_path), {"method": "scaffold", "rounds": 4, "checkpoint_seconds": 0}
    real, saved = execute.checkpoints.save_checkpoint, []

    def killed(*given):
        if len(saved) == 2:
            raise Stop
        saved.append(real(*given))

    monkeypatch.setattr(execute.checkpoints, "save_checkpoint", killed)
    with pytest.raises(Stop):
        federated(tmp_path, exchange_of(nodes), **options)
    monkeypatch.undo()
    assert len((tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()) == 3
    result = federated(tmp_path, exchange_of(nodes), resume=True, **options)
    assert result.weights_sha256 == loop(tmp_path, **options).weights_sha256
    assert not any("notes" in row and "anew" in str(row["notes"]) for row in result.history)


def test_failures_and_notes_are_in_the_metrics_and_the_report(tmp_path):
    nodes = make_nodes(tmp_path)
    exchange = exchange_of(nodes)
    away = {}

    def observe(event):
        if getattr(event, "round", None) == 1:
            away[101] = exchange.answers.pop(101)
        if getattr(event, "round", None) == 2:
            exchange.answers.update(away)
        exchange.pause(5)

    result = federated(tmp_path, exchange, observe=observe, rounds=4)
    rows = read_metrics(tmp_path / "run")
    assert [[each["client"] for each in row.get("failures", ())] for row in rows] == [[], [1], [], []]
    assert rows[1]["failures"][0]["reason"] == "node-1: node node-1 is not connected"
    assert "node node-1 is back: client 1 (435 examples)" in rows[2]["notes"]
    assert result.failures == 1
    _, page = make_report(tmp_path / "run", out=tmp_path / "report.html", only=["curves"])
    section = next(each for each in page.sections if each.name == "happened")
    assert [2, "client 1", "node-1: node node-1 is not connected"] in section.elements[0].rows


def test_a_run_folder_that_has_a_run_is_refused(tmp_path):
    exchange = exchange_of(make_nodes(tmp_path))
    federated(tmp_path, exchange, rounds=1)
    with pytest.raises(UserError, match="is not an empty folder; choose another --out"):
        federated(tmp_path, exchange, rounds=1)


# Who takes part, and on what they agree


def node_with(tmp_path, name, classes, images=20, shape=(8, 8)):
    """A node with arrays of its own: so many images, their classes named."""
    rng, number = np.random.default_rng(len(classes)), len(classes)
    arrays = {
        "x_train": rng.integers(0, 255, (images, *shape), np.uint8), "y_train": np.arange(images) % number,
        "x_test": rng.integers(0, 255, (number, *shape), np.uint8), "y_test": np.arange(number),
        "classes": np.array(classes),
    }  # fmt: skip
    np.savez(tmp_path / f"{name}.npz", **arrays)
    return Node(read_node_data(name, f"arrays:{tmp_path / name}.npz"), tmp_path / name)


def nodes_with(tmp_path, shapes=None, **classes):
    """Nodes with these classes by name; images are 8x8, or as ``shapes`` has them."""
    shapes = shapes or {}
    made = [node_with(tmp_path, name, names, shape=shapes.get(name, (8, 8))) for name, names in classes.items()]
    return dict(enumerate(made, 1))


def test_nodes_with_other_classes_train_together_on_all_of_them(tmp_path):
    nodes = nodes_with(tmp_path, north=["cat", "dog"], south=["dog", "owl", "ant"])
    result = federated(tmp_path, exchange_of(nodes), data="nodes", clients=2, rounds=1)
    terms = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert terms["classes"] == ["ant", "cat", "dog", "owl"]
    assert [(each["name"], each["number"]) for each in terms["clients"]] == [("north", 0), ("south", 1)]
    assert result.clients == 2
    means = [node.data.images.mean[0] for node in nodes.values()]
    assert min(means) < terms["mean"][0] < max(means)


def test_a_node_whose_data_do_not_fit_is_told_so_and_left_out(tmp_path):
    heard, said = [], []
    classes = {"north": ["cat", "dog"], "south": ["cat", "dgo"], "west": ["cat", "dog"], "east": ["cat"]}
    nodes = nodes_with(tmp_path, {"west": (9, 9)}, **classes)
    for node in nodes.values():
        node.say = heard.append
    result = federated(
        tmp_path, exchange_of(nodes), data="nodes", clients=4, rounds=1, classes=("cat", "dog"), said=said
    )
    assert result.clients == 2
    assert any("node south is left out: its class 'dgo'" in line for line in said)
    assert any("node west is left out: its images are 9x9" in line for line in said)
    assert sum("the server leaves this node out" in line for line in heard) == 2


def test_the_servers_own_test_images_must_fit(tmp_path):
    nodes = {1: node_with(tmp_path, "north", [str(number) for number in range(10)], shape=(9, 9))}
    with pytest.raises(UserError, match=r'the server\'s test images \(digits, 8x8.*give data = "nodes"'):
        federated(tmp_path, exchange_of(nodes), clients=1)
    assert not (tmp_path / "run").exists()


def test_a_federation_of_which_too_few_come_does_not_begin(tmp_path):
    nodes = {1: make_node(tmp_path, 0)}
    with pytest.raises(UserError, match="only 1 client joined within 30 seconds; start 2 or more"):
        federated(tmp_path, exchange_of(nodes), rules=Rules(min_replies=2, wait=30))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("clients", [3, None])
def test_those_that_come_are_enough_where_the_rules_say_so_and_the_others_join_later(tmp_path, clients):
    nodes, said = make_nodes(tmp_path), []
    late = nodes.pop(102)
    exchange = exchange_of(nodes)

    def observe(event):
        if getattr(event, "round", None) == 1:
            exchange.answers[102] = late.answer
        exchange.pause(5)

    rules = Rules(min_replies=2, wait=30)
    result = federated(tmp_path, exchange, clients=clients, rules=rules, rounds=4, said=said, observe=observe)
    assert ("2 of 3 clients joined within 30 seconds; others may join later" in said) == (clients == 3)
    assert [row["clients"] for row in result.history] == [2, 2, 3, 3]
    terms = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert {each["name"]: each["late"] for each in terms["clients"]} == {
        "node-0": False, "node-1": False, "node-2": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"validation": 0.1}, "--validation holds out training images"),
        ({"method": "fedavg + oracle"}, "which a federation cannot do"),
        ({"method": "no-such"}, "no-such"),
        ({"rules": Rules(min_replies=3), "per_round": 2}, "min-replies 3 is more than --per-round 2"),
    ],
)
def test_what_a_federation_cannot_do_is_refused_before_a_folder_is_made(tmp_path, options, wrong):
    with pytest.raises(UserError, match=wrong):
        federated(tmp_path, exchange_of(make_nodes(tmp_path)), **options)
    assert not (tmp_path / "run").exists()


# What Flower's run configuration says


def test_the_run_configuration_goes_over_the_recipes_table(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('rounds = 1\n[federation]\ndeadline = 5\nmin-replies = 2\nclasses = ["a", "b"]\n')
    given = {"recipe": str(recipe), "out": str(tmp_path / "run"), "resume": False, "deadline": 0.0, "wait": 7.0,
             "min-replies": -1}  # fmt: skip
    asked = settings_of(given)
    assert asked.rules == Rules(deadline=5.0, min_replies=2, wait=7.0)
    assert asked.classes == ("a", "b")
    assert not asked.resume


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[federation]\ndeadline = -1", "deadline"),
        ("[federation]\nmin-replies = 0.5", "min-replies"),
        ('[federation]\nclasses = "cat"', "classes"),
        ("[federation]\nclases = []", "unknown field `clases`"),
        ("federation = 3", r"the \[federation\] table is invalid"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path, text, wrong):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    with pytest.raises(UserError, match=wrong):
        settings_of({"recipe": str(recipe), "out": str(tmp_path / "run")})


def test_clients_that_do_not_fit_do_not_count_as_joined(tmp_path):
    nodes = nodes_with(tmp_path, {"south": (9, 9)}, north=["cat", "dog"], south=["cat", "dgo"], west=["cat", "dgo"])
    chosen = {"data": "nodes", "clients": 3, "classes": ("cat", "dog")}
    with pytest.raises(UserError, match=r"only 1 client joined.*start 3 or more.*south is left out: its images are 9"):
        federated(tmp_path, exchange_of(nodes), rules=Rules(min_replies=3, wait=30), **chosen)
    assert not (tmp_path / "run").exists()


def test_classes_that_differ_in_case_alone_are_refused_with_the_nodes_names(tmp_path):
    nodes = nodes_with(tmp_path, north=["Normal", "ill"], south=["normal"])
    with pytest.raises(UserError, match="node north has a class 'Normal' and node south a class 'normal'"):
        federated(tmp_path, exchange_of(nodes), data="nodes", clients=2)
    both = ("Normal", "ill", "normal")
    assert federated(tmp_path, exchange_of(nodes), data="nodes", clients=2, classes=both, rounds=1).clients == 2


def test_a_resumed_run_keeps_the_rules_that_it_began_with(tmp_path):
    rules = Rules(deadline=50, min_replies=2, wait=40)
    with pytest.raises(Stop):
        federated(tmp_path, exchange_of(make_nodes(tmp_path)), rules=rules, observe=stop_after(1), rounds=3)
    asked = {"out": str(tmp_path / "run"), "resume": True}
    assert settings_of(asked).rules == rules
    assert settings_of({**asked, "min-replies": 3}).rules == Rules(deadline=50, min_replies=3, wait=40)


def _refuse_visits(fields, came):
    fields.update(kind="refused", reason="no")


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"lr": 1e30}, r"round \d: only 0 of the 1 required replies .* NaN or infinity; try a smaller --lr"),
        ({"method": "centralised"}, "centralised needs all examples in one place"),
    ],
)
def test_a_run_that_diverges_or_needs_all_examples_says_so_and_not_that_nodes_are_missing(tmp_path, options, wrong):
    with pytest.raises(UserError, match=wrong):
        federated(tmp_path, exchange_of(make_nodes(tmp_path)), **options)
    assert (tmp_path / "run").exists() == ("lr" in options), "what can be known before is refused before"


def test_a_run_of_which_no_round_counted_fails(tmp_path):
    exchange = exchange_of(make_nodes(tmp_path, 4))
    exchange.between = lambda node, question, reply: (
        reply_with(reply, _refuse_visits) if node > 101 and read_header(question)["kind"] == "job" else reply
    )
    with pytest.raises(UserError, match=r"no round was valid.*a secure sum"):
        federated(
            tmp_path, exchange, clients=4, method="fedavg + secure(updates=true)", rules=Rules(wait=5, deadline=5)
        )


def test_a_federated_run_keeps_earlier_checkpoints_and_returns_to_one_with_the_same_bits(tmp_path):
    nodes, options = make_nodes(tmp_path), {"rounds": 9, "checkpoint_seconds": 0, "during": "norms"}
    whole = federated(tmp_path, exchange_of(nodes), **options)
    path, again = tmp_path / "run", tmp_path / "again"
    kept = earlier_checkpoints(path)
    number = list(kept)[1]
    roll_back(path, number, again)
    assert len(read_metrics(again)) == number
    assert read_result(path) == whole
    result = federated(tmp_path, exchange_of(nodes), resume=True, out="again", **options)
    assert result.weights_sha256 == whole.weights_sha256
    assert (again / "during.jsonl").read_bytes() == (path / "during.jsonl").read_bytes()


def test_rounds_that_a_release_trains_again_after_returning_cost_epsilon_twice(tmp_path):
    """Stopped after round 3, back to round 2, trained to round 4: rounds 1 to 3 and then 3 and 4 were begun."""
    pytest.importorskip("dp_accounting")
    nodes, options = make_nodes(tmp_path), {"rounds": 4, "checkpoint_seconds": 0}
    options["method"] = "private-updates(clip=0.01, noise=4)"  # the noise differs; with clip=1 some runs diverge
    with pytest.raises(Stop):
        federated(tmp_path, exchange_of(nodes), observe=stop_after(3), **options)
    roll_back(tmp_path / "run", 2, tmp_path / "again")
    result = federated(tmp_path, exchange_of(nodes), resume=True, out="again", **options)
    assert (result.rounds, result.privacy.updates.rounds) == (4, 5)
    assert not list((tmp_path / "again" / "checkpoint").iterdir())


def test_returning_to_a_round_without_a_checkpoint_names_those_that_there_are(tmp_path):
    federated(tmp_path, exchange_of(make_nodes(tmp_path)), checkpoint_seconds=0)
    with pytest.raises(UserError, match="no checkpoint of round 7; available: 1, 2"):
        roll_back(tmp_path / "run", 7, tmp_path / "again")
    with pytest.raises(UserError, match="is not an empty folder; choose another"):
        roll_back(tmp_path / "run", 1, tmp_path / "run")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("rounds", [1, 2, 100])
def test_earlier_checkpoints_grow_with_the_logarithm_of_the_rounds(tmp_path, monkeypatch, rounds):
    monkeypatch.setattr("unskew.runs.checkpoint.write_whole", lambda file, content: file.write_bytes(content))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / CHECKPOINT).write_bytes(b"state")
    for number in range(1, rounds + 1):
        keep_checkpoint(tmp_path, number)
    kept = list(earlier_checkpoints(tmp_path))
    assert kept[-2:] == [rounds - 1, rounds][-len(kept) :]
    assert len(kept) <= 1 + rounds.bit_length()
    assert kept[0] <= max(1, rounds // 2)


def checked(tmp_path, nodes, classes=(), clients=None):
    said = []
    recipe = tmp_path / "check.toml"
    recipe.write_text(f'data = "nodes"\n{f"clients = {clients}" if clients else ""}\n')
    asked = FederatedRequest(recipe, tmp_path / "none", rules=Rules(wait=20), classes=classes, check=True)
    try:
        check_nodes(exchange_of(nodes), asked, said.append)
    finally:
        assert not (tmp_path / "none").exists()
    return said


def test_a_check_tells_what_each_node_has_and_trains_nothing(tmp_path):
    many = [f"class {number}" for number in range(7)]
    said = checked(tmp_path, nodes_with(tmp_path, usual=["cat", "dog"], many=["cat", *many]))
    assert "node usual: 1 client, 20 training and 2 test images of 8x8 with 1 channel, 2 classes: cat, dog" in said
    assert any(line.startswith("node many has 7 classes that no other node has, the others have 2") for line in said)
    assert "node many lacks dog" in said
    assert said[-1] == "all 2 nodes can take part"
    assert not list(tmp_path.glob("*/runs/*/agreement*"))


def test_a_check_names_every_node_that_does_not_fit_and_why(tmp_path):
    nodes = nodes_with(tmp_path, {"west": (9, 9)}, north=["cat", "dog"], south=["cat", "dgo"], west=["cat", "dog"])
    with pytest.raises(UserError, match=r"2 of 3 nodes cannot.*south: its class 'dgo'.*west: its images are 9x9"):
        checked(tmp_path, nodes, classes=("cat", "dog"), clients=3)


def test_accuracy_tells_which_clients_it_does_not_cover(tmp_path):
    exchange = exchange_of(make_nodes(tmp_path))

    def between(node, question, reply):
        header = read_header(question)
        away = node == 101 and header["kind"] == "job" and header["job"]["type"] == "evaluate"
        return reply_with(reply, _refuse_visits) if away else reply

    exchange.between = between
    result = federated(tmp_path, exchange, data="nodes", method="fedavg + lda", rules=Rules(deadline=5, wait=5))
    assert result.notes == ["the accuracy of the trained model covers 2 of 3 clients; client 1 did not reply"]


def test_grey_images_of_one_node_are_used_in_colour_where_the_others_are(tmp_path):
    shapes = {"grey": (8, 8), "colour": (3, 8, 8), "large": (3, 9, 9)}
    nodes = nodes_with(tmp_path, shapes, **{name: ["cat", "dog"] for name in shapes})
    said = []
    result = federated(tmp_path, exchange_of(nodes), data="nodes", clients=3, rounds=1, rules=Rules(wait=20), said=said)
    assert result.clients == 2
    assert any("node large is left out: its images are 9x9" in line for line in said)
    terms = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert terms["shape"] == [3, 8, 8]
    assert len(terms["mean"]) == 3


def test_terms_for_many_classes_take_no_scan_per_class():  # Landmarks has 203,094, for which that took hours
    many = tuple(f"landmark {number}" for number in range(40_000))
    nodes = [
        Description(name, "1", (ClientFacts(name, None, 5, 2),), classes, (1, 8, 8), (0.5,), (0.2,), False, "shift")
        for name, classes in (("all", many), ("half", many[20_000:]))
    ]
    began = time.process_time()
    terms = federations.agree_on_terms(federations.FederationTerms(run="0" * 32), nodes, ())
    assert [federations.why_not(node, terms) for node in nodes] == [None, None]
    assert federations.describe_oddities(nodes, terms) == []
    assert time.process_time() - began < 3
