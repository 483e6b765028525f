"""What a task asks the database, as the server has seen it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import click

from benchmarks.books import Books
from benchmarks.crew import start_worker
from benchmarks.ledger import make_app, publish
from benchmarks.report import Figure, progress
from benchmarks.stage import Stage, is_drained
from celery_selfheal.testing.postgres import PostgresServer
from celery_selfheal.testing.processes import wait_until

TASKS = 100
ABOUT = {"body": "the body's own", "by_hand": "by hand", "ours": 'dedup="transaction"'}
ADDED = 2  # the row before the body, its completion after it
STUCK_SECONDS = 60.0


def count_statements(stage: Stage, postgres: PostgresServer) -> dict[str, Counter[str]]:
    """Statements of ``TASKS`` tasks by their first word, for each task; a connection's first ones do not count."""
    return {task: _count(stage, Books(postgres), task) for task in ABOUT}


def statement_figures(counted: Mapping[str, Counter[str]]) -> list[Figure]:
    """Statements a task, and how many more than the body's own."""
    each = {task: statements.total() / TASKS for task, statements in counted.items()}
    for task, statements in counted.items():
        progress(f"statements of {TASKS} tasks, {ABOUT[task]}: {dict(statements)}")
    found = [
        Figure(name=f"statements_{task}", about=f"statements a task with BEGIN and COMMIT, {ABOUT[task]}", value=value)
        for task, value in each.items()
    ]
    added = each["ours"] - each["body"]
    return [
        *found,
        Figure(
            name="statements_added",
            about="statements a task beyond the body's own",
            value=added,
            at_most=ADDED,
            at_least=ADDED,
        ),
    ]


def _count(stage: Stage, books: Books, name: str) -> Counter[str]:
    broker = stage.client()
    broker.flushall()
    books.record()
    task = make_app(stage.url, books.url, plain=False).tasks[name]
    worker = start_worker(stage, books, concurrency=1)
    for marked in (False, True):
        if marked:
            books.mark()
        publish(task, TASKS)
        # The queue is looked at first and the rows then: a task that is done may not be acknowledged yet.
        if not wait_until(lambda: is_drained(broker), seconds=STUCK_SECONDS):
            raise click.ClickException(f"{ABOUT[name]}: stuck")
    books.mark()
    worker.stop()
    return books.asked_between_marks()
