"""A configuration: what it reads, what it refuses and under which name, and that its recipe repeats it."""

import math
import os
import re
import tomllib
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.core.errors import UserError
from unskew.runs.config import OPTIONS, Config, checked, deciding, fingerprint, read, to_toml, with_values
from unskew.runs.prepare import prepare

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
counts = st.integers(1, 10**9)
shares = st.floats(0, 1, exclude_max=True)
amounts = st.floats(0, 1e300, exclude_min=True)
METHODS = ["fedavg", "fedavgm(0.9) + fedprox(mu=0.01)", 'outside:method("two words", a=true)']

configs = st.builds(
    Config,
    data=texts,
    data_dir=st.none() | texts.filter(bool).map(lambda text: f"/data/{text}"),
    partition=texts,
    clients=st.none() | counts,
    per_round=st.none() | counts,
    method=st.sampled_from(METHODS),
    model=st.none() | texts.filter(bool),
    rounds=counts,
    epochs=counts,
    batch=counts,
    lr=amounts,
    momentum=shares,
    weight_decay=amounts,
    augment=st.none() | st.booleans(),
    engine=st.sampled_from(["auto", "loop", "pool"]),
    workers=st.none() | counts,
    seed=st.integers(0, 2**63 - 1),
    evaluate_every=counts,
    on_failure=st.sampled_from(["stop", "skip"]),
    checkpoint_seconds=amounts,
)


def write(folder, content):
    file = folder / "recipe.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@settings(deadline=None)
@given(configs)
def test_a_recipe_repeats_its_configuration(config):
    table = tomllib.loads(to_toml(config))
    again = with_values(Config(), table, "recipe")
    assert again == config
    assert [type(value) for value in asdict(again).values()] == [type(value) for value in asdict(config).values()]


@settings(deadline=None)
@given(configs)
def test_a_checked_configuration_checks_again_to_itself(config):
    once = checked(config)
    assert checked(once) == once
    spelled = {name: getattr(config, name) for name in ("data_dir", "data", "partition")}
    assert replace(once, **spelled) == config  # a value is refused or kept, never changed


def test_a_recipe_file_is_read_with_its_defaults(tmp_path):
    file = write(tmp_path, 'data = "cifar10"\nrounds = 3\nper_round = 2\nweight-decay = 0\naugment = true\n')
    wanted = replace(Config(), data="cifar10", rounds=3, per_round=2, weight_decay=0.0, augment=True)
    assert read(file) == wanted
    assert type(read(file).weight_decay) is float


@pytest.mark.parametrize(
    "text", ['a"b', "a\\b", "tab\there", "line\nline", "\x00\x7f", "né", "a\u2028b", "\U000e0001x"]
)
def test_any_text_survives_a_recipe(text):
    assert tomllib.loads(to_toml(replace(Config(), model=text)))["model"] == text


@pytest.mark.parametrize(
    ("key", "hint"),
    [("round", "did you mean 'rounds'?"), ("batchsize", "did you mean 'batch'?"), ("qqqq", "choose from: data")],
)
def test_an_unknown_key_is_told_the_nearest(key, hint):
    with pytest.raises(UserError, match=rf"^recipe.toml: no option is called '{key}'; {re.escape(hint)}"):
        with_values(Config(), {key: 1}, "recipe.toml")


def test_with_values_changes_what_is_given_and_nothing_else():
    base = replace(Config(), rounds=9, model="tiny-cnn")
    assert with_values(base, {"model": None, "lr": 1}, "here") == replace(base, model=None, lr=1.0)
    assert with_values(base, {}, "here") == base


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        *(("rounds", value, "a whole number") for value in (True, "3", 3.0, None, [3])),
        *(("clients", value, "a whole number") for value in ("all", False)),
        *(("lr", value, "a number") for value in ("0.1", True, None)),
        *(("augment", value, "true or false") for value in (1, "yes")),
        *((key, value, "text") for key, value in (("data", 3), ("data", None), ("data_dir", 3), ("model", b"bytes"))),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(key, value, wanted):
    message = f"recipe.toml: {key} must be {wanted}, not {value!r}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        with_values(Config(), {key: value}, "recipe.toml")


@pytest.mark.parametrize(
    ("key", "values"),
    [
        *((key, (0, -1)) for key in ("clients", "per_round", "epochs", "batch", "workers", "evaluate_every")),
        ("rounds", (-1, -(2**70))),
        ("lr", (0.0, -0.1, math.inf, -math.inf, math.nan)),
        ("momentum", (-0.1, 1.0, 2.0, math.inf, math.nan)),
        ("weight_decay", (-1e-9, math.inf, math.nan)),
        ("checkpoint_seconds", (-1.0, math.inf, math.nan)),
        ("seed", (-1, 2**63)),
        ("on_failure", ("", "go on")),
        ("patience", (0, -1)),
        ("monitor", ("speed",)),
    ],
)
def test_an_impossible_value_is_refused_under_its_flag(key, values):
    for value in values:
        with pytest.raises(UserError, match=rf"^--{key.replace('_', '-')} {value}: "):
            checked(replace(Config(), **{key: value}))


