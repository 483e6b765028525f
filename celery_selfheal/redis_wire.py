"""The short way to Redis: one packed command on a connection that nobody else uses meanwhile.

redis-py's client spends more processor on a call than the server does. Its ``Connection`` is kept, and with it login,
TLS, Sentinel, database and timeouts; what is left out is what surrounds it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import redis

Word: TypeAlias = str | int | float | bytes
"""One argument of a command."""


def packed(words: Iterable[Word]) -> bytes:
    """Words as they stand on the wire, without the count in front of them."""
    pieces = []
    for word in words:
        data = word.encode() if isinstance(word, str) else word if isinstance(word, bytes) else repr(word).encode()
        pieces.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(pieces)


def command(count: int, *chunks: bytes) -> bytes:
    """One command of ``count`` words; they may have been ``packed`` in parts, and long ago."""
    return b"*%d\r\n%b" % (count, b"".join(chunks))


def milliseconds(duration: timedelta) -> int:
    """Whole milliseconds, for ``PX``."""
    return round(duration.total_seconds() * 1000)


class Wire:
    """Connections to the server of one client, and to none of those that the client itself uses.

    Threads and greenlets may share it: each call has a connection of its own. A forked child begins with none.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._idle: tuple[int, list[Any]] = (os.getpid(), [])

    def call(self, data: bytes) -> Any:
        """Send one command and wait for its answer.

        When the connection breaks or the answer does not come in time, it is sent once more on a new one: whatever is
        sent may run twice. That covers a connection that the server closed while it was idle.

        Raises:
            RedisError: no answer, or a refusal. The effect is unknown.
        """
        idle = self._idle_here()
        try:
            connection = idle.pop()
        except IndexError:
            connection = new_connection(self._pool)
        try:
            try:
                reply = _ask(connection, data)
            except (redis.ConnectionError, redis.TimeoutError):
                connection.disconnect()
                reply = _ask(connection, data)
        except BaseException:
            # A refusal, too: the next call logs in anew, and may find another server.
            connection.disconnect()
            raise
        # Only here: a signal's exception at any line above must not leave an unread answer to the next call.
        idle.append(connection)
        return reply

    def _idle_here(self) -> list[Any]:
        pid, idle = self._idle
        if pid != os.getpid():
            # The parent goes on with its connections; here they are only closed.
            idle = []
            self._idle = (os.getpid(), idle)
        return idle


def new_connection(pool: Any) -> Any:
    """A connection to the pool's server for one user alone; it connects on first use.

    Not by the pool's own hand: that counts what it makes, forgets nothing, and would one day refuse to make more.
    """
    return pool.connection_class(**pool.connection_kwargs)


def wire_of(client: redis.Redis) -> Wire:
    """The one wire of a client, whoever asks for it."""
    wire = _wires.get(client)
    if wire is None:
        wire = _wires.setdefault(client, Wire(client))
    return wire


def _ask(connection: Any, data: bytes) -> Any:
    connection.send_packed_command((data,), check_health=False)
    return connection.read_response()


_wires: WeakKeyDictionary[redis.Redis, Wire] = WeakKeyDictionary()
