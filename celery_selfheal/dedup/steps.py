"""Short steps on the user's database: each statement commits by itself, waits bounded, and may be repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, case, func, insert, literal, select, text, true
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from celery_selfheal import clock
from celery_selfheal.database.drivers import shown
from celery_selfheal.database.migrate import REMEDY
from celery_selfheal.dedup.faults import Fault, fault_of, said
from celery_selfheal.errors import StoreError

LOCK_WAIT = timedelta(seconds=3)
"""How long a statement waits for a transaction that works on the same row: our own take milliseconds."""

REPEAT_FOR = timedelta(seconds=10)
"""How long what was undone by a deadlock, a lock or a broken connection is repeated."""

_PAUSE_SECONDS = 0.05

# A connection that broke is repeated on a fresh one, which fails at once if the database is down.
_REPEATABLE = (Fault.BLOCKED, Fault.REPEAT, Fault.BROKEN)

_T = TypeVar("_T")


class Steps:
    """Runs steps that are known by their token, so that one whose reply was lost can be made again.

    A process that is paused or dies between two statements locks nothing.

    Args:
        engine: Of this process. Its connections go back as they were.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._address = shown(engine.url)
        self._dialect = {"mariadb": "mysql"}.get(engine.dialect.name, engine.dialect.name)

    def do(self, what: str, step: Callable[[Connection], _T], *, blocked: Callable[[], _T] | None = None) -> _T:
        """Run a step, perhaps several times from its beginning.

        Args:
            what: Names it in errors.
            blocked: What to answer when another transaction holds the row for longer than ``LOCK_WAIT``; by default
                the step is repeated for ``REPEAT_FOR``.

        Raises:
            StoreError: the database did not do it, or its reply was lost.
        """
        until = clock.monotonic() + REPEAT_FOR.total_seconds()
        while True:
            try:
                with self._connected() as connection, self._bounded_waits(connection):
                    return step(connection)
            except SQLAlchemyError as exc:
                fault = fault_of(exc)
                if fault is Fault.BLOCKED and blocked is not None:
                    return blocked()
                if fault not in _REPEATABLE or clock.monotonic() > until:
                    hint = f"; {REMEDY}" if fault is Fault.NO_TABLE else ""
                    raise StoreError(self._address, f"{what}: {said(exc)}{hint}") from exc
            time.sleep(clock.jitter().uniform(0, _PAUSE_SECONDS))

    @property
    def bound(self) -> ColumnElement[bool]:
        """Belongs into the ``WHERE`` of every change: true, and bounds how long it waits for a lock."""
        return select(_lock_timeout()).scalar_subquery().is_not(None) if self._is_postgresql else true()

    def insert(self, connection: Connection, row: type[Any], values: dict[str, Any]) -> bool:
        """Insert a row whose first value is its key; ``False`` where the key is there already.

        Not every driver tells the number of rows (psycopg 3 says -1 after an INSERT), so it is only trusted if it is 1.
        """
        if self._is_postgresql:
            key, value = next(iter(values.items()))
            bounded = {**values, key: case((_lock_timeout().is_not(None), literal(value)))}
            change = postgresql.insert(row).values(bounded).on_conflict_do_nothing().returning(literal(1))
            return connection.execute(change).first() is not None
        if self._dialect == "sqlite":
            return connection.execute(sqlite.insert(row).values(values).on_conflict_do_nothing()).rowcount == 1
        try:
            # INSERT IGNORE would also ignore a text that is too long, and cut it.
            connection.execute(insert(row).values(values))
        except SQLAlchemyError as exc:
            if fault_of(exc) is Fault.DUPLICATE:
                return False
            raise
        return True

    @property
    def _is_postgresql(self) -> bool:
        return self._dialect == "postgresql"

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        dialect = self._engine.dialect
        try:
            with self._engine.begin() as connection:
                yield connection
        except dialect.loaded_dbapi.Error as exc:
            # A connection that broke in the pool, and was found out when its isolation level was set: SQLAlchemy lets
            # such an error through as it is.
            is_broken = dialect.is_disconnect(exc, None, None)
            raise DBAPIError(None, None, exc, connection_invalidated=is_broken) from exc

    @contextmanager
    def _bounded_waits(self, connection: Connection) -> Iterator[None]:
        """On MySQL this is a matter of the session: 50 s by default, and by the minute in most set-ups."""
        if self._dialect != "mysql":
            yield
            return
        seconds = int(LOCK_WAIT.total_seconds())
        connection.execute(
            text(f"SET @selfheal_wait = @@innodb_lock_wait_timeout, SESSION innodb_lock_wait_timeout = {seconds}")
        )
        try:
            yield
        finally:
            if not connection.invalidated:
                connection.execute(text("SET SESSION innodb_lock_wait_timeout = @selfheal_wait"))


def _lock_timeout() -> ColumnElement[str]:
    """Bound the wait of the statement it stands in, and of no other: behind a pooler there is no session to set."""
    return func.set_config("lock_timeout", f"{round(LOCK_WAIT.total_seconds() * 1000)}ms", true())
