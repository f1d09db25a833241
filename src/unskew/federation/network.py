"""Ports and TLS, tried before a program needs them: so that a message can say what is wrong."""

import re
import socket
import ssl
from contextlib import suppress
from pathlib import Path

from unskew.core.errors import UserError

SECONDS = 5.0  # that a connection may take


class NotReached(Exception):
    """Nobody answers there, now."""


def check_free(host: str, port: int, what: str) -> None:
    """Refuse a port on which something listens already."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        why = f"{error.strerror or error}; end what uses it, or choose another"
        raise UserError(f"port {port} of {host}, the {what}, cannot be opened: {why}") from error


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def free_pair() -> int:
    """A port of loopback that nobody uses now, and the next one neither."""
    for _ in range(100):
        first = free_port()
        with socket.socket() as trial, suppress(OSError, OverflowError):
            trial.bind(("127.0.0.1", first + 1))
            return first
    raise UserError("no two free ports beside each other were found on 127.0.0.1")


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of ``host:port``."""
    found = re.fullmatch(r"\[?([^\]\s]+?)\]?:([0-9]{1,5})", address)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise UserError(f"server {address!r}: give host:port, such as fed.example.org:8000")
    return found[1], int(found[2])


def greet(address: str, authority: Path, *, name: str | None = None) -> None:
    """A TLS handshake with a server whose certificate this authority signed; raises NotReached or UserError."""
    host, port = host_and_port(address)
    try:
        context = ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"{authority} is not a certificate: {error}") from error
    try:
        with (
            socket.create_connection((host, port), timeout=SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=name or host),
        ):
            return
    except ssl.SSLCertVerificationError as error:
        why = f"{error.verify_message}; {_advice(error)}"
        raise UserError(f"the server at {address} has a certificate that cannot be trusted: {why}") from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise NotReached("the connection was closed") from error
    except ssl.SSLError as error:
        raise UserError(f"what answers at {address} does not speak TLS: it is not this federation's server") from error
    except OSError as error:
        raise NotReached(str(error.strerror or error)) from error


def _advice(error: ssl.SSLCertVerificationError) -> str:
    if "not valid for" in error.verify_message:
        return "the server was made for another name: unskew federation init DIR --host NAME"
    if "expired" in error.verify_message or "not yet" in error.verify_message:
        return "compare the clocks, or make a new one on the server: unskew federation init DIR --renew"
    return "ca.crt of this node is not that of the server's federation"
