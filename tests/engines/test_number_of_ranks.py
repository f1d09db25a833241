"""Every method over one, two and three ranks; a process group is one a process, so these tests share no module."""

import pytest

from federation import federation, same
from torchrun_ranks import ranks_started
from unskew.methods import METHODS, parse_method


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_gives_the_bits_of_the_loop_for_every_method(ranks, monkeypatch):
    texts = [name for name in METHODS if not parse_method(name).finish or parse_method(name).statistics]
    with ranks_started(ranks) as own:
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        for text in ["fedvc(16)" if name == "fedvc" else name for name in texts]:
            assert same(federation(text).run(3, "torchrun"), federation(text).run(3)), text
