"""``unskew federation server``: Flower's server and the gateway before it, started, watched, stopped."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from unskew.core.child import Child
from unskew.core.errors import UserError
from unskew.core.files import read_content, read_json
from unskew.core.units import counted
from unskew.federation import certificates, flower, network
from unskew.federation.folder import FEDERATION, Federation
from unskew.federation.gateway import NOT_REGISTERED
from unskew.federation.initialise import refresh
from unskew.federation.processes import Group, claim

START_SECONDS = 90.0  # that a program may take until it listens
GONE_SECONDS = 75.0  # without a word, after which a node counts as gone: its heartbeat comes every 30
MOST_RESTARTS = 5

Say = Callable[[str], None]


def server_mark(federation: Federation) -> str:
    """By which the processes of this server are known."""
    return f"server:{federation.path}"


def serve(federation: Federation, say: Say) -> None:
    """Run the server until an interrupt comes."""
    _check(federation, say)
    mark = server_mark(federation)
    claim(mark, f"the server of {federation.path}", say)
    settings = federation.settings
    network.check_free(settings.listen, settings.port, f"port in {FEDERATION}")
    network.check_free("127.0.0.1", settings.control_port, f"control_port in {FEDERATION}")
    refresh(federation)
    with Group(mark, federation.logs, federation.path) as group:
        _Server(federation, group, say).run()


class _Server:
    """The programs of a server, and what is known about its nodes."""

    def __init__(self, federation: Federation, group: Group, say: Say) -> None:
        self._federation, self._group, self._say = federation, group, say
        self._registered: set[str] = set()
        self._present: set[str] = set()
        self._restarts = 0

    def run(self) -> None:
        """Start, then watch; returns never."""
        link, gateway = self._start_link(), None
        self._register()
        gateway = self._start_gateway()
        settings = self._federation.settings
        self._say(f"ready: nodes connect to {settings.host}:{settings.port}; {self._keys_in_words()}")
        while True:
            time.sleep(1.0)
            if link.code is not None:
                self._restarting(link)
                link = self._start_link()
            if gateway.code is not None:
                self._restarting(gateway)
                gateway = self._start_gateway()
            self._register()
            self._look_at_nodes()

    def _start_link(self) -> Child:
        federation = self._federation
        child = self._group.start("superlink", flower.superlink(federation), flower.server_environment(federation))
        self._wait(child, federation.settings.control_port)
        return child

    def _start_gateway(self) -> Child:
        federation = self._federation
        command = [sys.executable, "-m", "unskew.federation.gateway", str(federation.path)]
        child = self._group.start("gateway", command, flower.environment(federation.flower_home), self._say)
        self._wait(child, federation.settings.port)
        return child

    def _wait(self, child: Child, port: int) -> None:
        """Until it listens."""
        end = time.monotonic() + START_SECONDS
        while True:
            if child.code is not None:
                raise UserError(f"{child.name} ended while it started; {child.log.path} ends with:\n{child.log_end()}")
            try:
                network.greet(f"127.0.0.1:{port}", self._federation.authority)
            except network.NotReached:
                if time.monotonic() > end:
                    raise UserError(
                        f"{child.name} does not listen after {START_SECONDS:.0f} s; see {child.log.path}"
                    ) from None
                time.sleep(0.2)
            else:
                return

    def _restarting(self, child: Child) -> None:
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise UserError(f"{child.name} ends again and again; {child.log.path} ends with:\n{child.log_end()}")
        self._say(
            f"{child.name} ended with code {child.code} and is started again; a run that was on has to be resumed"
        )

    def _register(self) -> None:
        """Make Flower know the keys that are new in the folder."""
        new = {name: key for name, key in self._federation.public_keys().items() if name not in self._registered}
        if not new:
            return
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda each: flower.register(self._federation, *each), new.items())
        for name, trouble in zip(new, answers, strict=True):
            self._registered.add(name)
            if trouble:
                self._say(f"node {name} cannot join: {trouble}")

    def _look_at_nodes(self) -> None:
        now = {name for name, when in last_seen(self._federation).items() if time.time() - when < GONE_SECONDS}
        for name in sorted(now - self._present):
            self._say(f"node {name} is here ({len(now)} of {len(self._federation.public_keys())})")
        for name in sorted(self._present - now):
            self._say(f"node {name} has said nothing for {GONE_SECONDS:.0f} s")
        self._present = now

    def _keys_in_words(self) -> str:
        count = len(self._registered)
        return (
            f"{counted(count, 'key')} registered" if count else f"no keys: whoever comes is told that {NOT_REGISTERED}"
        )


def last_seen(federation: Federation) -> dict[str, float]:
    """When each node was last heard of, as seconds since 1970."""
    if not federation.seen.exists():
        return {}
    values = read_json(federation.seen)
    return {name: float(when) for name, when in values.items() if isinstance(when, int | float)}


def _check(federation: Federation, say: Say) -> None:
    """What would fail later, in one message now."""
    flower.program("flower-superlink")
    for path in (federation.authority, federation.certificate, federation.key):
        if not path.exists():
            raise UserError(f"{path} is missing; make it with: unskew federation init {federation.path} --renew")
    left = certificates.days_left(read_content(federation.certificate) or b"", str(federation.certificate))
    if left < 0:
        raise UserError(f"{federation.certificate} has expired; run: unskew federation init {federation.path} --renew")
    if left < 30:
        say(f"the server's certificate expires in {left:.0f} days; unskew federation init DIR --renew makes a new one")
