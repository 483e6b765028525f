"""Transactions of ours in PostgreSQL: they bound their wait for each other, and can be found and ended from outside."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, text

LOCK_WAIT = timedelta(seconds=1)
"""How long a start waits for another transaction that has its key, before it gives its place in the pool to others."""

ALONE = """
before AS MATERIALIZED (SELECT current_setting('lock_timeout') AS lock_timeout),
bounded AS MATERIALIZED (
  SELECT set_config('lock_timeout', :wait_ms, true), set_config('application_name', :backend, true) FROM before),
alone AS MATERIALIZED (SELECT pg_advisory_xact_lock(:lock) FROM bounded)"""
"""Head of a first statement: it bounds its own wait for another transaction with the same key, and says who we are to
whoever must end us. The advisory lock is there to be asked about; a row that is not committed cannot be seen."""

RESTORED = "set_config('lock_timeout', (SELECT lock_timeout FROM before), true)"
"""To be returned by that statement: the body has its own lock_timeout again."""

# Only while it still has this very key.
_END = text("""
SELECT pg_terminate_backend(held.pid)
FROM pg_locks AS held JOIN pg_stat_activity AS backend ON backend.pid = held.pid
WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 1
  AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (held.classid::bigint << 32 | held.objid::bigint) = :lock
  AND backend.application_name LIKE :ours
  AND split_part(backend.application_name, ' ', 3)::bigint < :fence
""")


def alone_values(name: str, *, task_id: str, fence: int) -> dict[str, Any]:
    """Parameters of ``ALONE``.

    Args:
        name: Of the key, with its kind.
    """
    return {
        "wait_ms": str(int(LOCK_WAIT.total_seconds() * 1000)),
        "backend": f"selfheal {_short(task_id)} {fence}",
        "lock": _lock_of(name),
    }


def end_older(engine: Engine, name: str, *, fence: int, task_id: str | None) -> bool:
    """End the connection of whoever has the key with a smaller fence; ``False`` when nobody has.

    Args:
        task_id: Only if it is a start of this task.
    """
    ours = "selfheal %" if task_id is None else f"selfheal {_short(task_id)} %"
    with engine.begin() as connection:
        return bool(connection.execute(_END, {"lock": _lock_of(name), "ours": ours, "fence": fence}).all())


def _short(task_id: str) -> str:
    # An application_name has 63 characters.
    return hashlib.sha256(task_id.encode()).hexdigest()[:24]


def _lock_of(name: str) -> int:
    """PostgreSQL's advisory locks have 64 bits."""
    return int.from_bytes(hashlib.sha256(f"selfheal:{name}".encode()).digest()[:8], "big", signed=True)
