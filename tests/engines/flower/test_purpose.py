"""What a job's text says of it: how many replies are waited for follows from that."""

import pytest

from unskew.engines.flower.purpose import Purpose, is_secure
from unskew.privacy.questions import Question


def asking(job, about, threshold=5):
    return f"{job} " + Question(bytes(32), threshold, about, "").to_text()


@pytest.mark.parametrize(("job", "purpose", "may_miss"), [
    ("train", Purpose("train"), True),
    ("rounded-train 4", Purpose("train"), True),
    ("survey", Purpose("survey"), False),
    ("moments {}", Purpose("moments"), False),
    ("evaluate-calibrated", Purpose("evaluate-calibrated"), True),
    (asking("mask-keys", "masked-train"), Purpose("train", 5), True),
    (asking("masked-train", "masked-train", 2), Purpose("train", 3, under_way=True), True),  # of two no sum is made
    (asking("mask-keys", "masked-statistics"), Purpose("statistics", 5), False),
    (asking("mask-openings", "masked-statistics"), Purpose("statistics", 5, under_way=True), False),
    (asking("mask-shares", "masked-evaluate"), Purpose("evaluate", 5, under_way=True), True),
])  # fmt: skip
def test_a_job_tells_its_purpose(job, purpose, may_miss):
    assert Purpose.of(job) == purpose
    assert purpose.may_miss == may_miss
    assert is_secure(job) == (purpose.threshold > 0)
