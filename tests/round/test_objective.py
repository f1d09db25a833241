"""What a step's loss is made of, and what another model makes of its batch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from federation import federation
from unskew.core.types import Loss, Step
from unskew.round.algorithm import Algorithm
from unskew.round.client import objective
from unskew.round.client_memory import whole_model


def step_of(classes=3, examples=4):
    logits = torch.arange(examples * classes, dtype=torch.float64).view(examples, classes).sin()
    labels = torch.arange(examples) % classes
    return Step(logits, logits, labels, {}, {}, {}, torch.bincount(labels), None, None)


def test_margins_come_before_cross_entropy_the_blend_after_it_and_terms_last():
    step = step_of()
    one, two = torch.tensor([0.5, -1.0, 2.0]).double(), 0.1 * step.logits
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    algorithm = Algorithm(
        margin=(lambda step: one, lambda step: two),
        blend=lambda entropy, step: 0.3 * entropy + 0.7 * entropy**2,
        terms=(lambda loss, step: replace(loss, weight=weight), lambda loss, step: loss.plus(torch.tensor(5.0))),
    )
    entropy = F.cross_entropy(step.logits + one + two, step.labels, reduction="none")
    blended = 0.3 * entropy + 0.7 * entropy**2
    expected = (weight * blended).sum() / 10 + 5
    torch.testing.assert_close(objective(algorithm, step).value(), expected, rtol=0, atol=1e-14)


def test_without_methods_it_is_cross_entropy_bit_for_bit():
    step = step_of()
    loss = objective(Algorithm(), step)
    assert torch.equal(loss.example, F.cross_entropy(step.logits, step.labels, reduction="none"))
    assert loss.weight is None
    assert loss.penalty is None


def test_a_class_with_a_margin_of_minus_infinity_leaves_the_softmax():
    step = step_of(classes=4, examples=3)
    logits = step.logits.clone().requires_grad_()
    margin = torch.tensor([0.0, 0.0, 0.0, -torch.inf]).double()
    value = objective(Algorithm(margin=(lambda step: margin,)), replace(step, logits=logits)).value()
    assert value.item() == pytest.approx(F.cross_entropy(step.logits[:, :3], step.labels).item(), abs=1e-15)
    (gradient,) = torch.autograd.grad(value, logits)
    assert not gradient[:, 3].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("method", ["fedavg", "clsnorm"])
def test_predict_gives_the_logits_of_the_servers_model_and_of_a_remembered_one(method):
    """In a visit's first step the client's model is the server's; the remembered one is that of its last visit."""
    seen = []

    def term(loss: Loss, step: Step) -> Loss:
        remembered = step.predict("last") if step.memory else None
        seen.append((step.logits.detach(), step.predict("shared"), remembered))
        return loss

    small = federation(method, sizes=(8,), epochs=2, batch=8)
    algorithm = small.algorithm
    watched = replace(small, value=replace(algorithm, terms=(term,), remember=(whole_model("last"),)))
    watched.run(2)
    (first, server, nothing), (second, again, _), (third, now, last), (_, _, still) = seen
    assert nothing is None
    assert server.shape == (8, 4)
    assert not server.requires_grad
    assert torch.equal(first, server)
    assert not torch.equal(second, again)
    torch.testing.assert_close(third, now, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        last.sort(0).values, third.sort(0).values, rtol=0, atol=1e-9
    )  # one client: its model is the server's
    assert still.shape == last.shape
