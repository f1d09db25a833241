"""Sentences on a table: how far ours agree, what is missing, and every known difference of the set-up."""

from collections.abc import Sequence
from dataclasses import dataclass

from unskew.core.units import counted, format_duration
from unskew.reproduce.cells import Asked, cells_of
from unskew.reproduce.results import AGREEMENT, CellResult, Gain, TableResult, columns_of, counts
from unskew.runs import config as configs
from unskew.runs.config import Value

MOST = 12  # options that a sentence on the scale names
SAME = 0.05  # points: gains that differ from zero by less have no sign


@dataclass(frozen=True)
class Wording:
    """All that is said of a table."""

    findings: list[str]  # what a reader wants to know first
    differences: list[str]  # every known one of the set-up
    facts: list[tuple[str, str]]  # scale, seeds, machine, …


def told(result: TableResult) -> Wording:
    """All sentences and facts, written once for all forms of a table."""
    return Wording(findings(result), differences(result), facts(result))


def findings(result: TableResult) -> list[str]:
    """What a reader wants to know first."""
    return [*_agreement(result), *_gains(result), *_missing(result)]


def _agreement(result: TableResult) -> list[str]:
    number = counts(result)
    judged = sum(number.values())
    if not judged:
        return []
    words = ", ".join(f"{count} {AGREEMENT[name]}" for name, count in number.items() if count)
    with_own = [each.paper.deviation is not None for each in result.cells if each.agreement and each.paper]
    whose = "the paper's ±" if any(with_own) else "our own ±, since the paper gives none"
    if any(with_own) and not all(with_own):
        whose += ", or ours where it gives none"
    said = f"Of {counted(judged, 'cell')} with a value in the paper, by {whose}: {words}."
    if result.asked.scale != "paper":
        said += " At this scale less is trained than in the paper, so that values are expected to be outside."
    return [said]


def _gains(result: TableResult) -> list[str]:
    """Whether gains have the paper's sign: what can be compared at every scale."""
    pairs = [gain for each in result.cells if (gain := result.gain(each)) is not None]
    known = [(gain, gain.paper, gain.ours) for gain in pairs if gain.paper is not None and gain.ours is not None]
    if not known:
        return []
    large = [(gain, paper * ours > 0) for gain, paper, ours in known if min(abs(paper), abs(ours)) >= SAME]
    same, other = ([gain for gain, agrees in large if agrees is wanted] for wanted in (True, False))
    small = len(known) - len(large)
    where = "" if all(each.judged for each in result.cells) else ", on other data than the paper's"
    has = "has" if len(same) == 1 else "have"
    said = f"Of {counted(len(large), 'gain')} of one row over another{where}, {len(same)} {has} the paper's sign"
    if any(gain.interval for gain in same):
        said += f"; for {_apart(same)} of these the 95 % interval over the seeds leaves out zero"
    if any(gain.interval for gain in other):
        said += f". Of the {len(other)} with the other sign it does for {_apart(other)}"
    rest = (
        f" Pairs with a gain of less than {SAME:g} points, the paper's or ours, are not counted: {small}."
        if small
        else ""
    )
    return [f"{said}.{rest}"]


def _apart(gains: Sequence[Gain]) -> int:
    """Of how many the interval leaves out zero."""
    return sum(each.interval is not None and (each.interval.low > 0 or each.interval.high < 0) for each in gains)


def _missing(result: TableResult) -> list[str]:
    said = []
    if lacking := [each for each in result.cells if each.cell.done and not each.values]:
        reasons = "; ".join(dict.fromkeys(each.reason for each in lacking))
        said.append(f"Without a value: {counted(len(lacking), 'cell')} ({reasons}).")
    if partly := [each for each in result.cells if each.values and each.missing]:
        said.append(f"Without some of the seeds: {counted(len(partly), 'cell')}.")
    if left := [each for each in result.cells if not each.cell.done]:
        shown = columns_of(result)
        names = [name for name in dict.fromkeys(each.cell.column.name for each in left) if name not in shown]
        which = f", among them the columns {', '.join(names)}" if names else ""
        said.append(f"Not done at the scale {result.asked.scale}: {counted(len(left), 'cell')} of the paper's{which}.")
    return said


