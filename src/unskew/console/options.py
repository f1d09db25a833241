"""Flags of commands, made from the options of a run."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from unskew import engines
from unskew.runs.config import OPTIONS, Option


def with_options(
    names: Sequence[str], default: str | None = None, several: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command with a flag for each of these options instead of its parameter ``options``.

    The command is called with ``options``, a dict of those that were given. ``default`` describes the
    defaults, if they are not the options' own. Those in ``several`` may be given more than once, and are lists.
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
                [_make_parameter(OPTIONS[name], default, name in several) for name in names]
                if parameter.name == "options"
                else [parameter]
            )
            parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in spelled]
        del called.__wrapped__  # typer would look at the hints of the command itself
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return spread


def _make_parameter(option: Option, default: str | None, several: bool) -> inspect.Parameter:
    flags = [option.flag, f"--no-{option.flag[2:]}"] if option.kind is bool else [option.flag]
    more = "; repeatable" if several else ""
    words = f"{option.help.removesuffix('.')}{more} (default: {default or option.default_text})."
    info = typer.Option("/".join(flags), help=words, metavar=option.metavar, show_default=False)
    wanted: Any = list[str] if several else option.kind
    kind = Annotated[wanted | None, info]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
