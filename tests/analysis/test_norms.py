"""Row norms: of classifiers made by hand, of local models as training left them, before and after calibration."""

import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.finished import CALIBRATIONS, content, drawn, finished_run, recorded, undisturbed
from partitions import counts_table
from unskew.analysis import norms
from unskew.analysis.norms import Norms, correlation, row_lengths, unevenness
from unskew.data.partition_files import Holdings


def test_rows_of_a_classifier_made_by_hand():
    """Rows ±(3, 4, 0, …) and ±(0, 0, 1, 1, 1, 1, 0, …), the others 0: lengths 5, 5, 2, 2, 0, ….

    A vector that all of them share changes no prediction and no length.
    """
    made = torch.zeros(10, 64)
    made[0, :2] = torch.tensor([3.0, 4.0])
    made[2, 2:6] = 1
    made[1], made[3] = -made[0], -made[2]
    for shift in (0.0, 100.0):
        assert row_lengths(made + shift) == pytest.approx([5.0, 5.0, 2.0, 2.0] + [0.0] * 6, abs=1e-9)


def test_unevenness_is_the_deviation_over_the_mean():
    """Of 1, 2, 3: √(2/3) / 2."""
    assert unevenness([1, 2, 3]) == pytest.approx((2 / 3) ** 0.5 / 2)
    assert unevenness([5, 5, 5]) == 0
    assert unevenness([0, 0]) == 0
    assert unevenness([10, 20, 30]) == pytest.approx(unevenness([1, 2, 3]))


def test_correlation_is_pearson_s_and_nothing_where_nothing_varies():
    """(1, 2, 3) and (2, 2, 5): Σ(x−2)(y−3) = 3 of √(2·6)."""
    assert correlation([1, 2, 3], [2, 2, 5]) == pytest.approx(3 / 12**0.5)
    assert correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert correlation([4, 4], [1, 2]) is None
    assert correlation([1, 2], [3, 3]) is None
    assert correlation([1], [3]) is None


def apart(weight):
    """How long each row is beside the mean of all rows, entry by entry."""
    rows = weight.double().tolist()
    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    return [sum((a - m) ** 2 for a, m in zip(row, mean, strict=True)) ** 0.5 for row in rows]


def test_rows_of_the_run_of_its_calibrations_and_of_its_clients(finished):
    with finished_run(finished) as opened, undisturbed():
        found = norms.take_norms(opened)
        models = opened.local_models()
        table = counts_table(opened.prepared.population, opened.images.train.labels, 10)
        weight = opened.weights["classifier.weight"]
    assert found.server == pytest.approx(apart(weight), rel=1e-6)
    assert list(found.calibrated) == list(CALIBRATIONS)
    for name, rows in found.calibrated.items():
        values = opened.calibrated[name]
        last = values["head.weight"] if "head.weight" in values else values["head.classifier.weight"]
        assert rows == pytest.approx(apart(last), rel=1e-6)
    assert found.total == table.sum(0).tolist()
    last = found.rounds[-1]
    assert (last["round"], last["when"], last["clients"]) == (4, "after the last round", list(map(str, models)))
    for rows, model in zip(last["local"], models.values(), strict=True):
        assert rows == pytest.approx([float(row.norm()) for row in model["params/classifier.weight"]], rel=1e-6)
    found_here = [np.corrcoef(table[k], rows)[0, 1] for k, rows in zip(models, last["local"], strict=True)]
    assert last["correlation"] == pytest.approx(np.mean(found_here), abs=1e-12)
    assert found.counts == [table[int(client)].tolist() for client in found.clients]


def test_rounds_recorded_while_training_stand_before_the_last_in_order(finished):
    with finished_run(finished) as opened:
        found = norms.take_norms(opened)
    rows = recorded(finished)
    assert [row["round"] for row in found.rounds] == [1, 2, 3, 4]
    assert [row["when"] for row in found.rounds] == ["in round 1", "in round 2", "in round 3", "after the last round"]
    for row, seen in zip(found.rounds, rows, strict=False):
        assert (row["local"], row["server"], row["clients"]) == (
            seen["norms"]["local"], seen["norms"]["server"], list(map(str, seen["norms"]["clients"])),
        )  # fmt: skip


