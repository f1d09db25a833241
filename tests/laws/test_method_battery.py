"""Every method in the table keeps every law, every pair commutes or is refused, and the laws catch what breaks them."""

import re
import sys
from dataclasses import fields, replace
from itertools import combinations

import breaking_methods as breaking
import pytest

from unskew.checks import COMMUTES, LAWS, NEUTRAL, QUICK, LawBroken, check_method, laws
from unskew.checks.laws import candidate
from unskew.console.main import main
from unskew.core.errors import UserError
from unskew.methods import METHODS, describe, parse_method
from unskew.methods.fedprox import fedprox
from unskew.round.algorithm import SHARED_SLOTS, Algorithm

AT_ZERO = {
    "fedavg": "fedavg(lr=1)",
    "fedprox": "fedprox(mu=0)",
    "fedavgm": "fedavgm(beta=0)",
    "moon": "moon(mu=0)",
    "fedntd": "fedntd(beta=0)",
    "feddecorr": "feddecorr(beta=0)",
    "fedsam": "fedsam(rho=0)",
    "fedlesam": "fedlesam(rho=0)",
    "clsprox": "clsprox(mu=0)",
    "fedlc": "fedlc(tau=0)",
    "fedrs": "fedrs(alpha=1)",
    "available": "available(share=1)",
    "absent": "absent(share=0)",
}
TEXTS = [QUICK.get(name, name) for name in METHODS]
PAIRS = list(combinations(TEXTS, 2))
REFUSED = [pair for pair in PAIRS if laws.refusal(candidate(" + ".join(pair)))]
COMPOSED = [pair for pair in PAIRS if pair not in REFUSED]
STATEFUL = {  # that resuming could forget
    "moon", "fedlesam", "prototypes", "fedir", "fedvc(16)", "scaffold", "feddyn", "fedavgm",
}  # fmt: skip
TRAINING = [text for text in TEXTS if candidate(text).trains()]

# A pool takes seconds to start, so that methods share one
POOLED = [
    "moon + prototypes + fedir + scaffold + fedlc + fedrs + clsnorm + clsprox + fedprox + fedavgm",
    "feddyn + balanced + moon + rounded + fedsam + fedntd",
    "fednova + fedadam + fedvc(16) + fedeccr + available + absent + fedlesam + fedetf + feddecorr",
    "centralised + prototypes",
    "trimmed + fedprox",
    "private-updates(sampling=fixed) + secure(updates=true)",
]


# Methods that are there


@pytest.mark.parametrize("text", TRAINING)
def test_every_method_keeps_the_laws(text):
    for name, law in LAWS.items():
        if law is not laws.engines_agree:
            assert law(candidate(text)) is None, name


@pytest.mark.parametrize("text", POOLED)
def test_loop_and_pool_agree_on_every_method(text):
    assert laws.engines_agree(candidate(text)) is None


def test_every_method_that_changes_what_clients_do_is_tried_in_the_pool():
    server_alone = {"fedyogi", "fedadagrad", "median", "bounded"}  # the code of fedadam and trimmed
    tried = {word for text in POOLED for word in candidate(text).names}
    assert tried | server_alone == {text.partition("(")[0] for text in TRAINING} | {"secure"}  # with updates=true


@pytest.mark.parametrize(("name", "neutral"), AT_ZERO.items())
def test_a_method_with_its_knob_at_zero_is_fedavg(name, neutral):
    assert laws.is_fedavg(candidate(neutral)) is None


@pytest.mark.parametrize("text", TEXTS[:-1])
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.heavy)])
def test_every_pair_commutes_over_three_rounds_or_is_refused_by_name(text, every):
    """A quarter of the pairs in a short test; all of them in the long one."""
    one = candidate(text)
    for other in TEXTS[TEXTS.index(text) + 1 :: every]:
        assert laws.commutes(one, candidate(other)) is None, other


@pytest.mark.parametrize("pair", [pair for pair in COMPOSED if set(pair) <= STATEFUL], ids=" + ".join)
def test_every_pair_that_keeps_something_resumes_exactly_and_keeps_its_memory_bounded(pair):
    both = candidate(" + ".join(pair))
    assert laws.resumes(both) is None
    assert laws.bounded(both) is None


