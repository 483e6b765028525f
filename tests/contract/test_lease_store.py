"""One contract for every lease store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from celery_selfheal.errors import StoreError
from celery_selfheal.keys import Keys
from celery_selfheal.leases.port import (
    Acquired,
    AlreadyDone,
    Busy,
    Lease,
    NotMine,
    OverBudget,
    Renewal,
    StalledOut,
    Start,
)
from celery_selfheal.leases.redis import RedisLeaseStore
from celery_selfheal.testing import servers
from contract.benches import (
    ADDRESS,
    BUDGET,
    DONE_TTL,
    MAX_STALLS,
    TTL,
    LeaseBench,
    MemoryBench,
    RedisBench,
    a_start,
    a_tag,
    commands,
)
from contract.postgres_bench import PostgresBench

NEARLY = timedelta(seconds=30)  # a slow machine may take so long between a step and the look at its effect


@pytest.fixture(params=["memory", "redis", "postgres"])
def make_bench(request: pytest.FixtureRequest) -> Callable[..., LeaseBench]:
    """Each store under the same contract; the server is started only for those that need it."""
    if request.param == "memory":
        return MemoryBench
    if request.param == "postgres":
        engine: sa.Engine = request.getfixturevalue("engine")
        return lambda **options: PostgresBench(engine, **options)
    client: redis.Redis = request.getfixturevalue("client")
    return lambda **options: RedisBench(client, **options)


@pytest.fixture
def bench(make_bench: Callable[..., LeaseBench]) -> LeaseBench:
    return make_bench()


@pytest.fixture(params=["memory", "redis"])
def broker_bench(request: pytest.FixtureRequest) -> LeaseBench:
    """A store that knows the broker's deliveries, too."""
    return MemoryBench() if request.param == "memory" else RedisBench(request.getfixturevalue("client"))


def begin(bench: LeaseBench, start: Start) -> Lease:
    outcome = bench.store.acquire(start)
    assert isinstance(outcome, Acquired), outcome
    return outcome.lease


def end(bench: LeaseBench, start: Start, **changes: Any) -> bool:
    return bench.store.release(start, **{"ended": True, "marker": True, "state": "success", **changes})


def hand_over(bench: LeaseBench, start: Start) -> bool:
    return bench.store.release(start, ended=False, marker=False, state="handed-over")


def renew(bench: LeaseBench, *starts: Start) -> list[Renewal]:
    return bench.store.renew(starts)


# -- acquire


def test_first_start_takes_the_lease_for_its_whole_ttl(bench: LeaseBench) -> None:
    start = a_start()

    outcome = bench.store.acquire(start)

    assert isinstance(outcome, Acquired)
    assert (outcome.lease.task_id, outcome.lease.token) == ("t1", start.token)
    assert (outcome.stalls, outcome.overtaken) == (0, None)
    assert TTL - NEARLY < bench.remaining("t1") <= TTL
    assert bench.count("starts") == 1


def test_fence_grows_with_each_acquisition_of_any_task(bench: LeaseBench) -> None:
    first, other = a_start("t1"), a_start("t2")
    fences = [begin(bench, first).fence, begin(bench, other).fence]
    hand_over(bench, first)

    fences.append(begin(bench, a_start("t1")).fence)

    assert fences == sorted(set(fences))


def test_repeated_acquire_is_answered_as_the_first_one(bench: LeaseBench) -> None:
    """The client repeats a call whose reply was lost."""
    start = a_start()
    first = bench.store.acquire(start)

    again = bench.store.acquire(start)

    assert again == first
    assert bench.count("starts") == 1
    assert bench.unfinished("t1") == {start.token}


def test_repeated_acquire_renews_the_lease(bench: LeaseBench) -> None:
    start = a_start()
    begin(bench, start)
    bench.shorten("t1")

    begin(bench, start)

    assert bench.remaining("t1") > TTL - NEARLY


def test_repeat_after_the_own_lease_ran_out_is_no_stall(bench: LeaseBench) -> None:
    """The first reply was lost and the store was away for a whole TTL: one start, and nobody died."""
    start = a_start()
    begin(bench, start)
    bench.run_out("t1")

    outcome = bench.store.acquire(start)

    assert isinstance(outcome, Acquired)
    assert (outcome.stalls, outcome.overtaken) == (0, None)
    assert bench.count("stalls") == 0
    assert bench.unfinished("t1") == {start.token}


def test_second_copy_is_told_who_runs_and_for_how_long(bench: LeaseBench) -> None:
    begin(bench, a_start(retries=3))

    outcome = bench.store.acquire(a_start(retries=3, session="w2"))

    assert isinstance(outcome, Busy)
    assert TTL - NEARLY < outcome.remaining <= TTL
    assert outcome.attempt == "shop.pay:3"


