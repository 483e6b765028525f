"""PostgreSQL is killed and stopped in the midst of work: nothing is lost, nothing doubled, no attempt is burned."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from celery_selfheal.testing.postgres import PostgresServer
from integration.effects.office import Office


@pytest.fixture
def postgres_server() -> Iterator[PostgresServer]:
    """Of this test alone: it may be killed."""
    with PostgresServer(fsync=True) as running:
        yield running


def restart_in_the_midst(office: Office, server: PostgresServer, tasks: int) -> None:
    office.start("w1", concurrency=4)
    office.start("w2", concurrency=4)
    sent = [office.ledger.book.apply_async((n,), task_id=f"entry-{n}") for n in range(tasks)]
    office.wait("a quarter is done", lambda: len(office.diary("written")) >= tasks // 4)
    server.kill()
    time.sleep(1)
    server.restart()
    office.wait("half is done", lambda: len(office.diary("written")) >= tasks // 2)
    server.restart()
    assert office.results(sent, patience=300) == list(range(tasks))
    assert office.entries() == Counter(f"entry-{n}" for n in range(tasks))
    assert list(office.dlq.list()) == []


def test_restarted_database_loses_and_doubles_nothing(office: Office, postgres_server: PostgresServer) -> None:
    restart_in_the_midst(office, postgres_server, 200)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_restarted_database_loses_and_doubles_nothing_of_much(
    office: Office, postgres_server: PostgresServer, rounds: Callable[[int], int]
) -> None:
    restart_in_the_midst(office, postgres_server, rounds(2_000))
