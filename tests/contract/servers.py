"""Servers of databases, one of each kind a session, and one database with our tables on each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, NullPool, create_engine

from celery_selfheal.database import drivers
from celery_selfheal.database.tables import Base
from celery_selfheal.errors import SettingsError
from celery_selfheal.testing.mariadb import MariaServer, find_mariadb_binary
from celery_selfheal.testing.postgres import PostgresServer, find_postgres_binary


def must_find(find: Callable[[], str]) -> None:
    """Without the server a test is left out on this machine, and fails in CI."""
    try:
        find()
    except SettingsError as exc:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(str(exc))
        pytest.skip(str(exc))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    must_find(find_postgres_binary)
    with PostgresServer() as running:
        yield running


@pytest.fixture(scope="session")
def maria_server() -> Iterator[MariaServer]:
    # No wheel brings it: a machine that has only Python is right without it, in CI, too.
    try:
        find_mariadb_binary()
    except SettingsError as exc:
        pytest.skip(str(exc))
    with MariaServer() as running:
        yield running


@pytest.fixture(scope="session")
def postgresql_engine(postgres_server: PostgresServer) -> Iterator[Engine]:
    """A database with our tables; what is in them is up to the tests."""
    yield from _with_tables(postgres_server.new_database())


@pytest.fixture(scope="session")
def mariadb_engine(maria_server: MariaServer) -> Iterator[Engine]:
    """As ``postgresql_engine``."""
    yield from _with_tables(maria_server.new_database())


@pytest.fixture(scope="session")
def sqlite_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """As ``postgresql_engine``."""
    yield from _with_tables(f"sqlite:///{tmp_path_factory.mktemp('sqlite')}/jobs.db")


def _with_tables(url: str) -> Iterator[Engine]:
    engine = an_engine(url)
    yield engine
    engine.dispose()


def an_engine(url: str) -> Engine:
    """With our tables, and as many connections as threads want."""
    engine = create_engine(drivers.parse(url), pool_size=0)
    if engine.dialect.name == "sqlite":
        engine.dispose()
        engine = create_engine(drivers.parse(url), connect_args={"timeout": 30}, poolclass=NullPool)
    Base.metadata.create_all(engine)
    return engine
