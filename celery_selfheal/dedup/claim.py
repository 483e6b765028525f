"""Claims in the table ``processed_jobs``: they commit by themselves, before the body runs and after it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, delete, select, update

from celery_selfheal.database.instants import store_now
from celery_selfheal.database.tables import ProcessedJob as Row
from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.port import Answer, Granted, Held, Job, Status
from celery_selfheal.dedup.record import Record, judge, owner_of, status_of, unseen
from celery_selfheal.dedup.steps import Steps

_LOOKS = 3  # so often may a row vanish between two of our statements


class SqlClaims:
    """``ClaimStore`` in the user's database.

    Args:
        engine: Of this process. Its connections go back as they were.
    """

    def __init__(self, engine: Engine) -> None:
        self._steps = Steps(engine)

    def claim(self, job: Job) -> Answer:
        """See ``ClaimStore.claim``."""

        def step(connection: Connection) -> Answer:
            for _ in range(_LOOKS):
                if self._insert(connection, job, Status.IN_PROGRESS):
                    return Granted()
                record = self._look(connection, job)
                if record is not None:
                    return judge(job, record)
            return unseen()

        return self._steps.do("claim", step, blocked=unseen)

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
            if connection.execute(change).rowcount == 1:
                return True
            record = self._look(connection, job)
            return record is not None and record.is_of(job) and record.status is status

        return self._steps.do("inherit", step)

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
                if connection.execute(change).rowcount == 1:
                    return True
                record = self._look(connection, job)
                if record is not None:
                    return record.is_of(job) and record.status is Status.COMPLETED
                if self._insert(connection, job, Status.COMPLETED, payload):
                    return True
            return False

        return self._steps.do("complete", step)

    def withdraw(self, job: Job) -> None:
        """See ``ClaimStore.withdraw``."""
        change = delete(Row).where(*self._row_of(job, Status.IN_PROGRESS), Row.owner == str(owner_of(job)))
        self._steps.do("withdraw", lambda connection: connection.execute(change))

    def mark_dispatched(self, job: Job) -> None:
        """See ``ClaimStore.mark_dispatched``."""
        change = update(Row).where(*self._row_of(job, Status.COMPLETED)).values(dispatched=True)
        self._steps.do("mark_dispatched", lambda connection: connection.execute(change))

    def _row_of(self, job: Job, status: Status) -> list[ColumnElement[bool]]:
        return [Row.idempotency_key == job.key, Row.status == status.value, self._steps.bound]

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
        return self._steps.insert(connection, Row, values)

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
            status=status_of(row.status),
            task_name=row.job_name,
            owner=Owner.parse(row.owner),
            fence=row.fence,
            payload_hash=row.payload_hash,
            age=row.now - row.updated_at,
            payload=row.response_payload,
            dispatched=row.dispatched,
        )
