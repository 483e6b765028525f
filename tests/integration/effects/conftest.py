"""Fixtures of the effect tests: a Redis, a RabbitMQ and a PostgreSQL, and an app with a database for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text

from celery_selfheal.errors import SettingsError
from celery_selfheal.testing import RedisServer
from celery_selfheal.testing.postgres import PostgresServer
from celery_selfheal.testing.rabbitmq import RabbitServer, find_rabbitmq_binary
from integration.effects.office import Office

BROKERS = ("redis", "classic")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Leases and results of all brokers, and the broker of some."""
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A private PostgreSQL."""
    with PostgresServer() as running:
        yield running


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[RabbitServer]:
    """A private RabbitMQ. Without one the tests are left out on this machine, and fail in CI."""
    try:
        find_rabbitmq_binary()
    except SettingsError as exc:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(str(exc))
        pytest.skip(str(exc))
    with RabbitServer() as running:
        yield running


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[Engine]:
    """A database of this test alone."""
    name = f"ledger_{uuid.uuid4().hex[:8]}"
    server = create_engine(postgres_server.url(), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine = create_engine(server.url.set(database=name))
    yield engine
    engine.dispose()
    with server.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    server.dispose()


@pytest.fixture
def new_office(
    redis_server: RedisServer, database: Engine, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Office]]:
    """Makes an office on a kind of broker. If the test fails, its workers' logs are in its report."""
    offices: list[Office] = []

    def make(kind: str) -> Office:
        # Asked for only now, so that a test on Redis needs no RabbitMQ.
        broker = redis_server.url(0) if kind == "redis" else request.getfixturevalue("rabbit_server").url()
        offices.append(Office(broker, redis_server, database, tmp_path, name=f"ledger-{uuid.uuid4().hex[:8]}"))
        return offices[-1]

    try:
        yield make
    finally:
        for office in offices:
            office.close()
        for log in sorted(tmp_path.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-80:]
            request.node.add_report_section("teardown", log.name, "\n".join(lines))


@pytest.fixture(params=BROKERS)
def office(request: pytest.FixtureRequest, new_office: Callable[[str], Office]) -> Office:
    """An office on each kind of broker."""
    return new_office(request.param)


@pytest.fixture
def redis_office(new_office: Callable[[str], Office]) -> Office:
    """An office on Redis."""
    return new_office("redis")
