"""Opens the lease store in PostgreSQL, for applications that have set ``selfheal_lease_backend = "postgres"``."""

from __future__ import annotations

from datetime import timedelta

from celery_selfheal.database import migrate
from celery_selfheal.database.drivers import shown
from celery_selfheal.database.engines import database_of
from celery_selfheal.errors import SettingsError
from celery_selfheal.keys import Keys
from celery_selfheal.leases.functions import Functions, own_engine
from celery_selfheal.leases.postgres import PostgresLeaseStore
from celery_selfheal.retry_budget import RetryBudget
from celery_selfheal.sessions.postgres import PostgresSessionStore
from celery_selfheal.settings import SelfHealSettings


def open_functions(settings: SelfHealSettings) -> Functions:
    """Calls on connections of their own; nothing is connected before the first one.

    Raises:
        SettingsError: the database is no PostgreSQL, or its settings cannot be used.
    """
    database = database_of(settings)
    url = database.engine.url
    if url.get_backend_name() != "postgresql":
        raise SettingsError(
            f"selfheal_lease_backend is 'postgres', and {database.setting} ({shown(url)}) names another kind of"
            " database: name a PostgreSQL there, or keep the leases in Redis (selfheal_redis_url)",
            "selfheal_lease_backend",
        )
    patience = settings.lease_ttl / 3
    is_theirs = database.setting != "selfheal_database_url"
    return Functions(own_engine(database.engine, patience=patience, as_it_is=is_theirs), patience=patience)


def open_leases(
    settings: SelfHealSettings, keys: Keys, *, done_ttl: timedelta
) -> tuple[PostgresLeaseStore, PostgresSessionStore]:
    """Both stores on the same connections.

    Raises:
        SettingsError: as ``open_functions``.
    """
    functions = open_functions(settings)
    leases = PostgresLeaseStore(
        functions,
        keys,
        ttl=settings.lease_ttl,
        max_stalls=settings.max_stalls,
        done_ttl=done_ttl,
        budget=RetryBudget.parse(settings.retry_budget) if settings.retry_budget else None,
    )
    return leases, PostgresSessionStore(functions, keys, ttl=settings.lease_ttl)


def address(settings: SelfHealSettings) -> tuple[str, str]:
    """Which setting names the database, and the database without its password.

    Raises:
        SettingsError: as ``open_functions``.
    """
    return database_of(settings).setting, open_functions(settings).address


def check(settings: SelfHealSettings) -> None:
    """Ask the server whether it can keep the leases now.

    Raises:
        SettingsError: the migrations have not been run, or the database is no PostgreSQL.
        StoreError: it does not answer, or is not set up for it.
    """
    functions = open_functions(settings)
    try:
        migrate.check(functions.engine)
        functions.rows("enter", None)
    finally:
        functions.engine.dispose()
