"""Every store keeps the budget as ``RetryBudget`` computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import pytest
import redis
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_selfheal.leases.port import Acquired, Outcome, OverBudget, Start
from celery_selfheal.retry_budget import WINDOW_SECONDS, Bucket, RetryBudget, Turn
from contract.benches import KEYS, MemoryBench, RedisBench, a_start
from contract.postgres_bench import PostgresBench, empty

SLOW = RetryBudget(share=0.5, per_second=0.1)  # six retries at once; a test's own seconds earn next to nothing
TASK = "shop.pay"


class Shelf(Protocol):
    """A store whose bucket may be looked at and aged."""

    def take(self, start: Start) -> Outcome:
        """Ask for the lease."""

    def look(self) -> Bucket | None:
        """Return the bucket as the store keeps it."""

    def age(self, seconds: float) -> None:
        """Let so much time pass for the bucket."""


class LastingShelf(Shelf, Protocol):
    """One that forgets."""

    def lives_seconds(self) -> float:
        """Until the bucket is forgotten."""


class MemoryShelf:
    def __init__(self, budget: RetryBudget) -> None:
        self._bench = MemoryBench(budget=budget)

    def take(self, start: Start) -> Outcome:
        return self._bench.store.acquire(start)

    def look(self) -> Bucket | None:
        return self._bench.store._buckets.get(TASK)

    def age(self, seconds: float) -> None:
        self._bench.now += seconds


class RedisShelf:
    """The server's clock cannot be set, so the bucket is dated back."""

    def __init__(self, client: redis.Redis, budget: RetryBudget) -> None:
        client.flushdb()
        self._client = client
        self._bench = RedisBench(client, budget=budget)

    def take(self, start: Start) -> Outcome:
        return self._bench.store.acquire(start)

    def look(self) -> Bucket | None:
        kept = self._client.hgetall(KEYS.budget(TASK))
        if not kept:
            return None
        return Bucket(
            tokens=float(kept[b"tokens"]),
            at=int(kept[b"at_ms"]) / 1000,
            firsts=float(kept[b"firsts"]),
            firsts_before=float(kept[b"firsts_before"]),
        )

    def age(self, seconds: float) -> None:
        if self._client.exists(KEYS.budget(TASK)):
            self._client.hincrby(KEYS.budget(TASK), "at_ms", -round(seconds * 1000))

    def lives_seconds(self) -> float:
        return self._client.pttl(KEYS.budget(TASK)) / 1000


class PostgresShelf:
    """The same."""

    def __init__(self, engine: sa.Engine, budget: RetryBudget) -> None:
        empty(engine)
        self._bench = PostgresBench(engine, budget=budget)

    def take(self, start: Start) -> Outcome:
        return self._bench.store.acquire(start)

    def look(self) -> Bucket | None:
        kept = self._bench.sql(
            "SELECT tokens, at_ms, firsts, firsts_before FROM selfheal_budgets WHERE task = :task", task=TASK
        )
        if not kept:
            return None
        tokens, at_ms, firsts, firsts_before = kept[0]
        return Bucket(tokens=tokens, at=at_ms / 1000, firsts=firsts, firsts_before=firsts_before)

    def age(self, seconds: float) -> None:
        self._bench.earn_for(timedelta(seconds=seconds))

    def lives_seconds(self) -> float:
        ((left,),) = self._bench.sql("SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM selfheal_budgets")
        return float(left)


@pytest.fixture(params=["memory", "redis", "postgres"])
def make_shelf(request: pytest.FixtureRequest) -> Callable[[RetryBudget], Shelf]:
    if request.param == "memory":
        return MemoryShelf
    return _on_a_server(request.param, request)


@pytest.fixture(params=["redis", "postgres"])
def make_lasting_shelf(request: pytest.FixtureRequest) -> Callable[[RetryBudget], LastingShelf]:
    """Where a bucket outlives the process."""
    return _on_a_server(request.param, request)


