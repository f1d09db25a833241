"""Every measure of a finished run has the same values on a device as on the CPU."""

from contextlib import contextmanager
from dataclasses import asdict

import pytest
from placed import name_of

from analysis.finished import finished, runs_of
from unskew.analysis import MEASURES, parse_measure
from unskew.runs.finished import FinishedRun

__all__ = ["finished", "runs_of"]

QUICK = {"inversion": "inversion(examples=2, of=2, steps=5)", "projection": "projection(images=60)"}


@contextmanager
def opened(path, device):
    with FinishedRun(path, engine="loop", device=name_of(device)) as run:
        yield run


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure_is_the_same_as_on_the_cpu(each_home, finished, name):
    request = parse_measure(QUICK.get(name, name))
    taken = []
    for device in ("cpu", each_home.device):
        with opened(finished, device) as run:
            taken.append((asdict(request.take(run)), run.notes))
            if "prepared" in run.__dict__:
                assert run.side.device.type == str(device).partition(":")[0]
    assert taken[0] == taken[1]


@pytest.mark.parametrize("at_once", [50, 1000])
def test_wide_layers_are_compared_the_same_way(home, finished, monkeypatch, at_once):
    from unskew.analysis import cka

    monkeypatch.setattr(cka, "WIDE", 8)
    monkeypatch.setattr(cka, "AT_ONCE", at_once)
    monkeypatch.setattr(cka, "IMAGES_AT_ONCE", 40)
    values = []
    for device in ("cpu", home.device):
        with opened(finished, device) as run:
            values.append(cka.take_cka(run, clients=3))
    assert values[0] == values[1]
    assert bool(values[0].estimated) == (at_once == 50)
