"""Outcomes of one visit each, added up as an engine must: in the order of the visits."""

import pytest
import torch

from unskew.core.types import Failure, Outcome
from unskew.extend import add_outcomes


def outcome(value, client=0):
    return Outcome({"weight": torch.tensor(value, dtype=torch.float64)}, receipts={client: f"{client}-00"})


def test_sums_are_added_in_the_order_given():
    values = [1e16, 1.0, -1e16]  # the 1 is lost where it meets 1e16 first
    assert add_outcomes(map(outcome, values)).sums["weight"].item() == 0.0
    assert add_outcomes(map(outcome, [1e16, -1e16, 1.0])).sums["weight"].item() == 1.0


def test_failures_and_receipts_are_kept_and_a_failed_visit_adds_nothing():
    failed = Outcome({}, (Failure(1, "no luck"),))
    total = add_outcomes([outcome(2.0, 0), failed, outcome(3.0, 2)])
    assert total.sums["weight"].item() == 5.0
    assert total.failures == (Failure(1, "no luck"),)
    assert total.receipts == {0: "0-00", 2: "2-00"}


def test_of_two_visits_to_one_client_the_last_receipt_counts():
    first, last = (Outcome({}, receipts={4: ticket}) for ticket in ("0-aa", "1-bb"))
    assert add_outcomes([first, last]).receipts == {4: "1-bb"}


def test_nothing_adds_up_to_nothing_and_the_parts_are_left_alone():
    assert add_outcomes([]) == Outcome({})
    one = outcome(1.0)
    add_outcomes([one, outcome(2.0)])
    assert one.sums["weight"].item() == 1.0


def test_other_entries_are_refused():
    other = Outcome({"loss": torch.zeros((), dtype=torch.float64)})
    with pytest.raises(ValueError, match="cannot be added: loss, weight"):
        add_outcomes([outcome(1.0), other])