def test_busy_copy_changes_nothing(bench: LeaseBench) -> None:
    running = a_start()
    begin(bench, running)
    bench.shorten("t1")

    bench.store.acquire(a_start(session="w2"))

    assert bench.holder("t1") == running.token
    assert bench.unfinished("t1") == {running.token}
    assert bench.remaining("t1") <= timedelta(seconds=60)
    assert bench.count("starts") == 1


def test_tasks_do_not_share_leases(bench: LeaseBench) -> None:
    begin(bench, a_start("t1"))

    assert isinstance(bench.store.acquire(a_start("t2")), Acquired)


def test_only_one_of_many_copies_starts(bench: LeaseBench) -> None:
    starts = [a_start(session=f"w{n}") for n in range(8)]
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


def test_copy_of_a_finished_message_does_not_start(bench: LeaseBench) -> None:
    first = a_start()
    begin(bench, first)
    end(bench, first)

    assert bench.store.acquire(a_start(session="w2")) == AlreadyDone()
    assert bench.holder("t1") is None


def test_marker_stops_copies_of_its_own_message_only(bench: LeaseBench) -> None:
    """A retry, a replay and a new message with the same id must run."""
    first = a_start()
    begin(bench, first)
    end(bench, first)

    for other in (a_start(retries=1), a_start(message="m2")):
        begin(bench, other)
        hand_over(bench, other)


def test_copy_runs_again_once_the_marker_is_gone(bench: LeaseBench) -> None:
    """Without a dedup row this is at-least-once, and the docs say so."""
    first = a_start()
    begin(bench, first)
    end(bench, first)
    bench.lose_marker(first.marker)

    begin(bench, a_start())


def test_holder_that_repeats_is_held_though_a_marker_was_left_meanwhile(bench: LeaseBench) -> None:
    """Was V17: "done" would leave its lease and its journal entry behind."""
    start = a_start()
    lease = begin(bench, start)
    bench.leave_marker(start.marker, "another start")

    assert begin(bench, start) == lease


def test_start_does_not_begin_without_its_delivery(broker_bench: LeaseBench) -> None:
    """Was V10: a paused worker wakes with copies that were restored long ago."""
    start = a_start(tag=a_tag())
    broker_bench.deliver(start)
    broker_bench.take_away(start)

    assert broker_bench.store.acquire(start) == NotMine()
    assert broker_bench.holder("t1") is None
    assert broker_bench.unfinished("t1") == set()


def test_start_begins_with_its_delivery(broker_bench: LeaseBench) -> None:
    start = a_start(tag=a_tag())
    broker_bench.deliver(start)

    begin(broker_bench, start)

    assert broker_bench.owns(start)


# -- takeover


def test_takeover_counts_one_stall_and_tells_whose(bench: LeaseBench) -> None:
    dead = a_start(session="w1")
    begin(bench, dead)
    bench.run_out("t1")

    outcome = bench.store.acquire(a_start(session="w2"))

    assert isinstance(outcome, Acquired)
    assert outcome.stalls == 1
    assert outcome.overtaken is not None
    assert (outcome.overtaken.task_id, outcome.overtaken.token) == ("t1", dead.token)
    assert (outcome.overtaken.task_name, outcome.overtaken.owner) == ("shop.pay", "celery@w1")
    assert outcome.overtaken.unfinished_starts == 1
    assert 0 <= outcome.overtaken.age_seconds < NEARLY.total_seconds()
    assert bench.count("stalls") == 1
    assert bench.store.expire(session=None, limit=10) == []


def test_three_starts_may_stall_and_no_fourth_runs(bench: LeaseBench) -> None:
    """Was V13: two starts that died must leave a third one its chance."""
    for stalls in range(MAX_STALLS + 1):
        start = a_start(session=f"w{stalls}")
        outcome = bench.store.acquire(start)
        assert isinstance(outcome, Acquired)
        assert outcome.stalls == stalls
        bench.run_out("t1")

    outcome = bench.store.acquire(a_start(session="w9"))

    assert isinstance(outcome, StalledOut)
    assert outcome.stalls == MAX_STALLS + 1


def test_start_that_stalled_too_often_holds_the_lease_while_it_fails(bench: LeaseBench) -> None:
    """Its failure is stored once: a second copy waits meanwhile."""
    stall_too_often(bench)
    doomed = a_start(session="w8")
    first = bench.store.acquire(doomed)

    again = bench.store.acquire(doomed)

    assert isinstance(first, StalledOut)
    assert again == first
    assert isinstance(bench.store.acquire(a_start(session="w9")), Busy)
    assert doomed.token not in bench.unfinished("t1")
    assert bench.count("starts") == MAX_STALLS + 1


def test_end_of_a_start_that_stalled_too_often_settles_the_journal(bench: LeaseBench) -> None:
    stall_too_often(bench)
    doomed = a_start()
    bench.store.acquire(doomed)

    end(bench, doomed, state="failure")

    assert bench.unfinished("t1") == set()
    assert bench.store.acquire(a_start()) == AlreadyDone()


