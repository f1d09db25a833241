"""The language of methods: what it reads, how it spells what it read, and where its complaints point."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew import methods
from unskew.core.errors import UserError
from unskew.core.language import Call, apply, parse_calls

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.:-]{0,8}", fullmatch=True)
words = st.text(st.characters(exclude_characters="'\"", exclude_categories=["Cs"]), max_size=8)
numbers = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
values = numbers | st.booleans() | words.filter(lambda word: word.lower() not in ("true", "false"))
calls = st.builds(
    lambda name, given, knobs: Call(name, tuple(given), knobs, 0, ""),
    names,
    st.lists(values, max_size=3),
    st.dictionaries(names, values, max_size=3),
)


def content(call):
    """What a call says, without where it stood; 1, 1.0 and true are told apart."""
    kinds = [type(value) for value in (*call.values, *call.knobs.values())]
    return call.name, call.values, dict(call.knobs), kinds


def complaint(source, build=None, what="method"):
    """The error's first line, and the column under which the caret stands."""
    with pytest.raises(UserError, match=r"(?s).+\n.+\n *\^") as caught:
        _ = [apply(call, build or (lambda: None), what) for call in parse_calls(source, what)]
    first, shown, caret = str(caught.value).split("\n")
    assert shown == "  " + source
    assert set(caret) <= {" ", "^"}
    assert caret.count("^") == 1
    return first, caret.index("^") - 2


def knobs(mu: float = 0.5, size: int = 3, *, cap: bool = False, kind: str = "plain"):
    return mu, size, cap, kind


@settings(deadline=None)
@given(st.lists(calls, min_size=1, max_size=3))
def test_parsing_what_was_spelled_gives_the_calls_again(wanted):
    source = " + ".join(map(str, wanted))
    assert [content(call) for call in parse_calls(source, "method")] == [content(call) for call in wanted]


@settings(deadline=None, max_examples=300)
@given(st.text(string.ascii_letters + string.digits + " ()=,+-.'\"_:#é\t", max_size=20))
def test_any_text_is_read_or_refused_and_a_refusal_is_the_users(source):
    try:
        found = parse_calls(source, "method")
    except UserError as error:
        lines = str(error).split("\n")
        assert lines[0].strip()
        if len(lines) > 1:
            assert 0 <= lines[2].index("^") - 2 <= len(source)
    else:
        assert [content(call) for call in parse_calls(" + ".join(map(str, found)), "method")] == [
            content(call) for call in found
        ]


@pytest.mark.parametrize(
    ("source", "name", "given", "knobs"),
    [
        ("fedavg", "fedavg", (), {}),
        ("fedavg()", "fedavg", (), {}),
        ("  fedavg ( ) ", "fedavg", (), {}),
        ("f(1)", "f", (1,), {}),
        ("f(1,)", "f", (1,), {}),
        ("f(1.)", "f", (1.0,), {}),
        ("f(.5, -2, +3)", "f", (0.5, -2, 3), {}),
        ("f(1e-3)", "f", (0.001,), {}),
        ("f(2, mu=-1E+2)", "f", (2,), {"mu": -100.0}),
        ("f(true, False, TRUE)", "f", (True, False, True), {}),
        ("f(low-rank, kind='two words', other=\"it's\")", "f", ("low-rank",), {"kind": "two words", "other": "it's"}),
        ("package.module:function(a='(+,=')", "package.module:function", (), {"a": "(+,="}),
        ("f('')", "f", ("",), {}),
    ],
)
def test_what_the_language_reads(source, name, given, knobs):
    (call,) = parse_calls(source, "method")
    wanted = Call(name, given, knobs, 0, source)
    assert content(call) == content(wanted)


