"""The dedup row inside the body's own transaction: two statements, and the database undoes both with the body."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, bindparam, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from celery_selfheal.database.instants import store_now
from celery_selfheal.database.tables import ProcessedJob
from celery_selfheal.dedup.backends import ALONE, LOCK_WAIT, RESTORED, alone_values, end_older
from celery_selfheal.dedup.faults import Fault, fault_of
from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.port import Answer, Granted, Held, Job, Status
from celery_selfheal.dedup.record import Record, judge, owner_of, status_of, unseen

JOBS = ProcessedJob.__table__
_COLUMNS = "idempotency_key, job_name, status, fence, payload_hash, owner, dispatched"
_POSTGRES = text(f"""
WITH {ALONE}
INSERT INTO processed_jobs ({_COLUMNS})
SELECT :key, :job_name, 'IN_PROGRESS', :fence, :payload_hash, :owner, false FROM alone
ON CONFLICT DO NOTHING
RETURNING {RESTORED}
""")  # noqa: S608  # constants only
_MYSQL_ROW = f"""INTO processed_jobs ({_COLUMNS})
VALUES (:key, :job_name, 'IN_PROGRESS', :fence, :payload_hash, CONCAT(:owner, '@', CONNECTION_ID()), false)"""
_MARIADB = text(
    f"SET STATEMENT innodb_lock_wait_timeout = {LOCK_WAIT.seconds} FOR INSERT IGNORE {_MYSQL_ROW}"
)  # as above
_MYSQL = text(f"INSERT /*+ SET_VAR(innodb_lock_wait_timeout = {LOCK_WAIT.seconds}) */ IGNORE {_MYSQL_ROW}")  # as above
_SQLITE = text(f"""
INSERT OR IGNORE INTO processed_jobs ({_COLUMNS})
VALUES (:key, :job_name, 'IN_PROGRESS', :fence, :payload_hash, :owner, false)
""")  # noqa: S608  # as above

# Made once: SQLAlchemy would take longer to put it together than the database to execute it.
_COMPLETE = (
    update(JOBS)  # type: ignore[arg-type]  # declared as any FROM clause
    .where(
        JOBS.c.idempotency_key == bindparam("of_key"),
        JOBS.c.status == Status.IN_PROGRESS.value,
        JOBS.c.fence == bindparam("of_fence"),
    )
    .values(status=Status.COMPLETED.value, response_payload=bindparam("payload", type_=JOBS.c.response_payload.type))
)


def take(session: Session, job: Job) -> Answer | None:
    """Insert the row of ``job``; waits ``LOCK_WAIT`` for another transaction that has the key.

    Unless the answer is ``Granted``, the transaction is rolled back.

    Returns:
        ``None`` when whoever had the key has rolled back meanwhile: it is free again.
    """
    try:
        if _insert(session, job):
            return Granted()
        session.rollback()
        found = look(session, job)
    except DBAPIError as exc:
        session.rollback()
        if fault_of(exc) not in (Fault.BLOCKED, Fault.REPEAT):
            raise
        return unseen()
    session.rollback()
    return found


def look(session: Session, job: Job) -> Answer | None:
    """What the committed row says; ``None`` without one."""
    found = session.execute(select(JOBS, store_now().label("now")).where(JOBS.c.idempotency_key == job.key)).first()
    if found is None:
        return None
    record = Record(
        status=status_of(found.status),
        task_name=found.job_name,
        owner=Owner.parse(found.owner),
        fence=int(found.fence),
        payload_hash=found.payload_hash,
        age=found.now - found.updated_at,
        payload=found.response_payload,
        dispatched=bool(found.dispatched),
    )
    return judge(job, record)


def inherit(session: Session, job: Job, held: Held) -> bool:
    """Take a row that another mode, or another system with this table, left in progress; commits with the body."""
    return _updated(
        session,
        job,
        JOBS.c.status == Status.IN_PROGRESS.value,
        JOBS.c.fence == held.fence,
        JOBS.c.fence < job.fence,
        fence=job.fence,
        owner=str(owner_of(job)),
        payload_hash=job.payload_hash,
    )


def complete(session: Session, job: Job, payload: Any) -> bool:
    """Say that the effect is there, as the transaction's last statement.

    Args:
        payload: The result as plain JSON values; ``None`` stores none.

    Returns:
        ``False`` when the row is not this start's any more: the transaction must be rolled back.
    """
    # A statement for the table: one for the class would also look for objects of it in the body's session.
    done = {"of_key": job.key, "of_fence": job.fence, "payload": payload}
    return _is_one(session.execute(_COMPLETE, done))


def mark_dispatched(session: Session, job: Job) -> None:
    """Remember that the callbacks of a finished job were sent. A second call changes nothing."""
    _updated(session, job, JOBS.c.status == Status.COMPLETED.value, dispatched=True)
    session.commit()


def is_committed(session: Session, job: Job) -> bool:
    """Whether this very start's commit went through, though its answer was lost."""
    found = session.execute(
        select(JOBS.c.fence).where(
            JOBS.c.idempotency_key == job.key, JOBS.c.status == Status.COMPLETED.value, JOBS.c.fence == job.fence
        )
    ).first()
    return found is not None


def end_overtaken(engine: Engine, job: Job) -> bool:
    """End the connection of an earlier start of the same task that still has the key: paused, or cut off.

    Never of a later one, nor of another task's. To be called by whoever has just proved that the lease is its own.

    Returns:
        Whether there was one. SQLite has no connections to end: always ``False``.
    """
    if engine.dialect.name == "postgresql":
        return end_older(engine, job.key, fence=job.fence, task_id=job.task_id)
    if engine.dialect.name not in ("mysql", "mariadb"):
        return False
    with engine.connect().execution_options(isolation_level="READ UNCOMMITTED") as connection:
        row = connection.execute(select(JOBS.c.owner, JOBS.c.fence).where(JOBS.c.idempotency_key == job.key)).first()
        owner = Owner.parse(row.owner if row else None)
        _, _, backend = owner.token.partition("@")
        if row is None or owner.task_id != job.task_id or row.fence >= job.fence or not backend:
            return False
        connection.exec_driver_sql(f"KILL {int(backend)}")
        return True


def _insert(session: Session, job: Job) -> bool:
    dialect = session.get_bind().dialect
    values = {
        "key": job.key,
        "job_name": job.task_name,
        "fence": job.fence,
        "payload_hash": job.payload_hash,
        "owner": str(owner_of(job)),
    }
    if dialect.name == "postgresql":
        values.update(alone_values(job.key, task_id=job.task_id, fence=job.fence))
        return session.execute(_POSTGRES, values).first() is not None
    if dialect.name in ("mysql", "mariadb"):
        statement = _MARIADB if getattr(dialect, "is_mariadb", False) else _MYSQL
        return _is_one(session.execute(statement, values))
    return _is_one(session.execute(_SQLITE, values))


def _updated(session: Session, job: Job, *conditions: Any, **values: Any) -> bool:
    statement = update(ProcessedJob).where(JOBS.c.idempotency_key == job.key, *conditions)
    result = session.execute(statement.values(**values))
    return _is_one(result)


def _is_one(result: Any) -> bool:
    # A driver that cannot tell the number says -1, which is none.
    return bool(result.rowcount == 1)
