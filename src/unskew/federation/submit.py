"""``unskew federation run``: submit a run to the server of this machine, show what it prints, say how it ended."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unskew.core.child import Child, Log
from unskew.core.errors import UserError
from unskew.core.files import write_whole
from unskew.federation import flower, network
from unskew.federation.flower import RUN_CONFIG
from unskew.federation.folder import Federation, toml

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
    _check_end(federation, _follow(federation, file, say), out)


def running(federation: Federation) -> None:
    """Refuse to go on where no server of this federation answers on this machine."""
    try:
        network.greet(f"127.0.0.1:{federation.settings.control_port}", federation.authority)
    except network.NotReached as error:
        start = f"start it with: unskew federation server {federation.path}"
        raise UserError(f"the server of {federation.path} is not running on this machine; {start}") from error


class _Followed:
    """What a run has printed so far, and the number that Flower gave it."""

    def __init__(self, log: Log, say: Callable[[str], None]) -> None:
        self.log, self.run, self.complaint = log, "", ""
        self._say = say

    def hear(self, line: str) -> None:
        """Show the line where a person should see it: Flower's own lines are in the log alone."""
        if started := _STARTED.search(line):
            self.run = started[1]
        if line.startswith("unskew: "):
            self.complaint = line.removeprefix("unskew: ")
        elif self.run and not _FLOWERS_OWN.match(line):
            self._say(line)


def _follow(federation: Federation, config: Path, say: Callable[[str], None]) -> _Followed:
    followed = _Followed(Log(federation.logs / "run.log"), say)
    child = Child(
        "flwr",
        flower.run_command(federation, config),
        environment=flower.environment(federation.flower_home, NO_COLOR="1", COLUMNS="1000"),
        folder=federation.path,
        log=followed.log,
        heard=followed.hear,
    )
    try:
        child.wait()
    except BaseException:
        if followed.run:
            with suppress(UserError):
                flower.stop_run(federation, followed.run)
        raise
    finally:
        child.end(patience=0)
    return followed


def _check_end(federation: Federation, followed: _Followed, out: Path) -> None:
    """A run that failed is one message: our own where there is one."""
    if not followed.run:
        raise UserError(f"the run was not accepted; {followed.log.path} ends with:\n" + "\n".join(followed.log.last(8)))
    if followed.complaint:
        raise UserError(followed.complaint)
    if (out / "result.json").exists():
        return
    about = flower.runs(federation, followed.run)
    status, details = (str(about[0].get(key) or "") if about else "" for key in ("status", "status-details"))
    reason = f"{status or 'unknown'}{': ' + details if details else ''}"
    raise UserError(f"the run ended as {reason}; {followed.log.path} has what it printed")
