"""A wire between nodes and the server that a test holds in its hands."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Wire:
    """Listens at a port of its own, and carries what comes to the target's, and back."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def ends(self, near: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
        """Both ends of a connection, as what passes is read and written there."""
        with near, socket.create_connection(("127.0.0.1", self._target)) as far:
            yield near, far

    def pass_on(self, part: bytes, other: socket.socket) -> None:
        """What happens to bytes that come."""
        other.sendall(part)

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with suppress(OSError), self.ends(plain) as (near, far):
            back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
            back.start()
            self._carry(near, far)
            back.join()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while part := one.recv(65536):
                self.pass_on(part, other)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
