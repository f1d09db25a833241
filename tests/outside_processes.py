"""An engine whose workers are processes, written from the page on extending Unskew; ``outside_processes:processes``."""

import io
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, reduction

import torch

from unskew.extend import Blueprint, EngineSetup, Reply, answer, decode_job, encode_job

worker = {}


class Inherited:
    """A descriptor that a spawned process gets."""

    def __init__(self, descriptor):
        self.descriptor = descriptor

    def __reduce__(self):
        return _detach, (reduction.DupFd(self.descriptor),)


def _detach(sent):
    return sent.detach()


def _pack(tensors):
    """Bytes: multiprocessing would move the tensors into shared memory, away from the arrays that view them."""
    content = io.BytesIO()
    torch.save(dict(tensors), content)
    return content.getvalue()


def _unpack(content):
    return torch.load(io.BytesIO(content))


def _open(blueprint, data, files):
    torch.set_num_threads(1)
    worker["side"] = EngineSetup(Blueprint.from_json(blueprint), _unpack(data), **files).client_side()


def _work(number, job, shared, key, visit):
    if worker.get("number") != number:  # one dictionary for each exchange
        worker.update(number=number, shared=_unpack(shared))
    reply = answer(worker["side"], decode_job(job), worker["shared"], visit, key)
    return (_pack(reply.sums), _pack(reply.extra), reply.ticket) if isinstance(reply, Reply) else reply


class Processes:
    """Worker processes, to which everything is sent by value."""

    def __init__(self, setup):
        self._side, self._number = setup.client_side(), 0
        self.roster, self.memory = self._side.population.roster, self._side.memory
        files = {"secret": self._side.secret, "sessions": Inherited(self._side.sessions.descriptor)}
        files |= {"memories": Inherited(self.memory.descriptor)} if self.memory else {}
        sent = setup.blueprint.to_json(), _pack(setup.data), files
        self._pool = ProcessPoolExecutor(setup.workers, get_context("spawn"), initializer=_open, initargs=sent)

    def visit(self, job, shared, visits, key):
        self._number += 1
        sent = self._number, encode_job(job), _pack(shared), key
        for part in [self._pool.submit(_work, *sent, visit) for visit in visits]:
            done = part.result()
            yield Reply(_unpack(done[0]), _unpack(done[1]), done[2]) if isinstance(done, tuple) else done

    def close(self):
        self._pool.shutdown(cancel_futures=True)
        self._side.close()


def processes(setup):
    return Processes(setup)
