"""The Flower app of a federation: the folder that ``flwr run`` takes, with all that Flower asks for."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import write_whole

SERVER_APP = "unskew_node.server_app:app"
CLIENT_APP = "unskew_node.client_app:app"

# what a run may be given with --run-config; Flower takes no key that does not stand here, "" and -1 mean not given
RUN_CONFIG: dict[str, str | bool | float | int] = {
    "recipe": "",
    "out": "",
    "resume": False,
    "deadline": -1.0,
    "min-replies": -1,
    "wait": -1.0,
}

_LICENSE = b"Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0\n"

# flwr looks for the app when a run is submitted: here it finds it without importing PyTorch
_SERVER = '''"""What runs on the server: the code is in the installed package."""

from unskew.engines.flower import server_app

app = server_app.app
'''

_README = """# The Flower app of this federation
`unskew federation run RECIPE` submits it. Flower's own command does the same:

    FLWR_HOME={home} flwr run {app} {connection} --run-config 'recipe="{recipe}" out="{out}"'

The code that runs on the server comes from the installed package unskew. `unskew_node/client_app.py` is all
that Flower sends to the nodes: it passes messages on to the node service there, and needs nothing but Flower.
"""


def write_app(folder: Path, *, home: Path, connection: str, recipe: Path, out: Path) -> None:
    """Write the app folder; ``recipe`` and ``out`` are what a plain ``flwr run`` uses."""
    write_whole(folder / "pyproject.toml", _project(recipe, out).encode())
    write_whole(folder / "LICENSE", _LICENSE)
    readme = _README.format(home=home, app=folder, connection=connection, recipe=recipe, out=out)
    write_whole(folder / "README.md", readme.encode())
    write_whole(
        folder / "unskew_node" / "__init__.py", b'"""What Flower loads on the server and sends to the nodes."""\n'
    )
    write_whole(folder / "unskew_node" / "server_app.py", _SERVER.encode())
    write_whole(folder / "unskew_node" / "client_app.py", client_app_source())


def client_app_source() -> bytes:
    """The thin app that runs on the nodes: read, not imported, since its package imports PyTorch."""
    return (Path(__file__).parent.parent / "engines" / "flower" / "client_app.py").read_bytes()


def flower_version() -> str:
    """The installed version of Flower."""
    try:
        return version("flwr")
    except PackageNotFoundError as error:
        raise UserError('flwr is not installed; pip install "unskew[flower]"') from error


def _own_version() -> str:
    try:
        return version("unskew")
    except PackageNotFoundError:  # run from its source
        return "0.0.0"


def _project(recipe: Path, out: Path) -> str:
    installed = flower_version()
    major, minor = installed.split(".")[:2]
    values = RUN_CONFIG | {"recipe": str(recipe), "out": str(out)}
    return "\n".join(
        [
            "# Made by unskew federation init; made again whenever the server starts.",
            "[build-system]",
            'requires = ["hatchling"]',
            'build-backend = "hatchling.build"',
            "",
            "[project]",
            'name = "unskew-federation"',
            f'version = "{_own_version()}"',
            'description = "Federated training on skewed image data"',
            'license = { file = "LICENSE" }',
            f'dependencies = ["flwr>={installed},<{major}.{int(minor) + 1}"]',
            "",
            "[tool.flwr.app]",
            'publisher = "unskew"',
            "fab-format-version = 1",
            f'flwr-version-target = "{installed}"',
            "",
            "[tool.flwr.app.components]",
            f'serverapp = "{SERVER_APP}"',
            f'clientapp = "{CLIENT_APP}"',
            "",
            "[tool.flwr.app.config]",
            *(f"{name} = {json.dumps(value)}" for name, value in values.items()),
            "",
        ]
    )
