"""The fence of a lock key in the database: what an overtaken holder of the key has done cannot be committed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from celery_selfheal.arguments import shortened
from celery_selfheal.dedup.backends import ALONE, RESTORED, alone_values, end_older
from celery_selfheal.dedup.faults import Fault, fault_of
from celery_selfheal.dedup.port import Answer, Granted, Job
from celery_selfheal.dedup.record import unseen

_POSTGRES = text(f"""
WITH {ALONE}
INSERT INTO selfheal_fences (lock_key, fence) SELECT :lock_key, :fence FROM alone
ON CONFLICT (lock_key) DO UPDATE SET fence = excluded.fence, updated_at = statement_timestamp()
WHERE selfheal_fences.fence <= excluded.fence
RETURNING {RESTORED}
""")  # noqa: S608  # constants only
_SQLITE = text("""
INSERT INTO selfheal_fences (lock_key, fence) VALUES (:lock_key, :fence)
ON CONFLICT (lock_key) DO UPDATE SET fence = excluded.fence WHERE selfheal_fences.fence <= excluded.fence
RETURNING fence
""")
# MySQL does not tell an upsert that changed nothing from one that was refused.
_MYSQL_RAISE = text("UPDATE selfheal_fences SET fence = :fence WHERE lock_key = :lock_key AND fence <= :fence")
_MYSQL_MAKE = text("INSERT IGNORE INTO selfheal_fences (lock_key, fence) VALUES (:lock_key, :fence)")


def pass_fence(session: Session, job: Job, lock_key: str) -> Answer | None:
    """Raise the key's fence to that of the start, as the transaction's first statement: its row is ours until the end.

    An earlier transaction under the key is waited for: ``LOCK_WAIT`` on PostgreSQL, elsewhere as long as the database
    waits for any lock. A repeat by the same fence is let through.

    Returns:
        ``Held`` when it did not end in time, ``None`` when a later lease of the key has passed. Unless the answer is
        ``Granted``, the transaction is rolled back.
    """
    values: dict[str, Any] = {"lock_key": shortened(lock_key), "fence": job.fence}
    dialect = session.get_bind().dialect.name
    try:
        if dialect == "postgresql":
            values.update(alone_values(_name(lock_key), task_id=job.task_id, fence=job.fence))
            passed = session.execute(_POSTGRES, values).first() is not None
        elif dialect == "sqlite":
            passed = session.execute(_SQLITE, values).first() is not None
        else:
            passed = _count(session.execute(_MYSQL_RAISE, values)) == 1 or (
                _count(session.execute(_MYSQL_MAKE, values)) == 1
            )
    except DBAPIError as exc:
        session.rollback()
        if fault_of(exc) not in (Fault.BLOCKED, Fault.REPEAT):
            raise
        return unseen()
    if passed:
        return Granted()
    session.rollback()
    return None


def end_overtaken(engine: Engine, job: Job, lock_key: str) -> bool:
    """End the connection of an earlier lease of the key: paused, or cut off. PostgreSQL only, elsewhere ``False``.

    To be called by whoever has just proved that the lease of the key is its own.
    """
    if engine.dialect.name != "postgresql":
        return False
    return end_older(engine, _name(lock_key), fence=job.fence, task_id=None)


def _name(lock_key: str) -> str:
    return f"lock:{lock_key}"


def _count(result: Any) -> int:
    return int(result.rowcount)
