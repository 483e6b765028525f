"""Rows of ``processed_jobs`` for people: look at them, and settle what is in doubt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, and_, delete, or_, select, update

from celery_selfheal.database.instants import store_now
from celery_selfheal.database.migrate import answering
from celery_selfheal.database.tables import ProcessedJob

#: What asks for a person comes first.
STATUSES = ("IN_DOUBT", "IN_PROGRESS", "COMPLETED")
PAGE_ROWS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """What one idempotency key did.

    Attributes:
        owner: Task id, token and connection of the start that has it, as its row says.
        has_result: A result is stored, be it ``None``.
        dispatched: Its callbacks were sent.
    """

    key: str
    task: str
    status: str
    owner: str | None
    fence: int
    has_result: bool
    dispatched: bool
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which rows are meant: those for which all holds that is set.

    Attributes:
        task: Name of the task; ``*`` and ``?`` match as in a shell.
        older_than: Last changed longer ago, by the database's clock.
    """

    status: str | None = None
    keys: tuple[str, ...] = ()
    task: str | None = None
    older_than: timedelta | None = None


def find_jobs(engine: Engine, wanted: JobFilter, *, limit: int | None = None) -> Iterator[JobRow]:
    """Rows, page by page: those in doubt first, then those in progress, then finished ones; each kind newest first.

    Raises:
        StoreError: the database does not answer.
    """
    left = limit
    for status in STATUSES if wanted.status is None else (wanted.status,):
        last: JobRow | None = None
        while left is None or left > 0:
            page = _page(engine, wanted, status, after=last, rows=PAGE_ROWS if left is None else min(PAGE_ROWS, left))
            yield from page
            if left is not None:
                left -= len(page)
            if len(page) < PAGE_ROWS:
                break
            last = page[-1]


def settle(engine: Engine, key: str, *, happened: bool) -> bool:
    """Say of a row in doubt what a person has found out.

    Args:
        happened: The effect is there: the row counts as finished, without a result. Else it is deleted, and the next
            start with this key runs its body.

    Returns:
        Whether there was such a row in doubt; a second call finds none.

    Raises:
        StoreError: the database does not answer; a repeat is harmless.
    """
    in_doubt = (ProcessedJob.idempotency_key == key, ProcessedJob.status == "IN_DOUBT")
    with answering(engine), engine.begin() as connection:
        if happened:
            settled = connection.execute(update(ProcessedJob).where(*in_doubt).values(status="COMPLETED"))
        else:
            settled = connection.execute(delete(ProcessedJob).where(*in_doubt))
        return settled.rowcount == 1


def _page(engine: Engine, wanted: JobFilter, status: str, *, after: JobRow | None, rows: int) -> list[JobRow]:
    table = ProcessedJob
    columns: tuple[Any, ...] = (
        table.idempotency_key.label("key"),
        table.job_name.label("task"),
        table.response_payload.is_not(None).label("has_result"),
        *(table.status, table.owner, table.fence, table.dispatched, table.created_at, table.updated_at),
    )
    statement = select(*columns).where(table.status == status)
    if wanted.keys:
        statement = statement.where(table.idempotency_key.in_(wanted.keys))
    if wanted.task is not None:
        statement = statement.where(table.job_name.like(_as_like(wanted.task), escape="!"))
    if after is not None:
        older = table.updated_at < after.updated_at
        beside = and_(table.updated_at == after.updated_at, table.idempotency_key > after.key)
        statement = statement.where(or_(older, beside))
    with answering(engine), engine.connect() as connection:
        if wanted.older_than is not None:
            now = connection.execute(select(store_now())).scalar_one()
            statement = statement.where(table.updated_at < now - wanted.older_than)
        found = (
            connection.execute(statement.order_by(table.updated_at.desc(), table.idempotency_key).limit(rows))
            .mappings()
            .all()
        )
    return [JobRow(**{**row, "has_result": bool(row["has_result"])}) for row in found]


def _as_like(glob: str) -> str:
    for special in "!%_":
        glob = glob.replace(special, f"!{special}")
    return glob.replace("*", "%").replace("?", "_")
