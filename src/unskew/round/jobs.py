"""Jobs: what a client does for a visit, how a job crosses a wire, and how the replies of all visits are added.

A job is a frozen msgspec struct that is called with the client's side. Its fields are its options, so the wire format
follows from the declaration: ``@register`` gives it a name there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor

from unskew.core.errors import StorageFailure, describe_error, nearest
from unskew.core.key import Key
from unskew.core.machine import deterministic, neutral
from unskew.core.plugins import load_function
from unskew.core.tensors import PackedSums
from unskew.core.types import Failure, Job, Note, Outcome, Progress, Reply, Sums, Tensors, TestPart, Visit

if TYPE_CHECKING:
    from unskew.round.client import ClientSide


NOT_FINITE = "its result contains NaN or infinity; try a smaller --lr, or smaller values in the method"
SUM_TYPES = (torch.float64, torch.int64)
JOBS: dict[str, type[Any]] = {}  # by tag

JobType = TypeVar("JobType", bound=type[Any])


def register(job: JobType) -> JobType:
    """Make a job known by its tag, so that it can be sent."""
    JOBS[job.__struct_config__.tag] = job
    return job


@register
class PluginJob(msgspec.Struct, frozen=True, tag="call"):
    """A plug-in's job: ``package.module:function``, called with ``(side, shared, visit, key, options)``.

    The function returns a Reply, or the sums alone.
    """

    function: str
    options: Any = None

    def __call__(self, side: "ClientSide", shared: Tensors, visit: Visit, key: Key) -> Reply:
        """Import the function and call it."""
        result = load_function(self.function, "job")(side, shared, visit, key, self.options)
        return result if isinstance(result, Reply) else Reply(result)


def encode_job(job: Job) -> dict[str, Any]:
    """A job as plain values that JSON can carry."""
    plain: dict[str, Any] = msgspec.to_builtins(job, enc_hook=lambda value: value.to_plain())
    return plain


def decode_job(plain: Any) -> Job:
    """The job that ``encode_job`` described. Raises ValueError where it is none."""
    name = plain.get("type") if isinstance(plain, dict) else plain
    if not isinstance(plain, dict) or not isinstance(name, str) or name not in JOBS:
        raise ValueError(f"there is no job {str(name)[:60]!r}; {nearest(str(name)[:60], JOBS)}")

    def decode_field(kind: Any, value: Any) -> Any:
        return decode_job(value) if kind is Job else kind.from_plain(value)

    job: Job = msgspec.convert(plain, JOBS[name], dec_hook=decode_field)
    return job


def plugins_of(job: Job) -> list[str]:
    """The plug-in functions that doing the job would import."""
    inner = getattr(job, "inner", None)
    return ([job.function] if isinstance(job, PluginJob) else []) + ([] if inner is None else plugins_of(inner))


def visit_key(key: Key, visit: Visit) -> Key:
    """What a visit draws from, made from its round's key."""
    return key.fold("client", visit.client, visit.repeat)


def answer(side: "ClientSide", job: Job, shared: Tensors, visit: Visit | TestPart, key: Key) -> Reply | Failure:
    """Do the job for one visit, store what the client keeps, check what leaves: every engine's worker calls this."""
    if isinstance(visit, Visit):
        client, repeat, key = visit.client, visit.repeat, visit_key(key, visit)
    else:
        client, repeat = None, 0
    try:
        with deterministic(side.device):
            reply = job(side, shared, visit, key)
        sums = reply.sums if isinstance(reply.sums, PackedSums) else _pack(reply.sums)
    except StorageFailure:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001  whatever it raises, the round decides
        return Failure(client, describe_error(error), repeat)
    if not sums.finite():
        return Failure(client, NOT_FINITE, repeat)
    ticket = None
    if side.memory is not None and reply.keep is not None and isinstance(visit, Visit) and visit.slot is not None:
        ticket = side.memory.write(visit.slot, reply.keep)
    return Reply(sums, reply.extra, ticket)


def _pack(sums: Mapping[str, Tensor]) -> PackedSums:
    for name, value in sums.items():
        if not isinstance(value, Tensor) or value.dtype not in SUM_TYPES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name}: a sum must be a float64 tensor, not {kind}")
    return PackedSums.of(sums)


def add(
    replies: Iterable[Reply | Failure | Note], visits: Sequence[Visit | TestPart], progress: Progress | None = None
) -> Outcome:
    """The sums of all replies, added in visit order: the only ordered addition, so every engine has the same bits."""
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
            else:
                sums = item.sums if isinstance(item.sums, PackedSums) else PackedSums.of(item.sums)
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
        raise RuntimeError(f"the engine answered {done} of {len(visits)} visits")
    sums_by_name: Sums = {} if total is None else total.by_name()
    return Outcome(sums_by_name, tuple(failures), tickets, tuple(notes), extra, tuple(replied))
