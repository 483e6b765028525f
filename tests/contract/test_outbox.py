"""The outbox keeps its promises on every database: in order, held by one, gone only when that is committed."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from sqlalchemy import Engine, create_engine, delete, update
from sqlalchemy.orm import Session

from celery_selfheal.database.instants import store_now
from celery_selfheal.database.tables import OutboxMessage
from celery_selfheal.errors import StoreError
from celery_selfheal.outbox.store import Outbox, add_rows, ids_of

NOW = timedelta(0)


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """An empty outbox on each database."""
    engine: Engine = request.getfixturevalue(f"{request.param}_engine")
    with engine.begin() as connection:
        connection.execute(delete(OutboxMessage))
    return engine


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    return Outbox(engine)


def write(engine: Engine, *messages: str) -> list[int]:
    with Session(engine) as session:
        rows = add_rows(session, [(f"id of {message}", message) for message in messages])
        session.commit()
        return ids_of(rows)


def held_messages(outbox: Outbox, *, limit: int = 100, older_than: timedelta = NOW) -> list[str]:
    with outbox.hold(limit=limit, older_than=older_than) as held:
        return [row.message for row in held.rows]


def has_row_locks(engine: Engine) -> bool:
    return engine.dialect.name != "sqlite"


def test_rows_come_in_the_order_in_which_they_were_written(engine: Engine, outbox: Outbox) -> None:
    ids = write(engine, "a", "b", "c")

    with outbox.hold(limit=2, older_than=NOW) as held:
        found = [(row.id, row.task_id, row.message) for row in held.rows]

    assert found == [(ids[0], "id of a", "a"), (ids[1], "id of b", "b")]


def test_a_row_is_held_only_when_it_is_old_enough_by_the_clock_of_the_database(engine: Engine, outbox: Outbox) -> None:
    (old, _) = write(engine, "old", "fresh")
    with engine.begin() as connection:
        now = connection.execute(store_now().select()).scalar_one()
        connection.execute(
            update(OutboxMessage).where(OutboxMessage.id == old).values(created_at=now - timedelta(hours=1))
        )

    assert held_messages(outbox, older_than=timedelta(minutes=1)) == ["old"]


def test_the_age_of_a_row_is_told(engine: Engine, outbox: Outbox) -> None:
    write(engine, "a")

    with outbox.hold(limit=1, older_than=NOW) as held:
        assert NOW <= held.rows[0].age < timedelta(minutes=1)


def test_what_was_not_committed_is_not_there(engine: Engine, outbox: Outbox) -> None:
    with Session(engine) as session:
        add_rows(session, [("1", "a")])
        session.flush()
        session.rollback()

    assert held_messages(outbox) == []


def test_a_removed_row_is_gone_when_the_hold_ends(engine: Engine, outbox: Outbox) -> None:
    ids = write(engine, "a", "b")

    with outbox.hold(limit=100, older_than=NOW) as held:
        held.remove(ids[:1])

    assert held_messages(outbox) == ["b"]


def test_removing_twice_is_no_error(engine: Engine, outbox: Outbox) -> None:
    ids = write(engine, "a")
    with outbox.hold(limit=100, older_than=NOW) as held:
        held.remove(ids)

        held.remove(ids)

    with outbox.hold_these(ids) as held:
        assert held.rows == []
        held.remove(ids)


def test_what_fails_in_the_hold_leaves_the_rows(engine: Engine, outbox: Outbox) -> None:
    write(engine, "a")

    def fail() -> None:
        with outbox.hold(limit=100, older_than=NOW) as held:
            held.remove([row.id for row in held.rows])
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()

    assert held_messages(outbox) == ["a"]


def test_nobody_else_gets_a_held_row_nor_waits_for_it(engine: Engine, outbox: Outbox) -> None:
    if not has_row_locks(engine):
        # Nothing locks a row there: two may hold the same, and a message is sent twice.
        write(engine, "a")
        with outbox.hold(limit=1, older_than=NOW):
            assert held_messages(outbox) == ["a"]
        return
    ids = write(engine, "a", "b", "c")

    with outbox.hold(limit=1, older_than=NOW):
        assert held_messages(outbox) == ["b", "c"]
        with outbox.hold_these(ids) as mine:
            assert [row.message for row in mine.rows] == ["b", "c"]


def test_rows_can_be_passed_over(engine: Engine, outbox: Outbox) -> None:
    ids = write(engine, "a", "b")

    with outbox.hold(limit=100, older_than=NOW, but_not=ids[:1]) as held:
        assert [row.message for row in held.rows] == ["b"]


def test_a_number_is_never_used_again(engine: Engine, outbox: Outbox) -> None:
    ids = write(engine, "a", "b")
    with outbox.hold_these(ids) as held:
        held.remove(ids)

    assert write(engine, "c")[0] > max(ids)


def test_a_long_message_of_any_characters_survives(engine: Engine, outbox: Outbox) -> None:
    message = "ü☃\U0001f600\\" * 30_000

    write(engine, message)

    assert held_messages(outbox) == [message]


def test_two_that_empty_the_outbox_together_take_each_row_once(engine: Engine, outbox: Outbox) -> None:
    if not has_row_locks(engine):
        return
    count = 300
    write(engine, *(str(n) for n in range(count)))
    taken: list[str] = []

    def empty() -> None:
        while True:
            with outbox.hold(limit=10, older_than=NOW) as held:
                taken.extend(row.message for row in held.rows)
                held.remove([row.id for row in held.rows])
                if not held.rows:
                    return

    threads = [threading.Thread(target=empty) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(taken, key=int) == [str(n) for n in range(count)]


def test_a_database_that_is_away_is_told_without_its_password() -> None:
    outbox = Outbox(create_engine("postgresql+psycopg2://me:secret@127.0.0.1:1/shop"))

    with pytest.raises(StoreError) as raised, outbox.hold(limit=1, older_than=NOW):
        pass

    assert "secret" not in str(raised.value)
    assert "127.0.0.1" in str(raised.value)


def test_a_missing_table_is_told_as_a_store_that_does_not_answer(tmp_path: object) -> None:
    outbox = Outbox(create_engine(f"sqlite:///{tmp_path}/empty.db"))

    with pytest.raises(StoreError, match="selfheal_outbox"), outbox.hold(limit=1, older_than=NOW):
        pass
