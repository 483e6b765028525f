"""Fixtures of the dead letter tests: one Redis, one RabbitMQ, and an app of its own for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery_selfheal.errors import SettingsError
from celery_selfheal.testing import RedisServer
from celery_selfheal.testing.rabbitmq import RabbitServer, find_rabbitmq_binary
from integration.dead_letters.desk import KINDS, Desk


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Leases and results of all brokers, and the broker of some."""
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
def new_desk(
    redis_server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Desk]]:
    """Makes a desk on a kind of broker. If the test fails, its workers' logs are in its report."""
    desks: list[Desk] = []

    def make(kind: str) -> Desk:
        # Asked for only now, so that a test on Redis needs no RabbitMQ.
        broker = redis_server.url(0) if kind == "redis" else request.getfixturevalue("rabbit_server").url()
        desks.append(Desk(kind, broker, redis_server, tmp_path, name=f"orders-{uuid.uuid4().hex[:8]}"))
        return desks[-1]

    try:
        yield make
    finally:
        for desk in desks:
            desk.close()
        for log in sorted(tmp_path.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-80:]
            request.node.add_report_section("teardown", log.name, "\n".join(lines))


@pytest.fixture(params=KINDS)
def desk(request: pytest.FixtureRequest, new_desk: Callable[[str], Desk]) -> Desk:
    """A desk on each kind of broker."""
    return new_desk(request.param)


@pytest.fixture
def redis_desk(new_desk: Callable[[str], Desk]) -> Desk:
    """A desk on Redis."""
    return new_desk("redis")


@pytest.fixture
def classic_desk(new_desk: Callable[[str], Desk]) -> Desk:
    """A desk on RabbitMQ."""
    return new_desk("classic")
