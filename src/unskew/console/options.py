"""What commands share: flags for the options of a run, trust, and finding run directories."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from unskew import engines
from unskew.core.errors import UserError
from unskew.core.units import counted
from unskew.runs.config import OPTIONS, Option
from unskew.runs.seals import unsealed_note
from unskew.runs.seeds import finished_runs


def option(text: str, *flags: str, metavar: str | None = None, **more: Any) -> Any:
    """An option of a command, with its description."""
    return typer.Option(*flags, help=text, metavar=metavar, **more)


def check_suffix(flag: str, file: Path | None, *suffixes: str) -> None:
    """Reject a file whose name does not end in one of these."""
    if file is not None and file.suffix not in suffixes:
        raise UserError(f"{flag} {file}: the file must end in {' or '.join(suffixes)}")


Trust = Annotated[bool, option("Trust plug-ins named in run directories by other authors.", "--trust")]
Format = Annotated[str, option("Format of the charts: svg | png | pdf", "--format")]
DataDir = Annotated[str | None, option("The folder of the published data sets (or UNSKEW_DATA).", metavar="DIR")]


def note_unsealed(paths: Iterable[Path]) -> None:
    """Print a note on standard error for each run directory without a manifest."""
    for path in paths:
        if note := unsealed_note(path):
            print(f"note: {note}", file=sys.stderr)  # noqa: T201


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The finished runs in these folders; a note on standard error lists the unfinished ones."""
    finished, begun = finished_runs(paths)
    if begun:
        left_out = f"{counted(len(begun), 'run')} left out: not finished"
        print(f"note: {left_out}: {', '.join(map(str, begun[:5]))}{' …' if begun[5:] else ''}", file=sys.stderr)  # noqa: T201
    return finished


def with_options(
    names: Sequence[str], default: str | None = None, several: Sequence[str] = (), texts: Mapping[str, str] = {}
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter ``options`` by a flag for each of these options.

    The command receives ``options``, a dict of those that were set. ``default`` describes the defaults, if they are
    not the options' own. Options in ``several`` are repeatable, and are lists. ``texts`` replaces the help of options
    that mean something else to this command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            flags = {name: values.pop(name, None) for name in names}
            if "engine" in flags:
                engines.check_command(flags["engine"])
                engines.serve_rank_zero(flags["engine"])
            command(options={name: value for name, value in flags.items() if value not in (None, [])}, **values)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name == "options":
                parameters += [_make_parameter(OPTIONS[n], default, n in several, texts.get(n)) for n in names]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        del wrapper.__wrapped__  # typer would use the hints of the command itself
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _make_parameter(option: Option, default: str | None, several: bool, text: str | None) -> inspect.Parameter:
    flags = [option.flag, f"--no-{option.flag[2:]}"] if option.kind is bool else [option.flag]
    more = "; repeatable" if several else ""
    text = f"{(text or option.help).removesuffix('.')}{more} (default: {default or option.default_text})."
    info = typer.Option("/".join(flags), help=text, metavar=option.metavar, show_default=False)
    kind: Any = list[str] if several else option.kind
    annotation = Annotated[kind | None, info]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