def test_hand_overs_are_never_counted(bench: LeaseBench) -> None:
    for _ in range(MAX_STALLS + 3):
        start = a_start()
        begin(bench, start)
        hand_over(bench, start)

    outcome = bench.store.acquire(a_start())

    assert isinstance(outcome, Acquired)
    assert outcome.stalls == 0
    assert bench.count("stalls") == 0


def test_hand_over_keeps_the_stalls_of_others(bench: LeaseBench) -> None:
    dead, stopped = a_start(session="w1"), a_start(session="w2")
    begin(bench, dead)
    bench.run_out("t1")
    begin(bench, stopped)

    hand_over(bench, stopped)

    assert bench.unfinished("t1") == {dead.token}


def test_end_clears_the_stalls(bench: LeaseBench) -> None:
    begin(bench, a_start(session="w1"))
    bench.run_out("t1")
    last = a_start(session="w2")
    begin(bench, last)

    end(bench, last)

    assert bench.unfinished("t1") == set()
    begin(bench, a_start(retries=1))


def test_retry_takes_the_lease_of_the_start_that_sent_it(bench: LeaseBench) -> None:
    """It may arrive before its sender has released."""
    sender = a_start(session="w1")
    fence = begin(bench, sender).fence
    retry = a_start(session="w2", retries=1, after=sender)

    outcome = bench.store.acquire(retry)

    assert isinstance(outcome, Acquired)
    assert (outcome.stalls, outcome.overtaken) == (0, None)
    assert outcome.lease.fence > fence
    assert bench.unfinished("t1") == {retry.token}
    assert bench.count("stalls") == 0


def test_retry_settles_its_sender_that_died_before_it_could_release(bench: LeaseBench) -> None:
    """The body had ended, or the retry would not exist."""
    sender = a_start()
    begin(bench, sender)
    bench.run_out("t1")
    retry = a_start(retries=1, after=sender)

    outcome = bench.store.acquire(retry)

    assert isinstance(outcome, Acquired)
    assert (outcome.stalls, outcome.overtaken) == (0, None)
    assert bench.unfinished("t1") == {retry.token}


def test_late_release_of_the_sender_leaves_its_retry_alone(bench: LeaseBench) -> None:
    sender = a_start()
    begin(bench, sender)
    retry = a_start(retries=1, after=sender)
    begin(bench, retry)

    assert not end(bench, sender)

    assert bench.holder("t1") == retry.token
    assert bench.unfinished("t1") == {retry.token}
    assert renew(bench, retry) == [Renewal.HELD]


def test_repeat_of_a_retry_is_held_when_its_sender_releases_in_between(bench: LeaseBench) -> None:
    sender = a_start()
    begin(bench, sender)
    retry = a_start(retries=1, after=sender)
    lease = begin(bench, retry)
    end(bench, sender)

    assert begin(bench, retry) == lease


def test_retry_waits_for_a_stranger(bench: LeaseBench) -> None:
    """A restored copy of the first attempt runs: naming some predecessor is no key to its lease."""
    sender = a_start(session="w1")
    begin(bench, sender)
    bench.run_out("t1")
    copy = a_start(session="w2")
    begin(bench, copy)

    outcome = bench.store.acquire(a_start(retries=1, after=sender))

    assert isinstance(outcome, Busy)
    assert outcome.attempt == "shop.pay:0"
    assert bench.holder("t1") == copy.token


# -- release


def test_release_frees_the_lease_at_once(bench: LeaseBench) -> None:
    start = a_start()
    begin(bench, start)

    assert end(bench, start, marker=False)

    assert bench.holder("t1") is None
    assert bench.count("success") == 1
    begin(bench, a_start())


def test_repeated_release_is_answered_alike_and_counted_once(bench: LeaseBench) -> None:
    for release in (end, hand_over):
        start = a_start(message=release.__name__)
        begin(bench, start)

        assert release(bench, start)
        assert release(bench, start)

    assert (bench.count("success"), bench.count("handed-over")) == (1, 1)


def test_repeated_release_leaves_the_next_start_alone(bench: LeaseBench) -> None:
    """The first reply was lost; before the repeat came another start."""
    first = a_start(tag=a_tag())
    bench.deliver(first)
    begin(bench, first)
    hand_over(bench, first)
    second = a_start(session="w2")
    begin(bench, second)

    assert not end(bench, first, acknowledge=True)

    assert bench.holder("t1") == second.token
    assert bench.unfinished("t1") == {second.token}
    assert bench.count("success") == 0
    assert isinstance(bench.store.acquire(a_start()), Busy)


def test_late_release_after_a_takeover_changes_nothing(bench: LeaseBench) -> None:
    loser, winner = a_start(session="w1"), a_start(session="w2")
    begin(bench, loser)
    bench.run_out("t1")
    begin(bench, winner)

    assert not end(bench, loser)

    assert bench.holder("t1") == winner.token
    assert renew(bench, winner) == [Renewal.HELD]
    assert isinstance(bench.store.acquire(a_start()), Busy), "no marker was left"