@pytest.mark.heavy
@pytest.mark.parametrize("pair", [pair for pair in COMPOSED if set(pair) <= set(TRAINING)], ids=" + ".join)
def test_every_pair_keeps_all_laws_of_one_method(pair):
    check_method(" + ".join(pair), beside=())


def test_pairs_are_refused_only_where_both_claim_one_slot():
    """Or give one name to what travels or is kept: fedeccr has prototypes in it. Some updates travel alone."""
    claims = {row.name: set(row.slots.split(", ")) - {*SHARED_SLOTS, ""} for row in describe()}
    sending = set()
    for name in METHODS:
        algorithm = parse_method(name)
        claims[name] |= {each.name for each in (*algorithm.statistics, *algorithm.remember)}
        sending |= {name for each in algorithm.statistics if each.measure or each.survey}
    assert len(COMPOSED) > len(REFUSED) > 10
    for pair in PAIRS:
        one, other = (name.partition("(")[0] for name in pair)
        uncovered = {"private-updates", "trimmed", "median", "bounded"} & {one, other} and {one, other} & sending
        assert (pair in REFUSED) == bool(claims[one] & claims[other] or uncovered), pair


# What check_method takes and gives


def test_check_method_names_the_laws_that_it_tried():
    tried = check_method("fedrs", neutral="fedrs(alpha=1)", beside=["fedlc", "moon"])
    assert tried == [*LAWS, COMMUTES, NEUTRAL]


@pytest.mark.heavy
def test_what_needs_a_package_that_is_not_installed_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    *tried, skipped = check_method("fedrs", beside=["fedlc", "private-updates"])
    assert tried == [*LAWS, COMMUTES]
    assert skipped.startswith("skipped: with private-updates; dp_accounting is not installed; pip install")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("fedrs", "--neutral", "fedrs(alpha=1)"), 0, f"kept: {COMMUTES}\nkept: {NEUTRAL}\n"),
        pytest.param(("fedrs", "--neutral", "fedrs"), 2, f"fedrs breaks a law ({NEUTRAL})", marks=pytest.mark.heavy),
        (("fedros",), 2, "no method is called 'fedros'; did you mean 'fedrs'?"),
    ],
)
def test_the_command_prints_the_laws_and_fails_at_the_first_that_is_broken(words, code, text, capsys, monkeypatch):
    monkeypatch.setattr("unskew.checks.METHODS", {"fedlc": METHODS["fedlc"]})
    with pytest.raises(SystemExit) as ended:
        main(["check-method", *words])
    assert ended.value.code == code
    assert text in "".join(capsys.readouterr())


def test_check_method_takes_a_function_with_knobs_a_method_and_an_algorithm():
    in_this_process = [name for name, law in LAWS.items() if law is not laws.engines_agree]
    for value in (fedprox(0.3), parse_method("moon + fedavgm"), lambda: fedprox(0.3)):
        assert check_method(value, beside=()) == in_this_process
    assert candidate(fedprox).text == "unskew.methods.fedprox:fedprox"


def test_an_algorithm_as_a_value_claims_the_slots_in_which_it_differs_from_fedavg():
    value = candidate(parse_method("fedavgm + fedlc"))
    assert "server slot" in laws.refusal(value + candidate("fedadam"))
    assert laws.commutes(value, candidate("balanced")) is None
    both = (candidate("fedrs") + value).algorithm()
    assert len(both.margin) == 2
    plain = Algorithm()
    assert all(getattr(candidate(plain).algorithm(), slot.name) == getattr(plain, slot.name) for slot in fields(plain)
               if slot.name != "server")  # fmt: skip


@pytest.mark.parametrize("wrong", [3, None, ["fedavg"]])
def test_check_method_refuses_what_is_not_a_method(wrong):
    with pytest.raises(UserError, match="is not a method; give its text"):
        check_method(wrong)


# The laws have teeth

