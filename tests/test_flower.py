"""unskew.flower: calibration for Flower apps of others, on a grid within this process."""

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import unskew
import unskew.flower
from unskew.calibration.statistics import ClassStatistics
from unskew.core.errors import UserError
from unskew.core.key import Key

RECIPE = Path(__file__).parents[1] / "recipes" / "flower_app"


@pytest.fixture(scope="module", autouse=True)
def in_an_apps_process():
    """As in the process that Flower starts for an app."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, 1


def grid_of(app, nodes, silent=()):
    """A grid whose nodes, node configurations by number, answer at once with this ClientApp."""

    class Here(Grid):
        def __init__(self):
            self.answers, self.asked = {}, []

        def set_run(self, run):
            raise NotImplementedError

        run = property(set_run)
        create_message = None

        def get_node_ids(self):
            return list(nodes)

        def push_messages(self, messages):
            numbers = []
            for message in messages:
                numbers.append(f"m{len(self.answers)}")
                self.asked.append(message)
                message.metadata.__dict__["_message_id"] = numbers[-1]
                message.metadata.__dict__["_src_node_id"] = 1
                self.answers[numbers[-1]] = self.answer(message)
            return numbers

        def answer(self, message):
            node = message.metadata.dst_node_id
            if node in silent:
                return None
            context = Context(7, node, nodes[node], RecordDict(), {})
            try:
                return app(message, context)
            except Exception as error:  # noqa: BLE001  as Flower does
                return Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)

        def pull_messages(self, message_ids):
            found = [self.answers.get(each) for each in message_ids]
            return [each for each in found if each is not None]

        def send_and_receive(self, messages, *, timeout=None):
            return self.pull_messages(self.push_messages(list(messages)))

    Here.__abstractmethods__ = frozenset()
    return Here()


def data(node):
    generator = Key(node).torch()
    labels = torch.arange(40) % 3
    return [(torch.randn(40, 5, generator=generator) + labels[:, None], labels)]


def an_app(give=None, **more):
    app = ClientApp()
    give = give or (lambda message, context: (nn.Identity(), data(context.node_id)))
    unskew.flower.answer_statistics(app, give, classes=more.pop("classes", 3), **more)
    return app


def weights():
    return ArrayRecord(torch_state_dict=nn.Linear(2, 2).state_dict())


def test_the_gathered_statistics_are_those_of_all_nodes_together():
    found = unskew.flower.gather(grid_of(an_app(), {5: {}, 3: {}}), weights(), classes=3)
    alone = ClassStatistics.merged(ClassStatistics.measure(nn.Identity(), data(node), 3) for node in (3, 5))
    assert found.nodes == (3, 5)
    assert found.failures == {}
    assert all(torch.equal(value, alone.tensors()[name]) for name, value in found.statistics.tensors().items())


def test_a_calibration_over_the_grid_is_the_one_from_the_same_statistics():
    classifier = nn.Linear(5, 3)
    made = unskew.flower.calibrate(grid_of(an_app(), {1: {}, 2: {}}), classifier, weights(), method="lda")
    alone = ClassStatistics.merged(ClassStatistics.measure(nn.Identity(), data(node), 3) for node in (1, 2))
    again = unskew.calibrate(classifier, alone, "lda")
    assert torch.equal(made.linear().weight, again.linear().weight)


def test_nodes_that_fail_are_left_out_by_name_with_a_warning():
    def give(message, context):
        if context.node_id == 2:
            raise OSError("disk full")
        return nn.Identity(), data(context.node_id)

    grid = grid_of(an_app(give), {1: {}, 2: {}, 3: {}}, silent={3})
    with pytest.warns(UserWarning, match="node") as told:
        unskew.flower.calibrate(grid, nn.Linear(5, 3), weights(), method="lda", timeout=0.1)
    said = [str(each.message) for each in told]
    assert "node 2 is left out of the calibration: OSError: disk full" in said
    assert "node 3 is left out of the calibration: it did not answer within 0 s" in said
    with pytest.raises(UserError, match="1 node sent class statistics, but 2 are needed: node 2: OSError: disk full"):
        unskew.flower.gather(grid, weights(), classes=3, timeout=0.1, min_replies=2)


def test_what_cannot_be_real_is_refused_as_a_strangers_file_is():
    good = ClassStatistics.measure(nn.Identity(), data(0), 3)
    spoiled = ClassStatistics(
        3, good.form, good.held, good.number, {**good.sums, "sums": good.sums["sums"] * torch.nan}
    )
    answers = {1: spoiled.to_bytes(), 2: b"no file", 3: None, 4: ClassStatistics.empty(4, 5).to_bytes()}
    app = ClientApp()

    @app.query(unskew.flower.ACTION)
    def answer(message, context):
        content = answers[context.node_id]
        record = {} if content is None else {"statistics": Array("uint8", (len(content),), "unskew", content)}
        return Message(RecordDict({unskew.flower.RECORD: ArrayRecord(record)}), reply_to=message)

    with pytest.raises(UserError, match="node 1: the statistics of its answer are rejected") as refused:
        unskew.flower.gather(grid_of(app, {node: {} for node in answers}), weights(), classes=3)
    said = str(refused.value)
    assert "node 2: its answer does not contain class statistics" in said
    assert "node 3: its answer does not contain class statistics" in said
    assert "node 4: it sent full statistics for 4 classes; expected full statistics for 3 classes" in said


def test_a_node_keeps_rare_classes_at_home_and_says_when_classes_differ():
    app = an_app(lambda message, context: (nn.Identity(), [(torch.randn(9, 4), [0] * 5 + [1] * 4)]), least=5)
    assert unskew.flower.gather(grid_of(app, {1: {}}), weights(), classes=3).statistics.held.tolist() == [0]
    with pytest.raises(UserError, match="the server's classifier has 4 classes, but this node's data have 3"):
        unskew.flower.gather(grid_of(app, {1: {}}), weights(), classes=4)


def test_without_nodes_and_with_calibrations_that_ask_more_there_is_one_message():
    grid = grid_of(an_app(), {})
    with pytest.raises(UserError, match="no node is connected"):
        unskew.flower.gather(grid, weights(), classes=3)
    for method, words in (("oracle", "real features"), ("ccvr(components=2)", "more than one exchange")):
        with pytest.raises(UserError, match=words):
            unskew.flower.calibrate(grid, nn.Linear(5, 3), weights(), method=method)
    assert grid.asked == []


@contextmanager
def recipe():
    sys.path.insert(0, str(RECIPE))
    try:
        yield importlib.import_module("digits_app.client_app"), importlib.import_module("digits_app.server_app")
    finally:
        sys.path.remove(str(RECIPE))
        for name in [name for name in sys.modules if name.split(".")[0] == "digits_app"]:
            del sys.modules[name]


def test_the_recipes_app_gains_from_the_lines_that_are_added(capsys):
    nodes = {number + 10: {"partition-id": number, "num-partitions": 4} for number in range(4)}
    with recipe() as (client, server):
        grid = grid_of(client.app, nodes)
        context = Context(1, 1, {}, RecordDict(), {"rounds": 2, "nodes": 4, "calibrate": "lda"})
        with torch.random.fork_rng():
            server.app(grid, context)
    before, after = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "after" in line)
    assert after > before + 0.05
    assert after > 0.9


def test_the_recipe_adds_ten_lines_at_most():
    added = sum(
        line.rstrip().endswith("# unskew") for file in RECIPE.rglob("*.py") for line in file.read_text().splitlines()
    )
    assert 5 <= added <= 10