@pytest.mark.parametrize(
    ("source", "message", "column"),
    [
        ("fedavg(1", "method: expected , or ) after a value, found 'the end'", 8),
        ("fedavg(1  ", "method: expected , or ) after a value, found 'the end'", 8),
        ("fedavg(", "method: expected a value, found 'the end'", 7),
        ("fedavg(mu=", "method: expected a value, found 'the end'", 10),
        ("fedavg(mu=)", "method: expected a value, found ')'", 10),
        ("fedavg(,)", "method: expected a value, found ','", 7),
        ("fedavg(1 2)", "method: expected , or ) after a value, found '2'", 9),
        ("fedavg((1))", "method: expected a value, found '('", 7),
        ("fedavg)", "method: expected + or the end, found ')'", 6),
        ("fedavg fedprox", "method: expected + or the end, found 'fedprox'", 7),
        ("fedavg +", "method: expected a name, found 'the end'", 8),
        ("+ fedavg", "method: expected a name, found '+'", 0),
        ("fedavg + + a", "method: expected a name, found '+'", 9),
        ("fedavg + 7", "method: expected a name, found '7'", 9),
        ("'fedavg'", "method: expected a name, found \"'fedavg'\"", 0),
        ("fedavg(#)", "cannot read '#' here", 7),
        ("available(traces/a.csv)", "cannot read '/' here; put file names in quotes", 16),
        ("fedavg  §", "cannot read '§' here", 8),
        ("fedavg(1.2.3)", "cannot read '1' here", 7),
        ("fedavg(5x)", "cannot read '5' here", 7),
        ("fedavg(1e)", "cannot read '1' here", 7),
        ("fedavg('open)", 'cannot read "\'" here', 7),
        ("fedavg(mu=1, 2)", "method: a bare value cannot follow knob=value", 13),
        ("a + fedprox(mu=1, mu=2)", "method fedprox: mu is given twice", 18),
        ("fedavg(1=2)", "method: expected , or ) after a value, found '='", 8),
    ],
)
def test_what_cannot_be_read_is_pointed_at(source, message, column):
    assert complaint(source) == (message, column)


@pytest.mark.parametrize("source", ["", "   ", "\t\n"])
def test_an_empty_text_is_refused(source):
    with pytest.raises(UserError, match=r"^method is empty; give a name$"):
        parse_calls(source, "method")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("f(sise=3)", "method f has no knob 'sise'; did you mean 'size'?"),
        ("f(zzz=3)", "method f has no knob 'zzz'; choose from: mu, size, cap, kind"),
        ("f(1, 2, true, a, 5)", "method f takes at most 4 (mu, size, cap, kind), but 5 were given"),
        ("f(1, mu=2)", "method f: mu is given twice"),
        ("f(wide)", "method f: mu must be a number, not wide"),
        ("f(true)", "method f: mu must be a number, not true"),
        ("f(size=3.0)", "method f: size must be a whole number, not 3.0"),
        ("f(size=true)", "method f: size must be a whole number, not true"),
        ("f(size='3')", 'method f: size must be a whole number, not "3"'),
        ("f(cap=1)", "method f: cap must be true or false, not 1"),
        ("f(cap=yes)", "method f: cap must be true or false, not yes"),
        ("f(kind=3)", "method f: kind must be a word, not 3"),
    ],
)
@pytest.mark.parametrize("before", ["", "   "])
def test_a_call_that_does_not_fit_is_pointed_at(before, source, message):
    assert complaint(before + source, knobs) == (message, len(before))


def test_a_knob_without_a_default_must_be_given():
    def build(alpha: float):
        return alpha

    assert complaint("  f", build, "partition") == ("partition f needs alpha: f(alpha=…)", 2)
    assert apply(parse_calls("f(2)", "partition")[0], build, "partition") == 2.0


def test_whole_numbers_pass_for_floats_and_nothing_else_is_converted():
    found = apply(parse_calls("f(2, 3, true, kind=b)", "method")[0], knobs, "method")
    assert found == (2.0, 3, True, "b")
    assert [type(value) for value in found] == [float, int, bool, str]
    assert apply(parse_calls("f", "method")[0], knobs, "method") == (0.5, 3, False, "plain")


def test_a_functions_own_complaint_becomes_the_users_with_a_caret():
    assert complaint("    fedprox(-1)", methods.METHODS["fedprox"]) == (
        "fedprox(mu=-1.0): mu must be 0 or more, and finite",
        4,
    )


def test_a_functions_other_errors_are_shown_with_their_place():
    def build():
        raise ZeroDivisionError

    with pytest.raises(UserError, match=r"method f raises ZeroDivisionError.*\n.*test_language.py.*in build"):
        apply(parse_calls("f", "method")[0], build, "method")