def test_late_release_after_the_winner_has_ended_says_so(bench: LeaseBench) -> None:
    loser, winner = a_start(session="w1"), a_start(session="w2")
    begin(bench, loser)
    bench.run_out("t1")
    begin(bench, winner)
    end(bench, winner)

    assert not end(bench, loser)
    assert bench.count("success") == 1


def test_release_of_a_lease_that_ran_out_untaken_counts_as_the_end(bench: LeaseBench) -> None:
    """An eviction or an outage must not make a finished body run again."""
    start = a_start()
    begin(bench, start)
    bench.run_out("t1")

    assert end(bench, start)

    assert bench.store.acquire(a_start()) == AlreadyDone()
    assert bench.unfinished("t1") == set()
    assert bench.store.expire(session=None, limit=10) == []


def test_release_after_its_stall_was_told_counts_as_the_end(bench: LeaseBench) -> None:
    """A reaper took it for dead, and nobody has begun it since."""
    start = a_start()
    begin(bench, start)
    bench.run_out("t1")
    assert len(bench.store.expire(session=None, limit=10)) == 1

    assert end(bench, start)

    assert bench.store.acquire(a_start()) == AlreadyDone()
    assert bench.unfinished("t1") == set()


def test_release_without_marker_lets_a_copy_run(bench: LeaseBench) -> None:
    start = a_start()
    begin(bench, start)

    end(bench, start, marker=False)

    begin(bench, a_start())


def test_release_acknowledges_the_delivery_in_the_same_step(broker_bench: LeaseBench) -> None:
    start, other = a_start(tag=a_tag()), a_start("t2", tag=a_tag())
    broker_bench.deliver(start)
    broker_bench.deliver(other)
    begin(broker_bench, start)

    end(broker_bench, start, acknowledge=True)

    assert not broker_bench.owns(start)
    assert broker_bench.owns(other)


def test_release_leaves_the_delivery_unless_it_is_asked(broker_bench: LeaseBench) -> None:
    start = a_start(tag=a_tag())
    broker_bench.deliver(start)
    begin(broker_bench, start)

    end(broker_bench, start)

    assert broker_bench.owns(start)


def test_start_that_lost_its_lease_does_not_acknowledge(broker_bench: LeaseBench) -> None:
    """Was V2: its delivery may be the only copy; whoever took the lease may die."""
    loser, winner = a_start(tag=a_tag("w1")), a_start(session="w2")
    broker_bench.deliver(loser)
    begin(broker_bench, loser)
    broker_bench.run_out("t1")
    begin(broker_bench, winner)

    assert not end(broker_bench, loser, acknowledge=True)

    assert broker_bench.owns(loser)


# -- renew


def test_renewal_sets_the_expiry_and_never_adds(bench: LeaseBench) -> None:
    start = a_start()
    begin(bench, start)
    bench.shorten("t1")

    assert renew(bench, start) == [Renewal.HELD]
    assert renew(bench, start) == [Renewal.HELD]

    assert TTL - NEARLY < bench.remaining("t1") <= TTL


def test_renewals_are_answered_in_the_order_of_the_question(bench: LeaseBench) -> None:
    held, lost, unborn = a_start("t1"), a_start("t2"), a_start("t3")
    begin(bench, held)
    begin(bench, lost)
    bench.run_out("t2")
    begin(bench, a_start("t2", session="w2"))

    assert renew(bench, unborn, lost, held) == [Renewal.IDLE, Renewal.LOST, Renewal.HELD]
    assert renew(bench) == []


def test_start_that_has_not_begun_is_no_loss(bench: LeaseBench) -> None:
    """Between the pool's acceptance and the child's acquire, another copy may run."""
    begin(bench, a_start(session="w2"))

    assert renew(bench, a_start()) == [Renewal.IDLE]


@pytest.mark.parametrize("release", [end, hand_over])
def test_start_that_has_ended_is_no_loss(bench: LeaseBench, release: Callable[..., bool]) -> None:
    """The child releases before main removes the request, and the next start may be quick."""
    ended = a_start()
    begin(bench, ended)
    release(bench, ended)
    assert renew(bench, ended) == [Renewal.IDLE]
    assert bench.holder("t1") is None

    begin(bench, a_start(message="m2", session="w2"))

    assert renew(bench, ended) == [Renewal.IDLE]


def test_lease_that_ran_out_untaken_is_taken_again_under_its_fence(bench: LeaseBench) -> None:
    """The first beat after an outage: nobody could take over meanwhile."""
    start = a_start()
    lease = begin(bench, start)
    bench.run_out("t1")

    assert renew(bench, start) == [Renewal.HELD]

    assert bench.remaining("t1") > TTL - NEARLY
    assert begin(bench, start) == lease
    assert bench.store.expire(session=None, limit=10) == []
    assert bench.count("stalls") == 0