def differences(result: TableResult) -> list[str]:
    """Every known difference of the set-up: of the scale, of the data, what was asked for, then the recipe's own."""
    recipe, asked = result.recipe, result.asked
    said = []
    if asked.data:
        what = recipe.stand_ins.get(asked.data, f"{asked.data} in the place of the paper's data")
        said.append(f"Data: {what}. The paper's values stand beside ours, and differences are not judged.")
    if asked.scale != "paper":
        changed = _changed(result)
        if changed:
            said.append(f"Scale {asked.scale}: {changed}.")
    said += [f"Asked for: {name} = {value}." for name, value in asked.changes.items()]
    published = recipe.extent("paper").seeds
    if len(result.seeds) != len(published):
        said.append(f"Seeds: {counted(len(result.seeds), 'seed')} instead of {len(published)}.")
    own = [*recipe.differences, *recipe.paper.differences]
    return [*said, *(each for each in own if not each.startswith(recipe.left_out.get(asked.data, ())))]


def _changed(result: TableResult) -> str:
    """The options in which the cells of this scale are not those of the paper's."""
    found: dict[str, set[tuple[Value | None, Value | None]]] = {}
    whole = cells_of(result.recipe, Asked("paper", result.asked.data))
    known = {id(each) for each in _run(result)}
    for each, there in zip(result.cells, whole, strict=True):
        now, published = configs.deciding(each.cell.config), configs.deciding(there.config)
        for name in {**now, **published} if id(each) in known else ():
            if now.get(name) != published.get(name) and name not in result.asked.changes:
                found.setdefault(name, set()).add((now.get(name), published.get(name)))
        if id(each) in known and each.cell.reads != there.reads:
            found.setdefault("read", set()).add((each.cell.reads, there.reads))
    words = []
    for name, pairs in list(found.items())[:MOST]:
        each_one = [f"{now} instead of {published}" for now, published in sorted(pairs, key=str)]
        words.append(f"{name.replace('_', ' ')} {' or '.join(each_one)}")
    return ", ".join(words)


def _run(result: TableResult) -> list[CellResult]:
    """The cells that have a value; before there are any, those of the scale."""
    return [each for each in result.cells if each.values] or [each for each in result.cells if each.cell.done]


def facts(result: TableResult) -> list[tuple[str, str]]:
    """Scale, seeds, what it took, where it was made."""
    records = result.records
    machines = dict.fromkeys(record.machine.get("machine", "") for record in records)
    versions = dict.fromkeys(
        ", ".join(
            f"{name} {record.machine[name]}"
            for name in ("unskew", "torch", "numpy", "python")
            if name in record.machine
        )
        for record in records
    )
    trained = sum(record.result.seconds for record in records)
    calibrated = sum(one.seconds for record in records for one in record.result.calibrations.values())
    return [
        ("scale", result.asked.scale),
        ("data", ", ".join(dict.fromkeys(each.cell.config.data for each in _run(result)))),
        ("seeds", _seeds(result)),
        ("runs", f"{len(records):,}"),
        ("training, of all runs together", format_duration(trained)),
        ("calibration", format_duration(calibrated)),
        ("machine", "; ".join(filter(None, machines)) or "none yet"),
        ("versions", "; ".join(filter(None, versions)) or "none yet"),
    ]


def _seeds(result: TableResult) -> str:
    """Those that a cell has a value of, and those that none has."""
    there = [seed for seed in result.seeds if any(seed in each.values for each in result.cells)]
    left = ", ".join(str(seed) for seed in result.seeds if seed not in there)
    if not there:
        return "none yet"
    return ", ".join(map(str, there)) + (f" (not yet {left})" if left else "")


def ours_of(result: TableResult) -> str:
    """What our columns are called: with other data in the paper's place their names say so."""
    other = result.asked.data
    if not other:
        return "ours"
    return f"ours ({other if other in result.recipe.stand_ins else 'other data'})"


def difference_words(each: CellResult) -> str:
    """Ours minus the paper's, with its sign; "" where it is not known."""
    return "" if each.difference is None else f"{each.difference:+.{each.reading.decimals}f}"
