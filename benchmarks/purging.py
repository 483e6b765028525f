"""A purge of many old rows, beside running tasks."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import click
from sqlalchemy import create_engine

from benchmarks.books import Books
from benchmarks.crew import start_worker
from benchmarks.ledger import SENT_AT, TIMES, make_app
from benchmarks.report import Figure, figures_of, progress
from benchmarks.stage import Stage, is_drained
from celery_selfheal.database.drivers import parse
from celery_selfheal.database.retention import purge
from celery_selfheal.testing.processes import wait_until

RATE = 50  # tasks a second: what a small machine does without a queue, so that only waiting makes them slow
WARM_UP_SECONDS = 3.0
ALONE_SECONDS = 10.0  # before the purge, and again after it
KEEP = timedelta(days=7)
STUCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One transaction of the purge.

    Attributes:
        seconds: Of work, without the pause after it.
    """

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long tasks took.

    Attributes:
        since_sent: Seconds from publication to end.
        in_child: Seconds from start to end, acquisition and release of the lease included.
    """

    since_sent: list[float]
    in_child: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Purging:
    """What was measured."""

    alone: Times
    beside: Times
    batches: list[Batch]
    seconds: float

    def figures(self) -> list[Figure]:
        """The tasks' times alone and beside the purge, and the purge's own."""
        rows = sum(batch.rows for batch in self.batches)
        return [
            *_figures("task_alone", f"a task, {RATE} a second, no purge", self.alone),
            *_figures("task_beside_purge", f"a task, {RATE} a second, beside the purge", self.beside),
            Figure(name="purged_rows", about="rows purged", value=rows),
            Figure(name="purge_rate", about="rows purged a second, pauses included", value=rows / self.seconds),
            Figure(name="purge_seconds", about="the whole purge", value=self.seconds, unit="s"),
            *figures_of("purge_batch", "a batch", [batch.seconds * 1000 for batch in self.batches], unit="ms"),
        ]

    def samples(self) -> dict[str, list[float]]:
        """Seconds of every task."""
        return {"task_alone": self.alone.since_sent, "task_beside_purge": self.beside.since_sent}


def purge_beside_tasks(stage: Stage, books: Books, *, rows: int) -> Purging:
    """Let tasks come at an even pace, and purge so many old rows meanwhile."""
    broker = stage.client()
    broker.flushall()
    books.clear()
    progress(f"filling in {rows} rows")
    books.fill(rows)
    task = make_app(stage.url, books.url, plain=False).tasks["ours"]
    worker = start_worker(stage, books, concurrency=2, timed=True)
    # A process of its own, as users start it: here it would make the publisher wait.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as elsewhere:
        elsewhere.submit(_purge, books.url, 0).result()
        _times(stage, task, until=_after(WARM_UP_SECONDS))
        before = _times(stage, task, until=_after(ALONE_SECONDS))
        progress(f"{len(before.in_child)} tasks alone; the purge begins")
        began = time.monotonic()
        purging: Future[list[Batch]] = elsewhere.submit(_purge, books.url, None)
        ended: list[float] = []
        purging.add_done_callback(lambda _: ended.append(time.monotonic()))
        beside = _times(stage, task, until=purging.done)
        batches = purging.result()
        progress(f"{len(beside.in_child)} tasks beside the purge of {sum(batch.rows for batch in batches)} rows")
        after = _times(stage, task, until=_after(ALONE_SECONDS))
    worker.stop()
    alone = Times(since_sent=before.since_sent + after.since_sent, in_child=before.in_child + after.in_child)
    return Purging(alone=alone, beside=beside, batches=batches, seconds=ended[0] - began)


def _purge(url: str, most: int | None) -> list[Batch]:
    """Purge what is due, or so many batches of it."""
    took: list[float] = []

    def pause(seconds: float) -> None:
        took.append(seconds)
        time.sleep(seconds)

    engine = create_engine(parse(url))
    rows = list(purge(engine, keep=KEEP, sleep=pause)) if most is None else []
    engine.dispose()
    # The last pauses are those of steps that found nothing.
    return [Batch(rows=deleted, seconds=seconds) for deleted, seconds in zip(rows, took, strict=False)]


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _times(stage: Stage, task: Any, *, until: Callable[[], bool]) -> Times:
    """Publish tasks at an even pace until told to stop; wait for the last one."""
    told = stage.client(1)
    told.delete(TIMES)
    sent = 0
    next_at = time.monotonic()
    with task.app.producer_pool.acquire(block=True) as producer:
        while not until():
            time.sleep(max(0.0, next_at - time.monotonic()))
            next_at += 1 / RATE
            task.apply_async((sent,), producer=producer, headers={SENT_AT: time.time()})
            sent += 1
    broker = stage.client()
    if not wait_until(lambda: is_drained(broker) and told.llen(TIMES) == sent, seconds=STUCK_SECONDS):
        raise click.ClickException(f"of {sent} tasks {told.llen(TIMES)} have told how long they took")
    both = [json.loads(one) for one in told.lrange(TIMES, 0, -1)]
    return Times(since_sent=[one for one, _ in both], in_child=[one for _, one in both])


def _figures(name: str, about: str, times: Times) -> list[Figure]:
    return [
        *figures_of(f"{name}_since_sent", f"{about}: since sent", [s * 1000 for s in times.since_sent], unit="ms"),
        *figures_of(f"{name}_in_child", f"{about}: in the child", [s * 1000 for s in times.in_child], unit="ms"),
    ]
