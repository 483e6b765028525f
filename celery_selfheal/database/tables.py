"""Our tables in the user's database: rows only, no behaviour."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Index, Integer, MetaData, String, Text, false, text
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_selfheal.database.instants import Instant, store_now

VERSION_TABLE = "selfheal_version"
KEY_CHARACTERS = 128  # of the reference schema

_MYSQL = ("mysql", "mariadb")
# What a MySQL without these defaults would choose holds no transactions, or not every character.
_OPTIONS = {
    f"{dialect}_{name}": value for dialect in _MYSQL for name, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
}


def _key(characters: int) -> Any:
    """Text that is compared byte by byte: elsewhere than there ``Order`` and ``order`` are two keys already."""
    return String(characters).with_variant(
        mysql.VARCHAR(characters, charset="utf8mb4", collation="utf8mb4_bin"), *_MYSQL
    )


class Base(DeclarativeBase):
    """All tables of ours, apart from the application's."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class ProcessedJob(Base):
    """What one idempotency key already did.

    Attributes:
        response_payload: The stored result. SQL NULL is "none stored", which ``None`` writes; a result that *is*
            ``None`` is the JSON null, written as ``sqlalchemy.JSON.NULL``. Both read as ``None``:
            ``response_payload.is_(None)`` tells them apart in SQL.
        fence: Of the start that has the key; whoever has the larger one is later.
        payload_hash: Of task name and arguments; NULL where they cannot be compared.
        owner: Who has the key: task id, token and id of its database connection. For programs.
        dispatched: Whether the callbacks of a finished job were sent.
    """

    __tablename__ = "processed_jobs"
    __table_args__ = (Index(None, "status", "updated_at"), _OPTIONS)

    idempotency_key: Mapped[str] = mapped_column(_key(KEY_CHARACTERS), primary_key=True)
    job_name: Mapped[str] = mapped_column(String(255))
    status: Mapped[str] = mapped_column(String(32))
    response_payload: Mapped[Any] = mapped_column(
        JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql"), nullable=True
    )
    created_at: Mapped[datetime] = mapped_column(Instant, server_default=store_now())
    updated_at: Mapped[datetime] = mapped_column(Instant, server_default=store_now(), onupdate=store_now())
    fence: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    payload_hash: Mapped[str | None] = mapped_column(String(64))
    owner: Mapped[str | None] = mapped_column(String(512))
    dispatched: Mapped[bool] = mapped_column(Boolean, server_default=false())


class Fence(Base):
    """Largest fence that a lock key has let write; its row lock is held until the writer's commit."""

    __tablename__ = "selfheal_fences"
    __table_args__ = _OPTIONS

    lock_key: Mapped[str] = mapped_column(_key(255), primary_key=True)
    fence: Mapped[int] = mapped_column(BigInteger)
    updated_at: Mapped[datetime] = mapped_column(Instant, server_default=store_now(), onupdate=store_now())


class OutboxMessage(Base):
    """A message that is to be sent, written by the transaction that wants it sent.

    Attributes:
        id: Grows, and is never used again: whoever removes a row by it removes no later one.
        message: The whole message, as text.
    """

    __tablename__ = "selfheal_outbox"
    __table_args__ = ({**_OPTIONS, "sqlite_autoincrement": True},)

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    task_id: Mapped[str] = mapped_column(String(255))
    message: Mapped[str] = mapped_column(Text().with_variant(mysql.LONGTEXT(), *_MYSQL))
    created_at: Mapped[datetime] = mapped_column(Instant, server_default=store_now())
