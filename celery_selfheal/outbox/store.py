"""The rows of ``selfheal_outbox``: written by a transaction, held while they are published, removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Dialect, Engine, bindparam, delete, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from celery_selfheal.database.drivers import shown
from celery_selfheal.database.instants import store_now
from celery_selfheal.database.tables import OutboxMessage
from celery_selfheal.errors import StoreError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

_ID_CHARACTERS = 255
_FIRST_WITH_SKIP_LOCKED = {"mysql": (8, 0, 1), "mariadb": (10, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One row.

    Attributes:
        message: As it was written.
        age: Since it was written, by the database's clock.
    """

    id: int
    task_id: str
    message: str
    age: timedelta


class Held:
    """Rows that nobody else publishes meanwhile, oldest first.

    SQLite has no locks of rows: there two may hold the same.
    """

    def __init__(self, connection: Connection, rows: Sequence[Waiting]) -> None:
        self._connection = connection
        self.rows = rows

    def remove(self, ids: Sequence[int]) -> None:
        """Remove rows when the hold ends; those that are gone already are no error."""
        if not ids:
            return
        if self._connection.dialect.name in ("mysql", "mariadb"):
            # Of a list InnoDB may make a scan, which waits for every row that another one holds, who may wait for ours.
            self._connection.execute(
                delete(OutboxMessage).where(OutboxMessage.id == bindparam("one")), [{"one": one} for one in ids]
            )
        else:
            self._connection.execute(delete(OutboxMessage).where(OutboxMessage.id.in_(ids)))


class Outbox:
    """The table, on one engine. Any method raises ``StoreError`` when the database did not answer or refused.

    Whoever publishes holds the rows in a transaction of its own until they are removed: if it dies, the database lets
    them go, and they are published again.
    """

    def __init__(self, engine: Engine) -> None:
        # Whatever the application has chosen: a higher level would lock the gaps between rows, too, and two that remove
        # neighbours would be each other's deadlock.
        is_sqlite = engine.dialect.name == "sqlite"
        self._engine = engine if is_sqlite else engine.execution_options(isolation_level="READ COMMITTED")
        self.address = shown(engine.url)

    @contextmanager
    def hold(self, *, limit: int, older_than: timedelta, but_not: Sequence[int] = ()) -> Iterator[Held]:
        """Hold the oldest rows that nobody else holds, in the order in which they were written.

        Args:
            limit: So many at most.
            older_than: Younger ones are just being published by whoever wrote them.
            but_not: Ids to be passed over.
        """
        wanted = select(OutboxMessage.id, OutboxMessage.task_id, OutboxMessage.message, OutboxMessage.created_at)
        if but_not:
            wanted = wanted.where(OutboxMessage.id.not_in(but_not))
        with self._held(wanted.limit(limit), older_than=older_than) as held:
            yield held

    @contextmanager
    def hold_these(self, ids: Sequence[int]) -> Iterator[Held]:
        """Hold those of some rows that are there and that nobody else holds."""
        wanted = select(OutboxMessage.id, OutboxMessage.task_id, OutboxMessage.message, OutboxMessage.created_at)
        # A scan would lock the rows of others for a moment, and those who look for them just then would miss them.
        for dialect in ("mysql", "mariadb"):
            wanted = wanted.with_hint(OutboxMessage, "FORCE INDEX (PRIMARY)", dialect)
        with self._held(wanted.where(OutboxMessage.id.in_(ids)), older_than=None) as held:
            yield held

    def count(self) -> int:
        """How many rows wait, those that others hold among them; looks at each."""
        with self._answering(), self._engine.connect() as connection:
            return len(connection.execute(select(OutboxMessage.id)).all())

    @contextmanager
    def _held(self, wanted: Any, *, older_than: timedelta | None) -> Iterator[Held]:
        with self._answering(), self._engine.begin() as connection:
            # The store's clock judges. A statement of its own: what it takes to compute with instants differs.
            now: datetime = connection.execute(select(store_now())).scalar_one()
            if older_than is not None:
                wanted = wanted.where(OutboxMessage.created_at <= now - older_than)
            if _skips_locked(connection.dialect):
                wanted = wanted.with_for_update(skip_locked=True)
            found = connection.execute(wanted.order_by(OutboxMessage.id))
            yield Held(
                connection,
                [
                    Waiting(id=row.id, task_id=row.task_id, message=row.message, age=now - row.created_at)
                    for row in found
                ],
            )

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as exc:
            said = getattr(exc, "orig", None) or exc
            raise StoreError(self.address, " ".join(str(said).split())) from exc


def add_rows(session: Session, messages: Sequence[tuple[str, str]]) -> list[OutboxMessage]:
    """Add rows to a session's transaction: they are written with its next flush, and rolled back with it.

    Args:
        messages: Task id and message of each; the id is for people, and cut to what its column holds.
    """
    rows = [OutboxMessage(task_id=task_id[:_ID_CHARACTERS], message=message) for task_id, message in messages]
    session.add_all(rows)
    return rows


def ids_of(rows: Sequence[OutboxMessage]) -> list[int]:
    """Ids of those rows that were flushed; without a statement, also when the session has expired them."""
    identities = (inspect(row).identity for row in rows)
    return [int(identity[0]) for identity in identities if identity is not None]


def _skips_locked(dialect: Dialect) -> bool:
    name = "mariadb" if getattr(dialect, "is_mariadb", False) else dialect.name
    version = getattr(dialect, "server_version_info", None) or ()
    return name == "postgresql" or (name in _FIRST_WITH_SKIP_LOCKED and tuple(version) >= _FIRST_WITH_SKIP_LOCKED[name])