def test_a_misspelt_policy_is_told_the_nearest():  # an engine: test_command_line
    with pytest.raises(UserError, match="--on-failure stopp: did you mean 'stop'"):
        checked(replace(Config(), on_failure="stopp"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rounds = ", "is not TOML"),
        (b"rounds = 1\nrounds = 2\n", "is not TOML"),
        (b"just words", "is not TOML"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "is not TOML"),
        (b"seed = " + b"1" * 5000, "recipe"),
        (b"method = " + b"[" * 50_000, "is not TOML: maximum recursion depth"),
        (b"method" + b".a" * 3_000 + b" = 1", "method must be text, not a deeply nested dict"),
        (b"#" * 1_000_001, "the limit is 1,000,000"),
        (b"a" * 100_000 + b" = 1", "no option is called 'aaa"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_name(tmp_path, content, message):
    file = write(tmp_path, content)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 1000


ODD = [math.nan, math.inf, -math.inf, 10**40, -(10**40), 2**63, -1, 0, "", "text", "1e999", True, None, [], [1],
       {"a": 1}, b"bytes", 1j, "a\0b", "\ud800", "x" * 100_000, 1e-400, 1e308]  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_an_odd_value_of_any_option_is_possible_or_refused_under_its_name(name):
    for value in ODD:
        try:
            config = checked(with_values(Config(), {name: value}, "recipe"))
        except UserError as error:
            said = str(error)
        else:
            kept = getattr(config, name)
            assert not isinstance(kept, float) or math.isfinite(kept)
            assert tomllib.loads(to_toml(config)).get(name) == kept
            continue
        assert name in said.replace("-", "_") or name == "data_dir"
        assert len(said) < 1000


def test_a_recipe_that_is_not_there_or_not_a_file_is_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(UserError, match=r"pipe\.toml cannot be read: it is not a regular file"):
        read(tmp_path / "pipe.toml")
    with pytest.raises(UserError, match=r"the recipe .*nowhere\.toml does not exist"):
        read(tmp_path / "nowhere.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)


def test_the_variable_stands_in_for_the_data_folder_and_both_become_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert checked(Config()).data_dir is None
    monkeypatch.setenv("UNSKEW_DATA", "from-variable")
    assert checked(Config()).data_dir == str(tmp_path / "from-variable")
    assert checked(replace(Config(), data_dir="given")).data_dir == str(tmp_path / "given")
    monkeypatch.setenv("UNSKEW_DATA", "")
    assert checked(Config()).data_dir is None


@pytest.mark.parametrize(
    ("key", "given", "wanted"),
    [
        ("data", "folder:pictures", "folder:{here}/pictures"),
        ("data", "arrays:/a/b.npz", "arrays:/a/b.npz"),
        ("data", "folder:~/pictures", "folder:{here}/home/pictures"),
        ("data", "digits", "digits"),
        ("partition", "file:split.csv", "file:{here}/split.csv"),
        ("partition", "file:split.csv(ids=rows.csv)", 'file:{here}/split.csv(ids="{here}/rows.csv")'),
        ("data", "table:a.csv(size=8)", "table:{here}/a.csv(size=8)"),
        ("partition", "dirichlet(alpha=0.1)", "dirichlet(alpha=0.1)"),
    ],
)
def test_paths_become_absolute_so_that_a_run_can_be_resumed_from_anywhere(monkeypatch, tmp_path, key, given, wanted):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert getattr(checked(replace(Config(), **{key: given})), key) == wanted.format(here=tmp_path)


def test_a_home_that_nobody_has_is_the_users_mistake():
    with pytest.raises(UserError, match="nobody-of-that-name"):
        checked(replace(Config(), data="folder:~nobody-of-that-name/pictures"))


def test_texts_are_kept_in_their_plainest_spelling_and_garbage_is_refused():
    config = replace(
        Config(), method=" fedavgm( beta = .5 ,) +fedprox() ", during=" norms( every=2 )+model(3, first=1)"
    )
    prepared = prepare(config)
    assert prepared.config.method == "fedavgm(beta=0.5) + fedprox"
    assert prepared.config.during == "norms(every=2) + model(3, first=1)"
    with pytest.raises(UserError, match="expected a value"):
        prepare(replace(Config(), method="fedavg("))


def test_steps_replace_epochs_and_the_later_of_the_two_counts():
    config = with_values(Config(epochs=9), {"steps": 12}, "here")
    assert config.local().steps == 12
    assert "epochs" not in to_toml(config)
    again = with_values(Config(), tomllib.loads(to_toml(config)), "there")
    assert fingerprint(again) == fingerprint(config)
    assert deciding(config)["steps"] == 12
    assert "epochs" not in deciding(config)
    assert with_values(config, {"epochs": 2}, "here").local().steps is None
    with pytest.raises(UserError, match="here: epochs and steps are both given; give one"):
        with_values(Config(), {"epochs": 2, "steps": 3}, "here")
