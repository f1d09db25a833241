"""Looking for what must not be in a federation's messages: every number that a client would send in the clear.

What a client would send is computed anew, beside its node, from the very question that it got; then its bytes are
looked for in all types in which they could travel.
"""

import json

import numpy as np
import torch

from unskew.calibration.jobs import FixedPointMoments, Moments
from unskew.core.key import Key
from unskew.core.types import Job, Visit
from unskew.engines.flower.messages import unseal
from unskew.engines.flower.policy import Purpose
from unskew.privacy.secure_sum import Masked, SecureJob
from unskew.round.jobs import answer, decode_job

HEAD = 8  # bytes by which a needle is found
WINDOW = 16  # bytes of a needle of an array
DISTINCT = 6  # bytes of a needle that differ: zeros and ones are everywhere
SOME = 40  # needles of each array
STEPS = (24, 32)  # binary places of the secure sums of statistics and of rounds


class Leaks:
    """Needles by what they are, and the look for them in bytes."""

    def __init__(self) -> None:
        self.known: dict[bytes, set[str]] = {}  # what each needle is
        self._heads = None

    def add(self, what: str, values: np.ndarray, *, whole: bool = False) -> None:
        """Needles of an array's bytes: some windows of it, or all of it."""
        content = np.ascontiguousarray(values).tobytes()
        step = values.dtype.itemsize * max(1, len(content) // values.dtype.itemsize // SOME)
        windows = [content] if whole else [content[at : at + WINDOW] for at in range(0, len(content), step)]
        for window in windows:
            if len(window) >= HEAD and len(set(window)) >= (4 if whole else DISTINCT):
                self.known.setdefault(window, set()).add(what)

    def add_numbers(self, what: str, value: np.ndarray) -> None:
        """Needles of float64 numbers in all types in which they could travel."""
        value = value.ravel()
        whole = value.size <= 32
        self.add(what, value, whole=whole)
        self.add(what, value.astype(np.float32), whole=whole)
        for bits in STEPS:
            steps = np.round(value * 2.0**bits)
            if np.abs(steps).max(initial=0) < 2**62:
                self.add(what, steps.astype(np.int64), whole=whole)
        if value.size >= HEAD and np.array_equal(value, value.round()) and 0 <= value.min() <= value.max() < 256:
            self.add(what, value.astype(np.uint8), whole=True)

    def add_counts(self, what: str, counts: np.ndarray) -> None:
        """Needles of label counts, as numbers and as text."""
        for kind in (np.uint8, np.int32, np.int64, np.float32, np.float64):
            if counts.max() <= (255 if kind is np.uint8 else 2**24):
                self.add(what, counts.astype(kind), whole=True)
        for separators in ((",", ":"), (", ", ": ")):
            self.known[json.dumps(counts.tolist(), separators=separators)[1:-1].encode()] = {what}

    def add_data(self, node, client: int) -> None:
        """Needles of a client's images, their features under the weights that its node has now, its label counts."""
        side = next(iter(node._runs.values())).side
        examples = side.population.examples(client)[:SOME]
        for number in examples.tolist():
            pixels = side.train.images[number].numpy()
            self.add("an image", pixels)
            self.add("an image", side.train.batch(_index(number))[0][0].numpy())
        self.add_features(side, examples.tolist())
        self.add_counts("label counts", side.counts(client).numpy())
        if (own := side.own_tests.get(client)) is not None:
            classes = side.network.classifier.out_features
            self.add_counts("label counts", np.bincount(side.test.labels[own].numpy(), minlength=classes))

    def add_features(self, side, examples) -> None:
        side.network.eval()
        for number in examples:
            features = side.network.encoder(side.train.batch(_index(number))[0])[0].detach().numpy()
            self.add("a feature", features)
            self.add("a feature", features.astype(np.float64))

    def add_work(self, node, question) -> None:
        """Needles of what this node's clients would have answered without masks."""
        header, sent = unseal(question)
        shared = dict(sent)
        if header["kind"] != "job" or (work := in_the_clear(decode_job(header["job"]))) is None:
            return
        side = node._runs[header["run"]].side
        for fields in header["visits"]:
            visit = Visit(**{**fields, "keep": False, "parcel": b""})
            reply = answer(side, work, shared, visit, Key(header["seed"], tuple(header["key"])))
            for name, value in reply.sums.items():
                if name in ("weight", "scaled", "metric/examples", "metric/visits"):
                    continue  # the server knows them beforehand
                self.add_numbers(kind_of(name), value.numpy())
                old = shared.get(name.removeprefix("delta/"))
                if name.startswith("delta/") and old is not None:
                    change = value.numpy() / visit.weight
                    self.add_numbers("an update", change)
                    new = (old.double().numpy() - change).astype(np.float32)
                    self.add("an update", np.where(new == old.numpy(), 0, new).astype(np.float32))

    def _by_head(self) -> tuple[dict[int, list[tuple[int, bytes]]], np.ndarray]:
        """By eight of its bytes each needle, and where in it they are."""
        if self._heads is None or self._heads[0] != len(self.known):
            heads: dict[int, list[tuple[int, bytes]]] = {}
            for needle in self.known:
                at = _telling(needle)
                heads.setdefault(int.from_bytes(needle[at : at + HEAD], "little"), []).append((at, needle))
            self._heads = len(self.known), heads, np.array(sorted(heads), np.uint64)
        return self._heads[1:]

    def found(self, content: bytes) -> set[str]:
        """What of all that is in these bytes, at any place."""
        heads, wanted = self._by_head()
        what = set[str]()
        for shift in range(HEAD):
            numbers = np.frombuffer(content, np.uint64, (len(content) - shift) // HEAD, shift)
            for place in np.flatnonzero(np.isin(numbers, wanted)).tolist():
                for at, needle in heads[int(numbers[place])]:
                    start = shift + HEAD * place - at
                    if not self.known[needle] <= what and content[start : start + len(needle)] == needle:
                        what |= self.known[needle]
        return what


def _telling(needle: bytes) -> int:
    """Where in a needle the eight bytes are that differ most: zeros are everywhere."""
    return max(range(len(needle) - HEAD + 1), key=lambda at: len(set(needle[at : at + HEAD])))


def kind_of(name: str) -> str:
    """A sum as people call it."""
    if name.startswith("delta/"):
        return "an update"
    return "a client's metrics" if name.startswith("metric/") else "a client's statistics"


def in_the_clear(job: Job) -> Job | None:
    """The job without masks and rounding; None where it does not work on the client's data."""
    if isinstance(job, SecureJob) and not isinstance(job, Masked):
        return None
    work = Purpose.of(job).work
    return Moments(work.request) if isinstance(work, FixedPointMoments) else work


def _index(number):
    return torch.tensor([number])
