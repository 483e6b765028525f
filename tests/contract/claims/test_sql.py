"""What can happen to a claim in a database: locks, lost replies, servers that go away, tables that are not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, select, text, update

from celery_selfheal.database.tables import ProcessedJob as Row
from celery_selfheal.dedup import steps
from celery_selfheal.dedup.claim import SqlClaims
from celery_selfheal.dedup.port import Doubtful, Finished, Granted, Held, Job
from celery_selfheal.errors import StoreError
from celery_selfheal.testing import TcpProxy
from contract.claims.benches import DATABASES, SqlClaimBench, a_bench, a_job, statements
from contract.servers import an_engine

SERVERS = ("postgresql", "mariadb")


@pytest.fixture(params=DATABASES)
def bench(request: pytest.FixtureRequest) -> Any:
    return a_bench(request.param, request)


@pytest.fixture(params=SERVERS)
def served(request: pytest.FixtureRequest) -> Any:
    """A database with a server and several writers."""
    return a_bench(request.param, request)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "LOCK_WAIT", timedelta(seconds=1))
    monkeypatch.setattr(steps, "REPEAT_FOR", timedelta(seconds=0))


# -- a transaction of another mode or program that does not end


@contextmanager
def somebody_inserts(engine: Engine, job: Job) -> Iterator[Any]:
    """A transaction that has the key and stays open."""
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        connection.execute(
            Row.__table__.insert().values(
                idempotency_key=job.key, job_name=job.task_name, status="IN_PROGRESS", fence=1, owner="t9 other"
            )
        )
        yield connection


@contextmanager
def somebody_locks(engine: Engine, job: Job) -> Iterator[Any]:
    """A transaction that has changed the row and stays open."""
    with engine.connect() as connection:
        connection.execute(update(Row).where(Row.idempotency_key == job.key).values(fence=Row.fence))
        yield connection


@pytest.mark.usefixtures("impatient")
def test_claim_does_not_wait_for_ever_for_a_transaction_that_has_the_key(served: SqlClaimBench) -> None:
    job = a_job()

    with somebody_inserts(served.engine, job):
        answer = served.store.claim(job)

    assert answer == Held(task_id="", token="", fence=0, age=timedelta(0))
    assert served.store.claim(job) == Granted()


@pytest.mark.usefixtures("impatient")
def test_no_step_waits_for_ever_for_a_locked_row(served: SqlClaimBench) -> None:
    job, heir = a_job(), a_job()
    served.store.claim(job)
    answer = served.store.claim(heir)
    assert isinstance(answer, Held)

    with somebody_locks(served.engine, job):
        for step in (
            lambda: served.store.complete(job, 1),
            lambda: served.store.inherit(heir, answer, doubt=False),
            lambda: served.store.withdraw(job),
        ):
            with pytest.raises(StoreError):
                step()

    assert served.store.complete(job, 1)


def test_end_of_a_job_waits_for_a_lock_that_is_let_go(served: SqlClaimBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The effect is there; to give up early would mean to have it twice."""
    monkeypatch.setattr(steps, "LOCK_WAIT", timedelta(seconds=1))
    job = a_job()
    served.store.claim(job)

    with somebody_locks(served.engine, job) as connection:
        timer = threading.Timer(1.5, connection.rollback)
        timer.start()
        assert served.store.complete(job, "receipt")
        timer.join()


# -- replies that are lost on the wire


@pytest.fixture(params=SERVERS)
def lossy(request: pytest.FixtureRequest) -> Iterator[tuple[SqlClaims, TcpProxy, SqlClaimBench]]:
    near = a_bench(request.param, request)
    assert isinstance(near, SqlClaimBench)
    url = near.engine.url
    with TcpProxy("127.0.0.1", url.port or 0) as proxy:
        far = create_engine(url.set(host="127.0.0.1", port=proxy.port))
        yield SqlClaims(far), proxy, near
        far.dispose()


def test_steps_are_repeated_when_their_replies_are_lost(lossy: tuple[SqlClaims, TcpProxy, SqlClaimBench]) -> None:
    store, proxy, _ = lossy
    job, heir = a_job(), a_job()

    proxy.drop_reply(1, request=b"INSERT")
    assert store.claim(job) == Granted()
    held = store.claim(heir)
    assert isinstance(held, Held)
    proxy.drop_reply(1, request=b"UPDATE")
    assert store.inherit(heir, held, doubt=False)
    proxy.drop_reply(1, request=b"UPDATE")
    assert store.complete(heir, "receipt")
    proxy.drop_reply(1, request=b"UPDATE")
    store.mark_dispatched(heir)

    assert store.claim(job) == Finished(payload="receipt", task_id="t1", dispatched=True)
    failed = a_job("another")
    store.claim(failed)
    proxy.drop_reply(1, request=b"DELETE")
    store.withdraw(failed)
    assert store.claim(a_job("another")) == Granted()
    assert proxy.replies_dropped == 5


def test_connection_that_broke_while_idle_is_no_error(lossy: tuple[SqlClaims, TcpProxy, SqlClaimBench]) -> None:
    store, proxy, _ = lossy
    job = a_job()
    store.claim(job)

    proxy.cut()

    assert store.complete(job, 1)


