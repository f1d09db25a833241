"""What commands share: flags made from the options of a run, trust, and the run directories that were given."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew import engines
from unskew.core.units import counted
from unskew.runs.config import OPTIONS, Option
from unskew.runs.seals import unsealed_note
from unskew.runs.seeds import finished_runs

Trust = Annotated[bool, typer.Option("--trust", help="Trust plug-ins named in run directories by other authors.")]


def note_unsealed(paths: Iterable[Path]) -> None:
    """Note on standard error each run directory that has no manifest."""
    for path in paths:
        if note := unsealed_note(path):
            print(f"note: {note}", file=sys.stderr)  # noqa: T201


def runs_named(paths: Sequence[Path]) -> list[Path]:
    """The finished runs in these folders; a note on standard error lists the unfinished ones."""
    found, begun = finished_runs(paths)
    if begun:
        left_out = f"{counted(len(begun), 'run')} left out: not finished"
        print(f"note: {left_out}: {', '.join(map(str, begun[:5]))}{' …' if begun[5:] else ''}", file=sys.stderr)  # noqa: T201
    return found


def with_options(
    names: Sequence[str],
    default: str | None = None,
    several: Sequence[str] = (),
    texts: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command with a flag for each of these options instead of its parameter ``options``.

    The command is called with ``options``, a dict of those that were given. ``default`` describes the
    defaults, if they are not the options' own. Those in ``several`` may be given more than once, and are lists.
    ``texts`` has the help of options that mean something else to this command.
    """

    def spread(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**values: Any) -> None:
            given = {name: values.pop(name, None) for name in names}
            if "engine" in given:
                engines.check_command(given["engine"])
                engines.work_beside(given["engine"])
            command(options={name: value for name, value in given.items() if value not in (None, [])}, **values)

        parameters = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            spelled = (
                [_make_parameter(OPTIONS[name], default, name in several, (texts or {}).get(name)) for name in names]
                if parameter.name == "options"
                else [parameter]
            )
            parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in spelled]
        del called.__wrapped__  # typer would look at the hints of the command itself
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return spread


def _make_parameter(option: Option, default: str | None, several: bool, text: str | None) -> inspect.Parameter:
    flags = [option.flag, f"--no-{option.flag[2:]}"] if option.kind is bool else [option.flag]
    more = "; repeatable" if several else ""
    text = f"{(text or option.help).removesuffix('.')}{more} (default: {default or option.default_text})."
    info = typer.Option("/".join(flags), help=text, metavar=option.metavar, show_default=False)
    wanted: Any = list[str] if several else option.kind
    kind = Annotated[wanted | None, info]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
