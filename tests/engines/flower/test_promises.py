"""What a job is for: how many replies are waited for follows from that, and whether a node answers it at all."""

import pytest

from unskew.calibration.covariances import Diagonal
from unskew.calibration.finisher import StatisticsRequest
from unskew.calibration.jobs import EvaluateCalibrated, FixedPointMoments, Moments
from unskew.core.types import Local
from unskew.engines.flower.messages import BadMessage
from unskew.engines.flower.policy import Purpose, check_masked, name_of, subject_of
from unskew.methods import parse_method
from unskew.privacy.secure_sum import Masked, MaskKeys, MaskOpenings, MaskShares, Rounded
from unskew.round.client import Survey, Train
from unskew.round.evaluation import Evaluate

REQUEST = StatisticsRequest(form=Diagonal()).to_plain()
MOMENTS, WORDS = Moments(REQUEST), FixedPointMoments(REQUEST, 10, 32, 24, 4)
MEMBERS = tuple((client, 0) for client in range(4))
KEYS, FLAGS, KEY = (b"",) * 4, (True,) * 4, b"k" * 32


def about(inner, threshold=5):
    return bytes(32), threshold, inner, MEMBERS


@pytest.mark.parametrize(("job", "purpose", "may_miss"), [
    (Train(7), Purpose(Train(7)), True),
    (Rounded(Train(7), 4), Purpose(Train(7)), True),
    (Survey(), Purpose(Survey()), False),
    (MOMENTS, Purpose(MOMENTS), False),
    (EvaluateCalibrated(), Purpose(EvaluateCalibrated()), True),
    (MaskKeys(*about(Rounded(Train(7), 4))), Purpose(Train(7), 5), True),
    (Masked(*about(Rounded(Train(7), 4), 2), KEYS, FLAGS), Purpose(Train(7), 3, under_way=True), True),  # no sum of two
    (MaskKeys(*about(WORDS)), Purpose(WORDS, 5), False),
    (MaskOpenings(*about(WORDS), KEYS, FLAGS, FLAGS), Purpose(WORDS, 5, under_way=True), False),
    (MaskShares(*about(Rounded(Evaluate(), 4)), KEYS), Purpose(Evaluate(), 5, under_way=True), True),
])  # fmt: skip
def test_a_job_tells_its_purpose(job, purpose, may_miss):
    assert Purpose.of(job) == purpose
    assert purpose.may_miss == may_miss
    assert purpose.trains == isinstance(purpose.work, Train)
    assert purpose.round == (7 if purpose.trains else 0)
    assert name_of(job) == name_of(purpose.work)


@pytest.mark.parametrize("job", [MOMENTS, WORDS, Rounded(MOMENTS, 1), Rounded(Rounded(WORDS, 1), 1)])
def test_statistics_that_were_to_be_masked_are_refused_however_they_are_wrapped(job):
    algorithm = parse_method("fedavg + lda + secure", Local())
    with pytest.raises(BadMessage, match=f"it asks for {name_of(job)} without masks, but secure"):
        check_masked(job, algorithm)
    check_masked(Train(1), algorithm)  # its updates were not to be masked
    check_masked(Masked(*about(WORDS), KEYS, FLAGS), algorithm)
    check_masked(job, parse_method("fedavg + lda", Local()))


@pytest.mark.parametrize("job", [Train(1), Survey(), Evaluate(), EvaluateCalibrated(), MOMENTS, WORDS])
def test_nothing_is_answered_without_masks_where_updates_were_to_be_masked(job):
    algorithm = parse_method("fedavg + secure(updates=true)", Local())
    for unmasked in (job, Rounded(job, 4), Rounded(MaskKeys(*about(job)), 4)):
        with pytest.raises(BadMessage, match=f"it asks for {name_of(job)} without masks"):
            check_masked(unmasked, algorithm)
    check_masked(Masked(*about(Rounded(job, 4)), KEYS, FLAGS), algorithm)


def test_masks_that_fewer_can_take_off_are_refused():
    algorithm = parse_method("fedavg + secure(threshold=0.9)", Local())
    for job in (MaskKeys(*about(WORDS, 3)), Masked(*about(WORDS, 3), KEYS, FLAGS)):
        with pytest.raises(BadMessage, match="3 of 4 clients remove the masks; 4 were agreed on"):
            check_masked(job, algorithm)
    check_masked(MaskKeys(*about(WORDS, 4)), algorithm)


def test_sums_are_about_the_same_where_their_difference_would_reveal_a_client():
    plain, steady = (parse_method(method, Local()) for method in ("fedavg", "prototypes"))
    one, other = b"m" * 32, b"n" * 32
    for job in (MOMENTS, WORDS, Masked(*about(WORDS), KEYS, FLAGS)):
        assert subject_of(job, one, KEY, plain) == subject_of(MOMENTS, other, KEY, steady) == "statistics"
    assert subject_of(Survey(), one, KEY, plain) == subject_of(Rounded(Survey(), 4), other, KEY, plain) == "survey"
    for job in (Train(1), Evaluate(), EvaluateCalibrated()):
        assert subject_of(job, one, KEY, plain) != subject_of(job, other, KEY, plain)
        assert subject_of(job, one, KEY, plain) == subject_of(Rounded(job, 3), one, KEY, plain)
    renamed = Train(2, ("norms",))  # whatever it calls the round
    assert subject_of(Train(1), one, KEY, plain) == subject_of(renamed, one, KEY, plain)
    assert subject_of(Train(1), one, KEY, plain) != subject_of(Train(1), one, bytes(32), plain)  # other batches
    assert subject_of(Train(1), one, KEY, steady) == subject_of(Train(2), other, KEY, steady) == "train"
