"""The two parts of a node as two users: the socket is all that they share, and it cannot be replaced."""

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unskew.console.federation import federation_app
from unskew.engines.flower.node_service import listen
from unskew.federation.folder import initialise, read_node
from unskew.federation.node import socket_path

SERVICE, LINK, STRANGER, SHARED = 20_001, 20_002, 20_003, 20_100


def become(user, groups):
    os.setgroups(groups)
    os.setgid(user)
    os.setuid(user)


def as_user(user, groups, work):
    """Whether the work succeeds for this user, tried in a process of its own."""
    child = os.fork()
    if not child:
        try:
            become(user, groups)
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  the exit code tells it
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def meeting():
    """A folder as systemd makes it: the service's own, open to the group of those who may ask it."""
    if os.getuid() != 0:
        pytest.skip("only root can become other users")
    base = Path(tempfile.mkdtemp(prefix="unskew-two-users-"))
    base.chmod(0o755)
    folder = base / "meeting"
    folder.mkdir()
    os.chown(folder, SERVICE, SHARED)
    folder.chmod(0o2750)
    yield folder
    shutil.rmtree(base)


def test_the_other_part_may_ask_and_do_nothing_else_and_strangers_not_even_that(meeting):
    place = meeting / "service.sock"
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        become(SERVICE, [SHARED])
        os.umask(0o077)
        with listen(place):
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)

        def ask():
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(str(place))

        assert as_user(LINK, [SHARED], ask)
        assert not as_user(STRANGER, [], ask)
        for attack in (
            lambda: place.unlink(),
            lambda: (meeting / "torch.py").write_text("import os"),
            lambda: place.rename(meeting / "other"),
            lambda: meeting.chmod(0o777),
        ):
            assert not as_user(LINK, [SHARED], attack)
        assert place.stat().st_mode & 0o777 == 0o660
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *done):
            os.close(end)


def test_both_parts_find_the_socket_in_node_toml(tmp_path, monkeypatch):
    folder = initialise(tmp_path / "fed", nodes=["ward"]).node("ward")
    started = []
    monkeypatch.setattr("unskew.console.federation.watch", started.append)
    place = tmp_path / "run" / "service.sock"
    words = ["node", str(folder), "--part", "supernode", "--socket", str(place)]
    printed = CliRunner().invoke(federation_app, words)
    assert printed.exit_code == 0, printed.output
    assert socket_path(read_node(folder)) == place
    assert started == [["node", str(folder), "supernode"]]
