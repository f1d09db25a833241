"""Schedules of the clients' rate: torch's own schedulers are the reference."""

import pytest
import torch
from torch.optim import lr_scheduler

from federation import federation, same
from unskew.core.errors import UserError
from unskew.core.types import Local
from unskew.round import local_optimizers
from unskew.round.local_optimizers import check_rounds, encode_rate, parse_schedule, rate_of_round, with_round_rate


def rates(text, rounds, lr=0.1):
    return [parse_schedule(text).rate(lr, number, rounds) for number in range(1, rounds + 1)]


def torch_rates(make, rounds, lr=0.1):
    """The rates of torch's scheduler, one step a round."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler, seen = make(optimizer), []
    for _ in range(rounds):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
def test_step_is_torchs_step_lr(rounds):
    want = torch_rates(lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.5), rounds)
    assert rates("step(every=3, factor=0.5)", rounds) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
@pytest.mark.parametrize("least", [0, 0.02])
def test_cosine_is_torchs_cosine_annealing(rounds, least):
    want = torch_rates(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=rounds, eta_min=least), rounds)
    assert rates(f"cosine(least={least})", rounds) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("warmup", [1, 4])
def test_warmup_is_torchs_linear_schedule_before_the_other(warmup):
    def make(optimizer):
        rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        fall = lr_scheduler.CosineAnnealingLR(optimizer, T_max=12 - warmup)
        return lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warmup])

    assert rates(f"cosine(warmup={warmup})", 12) == pytest.approx(torch_rates(make, 12), rel=1e-9)
    assert rates(f"constant(warmup={warmup})", 12)[warmup:] == [0.1] * (12 - warmup)


def test_a_round_after_the_last_has_the_rate_of_the_last_and_no_rate_is_zero():
    assert rates("cosine", 5)[-1] == parse_schedule("cosine").rate(0.1, 6, 5) > 0


def test_a_constant_rate_is_not_sent_and_a_clients_settings_stay():
    local = Local()
    assert rate_of_round(local, 3, 9) is None
    assert encode_rate(None) == {}
    assert with_round_rate(local, {}) is local
    assert with_round_rate(local, encode_rate(0.1234567890123456)).lr == 0.1234567890123456  # not a bit is lost


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", "did you mean 'cosine'"),
        ("step(every=0)", "every must be at least 1 round"),
        ("cosine(least=-1)", "least, a learning rate, must be 0 or more"),
        ("cosine(warmup=-1)", "warmup must be 0 or more rounds"),
        ("cosine + step", "give one schedule"),
        ("cosine(T_max=3)", "no knob 'T_max'"),
        ("", "schedule is empty; give a name"),
        ("step(factor=1e300)", "is out of range"),
    ],
)
def test_what_is_no_schedule_is_refused_in_a_sentence(text, message):
    with pytest.raises(UserError, match=message):
        local_optimizers.parse_schedule(text)


def test_a_schedule_that_does_not_fit_the_rounds_or_the_rate_is_refused():
    with pytest.raises(UserError, match="a warm-up of 5 rounds leaves no rounds at the full rate"):
        check_rounds(Local(schedule="cosine(warmup=5)"), 5)
    with pytest.raises(UserError, match=r"least is above --lr 0\.01"):
        check_rounds(Local(schedule="cosine(least=0.02)"), 5)
    check_rounds(Local(schedule="cosine(warmup=4, least=0.01)"), 5)


def test_every_round_trains_with_its_own_rate_and_says_so():
    """Two rounds of a step schedule are one at the first rate and, from its state, one at the second."""
    scheduled = federation(schedule="step(every=1, factor=0.5)", lr=0.08, dtype="float32")
    first = federation(lr=0.08, dtype="float32").run(1)
    assert same(scheduled.run(1), first)
    assert same(scheduled.run(2), federation(lr=0.04, dtype="float32").run(2, state=first))


def test_a_run_stopped_and_resumed_follows_the_same_cosine():
    small = federation("fedavgm(0.5)", schedule="cosine", dtype="float32", epochs=1)
    assert same(small.run(4), small.run(4, state=small.run(2, rounds_planned=4)))
    assert not same(small.run(4), small.run(4, state=small.run(2)))  # another --rounds is another cosine


def test_scaffolds_control_variates_use_the_rounds_rate():
    """One client alone: c_k⁺ is its mean gradient, (x − y)/(η·K) without momentum, at the round's own rate."""
    small = federation("scaffold", sizes=(40,), schedule="step(every=1, factor=0.1)", lr=0.1, momentum=0.0, epochs=1)
    one, two = small.run(1, rounds_planned=2), small.run(2)
    steps = 3  # 40 examples in batches of 16
    for name, before in one.tensors.items():
        if not name.startswith("params/"):
            continue
        # n_k = n and every client came: c becomes c_k⁺ = c_k − c + (x − y)/(ηK), and c_k = c after round 1
        moved = (before.double() - two.tensors[name].double()) / (0.01 * steps)
        assert torch.allclose(two.sent[f"scaffold/{name}"], moved, rtol=1e-6, atol=1e-9)
