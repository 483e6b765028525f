"""Fixtures of the contract tests: one private server a session, an empty database a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from celery_selfheal.keys import Keys
from celery_selfheal.testing import RedisServer
from contract.benches import KEYS
from contract.databases import database_url, empty, engine, maria_server, postgres_server

__all__ = ["database_url", "empty", "engine", "maria_server", "postgres_server"]


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    """A private Redis; each test finds it empty."""
    with RedisServer() as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """A client of an empty database."""
    client = server.client()
    client.flushdb()
    yield client
    client.close()


@pytest.fixture
def keys() -> Keys:
    """Names of the application under test."""
    return KEYS
