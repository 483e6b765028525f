"""One contract for the lock keys of every lease store that has them."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import redis

from celery_selfheal.leases.port import Acquired, AlreadyDone, Busy, OverBudget, Renewal, StalledOut, Start
from contract.benches import (
    BUDGET,
    KEYS,
    MAX_STALLS,
    TTL,
    LeaseBench,
    MemoryBench,
    RedisBench,
    a_start,
    commands,
)

NEARLY = timedelta(seconds=30)
KEY = "account:1 of Zoë"


@pytest.fixture(params=["memory", "redis"])
def bench(request: pytest.FixtureRequest) -> LeaseBench:
    return MemoryBench() if request.param == "memory" else RedisBench(request.getfixturevalue("client"))


def locked(task_id: str = "t1", *, key: str = KEY, **options: object) -> Start:
    return a_start(task_id, lock_key=key, **options)  # type: ignore[arg-type]


def as_main_knows(start: Start) -> Start:
    """Main has announced the start, and never learns its key."""
    return replace(start, lock_key=None)


def begin(bench: LeaseBench, start: Start) -> Start:
    outcome = bench.store.acquire(start)
    assert isinstance(outcome, Acquired), outcome
    return start


def end(bench: LeaseBench, start: Start) -> bool:
    return bench.store.release(as_main_knows(start), ended=True, marker=True, state="success")


def hand_over(bench: LeaseBench, start: Start) -> bool:
    return bench.store.release(as_main_knows(start), ended=False, marker=False, state="handed-over")


def renew(bench: LeaseBench, start: Start) -> Renewal:
    return bench.store.renew([as_main_knows(start)])[0]


def begin_behind(bench: LeaseBench, start: Start) -> Start:
    """Another task takes the lock key that the store has lost."""
    bench.lose_lock(KEY)
    return begin(bench, start)


# -- acquire


def test_other_task_is_told_who_has_the_key_and_for_how_long(bench: LeaseBench) -> None:
    holder = begin(bench, locked("t1", session="w1"))
    bench.shorten("t1")

    outcome = bench.store.acquire(locked("t2", session="w2"))

    assert isinstance(outcome, Busy)
    assert (outcome.key, outcome.holder, outcome.attempt) == (KEY, "celery@w1", "")
    assert timedelta(0) < outcome.remaining <= TTL
    assert bench.lock_holder(KEY) == holder.token


def test_waiter_leaves_no_trace(bench: LeaseBench) -> None:
    begin(bench, locked("t1"))
    waiter = locked("t2")

    for _ in range(MAX_STALLS + 2):
        assert isinstance(bench.store.acquire(waiter), Busy)

    assert bench.holder("t2") is None
    assert bench.unfinished("t2") == set()
    assert bench.count("starts") == 1


def test_other_keys_and_tasks_without_one_are_free(bench: LeaseBench) -> None:
    begin(bench, locked("t1"))

    begin(bench, locked("t2", key="account:2"))
    begin(bench, a_start("t3"))


def test_repeated_acquire_is_answered_as_the_first_one(bench: LeaseBench) -> None:
    start = locked()
    first = bench.store.acquire(start)

    assert bench.store.acquire(start) == first
    assert bench.lock_holder(KEY) == start.token
    assert bench.count("starts") == 1


def test_repeat_of_a_lost_answer_after_the_lease_ran_out_is_no_stall_of_the_waiter(bench: LeaseBench) -> None:
    late = begin(bench, locked("t1"))
    bench.run_out("t1")
    begin(bench, locked("t2"))

    assert isinstance(bench.store.acquire(late), Busy)

    assert bench.unfinished("t1") == set()


def test_only_one_of_many_tasks_gets_the_key(bench: LeaseBench) -> None:
    starts = [locked(f"t{n}", session=f"w{n}") for n in range(8)]
    barrier = threading.Barrier(len(starts))
    outcomes: list[object] = []

    def race(start: Start) -> None:
        barrier.wait(10)
        outcomes.append(bench.store.acquire(start))

    threads = [threading.Thread(target=race, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Acquired"] + ["Busy"] * 7


def test_busy_id_is_told_before_the_busy_key(bench: LeaseBench) -> None:
    begin(bench, locked("t1"))

    outcome = bench.store.acquire(locked("t1", session="w2"))

    assert isinstance(outcome, Busy)
    assert outcome.key is None


def test_finished_copy_needs_no_key(bench: LeaseBench) -> None:
    end(bench, begin(bench, locked("t1")))
    begin(bench, locked("t2"))

    assert bench.store.acquire(locked("t1", session="w2")) == AlreadyDone()


def test_start_that_stalled_too_often_fails_without_the_key(bench: LeaseBench) -> None:
    for _ in range(MAX_STALLS + 1):
        begin(bench, locked("t1"))
        bench.run_out("t1")
    begin(bench, locked("t2"))

    doomed = locked("t1")
    first = bench.store.acquire(doomed)

    assert isinstance(first, StalledOut)
    assert bench.store.acquire(doomed) == first
    assert renew(bench, doomed) in (Renewal.HELD, Renewal.LOST)


def test_waiting_costs_nothing_of_the_retry_budget(client: redis.Redis) -> None:
    for bench in (MemoryBench(budget=BUDGET), RedisBench(client, budget=BUDGET)):
        begin(bench, locked("t1"))
        for n in range(30):
            outcome = bench.store.acquire(locked("t2", retries=1, turn="retry", message=f"m{n}"))
            assert isinstance(outcome, Busy)

        outcomes = [bench.store.acquire(a_start(f"u{n}", retries=1, turn="retry")) for n in range(6)]

        assert not [outcome for outcome in outcomes if isinstance(outcome, OverBudget)]


def test_lock_key_costs_no_round_trip(client: redis.Redis) -> None:
    bench = RedisBench(client)
    end(bench, begin(bench, locked("warm")))

    with commands(client) as seen:
        start = begin(bench, locked("t1"))
        renew(bench, start)
        end(bench, start)

    assert len(seen) == 3


# -- the same task id


def test_retry_takes_over_the_key_of_its_sender(bench: LeaseBench) -> None:
    sender = begin(bench, locked("t1"))

    retry = begin(bench, locked("t1", retries=1, after=sender))

    assert bench.lock_holder(KEY) == retry.token
    assert not end(bench, sender)
    assert bench.lock_holder(KEY) == retry.token
    assert renew(bench, retry) is Renewal.HELD


def test_next_start_of_the_id_takes_the_key_when_the_lease_has_run_out(bench: LeaseBench) -> None:
    begin(bench, locked("t1"))
    bench.run_out("t1")

    again = begin(bench, locked("t1", session="w2"))

    assert bench.lock_holder(KEY) == again.token


def test_retry_with_another_key_frees_the_key_of_its_sender(bench: LeaseBench) -> None:
    sender = begin(bench, locked("t1"))

    retry = begin(bench, locked("t1", key="account:2", retries=1, after=sender))

    assert (bench.lock_holder(KEY), bench.lock_holder("account:2")) == (None, retry.token)


def test_retry_without_a_key_frees_the_key_of_its_sender(bench: LeaseBench) -> None:
    sender = begin(bench, locked("t1"))

    retry = begin(bench, a_start("t1", retries=1, after=sender))
    begin(bench, locked("t2"))

    assert renew(bench, retry) is Renewal.HELD


# -- the end


@pytest.mark.parametrize("leave", [end, hand_over])
def test_release_frees_the_key_and_a_repeat_takes_it_from_nobody(bench: LeaseBench, leave: object) -> None:
    assert callable(leave)
    start = begin(bench, locked("t1"))
    assert leave(bench, start)
    other = begin(bench, locked("t2"))

    leave(bench, start)

    assert bench.lock_holder(KEY) == other.token


def test_release_leaves_a_key_alone_that_another_task_has_by_now(bench: LeaseBench) -> None:
    start = begin(bench, locked("t1"))
    other = begin_behind(bench, locked("t2"))

    assert end(bench, start)

    assert bench.lock_holder(KEY) == other.token


def test_death_of_its_process_frees_the_key(bench: LeaseBench) -> None:
    dead = begin(bench, locked("t1"))

    bench.store.abandon(as_main_knows(dead))
    other = begin(bench, locked("t2"))
    bench.store.abandon(as_main_knows(dead))

    assert bench.lock_holder(KEY) == other.token


def test_death_of_its_worker_frees_the_key(bench: LeaseBench) -> None:
    begin(bench, locked("t1", session="w1"))

    assert len(bench.store.expire(session="w1", limit=10)) == 1
    other = begin(bench, locked("t2", session="w2"))
    assert bench.store.expire(session="w1", limit=10) == []

    assert bench.lock_holder(KEY) == other.token


def test_key_runs_out_with_its_lease(bench: LeaseBench) -> None:
    begin(bench, locked("t1"))
    bench.run_out("t1")

    begin(bench, locked("t2"))


def test_key_lives_as_long_as_its_lease(client: redis.Redis) -> None:
    bench = RedisBench(client)
    start = begin(bench, locked("t1"))
    for step in (lambda: bench.store.acquire(start), lambda: renew(bench, start)):
        bench.shorten("t1")
        bench.client.pexpire(KEYS.lock(KEY), 60_000)

        step()

        lives = [timedelta(milliseconds=bench.client.pttl(key)) for key in (KEYS.lock(KEY), KEYS.lease("t1"))]
        assert all(TTL - NEARLY < life <= TTL for life in lives)


# -- the beat


def test_beat_says_lost_when_another_task_has_the_key(bench: LeaseBench) -> None:
    start = begin(bench, locked("t1"))
    other = begin_behind(bench, locked("t2"))

    assert [renew(bench, start), renew(bench, start)] == [Renewal.LOST] * 2

    assert bench.lock_holder(KEY) == other.token
    assert renew(bench, other) is Renewal.HELD
    # Its message goes back at once: nobody has died.
    assert hand_over(bench, start)
    assert bench.unfinished("t1") == set()


def test_beat_takes_a_lost_key_again_that_nobody_has(bench: LeaseBench) -> None:
    start = begin(bench, locked("t1"))
    bench.lose_lock(KEY)

    assert renew(bench, start) is Renewal.HELD

    assert bench.lock_holder(KEY) == start.token


def test_beat_after_an_outage_takes_lease_and_key_again(bench: LeaseBench) -> None:
    start = begin(bench, locked("t1"))
    bench.run_out("t1")

    assert renew(bench, start) is Renewal.HELD

    assert bench.lock_holder(KEY) == start.token
    assert isinstance(bench.store.acquire(locked("t2")), Busy)
    end(bench, start)
    assert bench.lock_holder(KEY) is None


def test_beat_after_an_outage_takes_nothing_when_another_task_has_the_key(bench: LeaseBench) -> None:
    start = begin(bench, locked("t1"))
    bench.run_out("t1")
    other = begin(bench, locked("t2"))

    assert [renew(bench, start), renew(bench, start)] == [Renewal.LOST] * 2

    assert bench.holder("t1") is None
    assert bench.lock_holder(KEY) == other.token


def test_beat_after_the_store_was_emptied_takes_the_key_or_says_lost(client: redis.Redis) -> None:
    """Main works out the key then, once."""
    bench = RedisBench(client)
    first, second = begin(bench, locked("t1")), begin(bench, locked("t2", key="account:2"))
    bench.store.renew([first, second])
    client.flushdb()
    begin(bench, locked("t3", key="account:2"))

    assert bench.store.renew([first, second]) == [Renewal.HELD, Renewal.LOST]

    assert bench.lock_holder(KEY) == first.token


def test_ended_tasks_leave_no_key(client: redis.Redis) -> None:
    bench = RedisBench(client)
    ended, ended_late = begin(bench, locked("t1")), begin(bench, locked("t2", key="account:2"))
    bench.run_out("t2")

    for start in (ended, ended_late):
        end(bench, start)

    assert list(client.scan_iter(f"{KEYS.root}:lock*")) == []
