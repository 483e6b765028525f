"""Claims in the table ``processed_jobs``: they commit by themselves, before the body runs and after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    case,
    delete,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from celery_selfheal import clock
from celery_selfheal.database.drivers import shown
from celery_selfheal.database.instants import store_now
from celery_selfheal.database.migrate import REMEDY
from celery_selfheal.database.tables import ProcessedJob as Row
from celery_selfheal.dedup.faults import Fault, fault_of, said
from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.port import Answer, Granted, Held, Job, Status
from celery_selfheal.dedup.record import Record, judge, owner_of
from celery_selfheal.errors import StoreError

LOCK_WAIT = timedelta(seconds=3)
"""How long a statement waits for a transaction that works on the same key: our own take milliseconds."""

REPEAT_FOR = timedelta(seconds=10)
"""How long what was undone by a deadlock or a locked file is repeated."""

_PAUSE_SECONDS = 0.05
_LOOKS = 3  # so often may a row vanish between two of our statements

_UNSEEN = Held(task_id="", token="", fence=0, age=timedelta(0))  # nobody's token

# A connection that broke is repeated on a fresh one, which fails if the database is down, or is known by the token.
_REPEATABLE = (Fault.BLOCKED, Fault.REPEAT, Fault.BROKEN)

_T = TypeVar("_T")


class SqlClaims:
    """``ClaimStore`` in the user's database.

    Every statement commits by itself, so that a process that is paused or dies between two of them locks nothing.

    Args:
        engine: Of this process. Its connections go back as they were.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._address = shown(engine.url)
        self._dialect = {"mariadb": "mysql"}.get(engine.dialect.name, engine.dialect.name)

    def claim(self, job: Job) -> Answer:
        """See ``ClaimStore.claim``."""

        def step(connection: Connection) -> Answer:
            for _ in range(_LOOKS):
                if self._insert(connection, job, Status.IN_PROGRESS):
                    return Granted()
                record = self._look(connection, job)
                if record is not None:
                    return judge(job, record)
            return _unseen()

        return self._do("claim", step, blocked=_unseen())

    def inherit(self, job: Job, held: Held, *, doubt: bool) -> bool:
        """See ``ClaimStore.inherit``."""
        status = Status.IN_DOUBT if doubt else Status.IN_PROGRESS
        was_owner = Row.owner == str(Owner(held.task_id, held.token)) if held.token else Row.owner.is_(None)
        change = (
            update(Row)
            .where(*self._row_of(job, Status.IN_PROGRESS), was_owner)
            .where(Row.fence == held.fence, Row.fence <= job.fence)
            .values(status=status.value, owner=str(owner_of(job)), fence=job.fence, updated_at=store_now())
        )

        def step(connection: Connection) -> bool:
            if connection.execute(change).rowcount:
                return True
            record = self._look(connection, job)
            return record is not None and record.is_of(job) and record.status is status

        return self._do("inherit", step)

    def complete(self, job: Job, payload: Any) -> bool:
        """See ``ClaimStore.complete``."""
        change = (
            update(Row)
            .where(*self._row_of(job, Status.IN_PROGRESS))
            .where(Row.owner == str(owner_of(job)), Row.fence <= job.fence)
            .values(status=Status.COMPLETED.value, response_payload=payload, updated_at=store_now())
        )

        def step(connection: Connection) -> bool:
            for _ in range(_LOOKS):
                if connection.execute(change).rowcount:
                    return True
                record = self._look(connection, job)
                if record is not None:
                    return record.is_of(job) and record.status is Status.COMPLETED
                if self._insert(connection, job, Status.COMPLETED, payload):
                    return True
            return False

        return self._do("complete", step)

    def withdraw(self, job: Job) -> None:
        """See ``ClaimStore.withdraw``."""
        change = delete(Row).where(*self._row_of(job, Status.IN_PROGRESS), Row.owner == str(owner_of(job)))
        self._do("withdraw", lambda connection: connection.execute(change))

    def mark_dispatched(self, job: Job) -> None:
        """See ``ClaimStore.mark_dispatched``."""
        change = update(Row).where(*self._row_of(job, Status.COMPLETED)).values(dispatched=True)
        self._do("mark_dispatched", lambda connection: connection.execute(change))

    def _row_of(self, job: Job, status: Status) -> list[ColumnElement[bool]]:
        where = [Row.idempotency_key == job.key, Row.status == status.value]
        if self._dialect == "postgresql":
            where.append(select(_lock_timeout()).scalar_subquery().is_not(None))
        return where

    def _insert(self, connection: Connection, job: Job, status: Status, payload: Any = None) -> bool:
        """``False`` when the key is taken, be it by this very start."""
        values: dict[str, Any] = {
            "idempotency_key": job.key,
            "job_name": job.task_name,
            "status": status.value,
            "response_payload": payload,
            "fence": job.fence,
            "payload_hash": job.payload_hash,
            "owner": str(owner_of(job)),
        }
        if self._dialect == "postgresql":
            values["job_name"] = case((_lock_timeout().is_not(None), job.task_name))
            return bool(connection.execute(postgresql.insert(Row).values(values).on_conflict_do_nothing()).rowcount)
        if self._dialect == "sqlite":
            return bool(connection.execute(sqlite.insert(Row).values(values).on_conflict_do_nothing()).rowcount)
        try:
            # INSERT IGNORE would also ignore a text that is too long, and cut it.
            connection.execute(insert(Row).values(values))
        except SQLAlchemyError as exc:
            if fault_of(exc) is Fault.DUPLICATE:
                return False
            raise
        return True

    def _look(self, connection: Connection, job: Job) -> Record | None:
        row = connection.execute(
            select(
                Row.status,
                Row.job_name,
                Row.owner,
                Row.fence,
                Row.payload_hash,
                Row.response_payload,
                Row.dispatched,
                Row.updated_at,
                store_now().label("now"),
            ).where(Row.idempotency_key == job.key)
        ).one_or_none()
        if row is None:
            return None
        return Record(
            status=Status(row.status),
            task_name=row.job_name,
            owner=Owner.parse(row.owner),
            fence=row.fence,
            payload_hash=row.payload_hash,
            age=row.now - row.updated_at,
            payload=row.response_payload,
            dispatched=row.dispatched,
        )

    def _do(self, what: str, step: Callable[[Connection], _T], *, blocked: _T | None = None) -> _T:
        """Run a step that may be repeated from its beginning.

        Raises:
            StoreError: in every case in which the database did not do it.
        """
        until = clock.monotonic() + REPEAT_FOR.total_seconds()
        while True:
            try:
                with self._engine.begin() as connection, self._bounded_waits(connection):
                    return step(connection)
            except SQLAlchemyError as exc:
                fault = fault_of(exc)
                if fault is Fault.BLOCKED and blocked is not None:
                    return blocked
                if fault not in _REPEATABLE or clock.monotonic() > until:
                    hint = f"; {REMEDY}" if fault is Fault.NO_TABLE else ""
                    raise StoreError(self._address, f"{what}: {said(exc)}{hint}") from exc
            time.sleep(clock.jitter().uniform(0, _PAUSE_SECONDS))

    @contextmanager
    def _bounded_waits(self, connection: Connection) -> Iterator[None]:
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


def _unseen() -> Answer:
    """Somebody has the key, in a transaction that has not ended."""
    return Held(task_id="", token="", fence=0, age=timedelta(0))  # nobody's


def _lock_timeout() -> ColumnElement[str]:
    """Bound the wait of the statement it stands in, and of no other: there is no session behind a pooler to set."""
    return func.set_config("lock_timeout", f"{round(LOCK_WAIT.total_seconds() * 1000)}ms", True)
