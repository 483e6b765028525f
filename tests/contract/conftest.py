"""Fixtures of the contract tests: one private server a session, an empty database a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
import sqlalchemy as sa

from celery_selfheal.database import drivers, migrate
from celery_selfheal.keys import Keys
from celery_selfheal.leases.functions import own_engine
from celery_selfheal.testing import RedisServer
from celery_selfheal.testing.postgres import PostgresServer
from contract.benches import KEYS
from contract.postgres_bench import PATIENCE, empty
from contract.servers import maria_server, mariadb_engine, postgres_server, postgresql_engine, sqlite_engine

__all__ = ["maria_server", "mariadb_engine", "postgres_server", "postgresql_engine", "sqlite_engine"]


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


@pytest.fixture(scope="session")
def database(postgres_server: PostgresServer) -> Iterator[sa.Engine]:
    """A database with our tables."""
    url = drivers.parse(postgres_server.new_database())
    engine = sa.create_engine(url)
    migrate.upgrade(engine)
    engine.dispose()
    ours = own_engine(engine, patience=PATIENCE, as_it_is=False)
    yield ours
    ours.dispose()


@pytest.fixture
def engine(database: sa.Engine) -> sa.Engine:
    """Connections to it; the lease store is empty."""
    empty(database)
    return database


@pytest.fixture
def keys() -> Keys:
    """Names of the application under test."""
    return KEYS