def test_start_whose_stall_was_told_takes_its_lease_again(bench: LeaseBench) -> None:
    start = a_start()
    lease = begin(bench, start)
    bench.run_out("t1")
    bench.store.expire(session=None, limit=10)

    assert renew(bench, start) == [Renewal.HELD]

    assert begin(bench, start) == lease
    assert isinstance(bench.store.acquire(a_start(session="w2")), Busy)
    bench.run_out("t1")
    assert [stall.token for stall in bench.store.expire(session=None, limit=10)] == [start.token]


def test_overtaken_start_is_lost_even_when_its_successor_ran_out_too(bench: LeaseBench) -> None:
    loser, successor = a_start(session="w1"), a_start(session="w2")
    begin(bench, loser)
    bench.run_out("t1")
    begin(bench, successor)
    bench.run_out("t1")

    assert renew(bench, loser) == [Renewal.LOST]
    assert renew(bench, successor) == [Renewal.HELD]


def test_renewal_after_the_successor_has_ended_takes_nothing(bench: LeaseBench) -> None:
    loser, successor = a_start(session="w1"), a_start(session="w2")
    begin(bench, loser)
    bench.run_out("t1")
    begin(bench, successor)
    end(bench, successor)

    assert renew(bench, loser) == [Renewal.IDLE]
    assert bench.holder("t1") is None


# -- abandon


def test_abandoned_start_is_a_stall_and_its_task_is_free_at_once(bench: LeaseBench) -> None:
    dead = a_start()
    begin(bench, dead)

    assert bench.store.abandon(dead) == 1

    assert bench.count("stalls") == 1
    outcome = bench.store.acquire(a_start())
    assert isinstance(outcome, Acquired)
    assert (outcome.stalls, outcome.overtaken) == (1, None)
    assert bench.count("stalls") == 1


def test_repeated_abandon_counts_once(bench: LeaseBench) -> None:
    dead = a_start()
    begin(bench, dead)

    assert [bench.store.abandon(dead), bench.store.abandon(dead)] == [1, 1]
    assert bench.count("stalls") == 1


def test_child_that_dies_before_it_can_acquire_is_counted(bench: LeaseBench) -> None:
    """Else a message that kills its decoder loops for ever."""
    for n in range(MAX_STALLS + 1):
        dead = a_start()
        assert [bench.store.abandon(dead), bench.store.abandon(dead)] == [n + 1, n + 1]

    assert bench.count("stalls") == MAX_STALLS + 1
    assert isinstance(bench.store.acquire(a_start()), StalledOut)


def test_last_of_many_that_died_before_they_could_acquire_settles_them_all(bench: LeaseBench) -> None:
    """Main stores its failure and dead-letters the message; a copy of it must not fail once more."""
    dead = [a_start(token=token) for token in ("m", "z", "a")]
    for start in dead:
        bench.store.abandon(start)

    assert end(bench, dead[-1], state="failure")

    assert bench.unfinished("t1") == set()
    assert bench.store.acquire(a_start()) == AlreadyDone()


def test_child_that_dies_after_its_end_is_no_stall(bench: LeaseBench) -> None:
    """Killed between release and the acknowledgement that Celery sends."""
    start = a_start()
    begin(bench, start)
    end(bench, start)

    assert bench.store.abandon(start) is None
    assert bench.count("stalls") == 0
    assert bench.unfinished("t1") == set()


def test_abandoned_copy_leaves_the_running_start_alone(bench: LeaseBench) -> None:
    running, copy = a_start(session="w1"), a_start(session="w1")
    begin(bench, running)

    bench.store.abandon(copy)

    assert bench.holder("t1") == running.token
    assert renew(bench, running) == [Renewal.HELD]


def test_running_start_outlives_an_outage_though_a_copy_of_it_died_meanwhile(bench: LeaseBench) -> None:
    """The copy never held the lease: it is no later start, and no loss."""
    running, copy = a_start(session="w1"), a_start(session="w2")
    lease = begin(bench, running)
    bench.store.abandon(copy)
    bench.run_out("t1")

    assert renew(bench, running) == [Renewal.HELD]
    assert begin(bench, running) == lease
    assert end(bench, running)


def test_lease_of_an_abandoned_start_that_acquires_late_runs_out_uncounted(bench: LeaseBench) -> None:
    """Its last call reached the store after main had seen the child die."""
    dead = a_start()
    bench.store.abandon(dead)
    bench.store.acquire(dead)
    bench.run_out("t1")

    outcome = bench.store.acquire(a_start())

    assert isinstance(outcome, Acquired)
    assert outcome.stalls == 1


# -- expire