def test_database_that_is_away_is_named_without_its_password(served: SqlClaimBench) -> None:
    with TcpProxy("127.0.0.1", served.engine.url.port or 0) as proxy:
        proxy.refuse()
        url = served.engine.url.set(host="127.0.0.1", port=proxy.port, password="secret")
        store = SqlClaims(create_engine(url))

        with pytest.raises(StoreError) as caught:
            store.claim(a_job())

    assert f"127.0.0.1:{proxy.port}" in str(caught.value)
    assert "claim" in str(caught.value)
    assert "secret" not in str(caught.value)


# -- what is wrong for good


def test_table_that_is_missing_is_answered_with_the_remedy(bench: SqlClaimBench) -> None:
    Row.__table__.drop(bench.engine)
    try:
        with pytest.raises(StoreError, match=r"claim: .*; run: celery -A proj selfheal db upgrade"):
            bench.store.claim(a_job())
    finally:
        Row.__table__.create(bench.engine)


def test_text_that_is_too_long_is_not_cut(served: SqlClaimBench) -> None:
    """Cut, it would be another task's name."""
    with pytest.raises(StoreError):
        served.store.claim(a_job(task_name="n" * 300))

    assert served.look("payment:7") is None


def test_error_does_not_show_what_is_stored(served: SqlClaimBench) -> None:
    job = a_job(task_id="i" * 600)

    with pytest.raises(StoreError) as caught:
        served.store.claim(job)

    assert job.token not in str(caught.value)


# -- a guest in the application's engine


def test_claim_and_completion_are_one_statement_each(bench: SqlClaimBench) -> None:
    job = a_job()

    with statements(bench.engine) as seen:
        bench.store.claim(job)
        bench.store.complete(job, 1)

    assert [one.split()[0] for one in seen if not one.startswith("SET ")] == ["INSERT", "UPDATE"]


def test_connections_go_back_as_they_were(bench: SqlClaimBench) -> None:
    """Those who use them next have their transactions, and their patience with locks."""
    ask = {"postgresql": "SHOW lock_timeout", "mariadb": "SELECT @@innodb_lock_wait_timeout"}
    question = ask.get(bench.engine.dialect.name.replace("mysql", "mariadb"), "SELECT 1")
    engine = an_engine(bench.engine.url.render_as_string(hide_password=False))
    with engine.connect() as connection:
        before = connection.execute(text(question)).scalar_one()
    store = SqlClaims(engine)
    job = a_job()
    store.claim(job)
    store.complete(job, 1)
    store.claim(a_job())

    with engine.connect() as connection:
        assert connection.execute(text(question)).scalar_one() == before
        connection.execute(update(Row).values(dispatched=True))
        connection.rollback()
        assert not connection.execute(select(Row.dispatched)).scalar_one()
    engine.dispose()


def test_engine_that_begins_transactions_in_its_own_way_is_served(tmp_path: Any) -> None:
    """As SQLAlchemy's documentation tells users of SQLite to do."""
    engine = an_engine(f"sqlite:///{tmp_path}/jobs.db")
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    store = SqlClaims(engine)
    job = a_job()

    assert store.claim(job) == Granted()
    assert store.complete(job, "receipt")

    answer = SqlClaims(create_engine(engine.url)).claim(a_job())
    assert answer == Finished(payload="receipt", task_id="t1", dispatched=False)


def test_rows_of_another_program_are_judged_by_their_age(bench: SqlClaimBench) -> None:
    """The reference schema has no owner."""
    heir = a_job()
    with bench.engine.begin() as connection:
        connection.execute(
            Row.__table__.insert().values(idempotency_key=heir.key, job_name=heir.task_name, status="IN_PROGRESS")
        )
    bench.age(heir.key, timedelta(hours=1))

    answer = bench.store.claim(heir)

    assert isinstance(answer, Held)
    assert (answer.task_id, answer.token) == ("", "")
    assert answer.age >= timedelta(hours=1)
    assert bench.store.inherit(heir, answer, doubt=False)
    assert bench.store.complete(heir, 1)


def test_status_of_another_program_is_left_to_a_person(bench: SqlClaimBench) -> None:
    job = a_job()
    bench.store.claim(job)
    with bench.engine.begin() as connection:
        connection.execute(update(Row).values(status="STALE"))

    assert bench.store.claim(a_job()) == Doubtful()
    assert not bench.store.complete(job, 1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("kind", "driver"),
    [
        ("postgresql", "postgresql+psycopg2"),
        ("postgresql", "postgresql+psycopg"),
        ("postgresql", "postgresql+pg8000"),
        ("mariadb", "mysql+pymysql"),
        ("mariadb", "mysql+mysqlconnector"),
    ],
)
def test_every_driver_is_understood(kind: str, driver: str, request: pytest.FixtureRequest) -> None:
    """Each tells numbers of rows and of errors in its own way."""
    near = a_bench(kind, request)
    assert isinstance(near, SqlClaimBench)
    engine = create_engine(near.engine.url.set(drivername=driver))
    store = SqlClaims(engine)
    job, heir = a_job(), a_job()

    with somebody_inserts(near.engine, job):
        assert isinstance(store.claim(job), Held)
    assert store.claim(job) == Granted()
    answer = store.claim(heir)
    assert isinstance(answer, Held)
    assert answer.token == job.token
    assert store.inherit(heir, answer, doubt=False)
    assert not store.complete(job, 1)
    assert store.complete(heir, {"a": 2**60})
    assert store.claim(job) == Finished(payload={"a": 2**60}, task_id="t1", dispatched=False)
    engine.dispose()
