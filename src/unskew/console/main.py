"""The command line; commands are imported when they are called, so that ``unskew --help`` is fast."""

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import click
import typer
import typer.core

import unskew
from unskew.console.help import HelpfulCommand, suggest_option
from unskew.core.errors import ClientFailure, UserError

COMMANDS = {  # each command's function or group of commands, and its line in unskew --help
    "run": ("training:run", "Train, evaluate and calibrate; write the run directory."),
    "resume": ("training:resume", "Continue a stopped run, as if it had never stopped."),
    "calibrate": ("training:calibrate", "Build new classifiers for a finished run."),
    "sweep": ("training:sweep", "Try many settings on held-out training images."),
    "reproduce": ("reproduce:reproduce", "Reproduce a paper's table or figure, next to its values."),
    "analyse": ("study:analyse", "Measure a finished run, or draw several in one figure."),
    "report": ("study:report", "Write one offline HTML page about a run, or several."),
    "check": ("study:check", "Check a run directory for damaged files."),
    "compare": ("study:compare", "Compare finished runs in a table."),
    "predict": ("inference:predict", "Classify new pictures with a finished run."),
    "export": ("inference:export", "Write a finished run's model for other programs."),
    "partition": ("data:partition", "Draw a partition, report its skew, write it to a file."),
    "methods": ("training:show_methods", "List the methods, or describe one."),
    "check-method": ("study:check_method", "Test a method, ours or yours, against the laws."),
    "schema": ("schema:schema", "Print the JSON schema of a recipe or a result."),
    "data": ("data:data_app", "List, download and check data sets; write tables."),
    "federation": ("federation:federation_app", "Train across real machines, over TLS, on Flower."),
}


MAX_WIDTH = 110  # columns of help


class LazyGroup(typer.core.TyperGroup):
    """A group that can list its commands without importing them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was called, and import it."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(name or ""), rest


def load_command(name: str) -> click.Command:
    """Import a command."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    target = getattr(importlib.import_module(f"unskew.console.{module}"), attribute)
    importlib.import_module("unskew.console.progress").out.stderr = False  # reset --json of an earlier command in tests
    if isinstance(target, typer.Typer):
        for command_info in target.registered_commands:
            command_info.cls = HelpfulCommand
        group = typer.main.get_group(target)
        for command in group.commands.values():
            command.short_help = (command.help or "").partition("\n\n")[0]  # click would shorten it
        group.name, group.help = name, COMMANDS[name][1]
        return group
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=HelpfulCommand)(target)
    return typer.main.get_command(alone)


def _make_app() -> click.Group:
    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, rich_markup_mode=None)

    @app.callback(invoke_without_command=True)
    def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
        """Federated training on skewed image data."""
        if version:
            print(f"unskew {unskew.__version__}")  # noqa: T201
            raise typer.Exit

    group = typer.main.get_group(app)
    for name, (_, summary) in COMMANDS.items():
        group.add_command(click.Command(name, short_help=summary))
    return group


app = _make_app()


def fail(message: str, code: int) -> NoReturn:
    """Print a message and exit."""
    print(f"unskew: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a user's mistake prints one message and exits with code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # no terminal fails at a character it cannot show
    try:
        _command(arguments)
    except BrokenPipeError:  # nobody reads our output any more: `unskew methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is the cause; Python wraps one that occurs while a class is created."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _command(arguments: Sequence[str] | None) -> None:
    typer.core.HAS_RICH = False  # help is plain text, in which typer 0.20 would escape "[required]" for rich
    try:
        code = app.main(arguments, standalone_mode=False, prog_name="unskew", max_content_width=MAX_WIDTH)
    except (UserError, ClientFailure) as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            from unskew.core.machine import too_many_files

            fail(too_many_files("too many files are open"), 2)
        fail(f"{error.filename or 'a file'}: {error.strerror or error}", 2)
    except Exception as error:
        if _interrupted(error):
            fail("interrupted", 130)
        if not isinstance(error, click.ClickException):  # a mistake in the command's arguments
            raise
        if isinstance(error, click.NoSuchOption):
            fail(suggest_option(error, sys.argv[1:] if arguments is None else arguments), 2)
        message = error.format_message()
        if message.startswith("Usage:"):  # without a command
            print(message)  # noqa: T201
            sys.exit(2)
        fail(f"{message} (see unskew --help)", 2)
    else:
        if code == 130:  # typer has caught an interrupt
            fail("interrupted", 130)
        sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