def _on_a_server(kind: str, request: pytest.FixtureRequest) -> Callable[[RetryBudget], LastingShelf]:
    if kind == "postgres":
        engine: sa.Engine = request.getfixturevalue("engine")
        return lambda budget: PostgresShelf(engine, budget)
    client: redis.Redis = request.getfixturevalue("client")
    return lambda budget: RedisShelf(client, budget)


steps = st.lists(
    st.tuples(
        st.sampled_from(["first", "retry", "retry", "paid"]), st.sampled_from([0, 0, 0, 1, 7, 30, 61, 125, 9_000])
    ),
    max_size=40,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(turns=steps, share=st.sampled_from([0, 0.2, 0.5, 1.5]), per_second=st.sampled_from([0.05, 0.1, 0.5]))
def test_bucket_is_what_the_budget_computes(
    make_shelf: Callable[[RetryBudget], Shelf], turns: list[tuple[Turn, int]], share: float, per_second: float
) -> None:
    budget = RetryBudget(share=share, per_second=per_second)
    shelf = make_shelf(budget)
    for n, (turn, seconds) in enumerate(turns):
        shelf.age(seconds)
        before = shelf.look()
        start = a_start(f"t{n}", turn=turn)

        outcome = shelf.take(start)

        after = shelf.look()
        assert after is not None
        expected, wait = budget.take(before, turn, now=after.at)
        assert after.tokens == pytest.approx(expected.tokens, abs=1e-6)
        assert (after.firsts, after.firsts_before) == (expected.firsts, expected.firsts_before)
        if wait:
            assert isinstance(outcome, OverBudget)
            assert outcome.wait.total_seconds() == pytest.approx(wait, abs=0.002)
        else:
            assert isinstance(outcome, Acquired)


def test_repeat_of_a_question_takes_no_second_place(make_shelf: Callable[[RetryBudget], Shelf]) -> None:
    """A lost reply makes the client ask again: neither it nor those behind it may wait longer for that."""
    shelf = make_shelf(SLOW)
    for n in range(6):
        assert isinstance(shelf.take(a_start(f"t{n}", turn="retry")), Acquired)
    late = a_start("late", turn="retry")

    answers = [shelf.take(late) for _ in range(3)]
    behind = shelf.take(a_start("behind", turn="retry"))

    assert answers[0] == answers[1] == answers[2]
    assert isinstance(behind, OverBudget)
    assert behind.wait.total_seconds() == pytest.approx(20, abs=1)


def test_repeat_within_the_budget_is_paid_once(make_shelf: Callable[[RetryBudget], Shelf]) -> None:
    shelf = make_shelf(SLOW)
    start = a_start("t0", turn="retry")

    for _ in range(5):
        assert isinstance(shelf.take(start), Acquired)

    bucket = shelf.look()
    assert bucket is not None
    assert bucket.tokens == pytest.approx(5, abs=0.1)


def test_waiting_retry_keeps_its_place_as_another_start(make_shelf: Callable[[RetryBudget], Shelf]) -> None:
    shelf = make_shelf(SLOW)
    for n in range(7):
        shelf.take(a_start(f"t{n}", turn="retry"))
    before = shelf.look()

    outcome = shelf.take(replace(a_start("t6"), turn="paid"))

    after = shelf.look()
    assert isinstance(outcome, Acquired)
    assert before is not None
    assert after is not None
    assert after.tokens == pytest.approx(before.tokens, abs=0.1)


def test_bucket_in_debt_is_remembered_until_it_is_as_good_as_new(
    make_lasting_shelf: Callable[[RetryBudget], LastingShelf],
) -> None:
    """Else a minute of silence would forgive what a stampede owes."""
    shelf = make_lasting_shelf(SLOW)
    for n in range(106):
        shelf.take(a_start(f"t{n}", turn="retry"))

    assert shelf.lives_seconds() >= 1_000 + WINDOW_SECONDS


def test_bucket_of_a_task_that_is_no_longer_sent_is_forgotten(
    make_lasting_shelf: Callable[[RetryBudget], LastingShelf],
) -> None:
    shelf = make_lasting_shelf(SLOW)
    shelf.take(a_start())

    assert 0 < shelf.lives_seconds() <= 2 * WINDOW_SECONDS
