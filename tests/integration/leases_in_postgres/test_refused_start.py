"""A worker whose database cannot keep leases does not start: it says why in one line, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_selfheal.testing.postgres import PostgresServer
from celery_selfheal.testing.rabbitmq import RabbitServer
from celery_selfheal.testing.servers import free_port
from integration.fleet import PATIENCE_SECONDS
from integration.leases_in_postgres.crew import SHORT_TTL, Crew


@pytest.fixture
def bare_crew(postgres: PostgresServer, rabbit: RabbitServer, tmp_path: Path) -> Iterator[Crew]:
    """Nobody has run the migrations."""
    crew = Crew(postgres, rabbit.url(), tmp_path, migrated=False)
    yield crew
    crew.close()


def last_word(crew: Crew) -> str:
    """The line with which a worker refused to start."""
    worker = crew.start("w0", ready=False)
    assert worker.wait(PATIENCE_SECONDS / 2) not in (0, -9)
    log = worker.log_text()
    assert "Traceback" not in log
    assert " ready." not in log
    return log.splitlines()[-1]


def test_missing_migrations_are_named_with_the_command_that_runs_them(bare_crew: Crew) -> None:
    bare_crew.settings |= SHORT_TTL

    line = last_word(bare_crew)

    assert "celery -A proj selfheal db upgrade" in line
    assert "/selfheal_" in line


def test_another_kind_of_database_is_named_by_the_setting(crew: Crew) -> None:
    crew.settings |= {"selfheal_database_url": "sqlite:////tmp/nowhere.db"}

    line = last_word(crew)

    assert "selfheal_lease_backend is 'postgres'" in line
    assert "selfheal_database_url" in line


def test_a_database_that_does_not_answer_is_named_without_its_password(crew: Crew) -> None:
    crew.settings |= SHORT_TTL
    crew.settings["selfheal_database_url"] = f"postgresql://shop:let-me-in@127.0.0.1:{free_port()}/shop"

    line = last_word(crew)

    assert "selfheal_database_url" in line
    assert "no answer for 3 s" in line
    assert "let-me-in" not in crew.workers[0].log_text()


def test_an_isolation_level_that_hides_what_was_committed_is_named(crew: Crew) -> None:
    crew.settings |= SHORT_TTL
    crew.sql(f"ALTER DATABASE {crew.url.database} SET default_transaction_isolation = 'repeatable read'")

    assert "read committed" in last_word(crew)
