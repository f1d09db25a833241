"""Timing side by side: variants take turns, so that a busy moment hits all of them; medians and ratios come out."""

import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One line of the table: what was measured, what it should be at least or at most, whether it is."""

    name: str
    value: float
    unit: str
    wanted: str = ""
    holds: bool | None = None
    remark: str = ""

    def cells(self):
        verdict = {None: "", True: "yes", False: "**no**"}[self.holds]
        number = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return [self.name, f"{number} {self.unit}".strip(), self.wanted, verdict, self.remark]


def medians(variants, repeats, clock=time.perf_counter):
    """Call every variant ``repeats`` times in turn, after one call that does not count; median seconds by name."""
    times = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, work in variants.items():
            began = clock()
            work()
            if turn:
                times[name].append(clock() - began)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def peak_memory():
    """The most memory that this process has had, in bytes; ``ru_maxrss`` would include the process that started it."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def at_least(name, value, unit, bound, remark=""):
    return Row(name, value, unit, f"≥ {bound:g}", value >= bound, remark)


def at_most(name, value, unit, bound, remark=""):
    return Row(name, value, unit, f"≤ {bound:g}", value <= bound, remark)


def show_table(heading, rows, out=None):
    """Print a table row by row as they come, write it to a Markdown file too, and end the program: 1 if one misses."""
    lines = [heading, "", "| what | measured | wanted | holds | remark |", "| --- | ---: | ---: | --- | --- |"]
    print("\n".join(lines), flush=True)
    missed = 0
    for row in rows:
        lines.append("| " + " | ".join(row.cells()) + " |")
        print(lines[-1], flush=True)
        missed += row.holds is False
    if out:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(1 if missed else 0)
