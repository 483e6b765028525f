"""Delete rows that no late copy of a message can ask for any more, while tasks go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from sqlalchemy import Connection, Engine, Select, delete, func, select, text

from celery_selfheal import clock
from celery_selfheal.database.instants import store_now
from celery_selfheal.database.migrate import answering
from celery_selfheal.database.tables import Fence, ProcessedJob

BATCH_ROWS = 1_000  # some milliseconds of work: nobody who waits for one of these rows notices
FINISHED = "COMPLETED"

# For MySQL, which takes IN with many keys for a reason to read a small table from end to end, and so would wait for
# locked rows that are not even meant.
_BY_KEY = """
DELETE old
FROM JSON_TABLE(:keys, '$[*]' COLUMNS (found VARCHAR(255) CHARACTER SET utf8mb4 PATH '$')) AS due
STRAIGHT_JOIN {table} AS old ON old.{key} = due.found COLLATE utf8mb4_bin
"""

_Step: TypeAlias = Callable[[Connection], "tuple[int, bool]"]
"""Deletes a batch; returns its rows, and whether there may be more."""


def count_due(engine: Engine, *, keep: timedelta) -> int:
    """How many rows ``purge`` would delete from ``processed_jobs`` now."""
    with answering(engine), engine.connect() as connection:
        due = _finished_before(_now(connection) - keep)
        return connection.execute(select(func.count()).select_from(due.subquery())).scalar_one()


def purge(
    engine: Engine, *, keep: timedelta, batch_rows: int = BATCH_ROWS, sleep: Callable[[float], object] = time.sleep
) -> Iterator[int]:
    """Delete what was finished longer ago than ``keep`` by the database's clock; yields the rows of each batch.

    Deleted are ``COMPLETED`` rows, and fences of lock keys that nobody has taken for as long, which are not counted.
    What is in doubt stays until a person has looked. What is in progress stays, too: its start may still run, and if it
    is gone the next one takes it over.

    Each batch is a transaction of its own and does not wait for rows that somebody else holds: they stay for the next
    purge. It is followed by a pause as long as itself, so that a purge of any size takes at most half of one
    connection's time. May be stopped at any point, and run beside others.

    Args:
        keep: At least as long as a message can come late: see ``plugin.retention``.
        batch_rows: Rows of a transaction, at most 1 000.
        sleep: Waits so many seconds.

    Raises:
        StoreError: the database does not answer; the batches before are done.
    """
    batch_rows = min(batch_rows, BATCH_ROWS)
    with answering(engine), engine.connect() as connection:
        cutoff = _now(connection) - keep
    if engine.dialect.name == "sqlite":
        fences = select(Fence.lock_key).where(Fence.updated_at < cutoff)
        yield from _run(_in_one_statement(_finished_before(cutoff), batch_rows), engine, sleep)
        for _ in _run(_in_one_statement(fences, batch_rows), engine, sleep):
            pass
    else:
        yield from _run(_Jobs(cutoff, batch_rows), engine, sleep)
        for _ in _run(_Fences(cutoff, batch_rows), engine, sleep):
            pass


def _run(step: _Step, engine: Engine, sleep: Callable[[float], object]) -> Iterator[int]:
    may_be_more = True
    while may_be_more:
        began = clock.monotonic()
        with answering(engine), _short_transaction(engine) as connection:
            deleted, may_be_more = step(connection)
        if deleted:
            yield deleted
        sleep(clock.monotonic() - began)


@contextmanager
def _short_transaction(engine: Engine) -> Iterator[Connection]:
    # MySQL's default would lock the gaps between the rows, too, and let new ones wait.
    options = {} if engine.dialect.name == "sqlite" else {"isolation_level": "READ COMMITTED"}
    with engine.connect().execution_options(**options) as connection, connection.begin():
        yield connection


def _in_one_statement(due: Select[Any], batch_rows: int) -> _Step:
    """For SQLite: there a transaction that reads before it writes may find that it came too late to write."""

    def step(connection: Connection) -> tuple[int, bool]:
        key = due.selected_columns[0]
        deleted = connection.execute(delete(key.table).where(key.in_(due.limit(batch_rows)))).rowcount
        return deleted, deleted == batch_rows

    return step


class _Jobs:
    """Batches of finished jobs, oldest first."""

    def __init__(self, cutoff: datetime, batch_rows: int) -> None:
        self._cutoff = cutoff
        self._batch_rows = batch_rows
        self._from: datetime | None = None

    def __call__(self, connection: Connection) -> tuple[int, bool]:
        due = _finished_before(self._cutoff).add_columns(ProcessedJob.updated_at)
        if self._from is not None:
            # Not again over what was deleted before: as long as an old transaction lives, it is still there to be
            # stepped over, and each batch would take longer than the last.
            due = due.where(ProcessedJob.updated_at >= self._from)
        due = due.order_by(ProcessedJob.updated_at).limit(self._batch_rows).with_for_update(skip_locked=True)
        rows = connection.execute(due).all()
        if rows:
            self._from = rows[-1][1]
        return _delete(connection, ProcessedJob.idempotency_key, [key for key, _ in rows]), len(
            rows
        ) == self._batch_rows


class _Fences:
    """Batches of idle fences, by key: an index by age would cost each start more than it saves here."""

    def __init__(self, cutoff: datetime, batch_rows: int) -> None:
        self._cutoff = cutoff
        self._batch_rows = batch_rows
        self._after = ""

    def __call__(self, connection: Connection) -> tuple[int, bool]:
        page = select(Fence.lock_key, Fence.updated_at).order_by(Fence.lock_key).limit(self._batch_rows)
        rows = connection.execute(page.where(Fence.lock_key > self._after)).all()
        if rows:
            self._after = rows[-1][0]
        old = [key for key, updated_at in rows if updated_at < self._cutoff]
        # Asked again under lock: a start may have taken the key in between.
        still_old = select(Fence.lock_key).where(Fence.lock_key.in_(old), Fence.updated_at < self._cutoff)
        locked = connection.execute(still_old.with_for_update(skip_locked=True)).scalars() if old else ()
        return _delete(connection, Fence.lock_key, list(locked)), len(rows) == self._batch_rows


def _finished_before(cutoff: datetime) -> Select[Any]:
    return select(ProcessedJob.idempotency_key).where(ProcessedJob.status == FINISHED, ProcessedJob.updated_at < cutoff)


def _delete(connection: Connection, key: Any, keys: list[str]) -> int:
    if not keys:
        return 0
    if connection.dialect.name in ("mysql", "mariadb"):
        return connection.execute(
            text(_BY_KEY.format(table=key.class_.__tablename__, key=key.key)), {"keys": json.dumps(keys)}
        ).rowcount
    return connection.execute(delete(key.class_).where(key.in_(keys))).rowcount


def _now(connection: Connection) -> datetime:
    return connection.execute(select(store_now())).scalar_one()
