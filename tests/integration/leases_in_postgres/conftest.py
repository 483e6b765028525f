"""Fixtures: one PostgreSQL and one RabbitMQ, no Redis anywhere, and workers of its own for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_selfheal.errors import SettingsError
from celery_selfheal.testing import RedisServer
from celery_selfheal.testing.postgres import PostgresServer, find_postgres_binary
from celery_selfheal.testing.rabbitmq import RabbitServer, find_rabbitmq_binary
from integration.leases_in_postgres.crew import Crew


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A private PostgreSQL: leases, sessions and results."""
    _needs(find_postgres_binary)
    with PostgresServer() as running:
        yield running


@pytest.fixture(scope="session")
def rabbit() -> Iterator[RabbitServer]:
    """A private RabbitMQ."""
    _needs(find_rabbitmq_binary)
    with RabbitServer() as running:
        yield running


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """For the one that has a Redis broker."""
    with RedisServer() as running:
        yield running


@pytest.fixture
def crew(
    postgres: PostgresServer, rabbit: RabbitServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Crew]:
    """Workers of this test only, on RabbitMQ. When it fails, their logs are in its report."""
    yield from _report(Crew(postgres, rabbit.url(), tmp_path), request)


@pytest.fixture
def redis_crew(
    postgres: PostgresServer, redis_server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Crew]:
    """The same on a Redis broker."""
    client = redis_server.client()
    client.flushall()
    client.close()
    yield from _report(Crew(postgres, redis_server.url(0), tmp_path), request)


def _report(crew: Crew, request: pytest.FixtureRequest) -> Iterator[Crew]:
    try:
        yield crew
    finally:
        crew.close()
        for log in sorted(crew.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-80:]
            request.node.add_report_section("teardown", log.name, "\n".join(lines))


def _needs(find: object) -> None:
    """Skip on a machine that has no such server; in CI, which must, fail."""
    assert callable(find)
    try:
        find()
    except SettingsError as exc:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(str(exc))
        pytest.skip(str(exc))
