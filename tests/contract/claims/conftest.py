"""One database of each kind a session; what is in it is up to the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from celery_selfheal.testing.mariadb import MariaServer
from celery_selfheal.testing.postgres import PostgresServer
from contract.claims.benches import an_engine
from contract.databases import maria_server, postgres_server

__all__ = ["maria_server", "mariadb_engine", "postgres_server", "postgresql_engine", "sqlite_engine"]


@pytest.fixture(scope="session")
def postgresql_engine(postgres_server: PostgresServer) -> Iterator[Engine]:
    """With our tables."""
    engine = an_engine(postgres_server.new_database())
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def mariadb_engine(maria_server: MariaServer) -> Iterator[Engine]:
    """With our tables."""
    engine = an_engine(maria_server.new_database())
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def sqlite_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With our tables."""
    engine = an_engine(f"sqlite:///{tmp_path_factory.mktemp('sqlite')}/jobs.db")
    yield engine
    engine.dispose()
