"""Fixtures of the effect tests: a Redis, a RabbitMQ and a PostgreSQL, and an app with a database for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url, text

from celery_selfheal.errors import SettingsError
from celery_selfheal.testing import RedisServer
from celery_selfheal.testing.mariadb import MariaServer, find_mariadb_binary
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


@pytest.fixture(scope="session")
def maria_server() -> Iterator[MariaServer]:
    """A private MariaDB. No wheel brings one: its tests are left out where it is not, in CI, too."""
    try:
        find_mariadb_binary()
    except SettingsError as exc:
        pytest.skip(str(exc))
    with MariaServer() as running:
        yield running


def make_database(kind: str, request: pytest.FixtureRequest, folder: Path) -> Engine:
    """A database of this test alone; its server lives as long as the session."""
    if kind == "sqlite":
        return create_engine(f"sqlite:///{folder / 'ledger.db'}")
    fixture, driver = {"postgresql": ("postgres_server", "psycopg2"), "mariadb": ("maria_server", "pymysql")}[kind]
    name = f"ledger_{uuid.uuid4().hex[:8]}"
    url = make_url(request.getfixturevalue(fixture).url())
    server = create_engine(url.set(drivername=f"{url.get_backend_name()}+{driver}"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    # No pool: the server may be restarted.
    engine = create_engine(server.url.set(database=name), poolclass=NullPool)
    server.dispose()
    return engine


@pytest.fixture
def new_office(
    redis_server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Office]]:
    """Makes an office on a kind of broker and of database. If the test fails, its workers' logs are in its report."""
    offices: list[Office] = []

    def make(kind: str, *, database: str = "postgresql") -> Office:
        # Asked for only now, so that a test on Redis needs no RabbitMQ.
        broker = redis_server.url(0) if kind == "redis" else request.getfixturevalue("rabbit_server").url()
        engine = make_database(database, request, tmp_path)
        offices.append(Office(broker, redis_server, engine, tmp_path, name=f"ledger-{uuid.uuid4().hex[:8]}"))
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
def office(request: pytest.FixtureRequest, new_office: Callable[..., Office]) -> Office:
    """An office on each kind of broker."""
    return new_office(request.param)


@pytest.fixture
def redis_office(new_office: Callable[..., Office]) -> Office:
    """An office on Redis."""
    return new_office("redis")
