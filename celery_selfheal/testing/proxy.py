"""A TCP proxy that breaks connections on demand."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import TypeVar

from celery_selfheal.testing.servers import HOST, free_port

CHUNK_BYTES = 1 << 16
COMMAND_SECONDS = 10.0

_T = TypeVar("_T")


class TcpProxy:
    """Forwards a loopback port to a server, and fails as networks do.

    A fault is in force when the method that asks for it returns, and is independent of the others. Any thread may ask.

    Attributes:
        replies_dropped: So many replies were swallowed; a test that wants a lost reply should see that it was.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.replies_dropped = 0
        self._target = (target_host, target_port)
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._links: set[_Link] = set()
        self._is_refusing = False
        self._delay_seconds = 0.0
        self._replies_to_drop = 0
        self._request_to_drop = b""

    @property
    def port(self) -> int:
        """The port to connect to, on 127.0.0.1."""
        return self._port

    @property
    def connections(self) -> int:
        """So many connections are open through the proxy."""
        return len(self._links)

    def start(self) -> TcpProxy:
        """Listen. The target need not be up: who connects meanwhile is cut. Once only."""
        self._port = free_port()
        self._thread.start()
        self._run(self._listen())
        return self

    def stop(self) -> None:
        """Cut all connections and listen no more. A second call does nothing."""
        if self._thread.is_alive():
            self._run(self._shut_down())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(COMMAND_SECONDS)
        self._loop.close()

    def cut(self) -> None:
        """Reset (RST) every open connection, towards both ends; new ones may come."""
        self._run(self._cut())

    def refuse(self, on: bool = True) -> None:
        """Reset new connections at once, or no more. Open ones are not touched."""
        self._is_refusing = on

    def delay(self, seconds: float) -> None:
        """Hold back whatever comes, in each direction, for so long; 0 ends it."""
        self._delay_seconds = seconds

    def drop_reply(self, n: int = 1, *, request: bytes = b"") -> None:
        """Swallow the ``n``-th reply from now on, over all connections, and cut its connection. Once.

        The server has done the work; its client cannot know. A reply is what is read from the server at once.

        Args:
            request: Count only replies on connections that sent these bytes since the reply before.
        """
        self._request_to_drop = request
        self._replies_to_drop = n

    def half_open(self, on: bool = True) -> None:
        """Keep all connections, and take new ones, but forward nothing; when it ends, what was sent meanwhile flows."""
        self._run(self._set_flowing(not on))

    def __enter__(self) -> TcpProxy:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self, command: Coroutine[object, object, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(command, self._loop).result(COMMAND_SECONDS)

    async def _listen(self) -> None:
        # Made here: in Python 3.10 an event belongs to the loop that runs.
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, HOST, self._port)

    async def _set_flowing(self, on: bool) -> None:
        if on:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _cut(self) -> None:
        for link in self._links:
            link.reset()
        self._links.clear()
        await asyncio.sleep(0)  # sockets are closed at the loop's next turn

    async def _shut_down(self) -> None:
        self._server.close()
        await self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            _reset(writer)
            return
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        link = _Link(writer, target_writer)
        self._links.add(link)
        try:
            await asyncio.gather(
                self._forward(reader, target_writer, link, is_reply=False),
                self._forward(target_reader, writer, link, is_reply=True),
            )
            writer.close()
            target_writer.close()
        except OSError:
            link.reset()
        finally:
            self._links.discard(link)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link, *, is_reply: bool
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if self._delay_seconds:
                await asyncio.sleep(self._delay_seconds)
            await self._flowing.wait()
            if is_reply and self._is_to_drop(link):
                self.replies_dropped += 1
                link.reset()
                return
            if is_reply:
                link.request = b""
            elif self._replies_to_drop:
                link.request += chunk
            writer.write(chunk)
            await writer.drain()
        await self._flowing.wait()
        writer.write_eof()

    def _is_to_drop(self, link: _Link) -> bool:
        if not self._replies_to_drop or self._request_to_drop not in link.request:
            return False
        self._replies_to_drop -= 1
        return not self._replies_to_drop


class _Link:
    """One connection through the proxy.

    Attributes:
        request: What the client sent since the last reply, while a reply is to be dropped.
    """

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.request = b""
        self._writers = writers

    def reset(self) -> None:
        for writer in self._writers:
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    if not writer.is_closing():
        sock: socket.socket = writer.get_extra_info("socket")
        # Lingering for 0 s is what makes a close a reset.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