CAUGHT = [
    (breaking.order_by_statistics, r"both orders.*: fedprox.*order changes the model by .* in round 2"),
    (breaking.greedy, "only one order is rejected"),
    (breaking.smoothing_term, r"keep to their slots.*claim the blend slot for that \(round 1\)"),
    (breaking.weight_thief, r"keep to their slots.*multiply them by its own \(round 1\)"),
    (breaking.penalty_thief, r"keep to their slots.*add its own with loss.plus\(…\) \(round 2\)"),
    (breaking.tall_margin, r"a margin of shape \[1, 4\] does not fit"),
    (breaking.mean_blend, r"the blend returns shape \[1\] for 8 examples"),
    (breaking.careless, r"global random generators.*torch was used; draw through a Key \(round 2\)"),
    (breaking.lasting, "same seed.*two runs with the same seed differ from round 2 on"),
    (breaking.seeding, r"global random generators.*torch was used; draw through a Key \(round 2\)"),
    (breaking.forgetful, "resumed.*four rounds differ from two rounds, a checkpoint and two more"),
    (breaking.growing_memory, r"client 0, round 2.*memory growing/all: .*\[1\].*\[2\]"),
    (breaking.growing_statistic, "does not grow.*the tensors sent grew from 16 bytes in round 2 to 64"),
    (breaking.growing_server, "does not grow.*the server's memory grew"),
    (
        breaking.grabbing,
        r"does not modify its arguments.*the term modifies step.shared\['params/.*in place \(round 2\)",
    ),
    (
        breaking.scribbling,
        r"does not modify its arguments.*the term modifies step.memory\['breaking/.*in place \(round 2\)",
    ),
    (breaking.floating, "stat/x/y: a sum must be a float64 tensor, not float"),
    (breaking.folding, "server, statistic x: KeyError"),
]


def by_value(build):
    """The method as a function from Algorithm to Algorithm: not tried in the pool, which takes seconds."""
    method = build()

    def named(algorithm):
        return method(algorithm)

    named.__name__ = build.__name__
    return named


@pytest.mark.parametrize(("build", "message"), CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_the_laws_catch_a_method_that_breaks_one(build, message):
    with pytest.raises(LawBroken, match=re.compile(message, re.DOTALL)) as caught:
        check_method(by_value(build))
    assert str(caught.value).startswith(f"{build.__name__} breaks a law")


@pytest.mark.heavy
def test_engines_that_differ_only_once_memories_exist_are_caught():
    method = candidate("breaking_methods:counting")
    for law in (laws.seeded, laws.leaves_arguments):
        assert law(method) is None
    assert re.search(r"differ.* after round [23]", laws.engines_agree(method))


def test_a_method_that_gives_nan_is_caught_with_its_client():
    with pytest.raises(LawBroken, match=r"outside_methods:nan\(1\) breaks a law .*client 2, round 1"):
        check_method("outside_methods:nan(1)")


def test_a_neutral_text_that_is_not_neutral_is_caught():
    with pytest.raises(LawBroken, match=r"fedprox\(mu=1\) differs from FedAvg in round 1"):
        check_method(fedprox(1.0), neutral="fedprox(mu=1)", beside=())


@pytest.mark.parametrize("order", ["moon + breaking_methods:twin", "breaking_methods:twin + moon"])
def test_two_memories_of_one_name_are_refused_by_both_names(order):
    with pytest.raises(UserError, match=r"moon.*twin|twin.*moon") as refused:
        parse_method(order)
    assert "both put 'moon' in the remember slot; rename one" in str(refused.value)


def test_two_blends_are_refused_by_both_names():
    def smoothing(algorithm):
        return replace(algorithm, blend=lambda entropy, step: entropy)

    refusal = laws.refusal(candidate("prototypes") + candidate(smoothing))
    assert refusal == "prototypes and smoothing both claim the blend slot; leave out one of them"


CALIBRATIONS = {"ccvr", "uscc", "lda", "ridge", "qda", "oracle", "fedeccr"}


def test_what_a_method_does_fits_a_line_of_the_list():
    for row in describe():
        if row.name not in CALIBRATIONS:
            assert len(row.changes) <= 70, row.name
        assert row.changes.endswith("."), row.name
