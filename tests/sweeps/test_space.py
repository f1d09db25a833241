"""What a sweep tries, from texts: typed, within the options' limits, each value once."""

import pytest

from unskew.core.errors import UserError
from unskew.sweeps.sweep import describe_values, folder_name, grid, parse_over


def values(text):
    return parse_over([text])[0].values


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("lr=0.01,0.1", (0.01, 0.1)),
        ("lr=1", (1.0,)),
        (" per-round = 1 , 2 ", (1, 2)),
        ("--epochs=3", (3,)),
        ("augment=true,False", (True, False)),
        ("method=fedavg,fedavgm(0.9, lr=0.5),fedprox(mu=0.1) + ccvr(per_class=9, seed='a,b')",
         ("fedavg", "fedavgm(0.9, lr=0.5)", "fedprox(mu=0.1) + ccvr(per_class=9, seed='a,b')")),
        ("partition=\"dirichlet(alpha=0.1)\",iid", ("dirichlet(alpha=0.1)", "iid")),
    ],
)  # fmt: skip
def test_values_have_the_type_of_their_option_and_commas_in_brackets_are_theirs(text, found):
    assert values(text) == found
    assert [type(value) for value in values(text)] == [type(value) for value in found]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "a sweep needs an option to vary"),
        (["lr"], "no values are given; write NAME=VALUES"),
        (["lr="], "write NAME=VALUES"),
        (["lr=fast"], "lr must be a number, not 'fast'"),
        (["epochs=1.5"], "epochs must be an integer, not '1.5'"),
        (["augment=maybe"], "augment must be true or false"),
        (["lr=0.1,-1"], "--lr -1.0: give a number above 0"),
        (["momentum=0,1"], "--momentum 1.0: give 0 or more and less than 1"),
        (["lr=0.1", "lr=0.2"], "lr is given twice"),
        (["seed=0,1"], "seed cannot be varied; give --seeds"),
        (["validation=0.1,0.2"], "validation cannot be varied; give --validation"),
        (["workers=1,2"], "workers cannot be varied; it does not affect the result"),
        (["velocity=1"], "no option is called 'velocity'"),
        (["lr=0.3..0.1"], "give the lower end of a range first"),
        (["momentum=0..0.9 log"], "a logarithmic range must be above 0"),
        (["momentum=0..1"], "--momentum 1.0: give 0 or more and less than 1"),
    ],
)
def test_what_cannot_be_tried_is_refused(texts, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        parse_over(texts)


def test_the_grid_has_every_combination_once():
    found = grid(parse_over(["lr=0.1,0.2", "momentum=0,0.5,0.9"]))
    assert len(found) == len({tuple(each.items()) for each in found}) == 6
    assert found[:2] == [{"lr": 0.1, "momentum": 0.0}, {"lr": 0.1, "momentum": 0.5}]


def test_a_grid_of_ranges_or_of_too_many_settings_is_refused():
    with pytest.raises(UserError, match=r"lr=0.1..0.2: a range needs --trials N"):
        grid(parse_over(["lr=0.1..0.2"]))
    many = ",".join(map(str, range(1, 150)))
    with pytest.raises(UserError, match="22,201 settings exceed the limit of 10,000"):
        grid(parse_over([f"epochs={many}", f"batch={many}"]))


def test_folders_of_different_settings_have_different_names():
    assert folder_name({"lr": 0.01, "per_round": 3}) == "lr-0.01_per-round-3"
    texts = ["fedavgm(0.9)", "fedavgm-0.9", "fedavgm 0.9", "x" * 300, "x" * 301, "../../etc"]
    names = [folder_name({"method": text}) for text in texts]
    assert len(set(names)) == len(texts)
    assert all("/" not in name and len(name) < 120 for name in names)
    assert describe_values({"weight_decay": 1e-5, "augment": True}) == "weight decay 1e-05, augment true"