def test_lease_that_ran_out_is_told_once(bench: LeaseBench) -> None:
    dead = a_start(session="w1")
    begin(bench, dead)
    bench.run_out("t1")

    (stall,) = bench.store.expire(session=None, limit=10)

    assert (stall.task_id, stall.task_name, stall.token) == ("t1", "shop.pay", dead.token)
    assert (stall.owner, stall.unfinished_starts) == ("celery@w1", 1)
    assert 0 <= stall.age_seconds < NEARLY.total_seconds()
    assert bench.store.expire(session=None, limit=10) == []
    assert bench.store.expire(session="w1", limit=10) == []
    assert bench.count("stalls") == 1


def test_stall_that_was_told_is_still_counted_by_the_next_start(bench: LeaseBench) -> None:
    begin(bench, a_start())
    bench.run_out("t1")
    bench.store.expire(session=None, limit=10)

    outcome = bench.store.acquire(a_start())

    assert isinstance(outcome, Acquired)
    assert (outcome.stalls, outcome.overtaken) == (1, None)
    assert bench.count("stalls") == 1


def test_living_leases_do_not_expire(bench: LeaseBench) -> None:
    start = a_start()
    begin(bench, start)

    assert bench.store.expire(session=None, limit=10) == []
    assert bench.store.expire(session="w2", limit=10) == []
    assert bench.holder("t1") == start.token


def test_leases_of_a_dead_session_end_at_once(bench: LeaseBench) -> None:
    begin(bench, a_start("t1", session="w1"))
    living = a_start("t2", session="w2")
    begin(bench, living)

    stalls = bench.store.expire(session="w1", limit=10)

    assert [stall.task_id for stall in stalls] == ["t1"]
    assert bench.holder("t1") is None
    assert bench.holder("t2") == living.token
    assert bench.store.expire(session="w1", limit=10) == []


def test_lease_that_another_session_took_over_outlives_the_first_one(bench: LeaseBench) -> None:
    begin(bench, a_start(session="w1"))
    bench.run_out("t1")
    winner = a_start(session="w2")
    begin(bench, winner)

    assert bench.store.expire(session="w1", limit=10) == []

    assert bench.holder("t1") == winner.token
    assert [stall.token for stall in bench.store.expire(session="w2", limit=10)] == [winner.token]


def test_lease_that_a_retry_took_over_is_found_by_its_new_session(bench: LeaseBench) -> None:
    sender = a_start(session="w1")
    begin(bench, sender)
    retry = a_start(session="w2", retries=1, after=sender)
    begin(bench, retry)
    end(bench, sender)

    assert bench.store.expire(session="w1", limit=10) == []
    assert [stall.token for stall in bench.store.expire(session="w2", limit=10)] == [retry.token]


def test_running_start_is_found_by_its_session_though_a_copy_died_beside_it(bench: LeaseBench) -> None:
    """Else the restored message would meet the lease of its own dead start."""
    running, copy = a_start(session="w1"), a_start(session="w1")
    begin(bench, running)
    bench.store.abandon(copy)

    assert [stall.token for stall in bench.store.expire(session="w1", limit=10)] == [running.token]


@pytest.mark.parametrize("session", [None, "w1"])
def test_expired_starts_are_told_by_pages(bench: LeaseBench, session: str | None) -> None:
    ids = [f"t{n}" for n in range(5)]
    for task_id in ids:
        begin(bench, a_start(task_id, session="w1"))
        bench.run_out(task_id)

    pages = [bench.store.expire(session=session, limit=2) for _ in range(4)]

    assert [len(page) for page in pages] == [2, 2, 1, 0]
    assert sorted(stall.task_id for page in pages for stall in page) == ids


def test_ended_starts_are_never_told(bench: LeaseBench) -> None:
    for n, release in enumerate((end, hand_over)):
        start = a_start(f"t{n}")
        begin(bench, start)
        release(bench, start)

    assert bench.store.expire(session=None, limit=10) == []
    assert bench.store.expire(session="w1", limit=10) == []


# -- retry budget


def test_first_attempts_are_never_over_budget(make_bench: Callable[..., LeaseBench]) -> None:
    bench = make_bench(budget=BUDGET)

    for n in range(20):
        begin(bench, a_start(f"t{n}"))


def test_retries_above_the_budget_are_told_to_wait_each_longer(make_bench: Callable[..., LeaseBench]) -> None:
    bench = make_bench(budget=BUDGET)
    for n in range(6):
        begin(bench, a_start(f"t{n}", turn="retry"))

    waits = [bench.store.acquire(a_start(f"u{n}", turn="retry")) for n in range(3)]

    seconds = [outcome.wait.total_seconds() for outcome in waits if isinstance(outcome, OverBudget)]
    assert seconds == pytest.approx([10, 20, 30], abs=1)
    assert bench.count("over_budget") == 3


