"""A worker process of the pool: takes tasks from its line, writes results into shared memory, says where they are.

``start`` runs it in a new process.
"""

import socket
import sys
from dataclasses import replace
from typing import Any

import torch

from unskew.core.errors import LostMemory, StorageFailure
from unskew.core.key import Key
from unskew.core.tensors import Layout
from unskew.core.types import Failure, TestPart, Visit
from unskew.engines.blueprint import Blueprint, build
from unskew.engines.jobs import JOBS
from unskew.engines.malloc import keep_freed_memory
from unskew.engines.pool.shared import SLOTS, Line, SharedFile
from unskew.privacy.sessions import Sessions
from unskew.round.jobs import attempt, find_job


def main(line: int, data: int, weights: int, *others: int) -> None:
    """Serve until the line closes. The descriptors are LINE DATA WEIGHTS RESULTS RESULTS SESSIONS [MEMORIES]."""
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
    inbox, slots = SharedFile(weights), [SharedFile(each) for each in others[:SLOTS]]
    told: list[Layout | None] = [None for _ in slots]
    parent.send({"ready": True})
    while (message := parent.receive()) is not None:
        if "begin" in message:
            work, key = find_job(message["begin"], JOBS), Key(message["seed"], tuple(message["key"]))
            shared = inbox.read(message["weights"])
            continue
        slot = message["slot"]
        answer = {"place": message["place"], "slot": slot}
        try:
            result = attempt(side, work, shared, _visit(message["visit"]), key)
        except StorageFailure as error:
            parent.send(answer | {"storage": str(error), "lost": isinstance(error, LostMemory)})
            continue
        if isinstance(result, Failure):
            parent.send(answer | {"failure": result.reason})
            continue
        layout = slots[slot].write(result.sums)
        if result.receipt is not None:
            answer["receipt"] = result.receipt
        # a layout is long and nearly always the same as the last one
        parent.send(answer if layout == told[slot] else answer | {"layout": layout})
        told[slot] = layout


def _visit(fields: dict[str, Any]) -> Visit | TestPart:
    return Visit(**fields) if "client" in fields else TestPart(**fields)
