"""``unskew methods``: a short list of every method, or all about one."""

from typing import Annotated

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unskew import methods
from unskew.console.plain import PlainConsole
from unskew.core.errors import UserError, nearest
from unskew.methods.description import GROUPS, Description, describe, describe_method

out = PlainConsole()


def show_methods(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="All about this one; package.module:function works too.")
    ] = None,
) -> None:
    """List every method; of one, show what it changes, its knobs with defaults, its slots and its reference."""
    if name is None:
        _list()
    else:
        _show(_described(name))


def _list() -> None:
    rows = describe()
    width = max(len(row.name) for row in rows)
    for group in GROUPS:
        out.print(group.title)
        table = Table.grid(padding=(0, 2))
        table.add_column(width=width)
        table.add_column(overflow="fold")
        for row in rows:
            if row.group == group:
                table.add_row(Text(row.name), Text(row.changes))
        out.print(Padding(table, (0, 0, 1, 2)))
    out.print("unskew methods NAME shows all about one: its formula, its knobs with defaults, its reference.")
    out.print('Combine methods with +, as in --method "fedavgm(0.9) + fedvc(256) + fedir + ccvr".')
    out.print("A method of your own is package.module:function.")


def _described(name: str) -> Description:
    build = methods.find_method(name)
    if build is None:
        raise UserError(f"no method is called {name!r}; {nearest(name, methods.METHODS)}")
    return describe_method(name, build)


def _show(row: Description) -> None:
    out.print(Text(row.call))
    out.print(Padding(Text(row.changes), (0, 0, 0, 2)))
    if row.body:
        for paragraph in row.body.split("\n\n"):
            out.print(Padding(Text(" ".join(paragraph.split())), (1, 0, 0, 2)))
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("knobs", Text("\n".join(row.knobs) or "none"))
    table.add_row("slots", Text(row.slots or "none: with its defaults it changes nothing"))
    table.add_row("group", Text(row.group.title))
    if row.reference:
        table.add_row("reference", Text(row.reference))
    out.print(Padding(table, (1, 0, 0, 2)))