def test_repeat_above_the_budget_takes_no_second_place(make_bench: Callable[..., LeaseBench]) -> None:
    """A lost reply must not make the others wait longer."""
    bench = make_bench(budget=BUDGET)
    for n in range(6):
        begin(bench, a_start(f"t{n}", turn="retry"))
    late = a_start("u1", turn="retry")

    assert bench.store.acquire(late) == bench.store.acquire(late)

    outcome = bench.store.acquire(a_start("u2", turn="retry"))
    assert isinstance(outcome, OverBudget)
    assert outcome.wait.total_seconds() == pytest.approx(20, abs=1)
    assert bench.count("over_budget") == 2


def test_retry_that_waits_for_the_budget_takes_no_lease(make_bench: Callable[..., LeaseBench]) -> None:
    bench = make_bench(budget=BUDGET)
    for n in range(6):
        begin(bench, a_start(f"t{n}", turn="retry"))
    late = a_start("u1", turn="retry")
    bench.store.acquire(late)

    assert bench.holder("u1") is None
    assert bench.unfinished("u1") == set()


def test_retry_that_has_waited_is_let_through(make_bench: Callable[..., LeaseBench]) -> None:
    bench = make_bench(budget=BUDGET)
    for n in range(7):
        bench.store.acquire(a_start(f"t{n}", turn="retry"))

    begin(bench, a_start("t9", turn="paid"))


def test_time_and_first_attempts_earn_retries(make_bench: Callable[..., LeaseBench]) -> None:
    bench = make_bench(budget=BUDGET)
    for n in range(6):
        begin(bench, a_start(f"t{n}", turn="retry"))
    assert isinstance(bench.store.acquire(a_start("u1", turn="retry")), OverBudget)

    bench.earn_for(timedelta(seconds=20))
    begin(bench, a_start("u2", turn="retry"))
    assert isinstance(bench.store.acquire(a_start("u3", turn="retry")), OverBudget)

    for n in range(4):
        begin(bench, a_start(f"first{n}"))
    begin(bench, a_start("u4", turn="retry"))
    assert isinstance(bench.store.acquire(a_start("u5", turn="retry")), OverBudget)


def test_what_is_not_used_within_the_window_is_gone(make_bench: Callable[..., LeaseBench]) -> None:
    """A good day must not pay for a stampede at night."""
    bench = make_bench(budget=BUDGET)
    for n in range(40):
        begin(bench, a_start(f"first{n}"))
    bench.earn_for(timedelta(days=1))

    outcomes = [bench.store.acquire(a_start(f"t{n}", turn="retry")) for n in range(8)]

    assert isinstance(outcomes[-1], OverBudget)


def test_task_names_do_not_share_a_budget(make_bench: Callable[..., LeaseBench]) -> None:
    bench = make_bench(budget=BUDGET)
    for n in range(7):
        bench.store.acquire(a_start(f"t{n}", turn="retry"))

    begin(bench, a_start("u1", turn="retry", task_name="shop.mail"))


def test_busy_and_done_copies_cost_no_budget(make_bench: Callable[..., LeaseBench]) -> None:
    bench = make_bench(budget=BUDGET)
    running = a_start(turn="retry")
    begin(bench, running)
    for _ in range(10):
        bench.store.acquire(a_start(turn="retry"))
    end(bench, running)
    for _ in range(10):
        bench.store.acquire(a_start(turn="retry"))

    for n in range(5):
        begin(bench, a_start(f"u{n}", turn="retry"))


# -- what only a server can do


@pytest.mark.parametrize("make_bench", ["redis", "postgres"], indirect=True)
def test_forgotten_journals_let_replayed_tasks_start(bench: Any) -> None:
    """What went before a replay does not judge it; what runs meanwhile goes on."""
    running = a_start("t2")
    begin(bench, running)
    stall_too_often(bench)

    for _ in range(2):
        bench.store.forget(["t1", "t2", "t3"])

    assert bench.unfinished("t1") == set()
    assert bench.store.acquire(a_start("t1")).stalls == 0
    assert renew(bench, running) == [Renewal.HELD]


def test_lease_runs_out_by_the_servers_clock(client: redis.Redis) -> None:
    bench = RedisBench(client, ttl=timedelta(milliseconds=60))
    start = a_start()
    begin(bench, start)

    stalls = []
    give_up_at = time.monotonic() + 10
    while not stalls and time.monotonic() < give_up_at:
        stalls = bench.store.expire(session=None, limit=10)

    assert [stall.token for stall in stalls] == [start.token]
    assert stalls[0].age_seconds >= 0.06


def test_start_that_acquires_between_the_reapers_look_and_its_step_is_spared(client: redis.Redis, keys: Keys) -> None:
    bench = RedisBench(client)
    begin(bench, a_start(session="w1"))
    bench.run_out("t1")
    seen = [("t1", bench.client.hget(keys.inflight, "t1"))]
    taken = a_start(session="w2")
    begin(bench, taken)
    bench.run_out("t1")

    assert list(bench.store._expire_each(None, seen, now_ms=0)) == []

    assert [stall.token for stall in bench.store.expire(session=None, limit=10)] == [taken.token]


