"""The harness itself: it computes what the CPU computes, and refuses what a device refuses."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pretend import PretendDevice, PretendTensor, WrongDevice
from torch import nn

from unskew.core.tensors import half_squared_distance
from unskew.core.types import Local
from unskew.round.local_optimizers import clip_gradients, make_optimizer


def network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 7)
    )
    for value in made.parameters():
        nn.init.uniform_(value, -0.3, 0.3, generator=generator)
    return made


def trained(made, images, labels, kind="sgd"):
    """The state after three steps of the clients' own optimiser, clipped, and the loss of each."""
    values, losses = list(made.parameters()), []
    local = Local(lr=0.1, optimizer=kind, decay="weights", weight_decay=0.1)
    update, start = make_optimizer(values, local), [value.detach().clone() for value in values]
    for _ in range(3):
        loss = F.cross_entropy(made(images), labels) + half_squared_distance(values, start)
        update(clip_gradients(torch.autograd.grad(loss, values), 0.5))
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in made.state_dict().items()}


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_training_there_gives_the_same_bits_as_here(each_home, kind):
    images, labels = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(5)
    here, there = network(), network().to(each_home.device)
    losses, state = trained(here, images, labels, kind)
    other_losses, other_state = trained(there, images.to(each_home.device), labels.to(each_home.device), kind)
    assert losses == other_losses
    assert all(torch.equal(state[name], other_state[name]) for name in state)
    assert not any(isinstance(value, PretendTensor) for value in other_state.values())


def test_a_gradient_crosses_to_the_cpu_and_back(each_home):
    there = torch.ones(3).to(each_home.device).requires_grad_()
    (gradient,) = torch.autograd.grad((there.cpu() * torch.tensor([1.0, 2.0, 3.0])).sum(), there)
    assert gradient.device == each_home.device
    assert gradient.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "work",
    [
        lambda there: torch.bincount(there.long(), minlength=4),
        lambda there: torch.linalg.eigh(there[:, None] * there)[0],
        lambda there: torch.unique(there, return_counts=True)[1],
        lambda there: torch._foreach_add([there], [there])[0],
        lambda there: there.new_zeros(4).index_put_((there.long(),), there),
        lambda there: there[there > 1],
        lambda there: there + torch.tensor(1.0),  # a CPU scalar is welcome
        lambda there: torch.func.functional_call(nn.ReLU(), {}, (there,)),
    ],
)
def test_these_pass_through(each_home, work):
    here = torch.tensor([0.0, 1.0, 3.0])
    result = work(here.to(each_home.device))
    assert result.device == each_home.device
    assert torch.equal(result.cpu(), work(here))


@pytest.mark.parametrize(
    "mistake",
    [
        lambda there, here: there + here,
        lambda there, here: here.add_(there),
        lambda there, here: there.add_(here),
        lambda there, here: torch.cat([there, here]),
        lambda there, here: torch.where(there > 0, there, here),
        lambda there, here: torch.equal(there, here),
        lambda there, here: torch._foreach_add([there], [here]),
        lambda there, here: there[here.long()],
        lambda there, here: here[there.long()],
        lambda there, here: torch.zeros(4).index_add_(0, there.long(), there),
        lambda there, here: F.cross_entropy(there[None], here[:1].long()),
        lambda there, here: half_squared_distance([there.requires_grad_()], [here]),
        lambda there, here: nn.Linear(3, 2)(there),
        lambda there, here: there.numpy(),
        lambda there, here: np.asarray(there),
        lambda there, here: there.uniform_(generator=torch.Generator()),
        lambda there, here: torch.randn(3, generator=torch.Generator(), device=there.device),
    ],
)
def test_these_are_refused(each_home, mistake):
    here = torch.tensor([0.0, 1.0, 2.0])
    with pytest.raises(WrongDevice):
        mistake(here.to(each_home.device), here)


def test_copies_may_cross_and_are_counted(each_home):
    here, there = torch.zeros(3), torch.ones(3).to(each_home.device)
    there.copy_(torch.full((3,), 2.0))
    assert each_home.waits.total() == 0
    here.copy_(there)
    torch._foreach_copy_([here], [there])
    assert here.tolist() == [2, 2, 2]
    assert each_home.waits == {"copy to the CPU": 2}
    assert there.sum().item() == 6.0
    assert each_home.waits["aten._local_scalar_dense.default"] == 1


def test_only_mps_refuses_float64():
    with PretendDevice("cuda:0") as home:
        assert torch.zeros(2).to(home.device).double().dtype == torch.float64
    with PretendDevice("mps:0") as home:
        there = torch.zeros(2).to(home.device)
        for mistake in (there.double, lambda: torch.zeros(2, device="mps", dtype=torch.float64)):
            with pytest.raises(WrongDevice, match="no float64"):
                mistake()
