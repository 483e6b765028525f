"""Connections of psycopg2 that give up: libpq itself would wait for a server that is frozen, for ever."""

from __future__ import annotations

import select
from typing import Any

import psycopg2
import psycopg2.extensions as ext

from celery_selfheal.clock import monotonic

_PAUSE_SECONDS = 1.0  # a signal's handler has its turn at least that often


class _Cursor(ext.cursor):  # type: ignore[misc]  # psycopg2 ships no types
    """Waits for its answer no longer than its connection has patience."""

    def execute(self, query: Any, vars: Any = None) -> None:  # noqa: A002  # psycopg2's own name
        super().execute(query, vars)
        connection: Any = self.connection
        connection.wait()


class BoundedConnection(ext.connection):  # type: ignore[misc]  # psycopg2 ships no types
    """A connection in psycopg2's asynchronous mode, in which each statement is a transaction, for one that waits.

    Whatever takes longer than the patience closes the connection, and raises ``OperationalError``: the statement may
    have been executed, or may be later.
    """

    def __init__(self, dsn: str, *, seconds: float) -> None:
        super().__init__(dsn, async_=1)
        self._seconds = seconds
        self.wait()

    def wait(self) -> None:
        """Until the server has answered."""
        give_up_at = monotonic() + self._seconds
        while True:
            state = self.poll()
            if state == ext.POLL_OK:
                return
            left = give_up_at - monotonic()
            if left <= 0:
                self.close()
                raise psycopg2.OperationalError(f"no answer within {self._seconds:g} s")
            # Under gevent this lets other greenlets run.
            readers, writers = ([self], []) if state == ext.POLL_READ else ([], [self])
            select.select(readers, writers, [], min(left, _PAUSE_SECONDS))

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """As psycopg2's."""
        return super().cursor(*args, **{"cursor_factory": _Cursor, **kwargs})

    def commit(self) -> None:
        """Nothing: the statement has committed."""

    def rollback(self) -> None:
        """Nothing: there is no transaction."""

    def set_isolation_level(self, level: object) -> None:
        """Nothing: no other than "autocommit" is possible, and SQLAlchemy asks for it."""
