"""Fixtures of the outbox tests: a Redis, a RabbitMQ and a PostgreSQL, and an outlet with a database for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery_selfheal.errors import SettingsError
from celery_selfheal.testing import RedisServer
from celery_selfheal.testing.postgres import PostgresServer
from celery_selfheal.testing.rabbitmq import RabbitServer, find_rabbitmq_binary
from integration.outbox.outlet import Outlet


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
def new_outlet(
    redis_server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Outlet]]:
    """Opens an outlet. If the test fails, the logs are in its report."""
    outlets: list[Outlet] = []

    def make(kind: str = "redis", *, broker: str = "", database: str = "postgresql") -> Outlet:
        # Asked for only now, so that a test on Redis needs no RabbitMQ.
        if not broker:
            broker = redis_server.url(0) if kind == "redis" else request.getfixturevalue("rabbit_server").url()
        if database == "sqlite":
            url = f"sqlite:///{tmp_path}/outlet.db"
        else:
            url = request.getfixturevalue("postgres_server").new_database()
        outlets.append(Outlet(broker, redis_server, url, tmp_path, name=f"outlet-{uuid.uuid4().hex[:8]}"))
        return outlets[-1]

    try:
        yield make
    finally:
        for outlet in outlets:
            outlet.close()
        for database in range(3):
            client = redis_server.client(database)
            client.flushdb()
            client.close()
        for log in sorted(tmp_path.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-80:]
            request.node.add_report_section("teardown", log.name, "\n".join(lines))


@pytest.fixture(params=["redis", "classic"])
def outlet(request: pytest.FixtureRequest, new_outlet: Callable[..., Outlet]) -> Outlet:
    """An outlet on each kind of broker."""
    return new_outlet(request.param)
