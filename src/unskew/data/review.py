"""Warnings about a data set: classes or users in one part only, labels that differ only in spelling."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unskew.core.errors import brief
from unskew.core.types import ImageSet
from unskew.core.units import counted

NAMED = 5  # classes or users in a note

Counts = dict[str, tuple[int, int]]  # training and test examples, by name


@dataclass(frozen=True)
class Summary:
    """The training and test examples of each class and each user; empty without users."""

    classes: Counts
    users: Counts


def summarize(images: ImageSet) -> Summary:
    """Count the examples of a data set."""
    size = len(images.classes)
    parts = [np.bincount(part.labels, minlength=size).tolist() for part in (images.train, images.test)]
    classes = dict(zip(images.classes, zip(*parts, strict=True), strict=True))
    held = [_count(images.users), _count(images.test_users)]
    users = {name: (held[0].get(name, 0), held[1].get(name, 0)) for name in sorted({*held[0], *held[1]})}
    return Summary(classes, users)


def _count(users: npt.NDArray[np.str_] | None) -> dict[str, int]:
    names, counts = np.unique(np.zeros(0, np.str_) if users is None else users, return_counts=True)
    return {name: count for name, count in zip(names.tolist(), counts.tolist(), strict=True) if name}


def review(summary: Summary) -> list[str]:
    """What a user should know before training."""
    notes = []
    train, test = (_only(summary.classes, part) for part in (0, 1))
    known = [name for name, counts in summary.classes.items() if any(counts)]
    if len(train) + len(test) == len(known) and train and test:
        notes.append(
            f"train and test have no class in common, so accuracy is meaningless: train has {_named(train)}; "
            f"test has {_named(test)}"
        )
    else:
        notes += [f"no training examples of {_share(test, known, 'class')}"] if test else []
        notes += [f"no test examples of {_share(train, known, 'class')}"] if train else []
    if any(test for _, test in summary.users.values()):
        train, test = (_only(summary.users, part) for part in (0, 1))
        notes += [f"no training examples of {_share(test, summary.users, 'user')}"] if test else []
        notes += [f"no test examples of {_share(train, summary.users, 'user')}"] if train else []
    return [*notes, *_review_names(known, "labels"), *_review_names(summary.users, "users")]


def _only(counts: Counts, part: int) -> list[str]:
    return [name for name, both in counts.items() if both[part] and not both[1 - part]]


def _share(names: Sequence[str], known: Sequence[str] | Counts, word: str) -> str:
    return f"{counted(len(names), word)} of {len(known):,}: {_named(names)}"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(brief(name, 40)[1:-1] for name in names[:NAMED])
    return f"{shown} and {len(names) - NAMED:,} more" if len(names) > NAMED else shown


def _review_names(names: Iterable[str], what: str) -> list[str]:
    """Find names that may mean the same (``CAT`` and ``cat``, ``3`` and ``3.0``), and labels of mixed kinds."""
    alike = defaultdict[str, list[str]](list)
    numbers, texts = list[str](), list[str]()
    for name in names:
        number = re.fullmatch(r"[+-]?0*(\d+)(\.0*)?", name)
        alike[number[1] if number else re.sub(r"[\s_-]+", " ", name).casefold()].append(name)
        (numbers if number else texts).append(name)
    twins = [" and ".join(group) for group in alike.values() if len(group) > 1]
    notes = [f"{what} that differ only in spelling count as different: {_named(twins)}"] if twins else []
    if what == "labels" and numbers and texts:
        few = min(numbers, texts, key=len)
        notes.append(f"labels mix numbers and words; {counted(len(few), 'label')} may be wrong: {_named(few)}")
    return notes