def test_start_that_renews_between_the_reapers_look_and_its_step_is_spared(client: redis.Redis, keys: Keys) -> None:
    bench = RedisBench(client)
    start = a_start(session="w1")
    begin(bench, start)
    bench.run_out("t1")
    seen = [("t1", bench.client.hget(keys.inflight, "t1"))]
    renew(bench, start)

    assert list(bench.store._expire_each(None, seen, now_ms=0)) == []

    assert bench.holder("t1") == start.token


def test_retry_that_ends_between_the_reapers_look_and_its_step_leaves_nothing(client: redis.Redis, keys: Keys) -> None:
    bench = RedisBench(client)
    start = a_start()
    begin(bench, start)
    bench.run_out("t1")
    seen = [("t1", bench.client.hget(keys.inflight, "t1"))]
    end(bench, start)

    assert list(bench.store._expire_each(None, seen, now_ms=0)) == []
    assert bench.count("stalls") == 0


def test_index_entries_without_a_record_are_swept_away(client: redis.Redis, keys: Keys) -> None:
    """Else a page of them would hide every stall behind it."""
    bench = RedisBench(client)
    client.zadd(keys.index, {f"ghost{n}": 1 for n in range(3)})
    begin(bench, a_start())
    bench.run_out("t1")
    client.zadd(keys.index, {"t1": 2})

    assert bench.store.expire(session=None, limit=3) == []
    assert len(bench.store.expire(session=None, limit=3)) == 1


def test_held_sets_do_not_grow_with_finished_tasks(client: redis.Redis, keys: Keys) -> None:
    """A worker lives for weeks and a million tasks."""
    bench = RedisBench(client)
    plain, overtaken, dead = a_start("t1"), a_start("t2"), a_start("t3")
    for start in (plain, overtaken, dead):
        begin(bench, start)
    begin(bench, a_start("t2", session="w2", retries=1, after=overtaken))

    end(bench, plain)
    end(bench, overtaken)
    bench.store.abandon(dead)

    assert client.smembers(keys.held("w1")) == set()


def test_fence_grows_although_the_servers_clock_was_set_back(client: redis.Redis, keys: Keys) -> None:
    bench = RedisBench(client)
    ahead = begin(bench, a_start("t1")).fence + 10**12
    client.set(keys.fence, ahead)

    assert begin(bench, a_start("t2")).fence == ahead + 1
    assert begin(bench, a_start("t3")).fence == ahead + 2


def test_sweep_looks_at_nothing_that_was_renewed(client: redis.Redis, keys: Keys) -> None:
    """Its cost follows what has run out, not what lives."""
    bench = RedisBench(client)
    held, run_out = a_start("t1"), a_start("t2")
    begin(bench, held)
    begin(bench, run_out)
    bench.shorten("t1")
    bench.run_out("t2")
    renew(bench, held, run_out)

    with commands(client) as sent:
        assert bench.store.expire(session=None, limit=10) == []

    assert [command.split()[0] for command in sent] == ["TIME", "ZRANGEBYSCORE"]


def test_emptied_store_gives_larger_fences(client: redis.Redis) -> None:
    bench = RedisBench(client)
    before = begin(bench, a_start()).fence
    client.flushdb()

    assert begin(bench, a_start()).fence > before


def test_scripts_are_loaded_again_where_the_server_has_forgotten_them(client: redis.Redis) -> None:
    bench = RedisBench(client)
    begin(bench, a_start("t1"))
    client.script_flush()

    begin(bench, a_start("t2"))


def test_every_step_tells_a_store_that_does_not_answer_by_one_error() -> None:
    with redis.Redis(port=servers.free_port(), retry=None) as nobody:
        store = RedisBench(nobody).store
        steps: list[Callable[[], object]] = [
            lambda: store.acquire(a_start()),
            lambda: store.release(a_start(), ended=True, marker=True, state="success"),
            lambda: store.renew([a_start()]),
            lambda: store.abandon(a_start()),
            lambda: store.expire(session=None, limit=1),
            lambda: store.expire(session="w1", limit=1),
        ]

        for step in steps:
            with pytest.raises(StoreError, match=ADDRESS):
                step()


def test_delivery_is_not_asked_for_where_leases_have_a_server_of_their_own(client: redis.Redis, keys: Keys) -> None:
    store = RedisLeaseStore(client, keys, ttl=TTL, max_stalls=MAX_STALLS, done_ttl=DONE_TTL, address=ADDRESS)
    start = a_start(tag=a_tag())

    assert isinstance(store.acquire(start), Acquired)
    assert store.release(start, ended=True, marker=True, state="success", acknowledge=True)


def stall_too_often(bench: LeaseBench) -> None:
    for n in range(MAX_STALLS + 1):
        begin(bench, a_start(session=f"dead{n}"))
        bench.run_out("t1")
