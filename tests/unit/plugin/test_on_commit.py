"""What waits for a commit: refused early where it cannot work, done in order where it can."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain
from celery.exceptions import Reject
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from celery_selfheal import SelfHealTask, SettingsError, apply_on_commit
from celery_selfheal.database.engines import engine_of
from celery_selfheal.database.migrate import upgrade
from celery_selfheal.database.tables import OutboxMessage
from celery_selfheal.errors import StoreError
from celery_selfheal.plugin import on_commit, sending
from celery_selfheal.plugin.install import install
from celery_selfheal.plugin.on_commit import AfterCommit

QUEUE = "shop-on-commit"


@pytest.fixture
def make_app(tmp_path: Path) -> Iterator[Callable[..., Celery]]:
    """Makes an app on kombu's broker in memory, and on a database of its own."""
    apps: list[Celery] = []

    def make(**settings: Any) -> Celery:
        app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.update(
            task_default_queue=QUEUE,
            selfheal_redis_url="redis://localhost:1/0",
            selfheal_database_url=f"sqlite:///{tmp_path}/shop.db",
            selfheal_lease_ttl=0.3,
            selfheal_heartbeat_interval=0.1,
            **settings,
        )

        @app.task(base=SelfHealTask, shared=False, name="shop.add")
        def add(x: int, y: int = 0) -> int:
            return x + y

        apps.append(app)
        with app.connection_for_write() as connection:
            connection.default_channel.queue_declare(QUEUE)
            connection.default_channel.queue_purge(QUEUE)
        return app

    yield make
    for app in apps:
        app.close()


@pytest.fixture
def app(make_app: Callable[..., Celery]) -> Celery:
    return make_app()


@pytest.fixture
def outbox_app(make_app: Callable[..., Celery]) -> Celery:
    app = make_app(selfheal_outbox=True)
    upgrade(database(app))
    return app


def database(app: Celery) -> Engine:
    return engine_of(install(app).settings)


def sent(app: Celery) -> list[str]:
    """Ids of the messages in the queue, in their order; takes them."""
    ids = []
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        while channel._size(QUEUE):
            ids.append(channel._get(QUEUE)["headers"]["id"])
    return ids


def rows(app: Celery) -> int:
    with Session(database(app)) as session:
        return session.scalar(select(func.count()).select_from(OutboxMessage)) or 0


def after_commit(app: Celery) -> AfterCommit:
    return AfterCommit(app.tasks["shop.add"], install(app))


def add(app: Celery) -> Any:
    return app.tasks["shop.add"]


def raise_no_broker(*_: object, **__: object) -> list[str]:
    raise StoreError("the broker", "refused")


@pytest.fixture(params=[False, True], ids=["plain", "outbox"])
def either_app(request: pytest.FixtureRequest) -> Celery:
    app: Celery = request.getfixturevalue("outbox_app" if request.param else "app")
    return app


def test_a_message_is_sent_after_the_commit_and_once(either_app: Celery) -> None:
    app = either_app
    with Session(database(app)) as session:
        result = apply_on_commit(session, add(app).s(1, 2))
        session.flush()
        assert sent(app) == []

        session.commit()

        session.commit()

    assert sent(app) == [result.id]
    if install(app).settings.outbox:
        assert rows(app) == 0


def test_a_rollback_sends_nothing(either_app: Celery) -> None:
    app = either_app
    with Session(database(app)) as session:
        apply_on_commit(session, add(app).s(1, 2))
        session.flush()
        session.rollback()
        session.commit()

    assert sent(app) == []


def test_a_savepoint_that_is_rolled_back_takes_its_messages_with_it(either_app: Celery) -> None:
    app = either_app
    with Session(database(app)) as session:
        first = apply_on_commit(session, add(app).s(1))
        savepoint = session.begin_nested()
        apply_on_commit(session, add(app).s(2))
        session.flush()
        savepoint.rollback()
        last = apply_on_commit(session, add(app).s(3))
        session.commit()

    assert sent(app) == [first.id, last.id]


def test_messages_are_sent_in_the_order_in_which_they_were_asked_for(either_app: Celery) -> None:
    app = either_app
    with Session(database(app)) as session:
        results = [apply_on_commit(session, add(app).s(n)) for n in range(20)]
        session.commit()

    assert sent(app) == [result.id for result in results]


def test_a_chain_answers_with_the_result_of_its_last_task(either_app: Celery) -> None:
    app = either_app
    with Session(database(app)) as session:
        result = apply_on_commit(session, chain(add(app).s(1), add(app).s(2)))
        session.commit()

    assert sent(app) == [result.parent.id]


def test_without_a_broker_the_rows_wait_and_the_commit_succeeds(
    outbox_app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_commit, "send", raise_no_broker)
    with Session(database(outbox_app)) as session:
        apply_on_commit(session, add(outbox_app).s(1, 2))
        session.commit()

    assert rows(outbox_app) == 1
    assert "left to the sweep" in caplog.text


