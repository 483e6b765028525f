"""Instants in a database: aware and in UTC on this side, whatever the database makes of them."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from sqlalchemy import DateTime, Dialect
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine


class Instant(TypeDecorator[datetime]):
    """Microseconds in UTC. PostgreSQL keeps the zone; the others keep the digits, and so must be given UTC.

    Raises:
        ValueError: a naive value is written, which means another instant on each host.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """MySQL cuts the fraction off unless it is asked for."""
        is_mysql = dialect.name in ("mysql", "mariadb")
        return dialect.type_descriptor(mysql.DATETIME(fsp=6) if is_mysql else DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Write it as the database keeps it."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone: use celery_selfheal.clock.utc_now()")
        in_utc = value.astimezone(timezone.utc)
        return in_utc if dialect.name == "postgresql" else in_utc.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Read it as aware and in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


class store_now(FunctionElement[datetime]):  # noqa: N801  # reads as the function that it is in SQL
    """The database's now, when the statement begins: not that of the transaction, which may have begun long ago."""

    type = Instant()
    inherit_cache = True


@compiles(store_now)
def _compile(element: store_now, compiler: Any, **kwargs: Any) -> str:
    return "CURRENT_TIMESTAMP"


@compiles(store_now, "postgresql")
def _compile_postgresql(element: store_now, compiler: Any, **kwargs: Any) -> str:
    return "statement_timestamp()"


@compiles(store_now, "mysql", "mariadb")
def _compile_mysql(element: store_now, compiler: Any, **kwargs: Any) -> str:
    # Neither the zone of the session nor a daylight saving time may move it.
    return "(UTC_TIMESTAMP(6))"


@compiles(store_now, "sqlite")
def _compile_sqlite(element: store_now, compiler: Any, **kwargs: Any) -> str:
    # As SQLAlchemy writes its parameters, or the two could not be compared: they are texts.
    return "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))"
