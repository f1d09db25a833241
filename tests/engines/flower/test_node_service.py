"""The node service over its socket, as Flower's ClientApp reaches it."""

import importlib.util
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import unskew
from nodes import PARTITION, SEED, make_node
from unskew.core.errors import UserError
from unskew.engines.flower.messages import Envelope, seal, unseal
from unskew.engines.flower.node_service import answer_one, listen, main, read_settings

RUN = "cd" * 16
SOURCE = Path(unskew.__file__).parent / "engines" / "flower" / "client_app.py"


@pytest.fixture(scope="module")
def client_app():
    """The file as an app folder has it: a module of its own, outside the package."""
    spec = importlib.util.spec_from_file_location("copied_client_app", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serving(tmp_path):
    """A node behind a socket, for three messages."""
    node, place = make_node(tmp_path, 0), tmp_path / "node.sock"
    line = listen(place)

    def serve():
        for _ in range(3):
            try:
                connection, _ = line.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(60)
                try:
                    answer_one(connection, node.answer)
                except ConnectionError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield place
    line.shutdown(socket.SHUT_RDWR)
    line.close()
    thread.join(60)


def described(number=1):
    return seal({"kind": "describe", "run": RUN, "number": number})


def test_a_message_goes_through_the_socket_and_back(client_app, serving):
    header, body = client_app._ask(serving, [described().header, b""])
    assert unseal(Envelope(header, body))[0]["kind"] == "described"


def test_only_its_owner_can_open_the_socket(serving):
    assert stat.S_IMODE(os.stat(serving).st_mode) == 0o600


def test_a_line_that_breaks_off_or_lies_about_its_length_does_not_end_the_service(client_app, serving):
    for content in (b"\x05", (2**60).to_bytes(8, "little")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(str(serving))
            line.sendall(content)
            line.shutdown(socket.SHUT_WR)
            assert line.recv(1) == b""
    header, body = client_app._ask(serving, [described().header, b""])
    assert unseal(Envelope(header, body))[0]["kind"] == "described"


def test_a_service_that_is_not_there_is_one_sentence(client_app, tmp_path):
    with pytest.raises(RuntimeError, match="the node service does not answer at"):
        client_app._ask(tmp_path / "none.sock", [b"", b""])


def test_a_second_service_at_the_same_place_is_refused_and_a_dead_ones_socket_replaced(serving, tmp_path):
    with pytest.raises(UserError, match="another node service answers"):
        listen(serving)
    dead = tmp_path / "dead.sock"
    listen(dead).close()
    assert dead.is_socket()
    listen(dead).close()


def test_a_path_too_long_for_a_socket_says_so(tmp_path):
    with pytest.raises(UserError, match="give a shorter path"):
        listen(tmp_path / ("x" * 120))


def test_the_client_app_imports_flower_and_the_standard_library_alone():
    """Every message starts a process: PyTorch in it would cost more than all else."""
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("copied", {str(SOURCE)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.app is not None
print([name for name in sys.modules if name.split(".")[0] in ("torch", "unskew", "sklearn", "matplotlib", "pandas")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Settings


def settings(tmp_path, **changes):
    values = {"name": "hospital", "data": "digits", "partition": PARTITION, "clients": 3, "client": 1, "seed": SEED,
              "folder": str(tmp_path / "node"), **changes}  # fmt: skip
    lines = [f"{name} = {value!r}" for name, value in values.items() if value is not None]
    (tmp_path / "settings.toml").write_text("\n".join(lines))
    return tmp_path / "settings.toml"


def test_settings_say_where_the_data_are_and_which_clients_are_the_nodes(tmp_path):
    read = read_settings(settings(tmp_path, client=[0, 2], plugins=["mine:method"]))
    assert (read.name, read.client, read.clients, read.seed) == ("hospital", (0, 2), 3, SEED)
    assert read.socket == str(tmp_path / "node" / "node.sock")
    assert (read.device, read.plugins) == ("cpu", ("mine:method",))


@pytest.mark.parametrize(("changes", "wrong"), [
    ({"name": None}, "missing required field name"), ({"name": 3}, "name: expected str, got int"),
    ({"data": ""}, "data: expected str of length >= 1"), ({"folder": None}, "missing required field folder"),
    ({"client": -1}, "client: expected int >= 0"), ({"client": "0"}, "client: expected int | array, got str"),
    ({"clients": 1.5}, "clients: expected int | null, got float"), ({"seed": "x"}, "seed: expected int, got str"),
    ({"plugins": "mine:method"}, "plugins: expected array, got str"), ({"colour": "red"}, "unknown key 'colour'"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(tmp_path, changes, wrong):
    with pytest.raises(UserError, match=re.escape(wrong)):
        read_settings(settings(tmp_path, **changes))


def test_a_mistake_ends_in_one_line_and_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path / "none.toml")]) == 2
    assert main([]) == 2
    (tmp_path / "bad.toml").write_text("name = ")
    assert main([str(tmp_path / "bad.toml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["unskew"] * 3


@pytest.mark.heavy
def test_the_service_as_a_process_is_ready_answers_and_ends_when_it_is_told_to(client_app, tmp_path):
    file = settings(tmp_path, socket=str(tmp_path / "node.sock"))
    command = [sys.executable, "-m", "unskew.engines.flower.node_service", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        ready = "ready: node hospital with 435 training images, 10 classes"
        assert any(line.startswith(ready) for line in process.stdout)  # after a line about its missing roster
        header, _ = client_app._ask(tmp_path / "node.sock", [described().header, b""])
        assert unseal(Envelope(header))[0]["node"] == "hospital"
        process.terminate()
        assert process.wait(30) == 0
