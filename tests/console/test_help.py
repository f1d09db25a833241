"""Help in groups and with examples; an unknown option names the one that was meant."""

import shlex

import click
import pytest

from analysis.finished import command as unskew
from unskew.console.help import EXAMPLES, GROUPS, SPELLED
from unskew.console.main import COMMANDS, load_command
from unskew.runs.config import OPTIONS


def help_of(*words):
    command = load_command(words[0])
    return command.get_help(click.Context(command, info_name=f"unskew {words[0]}", parent=None))


def test_every_option_of_a_run_has_a_group():
    listed = [name for names in GROUPS.values() for name in names.split()]
    assert {option.flag[2:] for option in OPTIONS.values()} <= set(listed)
    assert len(listed) == len(set(listed))
    assert "\nOptions:" not in help_of("run")


def test_the_groups_come_in_order_and_examples_last():
    text = help_of("run")
    heads = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["Arguments", *GROUPS, "Examples"]
    assert text.index("--data NAME") < text.index("--cache-dir") < text.index("--partition")
    assert "\nOptions:" in help_of("compare")  # a command with few options


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_a_command_whose_options_exist(name, capsys):
    flags = {flag for parameter in load_command(name).params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for _, example in EXAMPLES[name]:
        words = shlex.split(example)
        assert words[:2] == ["unskew", name]
        assert {word for word in words if word.startswith("--")} <= flags
    code, text, _ = unskew(capsys, name, "--help")
    assert (code, EXAMPLES[name][0][1] in text) == (0, True)


def test_every_name_elsewhere_leads_to_an_option_of_run():
    flags = {flag for parameter in load_command("run").params for flag in parameter.opts}
    assert {text.split()[0] for text in SPELLED} <= flags
    others = [name for names in SPELLED.values() for name in names.split()]
    assert len(others) == len(set(others))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--alpha 0.3", '--partition "dirichlet(alpha=0.3)"'),
        ("--alpha=0.3", '--partition "dirichlet(alpha=0.3)"'),
        ("--alpha --rounds 3", '--partition "dirichlet(alpha=X)"'),
        ("--mu 0.1", '--method "fedprox(mu=0.1)"'),
        ("--tau 3", '--method "moon(tau=3)"'),
        ("--num-clients 4", "--clients 4"),
        ("--num_clients 4", "--clients 4"),
        ("--dataset cifar10", "--data cifar10"),
        ("--local-epochs 2", "--epochs 2"),
        ("--batch-size 32", "--batch 32"),
        ("--learning-rate 0.1", "--lr 0.1"),
        ("-lr 0.1", "--lr 0.1"),
        ("--gpus 2", "--device cuda"),
        ("--roundz 3", "--rounds"),
    ],
)
def test_an_unknown_option_names_the_one_that_was_meant(capsys, words, meant):
    code, text, error = unskew(capsys, "run", *words.split())
    assert (code, text) == (2, "")
    assert error.startswith(f"unskew: no such option: {words.split()[0].partition('=')[0]}; did you mean {meant}")


def test_an_option_like_none_points_to_the_help(capsys):
    assert (
        unskew(capsys, "compare", "--alpha", "2")[2] == "unskew: no such option: --alpha (see unskew compare --help)\n"
    )


def test_commands_are_listed_whole_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    text = " ".join(unskew(capsys, "--help")[1].split())
    assert all(words in text for _, words in COMMANDS.values())
    assert "..." not in unskew(capsys, "federation", "--help")[1].replace("[ARGS]...", "")
