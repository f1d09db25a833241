"""Nodes in trouble while a run is on: late, slow, without room on the disk, without their memories; real processes."""

import json
import os
import resource
import shutil
import signal
from contextlib import closing, contextmanager

import pytest

from faults.live import Live, Run, recipe, rounds_done, until
from unskew.federation.folder import read_node

SERVICE = "node_service"


@pytest.fixture
def live(tmp_path):
    with closing(Live(tmp_path / "f", ["a", "b", "c"])) as made:
        made.start("server", "a", "b")
        yield made


@contextmanager
def stopped(live, name):
    """The node's work stands still meanwhile, as on a machine that is far too busy."""
    (service,) = live.programs(name, SERVICE)
    os.kill(service, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service, signal.SIGCONT)


@contextmanager
def full_disk(live, name):
    """The node cannot write a byte meanwhile."""
    (service,) = live.programs(name, SERVICE)
    before = resource.prlimit(service, resource.RLIMIT_FSIZE)
    resource.prlimit(service, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(service, resource.RLIMIT_FSIZE, before)


class Seen:
    """What the rounds of a run have told since the last look."""

    def __init__(self, run):
        self.run, self.number = run, 0

    def until(self, told, what):
        """Wait for a round of which ``told(row)`` is true; its row."""

        def found():
            return next((row for row in rounds_done(self.run.out)[self.number :] if told(row)), None)

        until(lambda: found() or not self.run.is_alive(), what=what)
        row = found()
        assert row, (what, self.run.trouble, self.run.said)
        self.number = row["round"]
        return row

    def failure(self, client, words):
        self.until(lambda row: any(why(each, client, words) for each in row.get("failures", ())), words)

    def all_well(self):
        self.until(lambda row: row["clients"] == 3 and not row.get("failures"), "a round with all three")


def why(failure, client, words):
    return failure["client"] == client and words in failure["reason"]


@pytest.mark.heavy
def test_nodes_that_are_late_slow_full_or_forgetful_are_named_and_take_part_again(live, tmp_path):
    """One run through all of it, about three minutes; the server is stopped once everything was seen."""
    run = Run(live, tmp_path / "run", recipe(3, 500, "scaffold"), deadline=60.0, wait=60.0)
    seen = Seen(run)
    first = seen.until(lambda row: True, "the first round")
    assert first["clients"] == 2  # the third did not come within the wait
    live.start("c")
    seen.until(lambda row: "node c takes part: client 2" in json.dumps(row.get("notes", [])), "c joins")
    seen.all_well()
    with stopped(live, "a"):
        seen.failure(0, "a: it did not answer within the deadline")
        seen.failure(0, "a: node a has not answered since its last deadline")  # nobody waits for it any more
    seen.all_well()
    with full_disk(live, "b"):
        seen.failure(1, "File too large")
    seen.all_well()
    live.kill("c")
    memories = list((read_node(live.federation.node("c")).state / "runs").glob("*/memories"))
    assert memories
    for folder in memories:
        shutil.rmtree(folder)
    live.start("c")
    seen.until(lambda row: "client 2 of node c has lost its saved state" in json.dumps(row), "c starts anew")
    seen.all_well()
    assert run.is_alive()
    live.commands["server"].stop()
    assert run.wait().trouble is not None
