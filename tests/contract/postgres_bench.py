"""PostgreSQL on a bench: what a test must do to its stores from outside."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from celery_selfheal.database.lease_store import TABLES
from celery_selfheal.leases.functions import Functions
from celery_selfheal.leases.port import Start
from celery_selfheal.leases.postgres import PostgresLeaseStore
from celery_selfheal.retry_budget import RetryBudget
from contract.benches import DONE_TTL, KEYS, MAX_STALLS, TTL, Picture

PATIENCE = timedelta(seconds=20)


class PostgresBench:
    """``LeaseBench`` on a real server."""

    def __init__(self, engine: sa.Engine, *, budget: RetryBudget | None = None, ttl: timedelta = TTL) -> None:
        self.engine = engine
        self.functions = Functions(engine, patience=PATIENCE)
        self.store = PostgresLeaseStore(
            self.functions, KEYS, ttl=ttl, max_stalls=MAX_STALLS, done_ttl=DONE_TTL, budget=budget
        )

    def sql(self, statement: str, **arguments: Any) -> list[Any]:
        """Rows of a statement; none of one that returns none."""
        with self.engine.connect() as connection:
            result = connection.execute(sa.text(statement), arguments)
            return list(result) if result.returns_rows else []

    def run_out(self, task_id: str) -> None:
        self.sql("UPDATE selfheal_leases SET expires_at = '1970-01-01' WHERE task_id = :id", id=task_id)

    def lose_marker(self, marker: str) -> None:
        self.sql("UPDATE selfheal_done SET expires_at = '1970-01-01' WHERE marker = :marker", marker=marker)

    def leave_marker(self, marker: str, token: str) -> None:
        self.sql(
            "INSERT INTO selfheal_done VALUES (:app, :marker, :token, '', now() + interval '1 minute')",
            app=KEYS.root,
            marker=marker,
            token=token,
        )

    def deliver(self, start: Start) -> None:
        """It knows no deliveries."""

    def take_away(self, start: Start) -> None:
        """It knows no deliveries."""

    def owns(self, start: Start) -> bool:
        raise AssertionError("it knows no deliveries")

    def look(self, task_ids: Sequence[str], events: Sequence[str]) -> Picture:
        (tasks, counts) = self.sql(
            "SELECT coalesce((SELECT json_object_agg(task_id, json_build_array("
            " CASE WHEN expires_at > clock_timestamp() THEN token END, ARRAY(SELECT jsonb_object_keys(journal))))"
            " FROM selfheal_leases WHERE app = :app), '{}'),"
            " coalesce((SELECT json_object_agg(event, total) FROM (SELECT event, sum(value) AS total"
            " FROM selfheal_counters WHERE app = :app GROUP BY event) c), '{}')",
            app=KEYS.root,
        )[0]
        return Picture(
            holders=[tasks.get(task_id, [None])[0] for task_id in task_ids],
            unfinished=[set(tasks.get(task_id, [None, []])[1]) for task_id in task_ids],
            counts=[counts.get(event, 0) for event in events],
            owned_tags=set(),
        )

    def holder(self, task_id: str) -> str | None:
        return self.look([task_id], []).holders[0]

    def unfinished(self, task_id: str) -> set[str]:
        return self.look([task_id], []).unfinished[0]

    def remaining(self, task_id: str) -> timedelta:
        ((left,),) = self.sql(
            "SELECT expires_at - clock_timestamp() FROM selfheal_leases WHERE task_id = :id", id=task_id
        )
        assert isinstance(left, timedelta)
        return left

    def shorten(self, task_id: str) -> None:
        self.sql(
            "UPDATE selfheal_leases SET expires_at = clock_timestamp() + interval '1 minute' WHERE task_id = :id",
            id=task_id,
        )

    def count(self, event: str) -> int:
        return self.look([], [event]).counts[0]

    def earn_for(self, duration: timedelta) -> None:
        self.sql(
            "UPDATE selfheal_budgets SET at_ms = at_ms - :ms WHERE task = 'shop.pay'",
            ms=round(duration.total_seconds() * 1000),
        )


def empty(engine: sa.Engine) -> None:
    """Nothing is left in the store, as after a restore of the schema alone."""
    with engine.connect() as connection:
        connection.execute(sa.text(f"TRUNCATE {', '.join(TABLES)}"))
        connection.execute(sa.text("ALTER SEQUENCE selfheal_fence RESTART"))


def postgres_time_passes(engine: sa.Engine, duration: timedelta) -> None:
    """Age all that the server holds, without anybody's beating meanwhile: an outage, or a fleet that is gone."""
    columns = {
        "leases": ("expires_at", "kept_until", "run_acquired_at"),
        "done": ("expires_at",),
        "sessions": ("expires_at",),
        "fleet": ("pulse", "grace_until", "leads_until"),
        "budgets": ("expires_at",),
        "waits": ("expires_at",),
    }
    with engine.connect() as connection:
        for table, names in columns.items():
            aged = ", ".join(f"{name} = {name} - :duration" for name in names)
            connection.execute(sa.text(f"UPDATE selfheal_{table} SET {aged}"), {"duration": duration})


def all_rows(engine: sa.Engine) -> dict[str, list[dict[str, Any]]]:
    """All that the server holds, by table; rows that have run out, too."""
    with engine.connect() as connection:
        return {
            name.removeprefix("selfheal_"): list(connection.scalars(sa.text(f"SELECT row_to_json(t) FROM {name} t")))
            for name in TABLES
        }


class statements:  # noqa: N801  # reads as what it collects
    """Collects what an engine sends."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._sent: list[str] = []

    def _note(self, connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        self._sent.append(statement)

    def __enter__(self) -> list[str]:
        sa.event.listen(self._engine, "before_cursor_execute", self._note)
        return self._sent

    def __exit__(self, *exc: object) -> None:
        sa.event.remove(self._engine, "before_cursor_execute", self._note)