def test_without_local_models_no_data_set_is_needed(run):
    before = content(run)
    (run.parent / "digits.npz").unlink()
    with finished_run(run) as opened:
        found = norms.take_norms(opened, local=False)
        assert [row["round"] for row in found.rounds] == [1, 2, 3]
        assert opened.notes == []
        found = norms.take_norms(opened)
        assert [row["round"] for row in found.rounds] == [1, 2, 3]
        assert "norms of local classifiers are shown only as recorded during training" in opened.notes[0]
        assert "digits.npz does not exist" in opened.notes[0]
    assert content(run) == before


def test_a_head_that_normalises_gives_rows_of_one_and_no_correlation(runs_of):
    """clsnorm: what is used has length 1, whatever is trained."""
    run = runs_of(method="clsnorm", during="norms")
    with finished_run(run) as opened:
        found = norms.take_norms(opened)
    for row in found.rounds:
        assert np.array(row["local"]) == pytest.approx(np.ones((5, 10)), abs=1e-6)
    assert drawn(norms.NORMS.draw(found))


def test_a_centralised_run_has_rows_and_no_client_to_hold_them_against(runs_of):
    with finished_run(runs_of(method="centralised", during="norms")) as opened:
        found = norms.take_norms(opened)
    assert found.clients == []
    assert [row["correlation"] for row in found.rounds] == [None] * 4
    assert norms.NORMS.findings(found) == []
    assert drawn(norms.NORMS.draw(found))


def made(**changes):
    """Two classes, two clients; rows that follow the counts wholly."""
    row = {"round": 1, "when": "in round 1", "server": [1.0, 3.0], "clients": [0, 4]}
    row |= {"local": [[1.0, 2.0], [5.0, 1.0]], "correlation": 1.0, "unevenness": 0.5}
    later = row | {"round": 2, "when": "after the last round", "server": None, "correlation": 0.1}
    whole = Norms(["a", "b"], [5, 7], [1.0, 3.0], {"lda": [2.0, 2.0]}, [row, later], [[1, 3], [4, 2]], [0, 4])
    return replace(whole, **changes)


def test_the_words_tell_the_first_round_the_last_and_what_calibration_did():
    """1 and 3: deviation 1 of a mean of 2."""
    assert norms.NORMS.findings(made()) == [
        "Rows of local classifiers follow the clients' label counts: mean correlation 1.00 in round 1, and 0.10 after "
        "the last round.",
        "1 of 1 calibrations make the classifier's rows more even: their deviation is 50.0% of their mean before, 0.0% "
        "after lda.",
    ]
    assert norms.NORMS.findings(made(calibrated={}, rounds=[])) == []
    both = made(calibrated={"ccvr": [0.1, 5.0], "ccvr(relu=true, tukey=0.5)": [2.0, 2.5], "oracle": [1.0, 1.0]})
    said = norms.NORMS.findings(both)[-1]
    assert said.startswith("1 of 2 calibrations make the classifier's rows more even")
    assert "50.0% of their mean before, 96.1% after ccvr, 11.1% after ccvr(relu=true, tukey=0.5)." in said


def test_pictures_of_the_rows():
    charts = norms.NORMS.draw(made())
    assert drawn(charts) == [
        "norms-classes", "norms-round-1", "norms-round-2", "norms-clients", "norms-rounds",
    ]  # fmt: skip
    bars = charts[0].marks
    assert [list(each.height) for each in bars] == [[0.5, 1.5], [1.0, 1.0]]
    dots = charts[1].marks[0]
    assert (list(dots.x), list(dots.y)) == ([1, 3, 4, 2], [1.0, 2.0, 5.0, 1.0])


def test_many_clients_and_classes_take_no_table_of_all_of_them():
    """20,000 clients of 2 examples and 1,203 classes: a table of all would be 192 MB, what is held is 1 MB."""
    clients, classes = 20_000, 1203
    cells = np.stack([np.arange(2 * clients) // 2, np.arange(2 * clients) % classes, np.ones(2 * clients, int)], axis=1)
    held = Holdings("test", None, np.full(clients, 2), cells)
    row = {"round": 1, "norms": {"clients": [5, 7], "local": [[1.0] * classes] * 2, "server": [1.0] * classes}}
    opened = SimpleNamespace(
        holdings=held, classes=[str(c) for c in range(classes)], during=[row], notes=[], calibrated={},
        classifier_weight=torch.eye(classes),
    )  # fmt: skip
    tracemalloc.start()
    try:
        found = norms.take_norms(opened, local=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60e6
    assert sum(found.total) == 2 * clients
    assert [sum(each) for each in found.counts] == [2, 2]
    assert found.counts[0][10 % classes] == found.counts[1][14] == 1
