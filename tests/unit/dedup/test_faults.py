"""Numbers of errors, as each driver carries them."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from sqlalchemy import exc
from sqlalchemy.exc import DBAPIError

from celery_selfheal.dedup.faults import Fault, fault_of, said


class DriverError(Exception):
    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args)
        vars(self).update(attributes)


def wrapped(orig: Exception, *, broken: bool = False) -> DBAPIError:
    return DBAPIError("SELECT secret", {"secret": 1}, orig, connection_invalidated=broken)


CASES = [
    (DriverError("deadlock", pgcode="40P01"), Fault.REPEAT),
    (DriverError("deadlock", sqlstate="40P01"), Fault.REPEAT),
    (DriverError({"C": "55P03", "M": "canceling statement due to lock timeout"}), Fault.BLOCKED),
    (DriverError("lock timeout", pgcode="55P03"), Fault.BLOCKED),
    (DriverError("no table", pgcode="42P01"), Fault.NO_TABLE),
    (DriverError("twice", pgcode="23505"), Fault.DUPLICATE),
    (DriverError(1213, "Deadlock found"), Fault.REPEAT),
    (DriverError("1213 (40001): Deadlock found", errno=1213, sqlstate="40001"), Fault.REPEAT),
    (DriverError(1205, "Lock wait timeout exceeded"), Fault.BLOCKED),
    (DriverError(1062, "Duplicate entry"), Fault.DUPLICATE),
    (DriverError(1146, "Table doesn't exist"), Fault.NO_TABLE),
    (DriverError(1406, "Data too long"), Fault.OTHER),
    (sqlite3.OperationalError("database is locked"), Fault.REPEAT),
    (sqlite3.OperationalError("database table is locked: processed_jobs"), Fault.REPEAT),
    (sqlite3.OperationalError("no such table: processed_jobs"), Fault.NO_TABLE),
    (sqlite3.OperationalError("disk I/O error"), Fault.OTHER),
    (DriverError("a row of the user says: database is locked"), Fault.OTHER),
    (DriverError(), Fault.OTHER),
]


@pytest.mark.parametrize(("orig", "fault"), CASES, ids=range(len(CASES)))
def test_driver_is_understood(orig: Exception, fault: Fault) -> None:
    assert fault_of(wrapped(orig)) is fault


def test_broken_connection_is_told_from_an_error_of_the_statement() -> None:
    assert fault_of(wrapped(DriverError(2013, "Lost connection"), broken=True)) is Fault.BROKEN


def test_error_of_the_pool_is_no_error_of_the_database() -> None:
    assert fault_of(exc.TimeoutError("QueuePool limit reached")) is Fault.OTHER


def test_what_was_said_is_one_line_without_the_users_data() -> None:
    assert said(wrapped(DriverError("first\n  second"))) == "first second"
    assert "secret" not in said(wrapped(DriverError("first")))
