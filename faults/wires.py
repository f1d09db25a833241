"""A TCP proxy on loopback that a test controls: it can delay, hold, cut and corrupt what passes.

One event loop carries everything. Two threads must never share one TLS connection: OpenSSL's objects are not safe for
that, and a process that tries may crash or never end.
"""

import asyncio
import ssl
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

OPEN, SLOW, HELD, CLOSED, TORN, CORRUPT = "open", "slow", "held", "closed", "torn", "corrupt"
PIECE = 65_536  # bytes
DELAY = 0.5  # seconds for each piece, where the wire is slow


class Wire:
    """Listens at a port of its own, and carries what arrives to the target's port, and back.

    ``mode`` may change at any time, from any thread. ``slow`` delays every piece; ``held`` keeps all of them, without
    an error on either side; ``closed`` resets connections and accepts no new ones; ``torn`` forwards half of the next
    piece and then closes its connection; ``corrupt`` flips a bit in the next piece. The last two happen once.
    """

    def __init__(
        self, target: int, *, near: ssl.SSLContext | None = None, far: ssl.SSLContext | None = None, mode: str = OPEN
    ) -> None:
        self.mode = mode
        self._target, self._near, self._far = target, near, far
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=near))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def heard(self, part: bytes, connection: object) -> None:
        """Called with every piece that passes; ``connection`` is the same for all pieces of one direction."""

    def close(self) -> None:
        """Close every connection and end the thread."""
        self._server.close()
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=5) if others else None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = None
        try:
            if self.mode == CLOSED:
                return
            name = "127.0.0.1" if self._far else None
            far_reader, far = await asyncio.open_connection(
                "127.0.0.1", self._target, ssl=self._far, server_hostname=name
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, far))
                group.create_task(self._carry(far_reader, writer))
                group.create_task(self._watch())
        except* (OSError, asyncio.CancelledError, ConnectionError):  # a broken connection is what a wire is for
            pass
        finally:
            for each in (writer, far):
                if each is not None:
                    with suppress(OSError, RuntimeError):
                        each.transport.abort()

    async def _watch(self) -> None:
        while self.mode != CLOSED:
            await asyncio.sleep(0.05)
        raise ConnectionResetError

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(PIECE):
            if self.mode == SLOW:
                await asyncio.sleep(DELAY)
            while self.mode == HELD:
                await asyncio.sleep(0.05)
            torn = self.mode == TORN
            if torn:
                self.mode, part = OPEN, part[: len(part) // 2]
            elif self.mode == CORRUPT:
                self.mode, part = OPEN, bytes([part[0] ^ 1]) + part[1:]
            self.heard(part, reader)
            writer.write(part)
            await writer.drain()
            if torn:
                break
        raise ConnectionResetError  # one side has ended: so does the connection
