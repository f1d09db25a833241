"""A worker process of the pool: takes visits from its line, writes results into shared memory, says where they are.

``start`` runs it in a new process.
"""

import socket
import sys
from dataclasses import replace
from typing import Any

import torch

from unskew.core.errors import LostMemory, StorageFailure
from unskew.core.key import Key
from unskew.core.tensors import Layout, PackedSums
from unskew.core.types import Failure, Tensors, Visit
from unskew.engines.blueprint import Blueprint, build
from unskew.engines.jobs import JOBS
from unskew.engines.malloc import keep_freed_memory
from unskew.engines.pool.shared import SLOTS, Line, ResultFile, SharedFile
from unskew.engines.work import visit_from
from unskew.privacy.sessions import Sessions
from unskew.round.client import ClientSide, plan_ahead, train
from unskew.round.jobs import Job, attempt, find_job


def main(line: int, data: int, weights: int, *others: int) -> None:
    """Serve until the line closes. Descriptors: LINE DATA WEIGHTS RESULTS … SESSIONS [MEMORIES], SLOTS of results."""
    keep_freed_memory()
    torch.set_num_threads(1)
    parent = Line(socket.socket(fileno=line))
    if (hello := parent.receive()) is None:
        return
    sys.path[:] = hello["path"]
    sessions, *kept = others[SLOTS:]
    memories = kept[0] if kept else None
    side = build(Blueprint.from_json(hello["blueprint"]), SharedFile(data).read(hello["data"]), memories)
    side = replace(side, secret=bytes.fromhex(hello["secret"]), sessions=Sessions(sessions))
    inbox, desk = SharedFile(weights), Desk(side, [ResultFile(each) for each in others[:SLOTS]])
    parent.send({"ready": True})
    while (message := parent.receive()) is not None:
        if "begin" in message:
            desk.begin(find_job(message["begin"], JOBS), inbox.read(message["weights"]), message)
        else:
            parent.send(desk.answer(message["slot"], message["visits"]))


class Desk:
    """Where the visits of a job are done, group by group."""

    def __init__(self, side: ClientSide, files: list[ResultFile]) -> None:
        self.files, self.file = files, files[0]
        self.side = replace(side, room=lambda count: self.file.room(count))  # an update is made where it is sent from
        self.told: Layout | None = None  # the last layout that the parent was told: long, and nearly always the same

    def begin(self, job: tuple[Job, str], shared: Tensors, message: dict[str, Any]) -> None:
        """The visits from here on are about this job."""
        self.job, self.shared, self.key = job, shared, Key(message["seed"], tuple(message["key"]))

    def answer(self, slot: int, visits: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        """Do a group of visits, each with its place in the round; what the parent is told of them."""
        self.file = file = self.files[slot]
        file.clear()
        results = list[dict[str, Any]]()
        answer = {"slot": slot, "results": results}
        group = [(place, visit_from(fields)) for place, fields in visits]
        if self.job[0] is train and len(group) > 1:
            plan_ahead(self.side, self.shared, [visit for _, visit in group if isinstance(visit, Visit)], self.key)
        for place, visit in group:
            file.running = place
            try:
                done = attempt(self.side, self.job, self.shared, visit, self.key)
            except StorageFailure as error:
                return answer | {"storage": str(error), "lost": isinstance(error, LostMemory)}
            if isinstance(done, Failure):
                results.append({"place": place, "failure": done.reason})
                continue
            results.append({"place": place, **self._written(file, done.packed)})
            if done.receipt is not None:
                results[-1]["receipt"] = done.receipt
        return answer

    def _written(self, file: ResultFile, packed: PackedSums) -> dict[str, Any]:
        where = file.write(packed.vector)
        if packed.layout is self.told or packed.layout == self.told:
            return {"where": where}
        self.told = packed.layout
        return {"where": where, "layout": packed.layout}
