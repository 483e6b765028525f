"""Fixtures of databases: each test gets an empty one, or one with our tables, of every kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from celery_selfheal.database import engines, migrate
from celery_selfheal.errors import SettingsError
from celery_selfheal.settings import SelfHealSettings
from celery_selfheal.testing.mariadb import MariaServer, find_mariadb_binary
from celery_selfheal.testing.postgres import PostgresServer, find_postgres_binary

KINDS = ("sqlite", "postgresql", "mariadb")


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
    must_find(find_mariadb_binary)
    with MariaServer() as running:
        yield running


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    server = request.getfixturevalue("postgres_server" if request.param == "postgresql" else "maria_server")
    url: str = server.new_database()
    return url


@pytest.fixture
def empty(database_url: str) -> Iterator[Engine]:
    """Engine of an empty database."""
    engine = engines.engine_of(SelfHealSettings(database_url=database_url))
    yield engine
    engine.dispose()


@pytest.fixture
def engine(empty: Engine) -> Engine:
    """Engine of a database with our tables."""
    migrate.upgrade(empty)
    return empty
