"""Jobs: a client's work in a visit, its wire format, and the addition of all replies.

A job is a frozen msgspec struct that is called with the client side. Its fields are its options, so the wire format
follows from the declaration; ``@register`` makes its tag known.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from unskew.core.errors import StorageFailure, UserError, a_kind, describe_error, nearest
from unskew.core.key import Key
from unskew.core.machine import deterministic, neutral
from unskew.core.plugins import load_function
from unskew.core.tensors import PackedSums
from unskew.core.types import Engine, Exchange, Failure, Job, Note, Outcome, Progress, Reply, Tensors, TestPart, Visit

if TYPE_CHECKING:
    from unskew.round.client import ClientSide


NOT_FINITE = "its result contains NaN or infinity; try a smaller --lr, or smaller values in the method"
SUM_TYPES = (torch.float64, torch.int64)
JOBS: dict[str, type[Any]] = {}  # by tag

JobType = TypeVar("JobType", bound=type[Any])


def register(job: JobType) -> JobType:
    """Register a job by its tag, so that it can be sent."""
    JOBS[job.__struct_config__.tag] = job
    return job


@register
class PluginJob(msgspec.Struct, frozen=True, tag="call"):
    """A plug-in's job: ``package.module:function``, called with ``(side, shared, visit, key, options)``.

    The function returns a Reply, or only the sums.
    """

    function: str
    options: Any = None

    def __call__(self, side: "ClientSide", shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Import the function and call it."""
        result = load_function(self.function, "job")(side, shared, visit, key, self.options)
        return result if isinstance(result, Reply) else Reply(result)


def encode_job(job: Job) -> dict[str, Any]:
    """A job as values for JSON."""
    plain: dict[str, Any] = msgspec.to_builtins(job, enc_hook=lambda value: value.to_plain())
    return plain


def decode_job(plain: Any) -> Job:
    """Decode the output of ``encode_job``. Raises ValueError for anything else."""
    name = plain.get("type") if isinstance(plain, dict) else plain
    if not isinstance(plain, dict) or not isinstance(name, str) or name not in JOBS:
        raise ValueError(f"no job is called {str(name)[:60]!r}; {nearest(str(name)[:60], JOBS)}")

    def decode_field(kind: Any, value: Any) -> Any:
        return decode_job(value) if kind is Job else kind.from_plain(value)

    job: Job = msgspec.convert(plain, JOBS[name], dec_hook=decode_field)
    return job


def plugins_of(job: Job) -> list[str]:
    """The plug-in functions that the job would import."""
    inner = getattr(job, "inner", None)
    return ([job.function] if isinstance(job, PluginJob) else []) + ([] if inner is None else plugins_of(inner))


def visit_key(key: Key, visit: Visit) -> Key:
    """A visit's key, derived from its round's key."""
    return key.fold("client", visit.client, visit.repeat)


def answer(side: "ClientSide", job: Job, shared: Tensors, visit: Visit | TestPart, key: Key) -> Reply | Failure:
    """Do the job for one visit, check its sums and store the client's memory; every engine's workers call this."""
    if isinstance(visit, Visit):
        client, repeat, key = visit.client, visit.repeat, visit_key(key, visit)
    else:
        client, repeat = None, 0
    try:
        with deterministic(side.device):
            reply = job(side, shared, visit, key)
        for name, value in () if isinstance(reply.sums, PackedSums) else reply.sums.items():
            if not isinstance(value, Tensor) or value.dtype not in SUM_TYPES:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"{name}: a sum must be a float64 tensor, not {kind}")
        sums = PackedSums.of(reply.sums)
    except StorageFailure:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001  the round decides what a failure means
        return Failure(client, describe_error(error), repeat)
    if not sums.finite():
        return Failure(client, NOT_FINITE, repeat)
    ticket = None
    if side.memory is not None and reply.keep is not None and isinstance(visit, Visit) and visit.slot is not None:
        ticket = side.memory.write(visit.slot, reply.keep)
    return Reply(sums, reply.extra, ticket, visit=visit)


def collect(
    exchange: Exchange | None, engine: Engine, job: Job, shared: Tensors, visits: Sequence[Visit], key: Key
) -> Outcome:
    """The job's sums over the visits, added here or by a method's exchange."""
    if exchange is not None and visits:
        return exchange(engine, job, shared, visits, key)
    return add(engine.visit(job, shared, visits, key), visits) if visits else Outcome({})


def add(
    replies: Iterable[Reply | Failure | Note], visits: Sequence[Visit | TestPart], progress: Progress | None = None
) -> Outcome:
    """Add all replies in visit order: the only ordered addition, so every engine produces the same bits."""
    total: PackedSums | None = None
    failures, notes, replied = list[Failure](), list[str](), list[int]()
    tickets, extra = dict[int, str](), dict[int, Mapping[str, Tensor]]()
    done = 0
    with neutral():
        for item in replies:
            if isinstance(item, Note):
                notes.append(item.text)
                continue
            if isinstance(item, Failure):
                failures.append(item)
            elif not isinstance(item, Reply):
                raise UserError(f"the engine yields {a_kind(item)}; yield what answer returns, or a Failure")
            elif done == len(visits) or (item.visit is not None and item.visit != visits[done]):
                raise UserError("the engine's replies are not in the order of the visits; yield them in that order")
            else:
                sums = PackedSums.of(item.sums)
                if total is None:
                    total = PackedSums(sums.layout, sums.vector.clone())
                else:
                    total.add(sums)
                replied.append(done)
                if item.ticket is not None and isinstance(visit := visits[done], Visit):
                    tickets[visit.client] = item.ticket
                if item.extra:
                    extra[done] = {name: value.clone() for name, value in item.extra.items()}
            done += 1
            if progress is not None:
                progress(done, len(visits))
    if done != len(visits):
        raise UserError(f"the engine answered {done} of {len(visits)} visits; yield a reply or a Failure for each")
    sums_by_name = {} if total is None else total.by_name()
    return Outcome(sums_by_name, tuple(failures), tickets, tuple(notes), extra, tuple(replied))
