"""Fixtures of the endings: one Redis, one RabbitMQ, and an app of its own for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from celery_selfheal.errors import SettingsError
from celery_selfheal.testing import RedisServer
from celery_selfheal.testing.rabbitmq import RabbitServer, find_rabbitmq_binary
from integration.endings.yard import Yard


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Leases and results of all brokers, and the broker of some."""
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="session")
def shared_yard(
    redis_server: RedisServer, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Yard]]:
    """A yard with one worker for each broker and pool, for tests that look at their own task only."""
    yards: dict[tuple[str, str], Yard] = {}

    def get(kind: str, pool: str) -> Yard:
        if (kind, pool) not in yards:
            broker = redis_server.url(0) if kind == "redis" else request.getfixturevalue("rabbit_server").url()
            folder = tmp_path_factory.mktemp(f"{kind}-{pool}")
            yards[kind, pool] = yard = Yard(kind, broker, redis_server, folder, name=f"dock-{uuid.uuid4().hex[:8]}")
            # A name of its own: the mailboxes of all workers of one name are one queue.
            yard.start(pool, pool=pool)
        return yards[kind, pool]

    try:
        yield get
    finally:
        for yard in yards.values():
            yard.close()


@pytest.fixture
def lease_server() -> Iterator[RedisServer]:
    """For leases alone, to be paused."""
    with RedisServer() as running:
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
def new_yard(
    redis_server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Yard]]:
    """Makes a yard on a kind of broker. If the test fails, its workers' logs are in its report."""
    with ExitStack() as ends:

        def make(kind: str, leases: RedisServer | None = None) -> Yard:
            # Asked for only now, so that a test on Redis needs no RabbitMQ.
            broker = redis_server.url(0) if kind == "redis" else request.getfixturevalue("rabbit_server").url()
            yard = Yard(kind, broker, redis_server, tmp_path, name=f"dock-{uuid.uuid4().hex[:8]}", leases=leases)
            ends.callback(yard.close)
            return yard

        yield make
    for log in sorted(tmp_path.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-80:]
        request.node.add_report_section("teardown", log.name, "\n".join(lines))
