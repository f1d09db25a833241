import socket
import threading

import pytest


@pytest.fixture
def serve():
    """Start a server that answers each connection with ``answer``; gives the port."""
    listeners = []

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def loop():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                try:
                    answer(connection)
                except OSError:
                    connection.close()

        threading.Thread(target=loop, daemon=True).start()
        return listener.getsockname()[1]

    yield start
    for listener in listeners:
        listener.close()
