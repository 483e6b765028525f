"""What the demo can see from the outside: books, receipts and worker logs, none of it from the plugin's own store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine, select
from sqlalchemy.exc import OperationalError

from example_project.ledger import BUSY_SECONDS, Booking, Start

_HEALED = re.compile(
    r"task (?P<what>stalled|recovered): (?P<task>\S+)\[(?P<task_id>[^]]+)] (?:on|from) (?P<worker>[^@\s]+)\S* after"
)


class Started(NamedTuple):
    """One start of a task: of which, on what, by whom, and when (milliseconds of Unix time)."""

    task: str
    task_id: str
    subject: str
    worker: str
    pid: int
    started_ms: int
    ended_ms: int | None


class Booked(NamedTuple):
    """Money that moved."""

    order_number: str
    currency: str
    amount_cents: int


class Healed(NamedTuple):
    """What the log of one worker says about a task of another, dead one.

    Attributes:
        what: ``stalled``: it was under way there; ``recovered``: its message is back in the queue.
    """

    what: str
    task: str
    task_id: str
    worker: str


def starts(engine: Engine) -> list[Started]:
    """All starts, oldest first."""
    columns = [getattr(Start, name) for name in Started._fields]
    with engine.connect() as connection:
        rows = [Started(*row) for row in connection.execute(select(*columns).order_by(Start.started_ms, Start.id))]
    return [row._replace(worker=row.worker.partition("@")[0]) for row in rows]


def bookings(engine: Engine) -> list[Booked]:
    """All bookings."""
    columns = [getattr(Booking, name) for name in Booked._fields]
    with engine.connect() as connection:
        return [Booked(*row) for row in connection.execute(select(*columns))]


def is_writable(engine: Engine) -> bool:
    """Whether nobody keeps the one write lock that SQLite has; always true for other databases."""
    if engine.dialect.name != "sqlite":
        return True
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 500")
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        except OperationalError:
            return False
        finally:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
        connection.rollback()
    return True


class Log:
    """A worker's log, read on from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new_lines(self) -> list[str]:
        """Whole lines that came since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as log:
            log.seek(self._position)
            whole = log.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._position += len(whole) + 1
        return whole.decode(errors="replace").split("\n")


def healed(line: str) -> Healed | None:
    """The act of healing that a line of a log tells of, if it does."""
    found = _HEALED.search(line)
    if found is None:
        return None
    return Healed(found["what"], found["task"].rpartition(".")[2], found["task_id"], found["worker"])
