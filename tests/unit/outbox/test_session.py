"""What waits for a session's outermost commit is done once after it, and never without it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, StaticPool, create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_selfheal.database.tables import Base
from celery_selfheal.errors import SettingsError
from celery_selfheal.outbox.session import Pending, check_same_database, session_of


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture
def done() -> list[list[str]]:
    """What was done: a list for each commit."""
    return []


@pytest.fixture
def pending(session: Session, done: list[list[str]]) -> Pending[str]:
    return Pending.of(session, done.append)


def test_it_is_done_after_the_commit_and_not_before(
    session: Session, pending: Pending[str], done: list[list[str]]
) -> None:
    pending.add(session, "a")
    pending.add(session, "b")
    session.flush()
    assert done == []

    session.commit()

    assert done == [["a", "b"]]


def test_a_second_commit_does_nothing(session: Session, pending: Pending[str], done: list[list[str]]) -> None:
    pending.add(session, "a")
    session.commit()

    session.execute(text("SELECT 1"))
    session.commit()

    assert done == [["a"]]


def test_a_rollback_drops_it_for_good(session: Session, pending: Pending[str], done: list[list[str]]) -> None:
    pending.add(session, "a")
    session.rollback()

    session.execute(text("SELECT 1"))
    session.commit()

    assert done == []


def test_closing_without_a_commit_drops_it(session: Session, pending: Pending[str], done: list[list[str]]) -> None:
    pending.add(session, "a")
    session.close()

    session.execute(text("SELECT 1"))
    session.commit()

    assert done == []


def test_a_savepoint_that_is_rolled_back_drops_what_was_added_inside_it(
    session: Session, pending: Pending[str], done: list[list[str]]
) -> None:
    pending.add(session, "before")
    savepoint = session.begin_nested()
    pending.add(session, "inside")
    savepoint.rollback()
    pending.add(session, "after")

    session.commit()

    assert done == [["before", "after"]]


def test_a_released_savepoint_waits_for_the_outermost_commit(
    session: Session, pending: Pending[str], done: list[list[str]]
) -> None:
    with session.begin_nested():
        pending.add(session, "outer")
        with session.begin_nested():
            pending.add(session, "inner")
        pending.add(session, "outer again")
    assert done == []

    session.commit()

    assert done == [["outer", "inner", "outer again"]]


def test_a_savepoint_inside_one_that_is_rolled_back_is_dropped_though_it_was_released(
    session: Session, pending: Pending[str], done: list[list[str]]
) -> None:
    outer = session.begin_nested()
    with session.begin_nested():
        pending.add(session, "inner")
    outer.rollback()

    session.commit()

    assert done == []


def test_a_released_savepoint_is_dropped_with_its_transaction(
    session: Session, pending: Pending[str], done: list[list[str]]
) -> None:
    with session.begin_nested():
        pending.add(session, "inside")
    session.rollback()

    session.commit()

    assert done == []


def test_a_failed_commit_drops_it(session: Session, pending: Pending[str], done: list[list[str]]) -> None:
    session.execute(text("CREATE TABLE parents (id INTEGER PRIMARY KEY)"))
    session.execute(
        text("CREATE TABLE children (parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)")
    )
    session.commit()
    session.execute(text("PRAGMA foreign_keys = ON"))
    session.commit()
    session.execute(text("INSERT INTO children VALUES (1)"))
    pending.add(session, "a")
    with pytest.raises(Exception, match="FOREIGN KEY"):
        session.commit()
    session.rollback()

    session.commit()

    assert done == []


def test_when_it_is_done_the_connection_is_given_back(engine: Engine, session: Session) -> None:
    in_use: list[bool] = []
    pending: Pending[str] = Pending.of(session, lambda _: in_use.append(session.in_transaction()))
    pending.add(session, "a")

    session.commit()

    assert in_use == [False]


def test_what_is_added_while_it_is_done_waits_for_the_next_commit(session: Session) -> None:
    done: list[list[str]] = []

    def run(entries: list[str]) -> None:
        done.append(entries)
        if entries == ["a"]:
            pending.add(session, "b")

    pending: Pending[str] = Pending.of(session, run)
    pending.add(session, "a")
    session.commit()
    assert done == [["a"]]

    session.commit()

    assert done == [["a"], ["b"]]


def test_what_it_raises_comes_out_of_the_commit_and_leaves_the_session_usable(session: Session) -> None:
    def run(_: list[str]) -> None:
        raise ConnectionError("no broker")

    session.execute(text("CREATE TABLE orders (id INTEGER)"))
    session.commit()
    pending: Pending[str] = Pending.of(session, run)
    session.execute(text("INSERT INTO orders VALUES (1)"))
    pending.add(session, "a")

    with pytest.raises(ConnectionError, match="no broker"):
        session.commit()

    assert session.execute(text("SELECT count(*) FROM orders")).scalar() == 1
    session.commit()


def test_it_works_in_a_transaction_that_was_begun_by_hand(engine: Engine, done: list[list[str]]) -> None:
    with sessionmaker(engine).begin() as session:
        Pending.of(session, done.append).add(session, "a")
        assert done == []

    assert done == [["a"]]


def test_a_session_has_one_list_however_often_it_is_asked_for(session: Session, done: list[list[str]]) -> None:
    Pending.of(session, done.append).add(session, "a")
    Pending.of(session, done.append).add(session, "b")

    session.commit()

    assert done == [["a", "b"]]


def test_a_scoped_session_means_that_of_the_thread(engine: Engine) -> None:
    scoped = scoped_session(sessionmaker(engine))

    assert session_of(scoped) is scoped()
    scoped.remove()


def test_an_asynchronous_session_means_the_one_inside() -> None:
    asyncio_part = pytest.importorskip("sqlalchemy.ext.asyncio", exc_type=ImportError)
    outer = asyncio_part.AsyncSession()

    assert session_of(outer) is outer.sync_session
    assert session_of(outer.sync_session) is outer.sync_session


def test_an_asynchronous_commit_counts(tmp_path: object) -> None:
    pytest.importorskip("aiosqlite")
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    done: list[list[str]] = []

    async def produce() -> None:
        engine = create_async_engine("sqlite+aiosqlite://")
        async with AsyncSession(engine) as session:
            await session.execute(text("SELECT 1"))
            Pending.of(session.sync_session, done.append).add(session.sync_session, "a")
            assert done == []
            await session.commit()
        await engine.dispose()

    asyncio.run(produce())

    assert done == [["a"]]


@pytest.mark.parametrize("given", [None, "session", object(), sessionmaker()])
def test_what_is_no_session_is_refused_by_its_type(given: object) -> None:
    with pytest.raises(TypeError, match=f"needs an SQLAlchemy Session .* got a {type(given).__name__}"):
        session_of(given)


def test_a_session_on_another_database_is_refused_by_name(engine: Engine) -> None:
    other = create_engine("sqlite:////tmp/other.db")

    with Session(other) as session, pytest.raises(SettingsError, match=r"writes to sqlite:////tmp/other\.db"):
        check_same_database(session, engine, setting="selfheal_database_url")


def test_two_databases_in_memory_are_never_the_same(engine: Engine) -> None:
    with Session(create_engine("sqlite://")) as session, pytest.raises(SettingsError, match="use one database"):
        check_same_database(session, engine, setting="selfheal_engine")


def test_a_session_without_an_engine_for_the_outbox_is_refused(engine: Engine) -> None:
    with Session() as session, pytest.raises(SettingsError, match="bound to no engine"):
        check_same_database(session, engine, setting="selfheal_engine")


def test_a_missing_table_is_refused_with_the_remedy(engine: Engine, session: Session) -> None:
    with pytest.raises(SettingsError, match="no table selfheal_outbox: run: celery -A proj selfheal db upgrade"):
        check_same_database(session, engine, setting="selfheal_engine")
    Base.metadata.create_all(session.connection())

    check_same_database(session, engine, setting="selfheal_engine")
