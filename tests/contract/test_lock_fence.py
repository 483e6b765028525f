"""Of two transactions under one lock key, none commits what began before the other's end."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy import Engine, delete, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from celery_selfheal.database.tables import Fence
from celery_selfheal.dedup.lock_fence import end_overtaken, pass_fence
from celery_selfheal.dedup.port import Granted, Held, Job


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """No key has been passed yet, on each database."""
    engine: Engine = request.getfixturevalue(f"{request.param}_engine")
    with engine.begin() as connection:
        connection.execute(delete(Fence))
    return engine


def a_job(fence: int, task_id: str = "t") -> Job:
    return Job(key=f"job-{task_id}", task_name="pay", task_id=task_id, token=f"token-{fence}", fence=fence)


def passes(engine: Engine, fence: int, key: str = "account:1") -> bool:
    with Session(engine) as session:
        found = pass_fence(session, a_job(fence, f"t{fence}"), key)
        session.commit()
        return isinstance(found, Granted)


def test_fences_pass_in_their_order_only(engine: Engine) -> None:
    assert [passes(engine, fence) for fence in (5, 6, 6, 5, 9, 8)] == [True, True, True, False, True, False]


def test_keys_do_not_concern_each_other(engine: Engine) -> None:
    assert passes(engine, 5, "account:1")
    assert passes(engine, 4, "account:2")
    assert passes(engine, 3, "ACCOUNT:1")


def test_what_was_rolled_back_has_not_passed(engine: Engine) -> None:
    with Session(engine) as session:
        assert pass_fence(session, a_job(9), "account:1") == Granted()
        session.rollback()

    assert passes(engine, 5)


def test_a_long_key_is_told_from_another(engine: Engine) -> None:
    assert passes(engine, 5, "a" * 300)
    assert passes(engine, 4, "a" * 299)


def test_an_earlier_transaction_is_waited_for(engine: Engine) -> None:
    """It commits first, and the later one sees what it has done."""
    passed = threading.Event()
    with Session(engine) as earlier:
        assert pass_fence(earlier, a_job(5), "account:1") == Granted()
        later = threading.Thread(target=lambda: passes(engine, 6) and passed.set())
        later.start()
        assert not passed.wait(0.3)
        earlier.commit()
    later.join(30)
    assert passed.is_set()


def test_the_later_one_refuses_the_earlier_one(engine: Engine) -> None:
    assert passes(engine, 6)

    with Session(engine) as session:
        assert pass_fence(session, a_job(5), "account:1") is None
        assert not session.in_transaction()


def test_the_wait_is_bounded_and_the_older_connection_can_be_ended(postgresql_engine: Engine) -> None:
    engine = postgresql_engine
    with engine.begin() as connection:
        connection.execute(delete(Fence))
    with Session(engine) as paused, Session(engine) as session:
        assert pass_fence(paused, a_job(5, "paused"), "account:1") == Granted()

        assert pass_fence(session, a_job(6), "account:1") == Held(task_id="", token="", fence=0, age=timedelta(0))
        assert not end_overtaken(engine, a_job(4), "account:1")
        assert not end_overtaken(engine, a_job(6), "account:2")
        assert end_overtaken(engine, a_job(6), "account:1")
        assert pass_fence(session, a_job(6), "account:1") == Granted()
        session.commit()

        with pytest.raises(DBAPIError):
            paused.execute(text("SELECT 1"))


def test_the_body_has_its_own_lock_timeout_again(postgresql_engine: Engine) -> None:
    with Session(postgresql_engine) as session:
        session.execute(text("SET LOCAL lock_timeout = '7s'"))
        assert pass_fence(session, a_job(50), "account:timeout") == Granted()
        assert session.execute(text("SHOW lock_timeout")).scalar_one() == "7s"
