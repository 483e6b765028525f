"""A purge deletes what it may and nothing else, in small steps that let others work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, select, text

from celery_selfheal.clock import utc_now
from celery_selfheal.database.retention import BATCH_ROWS, count_due, purge
from celery_selfheal.database.tables import Fence, ProcessedJob
from celery_selfheal.errors import SelfHealError

DAY = timedelta(days=1)
WEEK = timedelta(days=7)

with_row_locks = pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)


def add(engine: Engine, keys: list[str], *, age: timedelta, status: str = "COMPLETED", spread: bool = True) -> None:
    rows = [
        {
            "idempotency_key": key,
            "job_name": "shop.charge",
            "status": status,
            "updated_at": utc_now() - age - timedelta(milliseconds=n if spread else 0),
        }
        for n, key in enumerate(keys)
    ]
    same: datetime = rows[0]["updated_at"]  # type: ignore[assignment]
    with engine.begin() as connection:
        connection.execute(insert(ProcessedJob), rows if spread else [{**row, "updated_at": same} for row in rows])


def keys_of(engine: Engine, column: Any = ProcessedJob.idempotency_key) -> set[str]:
    with engine.connect() as connection:
        return set(connection.execute(select(column)).scalars())


def numbered(what: str, count: int) -> list[str]:
    return [f"{what}-{n}" for n in range(count)]


@pytest.fixture
def transactions(engine: Engine) -> Iterator[list[int]]:
    """Rows that each committed transaction has deleted."""
    deleted: list[int] = []
    open_now = 0

    def count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        nonlocal open_now
        if statement.lstrip().startswith("DELETE") and "processed_jobs" in statement:
            open_now += cursor.rowcount

    def commit(connection: Any) -> None:
        nonlocal open_now
        if open_now:
            deleted.append(open_now)
            open_now = 0

    event.listen(engine, "after_cursor_execute", count)
    event.listen(engine, "commit", commit)
    yield deleted
    event.remove(engine, "after_cursor_execute", count)
    event.remove(engine, "commit", commit)


@pytest.mark.parametrize("spread", [True, False], ids=["one instant each", "all at one instant"])
def test_old_finished_rows_go_in_small_transactions_and_all_others_stay(
    engine: Engine, transactions: list[int], spread: bool
) -> None:
    add(engine, numbered("old", 2_500), age=8 * DAY, spread=spread)
    add(engine, numbered("new", 10), age=6 * DAY)
    add(engine, numbered("doubt", 10), age=90 * DAY, status="IN_DOUBT")
    add(engine, numbered("running", 10), age=90 * DAY, status="IN_PROGRESS")
    pauses: list[float] = []

    assert count_due(engine, keep=WEEK) == 2_500
    steps = list(purge(engine, keep=WEEK, sleep=pauses.append))

    assert steps == transactions == [BATCH_ROWS, BATCH_ROWS, 500]
    assert len(pauses) >= 3
    assert keys_of(engine) == {*numbered("new", 10), *numbered("doubt", 10), *numbered("running", 10)}
    assert list(purge(engine, keep=WEEK, sleep=pauses.append)) == []
    assert count_due(engine, keep=WEEK) == 0


def test_no_transaction_is_larger_than_a_thousand_rows_whatever_is_asked_for(
    engine: Engine, transactions: list[int]
) -> None:
    add(engine, numbered("old", 1_500), age=8 * DAY)

    assert sum(purge(engine, keep=WEEK, batch_rows=1_000_000)) == 1_500

    assert max(transactions) == BATCH_ROWS


def test_a_purge_that_was_stopped_goes_on_with_the_rest(engine: Engine) -> None:
    add(engine, numbered("old", 250), age=8 * DAY)
    first = purge(engine, keep=WEEK, batch_rows=100)
    assert next(first) == 100
    first.close()

    assert count_due(engine, keep=WEEK) == 150
    assert sum(purge(engine, keep=WEEK, batch_rows=100)) == 150


def test_new_rows_come_in_between_two_batches_and_stay(engine: Engine) -> None:
    add(engine, numbered("old", 3_000), age=8 * DAY)
    added: list[str] = []

    def work(_: float) -> None:
        added.append(f"beside-{len(added)}")
        add(engine, added[-1:], age=timedelta(0))

    assert sum(purge(engine, keep=WEEK, sleep=work)) == 3_000

    assert len(added) >= 3
    assert keys_of(engine) == set(added)


@pytest.mark.timeout(240)
def test_writers_are_not_kept_waiting_for_the_whole_of_a_purge(engine: Engine) -> None:
    add(engine, numbered("old", 20_000), age=8 * DAY)
    stop = threading.Event()
    written: list[str] = []

    def write() -> None:
        while not stop.is_set():
            key = f"beside-{len(written)}"
            add(engine, [key], age=timedelta(0))
            written.append(key)
            time.sleep(
                0.002
            )  # SQLite gives the database to whoever asks at the right moment: let that be the purge, too

    writer = threading.Thread(target=write)
    writer.start()
    try:
        during = [len(written) for _ in purge(engine, keep=WEEK)]
    finally:
        stop.set()
        writer.join(60)

    assert during[-1] > during[0]
    assert keys_of(engine) == set(written)


def test_two_purges_at_once_delete_each_row_once(engine: Engine) -> None:
    add(engine, numbered("old", 4_000), age=8 * DAY)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(sum(purge(engine, keep=WEEK)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    rest = sum(purge(engine, keep=WEEK))

    assert len(counts) == 2
    assert sum(counts) + rest == 4_000
    assert keys_of(engine) == set()


@with_row_locks
def test_a_row_that_somebody_holds_is_left_and_waited_for_by_nobody(engine: Engine) -> None:
    add(engine, numbered("old", 50), age=8 * DAY)
    with engine.begin() as holder:
        holder.execute(select(ProcessedJob).filter_by(idempotency_key="old-7").with_for_update())

        assert sum(purge(engine, keep=WEEK, sleep=lambda _: None)) == 49

    assert keys_of(engine) == {"old-7"}


@with_row_locks
def test_a_full_batch_that_others_hold_ends_the_purge_and_no_loop(engine: Engine) -> None:
    add(engine, numbered("old", 30), age=8 * DAY, spread=False)
    with engine.begin() as holder:
        holder.execute(select(ProcessedJob).limit(20).with_for_update()).all()

        assert sum(purge(engine, keep=WEEK, batch_rows=10, sleep=lambda _: None)) == 10


def test_fences_that_nobody_took_for_long_go_and_those_in_use_stay(engine: Engine) -> None:
    with engine.begin() as connection:
        for n in range(25):
            connection.execute(insert(Fence).values(lock_key=f"old-{n}", fence=n, updated_at=utc_now() - 8 * DAY))
            connection.execute(insert(Fence).values(lock_key=f"used-{n}", fence=n))

    assert list(purge(engine, keep=WEEK, batch_rows=10, sleep=lambda _: None)) == []

    assert keys_of(engine, Fence.lock_key) == {f"used-{n}" for n in range(25)}


def test_a_table_that_goes_away_is_told_and_the_batches_before_stay_done(engine: Engine) -> None:
    add(engine, numbered("old", 300), age=8 * DAY)
    running = purge(engine, keep=WEEK, batch_rows=100)
    next(running)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE processed_jobs RENAME TO elsewhere"))

    with pytest.raises(SelfHealError, match="processed_jobs"):
        next(running)

    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO processed_jobs"))
    assert len(keys_of(engine)) == 200
