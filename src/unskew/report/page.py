"""A page as values: sentences, facts, sections with charts and tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from unskew.analysis.elements import Element


@dataclass(frozen=True)
class Section:
    """One section of the page. ``missing`` says what cannot be shown and why, ``notes`` what a reader must know."""

    name: str  # a word for links
    title: str
    text: str = ""  # a few plain sentences on how to read the charts
    elements: Sequence[Element] = ()
    findings: Sequence[str] = ()  # in a sentence each
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """The whole: what it is about, the findings in a sentence each, the facts, the sections."""

    title: str
    subtitle: str
    findings: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    footer: str = ""
    heading: str = "What this run shows"  # above the findings
