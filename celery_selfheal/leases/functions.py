"""Functions of the lease store in PostgreSQL, and the one border at which the database's errors become ours."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from celery_selfheal.clock import monotonic
from celery_selfheal.database import drivers
from celery_selfheal.errors import StoreError

NAME_BYTES = 512  # far below what an index entry may have, and no id or task name of sane people is so long
REPEATABLE = frozenset({"40001", "40P01"})  # serialization failure, deadlock: the other one has gone on

_LIBPQ = frozenset({"psycopg2", "psycopg"})


class Functions:
    """Calls one of them a step: one round trip, and one transaction of its own.

    Args:
        engine: In this process only, and used by nobody who holds its connections for long.
        patience: A call that cannot have its rows by then fails.
    """

    def __init__(self, engine: sa.Engine, *, patience: timedelta) -> None:
        self.engine = engine
        self._patience = patience
        self._statements: dict[str, sa.TextClause] = {}
        self.address = drivers.shown(engine.url)

    def __call__(self, name: str, app: str, /, **arguments: Any) -> sa.Row[Any]:
        """The one row that it returns.

        Raises:
            StoreError: PostgreSQL did not answer, or refused.
        """
        return self.rows(name, app, **arguments)[0]

    def rows(self, name: str, app: str | None, /, **arguments: Any) -> list[sa.Row[Any]]:
        """All rows. A connection that turns out to be lost is replaced once: every function may run twice.

        Raises:
            StoreError: as above.
        """
        # Less than the whole: the server's refusal shall come before we hang up.
        given = {"patience_ms": round(self._patience.total_seconds() * 800), **arguments}
        if app is not None:
            given = {"app": app, **given}
        statement = self._statement(name, given)
        give_up_at = monotonic() + self._patience.total_seconds()
        while True:
            try:
                with self.engine.connect() as connection:
                    return list(connection.execute(statement, _storable(given)))
            except (SQLAlchemyError, OSError) as exc:  # drivers in Python let those of their sockets through
                if monotonic() >= give_up_at or not _may_be_repeated(exc):
                    raise StoreError(self.address, f"{name}: {_words(exc)}") from exc
                give_up_at = -math.inf

    def _statement(self, name: str, arguments: Mapping[str, Any]) -> sa.TextClause:
        # Kept, so that SQLAlchemy compiles each of them once.
        if name not in self._statements:
            places = ", ".join(
                f"CAST(:{key} AS text[])" if isinstance(value, list) else f":{key}" for key, value in arguments.items()
            )
            self._statements[name] = sa.text(f"SELECT * FROM selfheal_{name}({places})")  # noqa: S608  # names are ours
        return self._statements[name]


def own_engine(engine: sa.Engine, *, patience: timedelta, as_it_is: bool) -> sa.Engine:
    """An engine of our own to the same database; connects on first use.

    Task bodies may hold connections of ``engine`` for hours: a lease must not wait for one.

    Args:
        as_it_is: The application made ``engine``: connect as it does, with whatever its owner has added to that.
    """
    if as_it_is:
        ours = sa.Engine(engine.pool.recreate(), engine.dialect, engine.url)
        return ours.execution_options(isolation_level="AUTOCOMMIT")
    return sa.create_engine(
        engine.url,
        isolation_level="AUTOCOMMIT",
        # No limit, so no queue in which one thread could starve: calls are short, and few of them meet. None is tested
        # first, since each call may run twice.
        pool_size=0,
        pool_use_lifo=True,
        **_driver_options(engine.url, seconds=patience.total_seconds()),
    )


def _driver_options(url: sa.URL, *, seconds: float) -> dict[str, Any]:
    """What makes a driver give up on a server that has vanished; what the URL says already is left alone."""
    driver = url.get_driver_name()
    wanted: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if driver in _LIBPQ:
        whole = max(1, math.ceil(seconds))
        wanted = {
            "connect_timeout": max(2, whole),  # libpq takes 1 for 2
            "tcp_user_timeout": whole * 1000,
            "keepalives_idle": whole,
            "keepalives_interval": 1,
            "keepalives_count": 3,
            "application_name": "celery_selfheal",
        }
    arguments = {name: value for name, value in wanted.items() if name not in url.query}
    if driver == "psycopg2":
        from celery_selfheal.leases.bounded import BoundedConnection

        arguments["connection_factory"] = lambda dsn, **_: BoundedConnection(dsn, seconds=seconds)
        options["use_native_hstore"] = False  # we have none, and it would cost a query a connection
    elif driver == "psycopg":
        # A pooler in transaction mode gives the next statement to another backend, which knows no prepared one.
        arguments["prepare_threshold"] = None
    return {**options, "connect_args": arguments}


def name_of(text: str) -> str:
    """A task id, marker or name as the store keeps it: one name for one text, short enough for an index."""
    safe = storable(text)
    encoded = safe.encode()
    if len(encoded) <= NAME_BYTES:
        return safe
    return f"{encoded[: NAME_BYTES - 65].decode(errors='ignore')}:{hashlib.sha256(encoded).hexdigest()}"


def storable(text: str) -> str:
    """The text without what PostgreSQL refuses: NUL and lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")


def _storable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: storable(value)
        if isinstance(value, str)
        else [storable(one) for one in value]
        if isinstance(value, list)
        else value
        for name, value in arguments.items()
    }


def _may_be_repeated(exc: Exception) -> bool:
    if not isinstance(exc, DBAPIError):
        return False
    code = getattr(exc.orig, "sqlstate", None) or getattr(exc.orig, "pgcode", None)
    return exc.connection_invalidated or code in REPEATABLE


def _words(exc: Exception) -> str:
    # SQLAlchemy's own text would show the arguments, and with them what failed tasks said.
    words = str(exc.orig if isinstance(exc, DBAPIError) else exc)
    if "does not exist" in words and "selfheal_" in words:
        words += " (run `celery -A proj selfheal db upgrade`)"
    return " ".join(words.split())
