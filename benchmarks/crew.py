"""Workers on the ledger's tasks."""

from __future__ import annotations

from benchmarks.books import Books
from benchmarks.ledger import APP, DATABASE_VARIABLE, TIMED_VARIABLE
from benchmarks.stage import Stage
from celery_selfheal.testing import WorkerProcess


def start_worker(
    stage: Stage, books: Books, *, plain: bool = False, concurrency: int = 1, timed: bool = False
) -> WorkerProcess:
    """Start a worker, without waiting until it is ready.

    Args:
        timed: Whether tasks tell how long they took.
    """
    return stage.worker(
        plain=plain,
        concurrency=concurrency,
        app=APP,
        env={DATABASE_VARIABLE: books.url, TIMED_VARIABLE: "yes" if timed else ""},
        # As Celery's own default: at INFO all would mostly write logs.
        args=["-l", "WARNING"],
    )
