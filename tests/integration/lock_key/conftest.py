"""Fixtures of the lock keys: an app of its own for each test, on each kind of broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_selfheal.testing import RedisServer
from integration.endings.conftest import rabbit_server, redis_server
from integration.endings.yard import Yard

__all__ = ("rabbit_server", "redis_server")


class Bank(Yard):
    """A yard whose workers are those of ``apps/locks.py``."""

    module = "locks"
    apps = Path(__file__).parent / "apps"


@pytest.fixture(params=["redis", "classic"])
def bank(redis_server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bank]:
    """If the test fails, its workers' logs are in its report."""
    kind = request.param
    # Ids are the same in each test.
    with redis_server.client(1) as results:
        results.flushdb()
    broker = redis_server.url(0) if kind == "redis" else request.getfixturevalue("rabbit_server").url()
    bank = Bank(kind, broker, redis_server, tmp_path, name=f"locks-{uuid.uuid4().hex[:8]}")
    bank.settings |= {"selfheal_lease_ttl": 3, "selfheal_heartbeat_interval": 0.5}
    try:
        yield bank
    finally:
        bank.close()
        for log in sorted(tmp_path.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-80:]
            request.node.add_report_section("teardown", log.name, "\n".join(lines))
