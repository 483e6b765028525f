"""Database URLs: which driver speaks to it, and how to show one without its password."""

from __future__ import annotations

import importlib.util

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from celery_selfheal.errors import SettingsError

SETTING = "selfheal_database_url"
MASK = "***"

# By backend: the extra that brings a driver, and the drivers of SQLAlchemy with the module that each needs, in the
# order in which a URL that names none gets them.
_DRIVERS = {
    "postgresql": ("postgres", {"psycopg2": "psycopg2", "psycopg": "psycopg", "pg8000": "pg8000"}),
    "mysql": ("mysql", {"mysqldb": "MySQLdb", "pymysql": "pymysql", "mysqlconnector": "mysql.connector"}),
    "mariadb": ("mysql", {"mariadbconnector": "mariadb", "mysqldb": "MySQLdb", "pymysql": "pymysql"}),
    "sqlite": ("", {"pysqlite": "sqlite3"}),
}
_ALIASES = {"postgres": "postgresql"}  # as hosting platforms write it


def parse(text: str) -> URL:
    """Read a URL, and choose a driver that is installed where it names none.

    Raises:
        SettingsError: it is none, or names a database or a driver that we cannot speak to.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Not shown: what cannot be read may hold a password anywhere.
        raise SettingsError(
            f"{SETTING} is no SQLAlchemy URL: write postgresql://user:password@host/name (a password with @ : / or %"
            " must be percent-encoded)",
            SETTING,
        ) from None
    backend, plus, driver = url.drivername.partition("+")
    backend = _ALIASES.get(backend, backend)
    url = url.set(drivername=backend + plus + driver)
    check_supported(url, SETTING)
    extra, drivers = _DRIVERS[backend]
    if not plus:
        chosen = next((name for name, module in drivers.items() if _is_there(module)), None)
        if chosen is None:
            raise _not_installed(url, next(iter(drivers.values())), extra)
        url = url.set(drivername=f"{backend}+{chosen}")
    return url


def check_supported(url: URL, setting: str) -> None:
    """Refuse a kind of database that our statements are not written for.

    Raises:
        SettingsError: with those that are.
    """
    backend = url.get_backend_name()
    if backend not in _DRIVERS:
        choice = ", ".join(_DRIVERS)
        raise SettingsError(f"{setting} = {shown(url)!r}: {backend} is not supported, use {choice}", setting)


def check_installed(url: URL) -> None:
    """Refuse a driver that cannot be loaded, and one for ``asyncio``.

    Raises:
        SettingsError: with the remedy.
    """
    extra, drivers = _DRIVERS[url.get_backend_name()]
    driver = url.drivername.partition("+")[2]
    choice = " or ".join(drivers)
    try:
        dialect = url.get_dialect()
    except NoSuchModuleError:
        raise SettingsError(
            f"{SETTING} = {shown(url)!r}: SQLAlchemy knows no driver {driver}, use {choice}", SETTING
        ) from None
    if dialect.is_async:
        raise SettingsError(
            f"{SETTING} = {shown(url)!r}: {driver} is for asyncio, which a task is not, use {choice}", SETTING
        )
    try:
        dialect.import_dbapi()
    except ImportError as exc:
        raise _not_installed(url, exc.name or driver, extra) from exc


def shown(url: URL) -> str:
    """Write a URL for people: no password, not even in its query."""
    secret = {name: MASK for name in url.query if "password" in name.lower() or name.lower() == "passwd"}
    return url.update_query_dict(secret).render_as_string(hide_password=True).replace("%2A%2A%2A", MASK)


def is_same(url: URL, other: URL) -> bool:
    """Whether two URLs name one database, whichever driver speaks to it and whoever logs in."""

    def place(one: URL) -> tuple[object, ...]:
        backend = {"mariadb": "mysql"}.get(one.get_backend_name(), one.get_backend_name())
        return backend, one.host, one.port, one.database

    return place(url) == place(other)


def _not_installed(url: URL, module: str, extra: str) -> SettingsError:
    return SettingsError(
        f"{SETTING} = {shown(url)!r} needs the module {module}, which is not installed:"
        f" pip install celery_selfheal[{extra}]" + (f", or {module}" if extra else ""),
        SETTING,
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there
        return False
