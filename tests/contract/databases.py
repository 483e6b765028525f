"""Each test gets an empty database, or one with our tables, of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from celery_selfheal.database import engines, migrate
from celery_selfheal.settings import SelfHealSettings

KINDS = ("sqlite", "postgresql", "mariadb")


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
