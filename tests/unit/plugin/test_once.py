"""What a task declares about its effects, and how its body runs then; in eager mode, on SQLite."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore
from sqlalchemy import Engine, create_engine, text

from celery_selfheal import SelfHealError, SelfHealTask, SettingsError, UnrecoverableError
from celery_selfheal.database.migrate import upgrade


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE entries (name text)"))
    return engine


@pytest.fixture
def app(engine: Engine) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(selfheal_engine=engine, task_always_eager=True, selfheal_key_prefix="test")
    return app


@pytest.fixture
def entries(engine: Engine) -> Callable[[], list[str]]:
    def read() -> list[str]:
        with engine.connect() as connection:
            return list(connection.execute(text("SELECT name FROM entries ORDER BY name")).scalars())

    return read


def write(task: Any, name: str) -> None:
    task.session.execute(text("INSERT INTO entries (name) VALUES (:name)"), {"name": name})


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dedup": "always"}, r"task shop\.pay: dedup must be one of .*'transaction'.*got 'always'"),
        ({"dedup": "claim", "on_in_doubt": "ask"}, r"on_in_doubt must be 'takeover' or 'hold', got 'ask'"),
        ({"idempotency_key": "pay:{order}"}, r"idempotency_key has no effect without dedup: add dedup="),
        ({"dedup": "claim", "idempotency_key": "pay:{ordr}"}, r"names the argument 'ordr', but the task takes order"),
        ({"dedup": "claim", "idempotency_key": ""}, r"idempotency_key must be a template"),
    ],
)
def test_wrong_option_is_an_error_where_the_task_is_defined(app: Celery, options: dict[str, Any], what: str) -> None:
    with pytest.raises(SettingsError, match=what):

        @app.task(shared=False, name="shop.pay", base=SelfHealTask, lazy=False, **options)
        def pay(order: int) -> None: ...


@pytest.mark.parametrize("mode", ["transaction", "claim"])
def test_mode_that_needs_a_database_says_so_where_the_task_is_defined(mode: str) -> None:
    app = Celery("shop", set_as_current=False)

    with pytest.raises(SettingsError, match=rf"dedup='{mode}' needs a database: set selfheal_database_url"):

        @app.task(shared=False, name="shop.pay", base=SelfHealTask, lazy=False, dedup=mode)
        def pay() -> None: ...


@pytest.mark.parametrize("mode", ["transaction", "claim", "redis"])
def test_duplicate_gets_the_stored_result_and_the_body_runs_once(app: Celery, mode: str) -> None:
    runs = []
    at = datetime(2026, 12, 1, tzinfo=timezone.utc)

    @app.task(shared=False, base=SelfHealTask, dedup=mode, idempotency_key="pay:{order}")
    def pay(order: int, cents: int = 5) -> dict[str, object]:
        runs.append(order)
        return {"cents": cents, "at": at}

    results = [pay.apply((1,)).get(), pay.apply(kwargs={"order": 1}).get(), pay.apply((1, 5)).get()]

    assert results == [{"cents": 5, "at": at}] * 3
    assert runs == [1]


@pytest.mark.parametrize("mode", ["transaction", "claim", "redis"])
def test_key_with_other_arguments_is_refused(app: Celery, mode: str) -> None:
    @app.task(shared=False, base=SelfHealTask, dedup=mode, idempotency_key="pay:{order}")
    def pay(order: int, cents: int) -> int:
        return cents

    pay.apply((1, 5))

    assert "used with other arguments before" in str(pay.apply((1, 6)).result)


def test_body_and_row_are_rolled_back_together(app: Celery, entries: Callable[[], list[str]]) -> None:
    @app.task(shared=False, bind=True, base=SelfHealTask, dedup="transaction", max_retries=2, retry_backoff=0.01)
    def pay(self: Any) -> int:
        write(self, f"attempt {self.request.retries}")
        if self.request.retries < 2:
            raise ConnectionError
        return int(self.request.retries)

    assert pay.apply().get() == 2
    assert entries() == ["attempt 2"]


def test_ignored_body_is_rolled_back_unless_it_says_otherwise(app: Celery, entries: Callable[[], list[str]]) -> None:
    @app.task(shared=False, bind=True, base=SelfHealTask, dedup="transaction")
    def pay(self: Any) -> None:
        write(self, self.name)
        raise Ignore

    @app.task(shared=False, bind=True, base=SelfHealTask, dedup="transaction", commit_on_ignore=True, name="kept")
    def keep(self: Any) -> None:
        write(self, self.name)
        raise Ignore

    pay.apply()
    keep.apply()

    assert entries() == ["kept"]


def test_savepoint_is_the_bodys_own(app: Celery, entries: Callable[[], list[str]]) -> None:
    @app.task(shared=False, bind=True, base=SelfHealTask, dedup="transaction")
    def pay(self: Any) -> None:
        write(self, "kept")
        nested = self.session.begin_nested()
        write(self, "undone")
        nested.rollback()
        with self.session.begin_nested():
            write(self, "kept, too")

    pay.apply().get()

    assert entries() == ["kept", "kept, too"]


@pytest.mark.parametrize(
    ("meddle", "what"),
    [
        ("commit", r"task shop\.pay commits by itself: leave self\.session\.commit\(\) out"),
        ("rollback", r"task shop\.pay has ended the transaction by itself"),
        ("close", r"task shop\.pay has ended the transaction by itself"),
    ],
)
def test_body_that_ends_the_transaction_is_told_so(
    app: Celery, entries: Callable[[], list[str]], meddle: str, what: str
) -> None:
    @app.task(shared=False, name="shop.pay", bind=True, base=SelfHealTask, dedup="transaction")
    def pay(self: Any) -> None:
        write(self, "half")
        getattr(self.session, meddle)()

    with pytest.raises(UnrecoverableError, match=what):
        pay.apply(throw=True)
    assert entries() == []


def test_result_that_cannot_be_stored_is_an_error_before_the_commit(
    app: Celery, entries: Callable[[], list[str]]
) -> None:
    @app.task(shared=False, name="shop.pay", bind=True, base=SelfHealTask, dedup="transaction")
    def pay(self: Any) -> object:
        write(self, "paid")
        return object()

    @app.task(shared=False, name="shop.quiet", bind=True, base=SelfHealTask, dedup="transaction", store_result=False)
    def quiet(self: Any) -> object:
        write(self, "quiet")
        return object()

    with pytest.raises(UnrecoverableError, match=r"task shop\.pay returned a result of type object"):
        pay.apply(throw=True)
    quiet.apply(throw=True)

    assert entries() == ["quiet"]


def test_calls_on_commit_are_made_after_it_and_not_after_a_failure(
    app: Celery, entries: Callable[[], list[str]]
) -> None:
    seen: list[list[str]] = []

    @app.task(shared=False, bind=True, base=SelfHealTask, dedup="transaction", max_retries=0)
    def pay(self: Any, fails: bool) -> None:
        write(self, "paid")
        self.on_commit(lambda: seen.append(entries()))
        if fails:
            raise ConnectionError

    pay.apply((True,))
    pay.apply((False,))

    assert seen == [["paid"]]


def test_direct_call_runs_the_plain_body(app: Celery) -> None:
    @app.task(shared=False, name="shop.pay", bind=True, base=SelfHealTask, dedup="transaction")
    def pay(self: Any, order: int) -> int:
        return order

    @app.task(shared=False, name="shop.asks", bind=True, base=SelfHealTask, dedup="transaction")
    def asks(self: Any) -> None:
        _ = self.session

    assert pay(3) == 3
    assert pay(3) == 3
    with pytest.raises(SelfHealError, match=r"task shop\.asks: self\.session is there while the body runs"):
        asks()


def test_missing_table_says_what_to_do(tmp_path: Path) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update(selfheal_database_url=f"sqlite:///{tmp_path / 'empty.db'}", selfheal_key_prefix="test")

    @app.task(shared=False, base=SelfHealTask, dedup="transaction", max_retries=0)
    def pay() -> None: ...

    with pytest.raises(SettingsError, match="run: celery -A proj selfheal db upgrade"):
        pay.apply(throw=True)


def test_callable_idempotency_key_gets_what_the_body_gets(app: Celery) -> None:
    runs = []

    @app.task(base=SelfHealTask, dedup="claim", idempotency_key=lambda order, note="": f"pay:{order}")
    def pay(order: int, note: str = "") -> None:
        runs.append(order)

    pay.apply((1,)).get()
    pay.apply(kwargs={"order": 1}).get()

    assert runs == [1]
