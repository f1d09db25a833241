"""The method of docs/how-to/writing.md runs, does what the page says, and keeps the laws."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from unskew.checks import check_method
from unskew.core.types import Step
from unskew.methods import parse_method
from unskew.round.client import objective

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "writing.md"
CODE = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The page's methods as a module that can be imported by name."""
    (tmp_path / "mine_from_the_page.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return "mine_from_the_page"


@pytest.mark.heavy
def test_the_method_of_the_page_keeps_the_laws(mine):
    assert check_method(__import__(mine).distil(), neutral=f"{mine}:distil(weight=0)")


def step_of(counts=(5, 0, 2), teacher=((0.0, 0.0, 0.0), (3.0, 0.0, 1.0))):
    logits = torch.tensor([[1.0, -0.5, 0.2], [0.3, 0.8, -1.0]], dtype=torch.float64)
    teacher = torch.tensor(teacher, dtype=torch.float64)
    return Step(logits, logits, torch.tensor([0, 2]), {}, {}, {}, torch.tensor(counts), None, {"shared": teacher}.get)


def test_distil_adds_the_distance_to_the_servers_answers(mine):
    step = step_of()
    p, q = (torch.softmax(x / 2, 1) for x in (step.predict("shared"), step.logits))
    expected = F.cross_entropy(step.logits, step.labels) + 4 * (p * (p / q).log()).sum(1).mean()
    assert objective(parse_method(f"{mine}:distil"), step).value().item() == pytest.approx(expected.item(), abs=1e-12)
    same = step_of(teacher=step.logits.tolist())
    assert objective(parse_method(f"{mine}:distil"), same).penalty.item() == pytest.approx(0, abs=1e-15)


def test_every_field_of_step_visited_statistic_and_memory_is_on_the_page():
    from dataclasses import fields

    from unskew.core.types import Loss, Memory, Statistic, Visited

    text = PAGE.read_text()
    for record in (Step, Visited, Loss, Statistic, Memory):
        for field in fields(record):
            assert re.search(rf"`{field.name}[`(]", text), f"{record.__name__}.{field.name}"
