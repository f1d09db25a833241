"""The fault campaign: break things on purpose and see whether a wrong result can come without a word.

    make faults                 ten minutes
    make faults MINUTES=120     as many trials as fit into two hours
    python -m faults --only texts --minutes 1
    python -m faults --minutes 60 --out docs/explanation/reliability.md      also put the table into the page

The trials and their order follow from the seed. The exit code is 1 when anything was a surprise.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from faults.contexts import context_trials
from faults.damage import finished_trials, interrupted_trials
from faults.evil import evil_trials
from faults.kills import kill_trials, resource_trials, worker_trials
from faults.nemesis import nemesis_trials
from faults.processes import process_trials
from faults.storage import storage_trials
from faults.texts import text_trials
from faults.trials import Section, Tally, conduct

SECTIONS = (
    Section(
        "damage",
        "finished runs with one file changed, for load, calibrate, analyse, compare, report",
        finished_trials,
        3,
    ),
    Section("checkpoints", "interrupted runs with one file changed, for resume", interrupted_trials, 2),
    Section("kills", "runs killed and interrupted up to five times, and resumed", kill_trials, 2),
    Section("workers", "workers of the pool killed", worker_trials, 1),
    Section("resources", "full disks, files that may not grow, few file descriptors", resource_trials, 1),
    Section("storage", "short writes; power failures that lose what was not synced, in any order", storage_trials, 1),
    Section("federation", "messages, nodes, clocks and the server of a federation", nemesis_trials, 1),
    Section(
        "processes",
        "a federation of real processes: network cut, clocks moved, disks full, every program stopped and killed",
        process_trials,
        2,
    ),
    Section("texts", "methods, calibrations, partitions, options and recipes as texts, by hypothesis", text_trials, 1),
    Section("evil files", "small files that claim to be large, endless, or of another kind", evil_trials, 1),
    Section("contexts", "every function of the package in odd calling contexts", context_trials, 1),
)
TABLE = re.compile(r"(<!-- campaign -->\n).*?(<!-- end -->)", re.S)


def main() -> int:
    options = _options()
    chosen = [section for section in SECTIONS if not options.only or section.name in options.only]
    total = sum(section.share for section in chosen)
    tallies = []
    for section in chosen:
        print(f"{section.name}: {section.what}", flush=True)
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            seconds = 60 * options.minutes * section.share / total
            tallies.append(conduct(section, Path(folder), options.seed, seconds))
        last = tallies[-1]
        print(
            f"  {last.trials} trials in {last.seconds:.0f} s: {last.same} the same, {last.refused} refused, "
            f"{len(last.surprises)} surprises{', all there are' if last.complete else ''}",
            flush=True,
        )
    print(table(tallies, options))
    if options.out is not None:
        page = options.out.read_text(encoding="utf-8")
        text, count = TABLE.subn(lambda match: f"{match[1]}{table(tallies, options)}\n{match[2]}", page)
        if not count:
            sys.exit(f"{options.out} has no place for the table")
        options.out.write_text(text, encoding="utf-8")
    return 1 if any(tally.surprises for tally in tallies) else 0


def table(tallies: list[Tally], options: argparse.Namespace) -> str:
    """The tallies in Markdown."""
    lines = [
        f"`python -m faults --minutes {options.minutes:g} --seed {options.seed}`",
        "",
        "| what was broken | trials | the same result | refused | surprises |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for tally in tallies:
        counts = (tally.trials, tally.same, tally.refused, len(tally.surprises))
        lines.append(f"| {tally.name}: {tally.what} | {' | '.join(f'{count:,}' for count in counts)} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="for all sections together; each tries at least one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=[section.name for section in SECTIONS])
    parser.add_argument("--out", type=Path, help="a page with <!-- campaign --> and <!-- end -->: the table goes there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
