"""Rows for people: which are shown, in which order, and what settling one in doubt does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import JSON, Engine, insert, select

from celery_selfheal.clock import utc_now
from celery_selfheal.database import jobs
from celery_selfheal.database.jobs import JobFilter, find_jobs, settle
from celery_selfheal.database.tables import ProcessedJob

HOUR = timedelta(hours=1)


def add(engine: Engine, key: str, status: str = "COMPLETED", *, age: timedelta = HOUR, **values: Any) -> None:
    row = {"idempotency_key": key, "job_name": "shop.charge", "status": status, "updated_at": utc_now() - age, **values}
    with engine.begin() as connection:
        connection.execute(insert(ProcessedJob).values(**row))


def keys(engine: Engine, *, limit: int | None = None, **wanted: Any) -> list[str]:
    return [job.key for job in find_jobs(engine, JobFilter(**wanted), limit=limit)]


def test_what_asks_for_a_person_comes_first_and_newest_before_older(engine: Engine) -> None:
    add(engine, "done-old", age=3 * HOUR)
    add(engine, "done")
    add(engine, "running", "IN_PROGRESS")
    add(engine, "doubt", "IN_DOUBT", age=9 * HOUR)

    assert keys(engine) == ["doubt", "running", "done", "done-old"]


def test_a_row_tells_all_that_it_holds(engine: Engine) -> None:
    add(engine, "a", owner="id token 7", fence=2**50, dispatched=True, response_payload=JSON.NULL)
    add(engine, "b", age=2 * HOUR)

    first, second = find_jobs(engine, JobFilter())

    assert (first.key, first.task, first.status, first.owner) == ("a", "shop.charge", "COMPLETED", "id token 7")
    assert (first.fence, first.has_result, first.dispatched) == (2**50, True, True)
    assert (second.fence, second.has_result, second.dispatched) == (0, False, False)
    assert first.updated_at.utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"status": "IN_DOUBT"}, ["d"]),
        ({"keys": ("a", "d", "nobody")}, ["d", "a"]),
        ({"task": "shop.*"}, ["d", "a", "b"]),
        ({"task": "blog_p?st"}, ["c"]),
        ({"task": "blog%"}, []),
        ({"older_than": timedelta(minutes=90)}, ["d", "b", "c"]),
        ({"status": "COMPLETED", "older_than": timedelta(minutes=150)}, ["c"]),
    ],
)
def test_filters(engine: Engine, wanted: dict[str, Any], found: list[str]) -> None:
    add(engine, "a")
    add(engine, "b", age=2 * HOUR)
    add(engine, "c", age=3 * HOUR, job_name="blog_post")
    add(engine, "d", "IN_DOUBT", age=4 * HOUR)

    assert keys(engine, **wanted) == found


@pytest.mark.parametrize("same_instant", [False, True])
def test_pages_leave_out_none_and_show_none_twice(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, same_instant: bool
) -> None:
    monkeypatch.setattr(jobs, "PAGE_ROWS", 3)
    now = utc_now()
    for n in range(10):
        add(engine, f"k{n}", updated_at=now if same_instant else now - timedelta(seconds=n))
    add(engine, "doubt", "IN_DOUBT")

    assert keys(engine) == ["doubt", *(f"k{n}" for n in range(10))]
    assert keys(engine, limit=5) == ["doubt", *(f"k{n}" for n in range(4))]
    assert keys(engine, limit=3) == ["doubt", "k0", "k1"]


def test_settled_as_happened_it_counts_as_finished_once(engine: Engine) -> None:
    add(engine, "doubt", "IN_DOUBT", age=HOUR * 1000)

    assert settle(engine, "doubt", happened=True)
    assert not settle(engine, "doubt", happened=True)

    (job,) = find_jobs(engine, JobFilter())
    assert (job.status, job.has_result, job.dispatched) == ("COMPLETED", False, False)
    assert utc_now() - job.updated_at < HOUR  # kept from now on: its copy may still come


def test_settled_as_not_happened_the_key_is_free(engine: Engine) -> None:
    add(engine, "doubt", "IN_DOUBT")

    assert settle(engine, "doubt", happened=False)
    assert not settle(engine, "doubt", happened=False)

    assert keys(engine) == []


@pytest.mark.parametrize("happened", [True, False])
@pytest.mark.parametrize("status", ["COMPLETED", "IN_PROGRESS"])
def test_only_what_is_in_doubt_can_be_settled(engine: Engine, status: str, happened: bool) -> None:
    add(engine, "a", status)

    assert not settle(engine, "a", happened=happened)

    with engine.connect() as connection:
        assert connection.execute(select(ProcessedJob.status)).scalars().all() == [status]
