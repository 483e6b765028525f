"""What an error of a database's driver means: the databases say it by number, each by its own."""

from __future__ import annotations

import enum

from sqlalchemy.exc import DBAPIError, SQLAlchemyError


class Fault(enum.Enum):
    """What to do about it."""

    REPEAT = "repeat"
    """The statement was undone for somebody else's sake, such as a deadlock."""
    BLOCKED = "blocked"
    """Another transaction holds the row, and we have waited as long as we wanted."""
    DUPLICATE = "duplicate"
    """The key is there already."""
    BROKEN = "broken"
    """The connection broke, and the statement was executed or not."""
    NO_TABLE = "no table"
    OTHER = "other"


# SQLSTATE for PostgreSQL, error numbers for MySQL and MariaDB.
_CODES: dict[Fault, frozenset[object]] = {
    Fault.REPEAT: frozenset({"40001", "40P01", 1213, 1020}),
    Fault.BLOCKED: frozenset({"55P03", 1205}),
    Fault.DUPLICATE: frozenset({"23505", 1062}),
    Fault.NO_TABLE: frozenset({"42P01", 1146}),
}
# SQLite has a number for the last only since Python 3.11.
_WORDS = {
    "is locked": Fault.REPEAT,
    "UNIQUE constraint failed": Fault.DUPLICATE,
    "no such table": Fault.NO_TABLE,
}


def fault_of(error: SQLAlchemyError) -> Fault:
    """Tell what an error means."""
    if not isinstance(error, DBAPIError) or error.orig is None:
        return Fault.OTHER
    codes = _codes(error.orig)
    for fault, known in _CODES.items():
        if codes & known:
            return fault
    if error.connection_invalidated:
        return Fault.BROKEN
    if type(error.orig).__module__.startswith("sqlite3"):
        words = str(error.orig)
        return next((fault for part, fault in _WORDS.items() if part in words), Fault.OTHER)
    return Fault.OTHER


def said(error: SQLAlchemyError) -> str:
    """What the driver said, in one line; without statement and parameters, which are the user's data."""
    words = str(error.orig if isinstance(error, DBAPIError) else error)
    return " ".join(words.split()) or type(error).__name__


def _codes(orig: BaseException) -> set[object]:
    """Every driver keeps the number elsewhere."""
    first = orig.args[0] if orig.args else None
    found = {getattr(orig, name, None) for name in ("pgcode", "sqlstate", "errno")}
    if isinstance(first, dict):  # pg8000
        found.add(first.get("C"))
    elif isinstance(first, int):
        found.add(first)
    return found - {None}
