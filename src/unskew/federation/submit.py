"""``unskew federation run``: submit a run to the server of this machine, show what it prints, say how it ended."""

import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.federation import flower, network
from unskew.federation.app import RUN_CONFIG
from unskew.federation.folder import Federation, toml
from unskew.federation.logs import Log

_STARTED = re.compile(r"Successfully started run ([0-9]+)")
_FLOWERS_OWN = re.compile(r"^(INFO|DEBUG|WARNING|ERROR) +:|^Using SuperLink|^Successfully (started|installed)")


def submit(
    federation: Federation,
    recipe: Path,
    out: Path,
    say: Callable[[str], None],
    *,
    resume: bool = False,
    deadline: float | None = None,
    min_replies: int | None = None,
    wait: float | None = None,
) -> None:
    """Run to the end; an interrupt stops the run, whose folder can be resumed."""
    running(federation)
    given = {"deadline": deadline, "min-replies": min_replies, "wait": wait}
    config = {
        **RUN_CONFIG,
        **{name: value for name, value in given.items() if value is not None},
        "recipe": str(recipe.absolute()),
        "out": str(out.absolute()),
        "resume": resume,
    }
    file = federation.path / "server" / "run-config.toml"
    write_whole(file, toml(config, "What the last run was submitted with.").encode())
    _follow(federation, file, say)


def running(federation: Federation) -> None:
    """Refuse to go on where no server of this federation answers on this machine."""
    try:
        network.greet(f"127.0.0.1:{federation.settings.control_port}", federation.authority)
    except network.NotReached as error:
        start = f"start it with: unskew federation server {federation.path}"
        raise UserError(f"the server of {federation.path} is not running on this machine; {start}") from error


def _follow(federation: Federation, config: Path, say: Callable[[str], None]) -> None:
    log, run, complaint = Log(federation.logs / "run.log"), "", ""
    process = subprocess.Popen(
        list(flower.run_command(federation, config)),
        env=flower.environment(federation.flower_home, NO_COLOR="1", COLUMNS="1000"),
        cwd=federation.path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # an interrupt reaches us alone
    )
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = log.write(raw)
            if started := _STARTED.search(line):
                run = started[1]
            if line.startswith("unskew: "):
                complaint = line.removeprefix("unskew: ")
            elif line and run and not _FLOWERS_OWN.match(line):
                say(line)
        process.wait()
    except BaseException:
        process.kill()
        if run:
            with suppress(UserError):
                flower.stop_run(federation, run)
        raise
    if not run:
        raise UserError(f"the run was not accepted; {log.path} ends with:\n" + "\n".join(log.last(8)))
    _check_end(federation, run, complaint, log)


def _check_end(federation: Federation, run: str, complaint: str, log: Log) -> None:
    """A run that failed is one message: our own where there is one."""
    about = flower.runs(federation, run)
    status = str(about[0].get("status", "")) if about else ""
    if complaint:
        raise UserError(complaint)
    if status != "finished:completed":
        details = str(about[0].get("status-details", "")) if about else ""
        raise UserError(
            f"the run ended as {status or 'unknown'}{': ' + details if details else ''}; {log.path} has what it printed"
        )
