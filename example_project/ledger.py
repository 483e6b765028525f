"""The books in SQL: what was paid, what was booked, and where each task was started."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import BigInteger, String, create_engine, event, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

BUSY_SECONDS = 30  # SQLite has one writer at a time; the others wait for so long


class Table(DeclarativeBase):
    """All tables of the shop."""


class Payment(Table):
    """That an order is paid: the key lets it happen once, however often the task is started."""

    __tablename__ = "shop_payments"
    order_number: Mapped[str] = mapped_column(String(20), primary_key=True)
    customer: Mapped[str] = mapped_column(String(80))


class Booking(Table):
    """Money that moved. Nothing here forbids a second booking of an order: only the payment's key does."""

    __tablename__ = "shop_bookings"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_number: Mapped[str] = mapped_column(String(20), index=True)
    currency: Mapped[str] = mapped_column(String(3))
    amount_cents: Mapped[int] = mapped_column(BigInteger)


class Start(Table):
    """That a task's body was entered; no end means that it was not left in good order."""

    __tablename__ = "shop_starts"
    id: Mapped[int] = mapped_column(primary_key=True)
    task: Mapped[str] = mapped_column(String(80))
    task_id: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(80))
    worker: Mapped[str] = mapped_column(String(120))
    pid: Mapped[int]
    started_ms: Mapped[int] = mapped_column(BigInteger)
    ended_ms: Mapped[int | None] = mapped_column(BigInteger)


class Ledger:
    """The books in one database; nothing is connected before the first call."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url, **_options(url))
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _tune_sqlite)
        self._transaction = sessionmaker(self.engine).begin

    def create_anew(self) -> None:
        """Make the tables, empty."""
        Table.metadata.drop_all(self.engine)
        Table.metadata.create_all(self.engine)

    def pay(self, order: dict[str, Any]) -> bool:
        """Book an order, once; ``False`` if it is paid already."""
        number = order["number"]
        try:
            with self._transaction() as session:
                session.add(Payment(order_number=number, customer=order["customer"]))
                session.flush()
                session.add(
                    Booking(order_number=number, currency=order["currency"], amount_cents=order["amount_cents"])
                )
        except IntegrityError:
            return False
        return True

    @contextmanager
    def start(self, task: Any, subject: str) -> Iterator[None]:
        """Note down that the body of a task starts, and that it ends, if it does."""
        row = Start(
            task=task.name.rpartition(".")[2],
            task_id=task.request.id,
            subject=subject,
            worker=task.request.hostname,
            pid=os.getpid(),
            started_ms=now_ms(),
        )
        with self._transaction() as session:
            session.add(row)
            session.flush()
            key = row.id
        yield
        with self._transaction() as session:
            session.execute(update(Start).where(Start.id == key).values(ended_ms=now_ms()))

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def now_ms() -> int:
    """This machine's clock, milliseconds of Unix time."""
    return time.time_ns() // 1_000_000


def _tune_sqlite(connection: Any, _: Any) -> None:
    # Readers and the writer do not wait for each other, nor the writer for the disk at each commit.
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _options(url: str) -> dict[str, Any]:
    return {"connect_args": {"timeout": BUSY_SECONDS}} if url.startswith("sqlite") else {"pool_pre_ping": True}
