"""Fixtures of the contract tests: one private server a session, an empty database a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
import sqlalchemy as sa
from sqlalchemy import Engine

from celery_selfheal.database import drivers, migrate
from celery_selfheal.keys import Keys
from celery_selfheal.leases.functions import own_engine
from celery_selfheal.testing import RedisServer
from celery_selfheal.testing.mariadb import MariaServer
from celery_selfheal.testing.postgres import PostgresServer
from contract.benches import KEYS
from contract.claim_benches import an_engine
from contract.postgres_bench import PATIENCE, empty


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
def postgres() -> Iterator[PostgresServer]:
    """A private PostgreSQL."""
    with PostgresServer() as running:
        yield running


@pytest.fixture(scope="session")
def database(postgres: PostgresServer) -> Iterator[sa.Engine]:
    """A database with our tables."""
    url = drivers.parse(postgres.new_database())
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


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaServer]:
    """A private MariaDB."""
    with MariaServer() as running:
        yield running


@pytest.fixture(scope="session")
def postgresql_engine(postgres: PostgresServer) -> Iterator[Engine]:
    """A database with our tables; what is in them is up to the tests."""
    engine = an_engine(postgres.new_database())
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def mariadb_engine(mariadb: MariaServer) -> Iterator[Engine]:
    """As ``postgresql_engine``."""
    engine = an_engine(mariadb.new_database())
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def sqlite_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """As ``postgresql_engine``."""
    engine = an_engine(f"sqlite:///{tmp_path_factory.mktemp('sqlite')}/jobs.db")
    yield engine
    engine.dispose()