def test_without_a_broker_and_without_the_outbox_the_commit_says_so_but_holds(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(database(app))
    monkeypatch.setattr(sending, "send", raise_no_broker)
    with Session(database(app)) as session:
        session.add(OutboxMessage(task_id="mine", message="of the application"))
        apply_on_commit(session, add(app).s(1, 2))
        with pytest.raises(StoreError, match="refused"):
            session.commit()

    assert rows(app) == 1


def test_a_message_that_was_expunged_before_it_was_flushed_is_sent_all_the_same(outbox_app: Celery) -> None:
    with Session(database(outbox_app)) as session:
        result = apply_on_commit(session, add(outbox_app).s(1))
        session.expunge_all()
        session.commit()

    assert sent(outbox_app) == [result.id]


def test_in_eager_mode_the_task_runs_after_the_commit(make_app: Callable[..., Celery]) -> None:
    app = make_app(task_always_eager=True)
    ran: list[int] = []

    @app.task(base=SelfHealTask, shared=False, name="shop.note")
    def note(number: int) -> None:
        ran.append(number)

    with Session(database(app)) as session:
        result = apply_on_commit(session, note.s(7))
        assert ran == []
        session.commit()

    assert ran == [7]
    assert result.id


@pytest.mark.parametrize(
    ("given", "words"),
    [("shop.add", "such as task.s"), (None, "such as task.s"), ("task", r"write add\.s\(\.\.\.\)")],
)
def test_what_is_no_signature_is_refused_with_the_remedy(app: Celery, given: object, words: str) -> None:
    with Session(database(app)) as session, pytest.raises(TypeError, match=words):
        apply_on_commit(session, add(app) if given == "task" else given)


def test_a_signature_of_no_application_is_refused(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    from celery import Signature, _state

    monkeypatch.setattr(_state, "default_app", None)
    monkeypatch.setattr(_state._tls, "current_app", None)
    with Session(database(app)) as session, pytest.raises(SettingsError, match="belongs to no Celery application"):
        apply_on_commit(session, Signature("shop.add", args=(1,)))
    with Session(database(app)) as session, pytest.raises(SettingsError, match="names no task"):
        apply_on_commit(session, Signature())


def test_what_is_no_session_is_refused(app: Celery) -> None:
    with pytest.raises(TypeError, match="needs an SQLAlchemy Session"):
        apply_on_commit(None, add(app).s(1))


def test_the_outbox_without_its_table_is_refused_before_the_commit(make_app: Callable[..., Celery]) -> None:
    app = make_app(selfheal_outbox=True)

    with Session(database(app)) as session, pytest.raises(SettingsError, match="selfheal db upgrade"):
        apply_on_commit(session, add(app).s(1))


def test_calls_are_made_in_order_and_one_that_fails_stops_nothing(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    waits = after_commit(app)
    waits.add(lambda: done.append("first"))
    waits.add(lambda: 1 / 0)
    waits.add(lambda: done.append("last"))
    result = waits.send(add(app).s(1))
    assert sent(app) == []

    with caplog.at_level(logging.ERROR):
        waits.run()

    assert done == ["first", "last"]
    assert sent(app) == [result.id]
    assert "ZeroDivisionError" in caplog.text
    waits.run()
    assert (done, sent(app)) == (["first", "last"], [])


def test_what_was_cleared_is_not_done(app: Celery) -> None:
    waits = after_commit(app)
    waits.add(lambda: 1 / 0)
    waits.send(add(app).s(1))

    waits.clear()
    waits.run()

    assert sent(app) == []


def test_messages_of_a_start_are_rows_of_its_transaction(outbox_app: Celery) -> None:
    waits = after_commit(outbox_app)
    result = waits.send(add(outbox_app).s(1))
    with Session(database(outbox_app)) as session:
        waits.store(session)
        waits.store(session)
        session.commit()
    assert (rows(outbox_app), sent(outbox_app)) == (1, [])

    waits.run()

    assert (rows(outbox_app), sent(outbox_app)) == (0, [result.id])


def test_rows_that_somebody_else_has_sent_are_not_sent_again(outbox_app: Celery) -> None:
    waits = after_commit(outbox_app)
    waits.send(add(outbox_app).s(1))
    with Session(database(outbox_app)) as session:
        waits.store(session)
        session.commit()
        session.execute(OutboxMessage.__table__.delete())
        session.commit()

    waits.run()

    assert sent(outbox_app) == []


def test_without_the_outbox_a_start_whose_messages_cannot_be_sent_comes_back(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "send", raise_no_broker)
    waits = after_commit(app)
    waits.send(add(app).s(1))

    with pytest.raises(Reject) as rejected:
        waits.run()

    assert rejected.value.requeue


def test_a_start_applies_its_messages_in_eager_mode(make_app: Callable[..., Celery]) -> None:
    app = make_app(task_always_eager=True)
    ran: list[int] = []

    @app.task(base=SelfHealTask, shared=False, name="shop.note")
    def note(number: int) -> None:
        ran.append(number)

    @app.task(base=SelfHealTask, bind=True, shared=False, name="shop.order")
    def order(self: Any) -> list[int]:
        self.send_on_commit(note.s(1))
        self.on_commit(lambda: ran.append(0))
        return list(ran)

    assert order.apply().get() == []
    assert ran == [0, 1]


def test_a_function_that_is_none_is_refused(app: Celery) -> None:
    with pytest.raises(TypeError, match="on_commit needs a function"):
        after_commit(app).add("call me")  # type: ignore[arg-type]  # as a user might


def test_another_application_is_refused(app: Celery, make_app: Callable[..., Celery]) -> None:
    other = make_app()

    with pytest.raises(SettingsError, match="belongs to the application 'shop'"):
        after_commit(app).send(add(other).s(1))


def test_an_asynchronous_session_writes_rows_and_sends_after_its_commit(outbox_app: Celery) -> None:
    pytest.importorskip("aiosqlite")
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    ids: list[str] = []

    async def produce() -> None:
        engine = create_async_engine(database(outbox_app).url.set(drivername="sqlite+aiosqlite"))
        async with AsyncSession(engine) as session:
            ids.append(apply_on_commit(session, add(outbox_app).s(1)).id)
            await session.flush()
            ids.append(apply_on_commit(session.sync_session, add(outbox_app).s(2)).id)
            assert sent(outbox_app) == []
            await session.commit()
            apply_on_commit(session, add(outbox_app).s(3))
            await session.rollback()
        await engine.dispose()

    asyncio.run(produce())

    assert sent(outbox_app) == ids
    assert rows(outbox_app) == 0
