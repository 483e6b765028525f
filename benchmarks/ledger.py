"""Tasks with one effect in a database, and the same transaction written by hand. The worker's app is ``app``."""

from __future__ import annotations

import functools
import json
import os
import time
from typing import Any

import redis
from celery import Celery, Task, signals
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from benchmarks.tasks import PLAIN_VARIABLE, URL_VARIABLE
from celery_selfheal import SelfHealTask
from celery_selfheal.database.drivers import parse

APP = "benchmarks.ledger"
DATABASE_VARIABLE = "BENCHMARK_DATABASE_URL"
TIMED_VARIABLE = "BENCHMARK_TIMED"
SENT_AT = "sent_at"  # header: when the task was published
TIMES = "times"
"""List in database 1 of the Redis server: JSON ``[seconds since publication, seconds in the child]`` of each task."""

# What our own rows have, in a table of its own: nobody's page is warmer than another's.
TABLES = """
CREATE TABLE entries (name varchar(255), amount integer);
CREATE TABLE by_hand (LIKE processed_jobs INCLUDING ALL);
"""
EFFECT = text("INSERT INTO entries (name, amount) VALUES (:name, :amount)")
TAKE = text("""
INSERT INTO by_hand (idempotency_key, job_name, status, fence, owner, dispatched)
VALUES (:key, :job_name, 'IN_PROGRESS', :fence, :owner, false)
ON CONFLICT DO NOTHING
""")
FINISH = text("""
UPDATE by_hand SET status = 'COMPLETED', response_payload = :payload, updated_at = now()
WHERE idempotency_key = :key AND status = 'IN_PROGRESS'
""")


def make_app(url: str, database_url: str, *, plain: bool) -> Celery:
    """Make the application.

    Args:
        url: Broker.
        plain: Celery's own task class with late acknowledgement, instead of ours; without what only ours can do.
    """
    app = Celery("ledger", broker=url, set_as_current=False)
    app.conf.update(selfheal_database_url=database_url, broker_connection_retry_on_startup=True)
    options: dict[str, Any] = {"base": Task, "acks_late": True} if plain else {"base": SelfHealTask}
    options.update(shared=False, bind=True, ignore_result=True)

    @app.task(name="by_hand", **options)
    def by_hand(self: Any, amount: int) -> int:
        """What a careful application does for itself."""
        key = f"{self.name}:{self.request.id}"
        with _sessions(database_url, os.getpid())() as session:
            row = {"key": key, "job_name": self.name, "fence": 1, "owner": f"{self.request.id} {os.getpid()}"}
            if session.execute(TAKE, row).rowcount:  # type: ignore[attr-defined]  # a cursor's result
                session.execute(EFFECT, {"name": self.request.id, "amount": amount})
                session.execute(FINISH, {"key": key, "payload": json.dumps(amount)})
            session.commit()
        return amount

    @app.task(name="body", **options)
    def body(self: Any, amount: int) -> int:
        """The effect in a transaction of its own, and nothing that makes it happen once."""
        with _sessions(database_url, os.getpid())() as session:
            session.execute(EFFECT, {"name": self.request.id, "amount": amount})
            session.commit()
        return amount

    if not plain:

        @app.task(name="ours", dedup="transaction", **options)
        def ours(self: Any, amount: int) -> int:
            self.session.execute(EFFECT, {"name": self.request.id, "amount": amount})
            return amount

    return app


def publish(task: Any, count: int) -> None:
    """Fill the queue."""
    with task.app.producer_pool.acquire(block=True) as producer:
        for number in range(count):
            task.apply_async((number,), producer=producer)


def time_tasks(url: str) -> None:
    """Let the children of this process tell how long each task took.

    Args:
        url: Of the Redis server that they tell it to.
    """
    started: dict[str, float] = {}

    def starts(task_id: str, **_: Any) -> None:
        started[task_id] = time.time()

    def ends(task_id: str, task: Any, **_: Any) -> None:
        now = time.time()
        took = [now - task.request.headers[SENT_AT], now - started.pop(task_id)]
        _client(url, os.getpid()).rpush(TIMES, json.dumps(took))

    signals.task_prerun.connect(starts, weak=False)
    signals.task_postrun.connect(ends, weak=False)


@functools.cache
def _sessions(database_url: str, pid: int) -> Any:
    """One engine a process, with the pool that ours has."""
    return sessionmaker(create_engine(parse(database_url), pool_size=0, pool_use_lifo=True), expire_on_commit=False)


@functools.cache
def _client(url: str, pid: int) -> Any:
    """One client a process: a forked child must not talk on its parent's connection."""
    return redis.Redis.from_url(url.rpartition("/")[0] + "/1")


if URL_VARIABLE in os.environ and DATABASE_VARIABLE in os.environ:
    app = make_app(os.environ[URL_VARIABLE], os.environ[DATABASE_VARIABLE], plain=bool(os.environ.get(PLAIN_VARIABLE)))
    if os.environ.get(TIMED_VARIABLE):
        time_tasks(os.environ[URL_VARIABLE])
