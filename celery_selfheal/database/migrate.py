"""Bring our tables in the user's database to what this code needs, and tell whether they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, inspect, select, text
from sqlalchemy.exc import DBAPIError, ProgrammingError

from celery_selfheal.database.drivers import shown
from celery_selfheal.database.tables import VERSION_TABLE, Base
from celery_selfheal.errors import SettingsError, StoreError

#: Revision that this code works with, ``<generation>.<step>``. Within a generation a step only adds, so that a
#: database that is some steps ahead serves older workers, too.
HEAD = "1.2"
REMEDY = "run: celery -A proj selfheal db upgrade"
LOCK_SECONDS = 60  # twenty that upgrade at once wait for one, and it takes no second
_LOCK_ID = 0x5E1FEA1  # "selfheal", for PostgreSQL, which knows its advisory locks by number

_versions = Table(VERSION_TABLE, MetaData(), Column("version_num", String(32), primary_key=True))


def upgrade(engine: Engine) -> tuple[str | None, str]:
    """Bring the schema to ``HEAD``; return the revision before and the one now.

    Any number may call at once: one works, the others wait. A second call changes nothing, and a call after a crash
    goes on where the database stands. Tables of the application are not touched.

    Raises:
        SettingsError: Alembic is not installed, the schema is newer than this code, or a table of the application
            has one of our names.
        StoreError: the database does not answer, refuses, or another upgrade takes more than a minute.
    """
    alembic = _alembic()
    with answering(engine):
        before = current(engine)
        if before is not None:
            _refuse_other_generation(engine, before)
            if _number(before) >= _number(HEAD):
                return before, before
        with engine.connect() as connection, _exclusively(connection):
            if _version(connection) is None:
                _refuse_strangers(engine, connection)
            config = alembic.config.Config(attributes={"connection": connection})
            config.set_main_option("script_location", "celery_selfheal.database:migrations")
            alembic.command.upgrade(config, HEAD)
    return before, HEAD


def current(engine: Engine) -> str | None:
    """Revision of the schema; ``None`` where it was never created.

    Raises:
        StoreError: the database does not answer.
    """
    with answering(engine), engine.connect() as connection:
        return _version(connection)


def check(engine: Engine) -> None:
    """Make sure that this code can work with the schema.

    Raises:
        SettingsError: a table is missing, or the schema is older or of a newer generation; with the remedy.
        StoreError: the database does not answer.
    """
    with answering(engine), engine.connect() as connection:
        version = _version(connection)
        there = set(inspect(connection).get_table_names())
    if version is not None:
        _refuse_other_generation(engine, version)
        if _number(version) < _number(HEAD):
            raise _error(engine, f"has schema {version} and this celery_selfheal needs {HEAD}: {REMEDY}")
    missing = sorted(Base.metadata.tables.keys() - there)
    if missing:
        # With a version and without the table, an upgrade would think that it has nothing to do.
        remedy = REMEDY if version is None else f"it was dropped; restore it, or drop {VERSION_TABLE} and {REMEDY}"
        raise _error(engine, f"has no table {missing[0]}: {remedy}")
    if version is None:
        raise _error(engine, f"has our tables, but no {VERSION_TABLE} that says which: {REMEDY}")


@contextmanager
def answering(engine: Engine) -> Iterator[None]:
    """Turn errors of the driver into ours.

    Raises:
        StoreError: the database did not answer, or the statement failed.
        SettingsError: it answered that it will never do that: a table is not there, or a right is missing.
    """
    try:
        yield
    except DBAPIError as exc:
        said = " ".join(str(exc.orig).split())
        if isinstance(exc, ProgrammingError):
            raise _error(engine, f"refuses: {said}") from exc
        raise StoreError(shown(engine.url), said) from exc


@contextmanager
def _exclusively(connection: Connection) -> Iterator[None]:
    """A transaction that no other upgrade can be in, committed at the end."""
    dialect = connection.dialect.name
    if dialect == "postgresql":
        # Both end with the transaction, so that neither a crash nor a pool of transactions leaves one behind.
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": _LOCK_ID})
        yield
        connection.commit()
    elif dialect == "sqlite":
        waits_ms = connection.execute(text("PRAGMA busy_timeout")).scalar_one()
        connection.rollback()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}")
        try:
            # Python's driver begins none before a DDL statement.
            connection.exec_driver_sql("BEGIN EXCLUSIVE")
            yield
            connection.commit()
        finally:
            connection.rollback()
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {waits_ms}")
    else:
        # Of this session, since each DDL statement ends the transaction. Locks are the server's: ours is by database.
        name = "CONCAT('selfheal_upgrade:', MD5(DATABASE()))"
        if connection.execute(text(f"SELECT GET_LOCK({name}, {LOCK_SECONDS})")).scalar() != 1:
            raise StoreError(shown(connection.engine.url), f"another upgrade has run for {LOCK_SECONDS} s")
        try:
            yield
            connection.commit()
        finally:
            connection.rollback()
            connection.execute(text(f"SELECT RELEASE_LOCK({name})"))


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(select(_versions.c.version_num)).scalar()


def _refuse_other_generation(engine: Engine, version: str) -> None:
    if _number(version)[0] > _number(HEAD)[0]:
        raise _error(
            engine, f"has schema {version} of a newer celery_selfheal, this one knows {HEAD}: update it on this machine"
        )


def _refuse_strangers(engine: Engine, connection: Connection) -> None:
    """No table of the application is taken for ours: only one that has all columns of ours."""
    there = inspect(connection)
    for table in Base.metadata.sorted_tables:
        if there.has_table(table.name):
            missing = set(table.columns.keys()) - {column["name"] for column in there.get_columns(table.name)}
            if missing:
                raise _error(
                    engine,
                    f"already has a table {table.name} that is not ours (it has no column {min(missing)}):"
                    " rename it, or give us another schema or database",
                )


def _number(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.split("."))
    except ValueError:
        raise SettingsError(f"the table {VERSION_TABLE} holds {version!r}, which is no version of ours") from None


def _error(engine: Engine, what: str) -> SettingsError:
    return SettingsError(f"the database {shown(engine.url)} {what}")


def _alembic() -> Any:
    try:
        import alembic.command
        import alembic.config
    except ImportError as exc:
        raise SettingsError("selfheal db upgrade needs Alembic: pip install alembic") from exc
    module: ModuleType = alembic
    return module
