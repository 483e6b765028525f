"""Redis dies or stands still under running tasks and comes back, with what it knew or without."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_selfheal.testing import RedisServer, WorkerProcess
from integration.outages.crew import SHORT_TTL, Crew

LEASE_TTL_SECONDS = 10  # the default
RECONNECT_SECONDS = 90.0  # Celery waits longer after each try: 2, 4, 6 ... seconds


def start_both_kinds(crew: Crew, running: int) -> tuple[list[WorkerProcess], dict[str, int]]:
    """One worker with processes and one with threads, so many tasks running in both together."""
    slots = {"w0": running // 2, "w1": running - running // 2}
    workers = [
        crew.start("w0", concurrency=slots["w0"], prefetch=2, queues="celery,w0"),
        crew.start("w1", concurrency=slots["w1"], prefetch=2, queues="celery,w1", pool="threads"),
    ]
    return workers, slots


def check_outage(crew: Crew, *, running: int, reserved: int, seconds: float) -> None:
    """Kill Redis while two workers hold all that they can, and bring it back after longer than the TTL."""
    workers, slots = start_both_kinds(crew, running)
    children = [worker.child_pids() for worker in workers]
    gate = crew.gate()
    run = [crew.load(f"{node}-{n}", gate, queue=node) for node, count in slots.items() for n in range(count)]
    crew.wait_started(run)
    due = [crew.ship("due", countdown=seconds)]
    wait = [crew.ship(f"reserved-{n}") for n in range(reserved)]
    crew.wait_held(2 * running + 1)  # a message that waits for its ETA takes nobody's place
    assert crew.leased() == set(run)

    crew.server.kill()
    time.sleep(seconds)
    crew.server.restart()
    back_at = time.monotonic()

    crew.wait("every running task has its lease again", lambda: crew.leased() == set(run), seconds=RECONNECT_SECONDS)
    # Whoever takes the living for dead does it in this time.
    crew.wait("a TTL passes", lambda: time.monotonic() > back_at + LEASE_TTL_SECONDS + 3)
    assert crew.leased() == set(run)
    gate.open()
    crew.wait_ended([*run, *wait, *due], seconds=RECONNECT_SECONDS)
    crew.wait_nothing_left()

    crew.check_each_ran_once()
    assert {crew.result(task_id) for task_id in run} == {"loaded"}
    assert {crew.result(task_id) for task_id in [*wait, *due]} == {"shipped"}
    assert [worker.child_pids() for worker in workers] == children


def check_healing(crew: Crew) -> None:
    """Kill w0 with a running task: w1 puts its message back, and a successor in the same queue runs it."""
    victim, healer = crew.workers
    gate = crew.gate("healing")
    run = crew.load("healed", gate, queue="w0")
    crew.wait_started([run])

    victim.kill_group()
    crew.wait("its message is back", lambda: crew.waiting("w0") == [run])
    gate.open()
    crew.start("w2", queues="w0")
    crew.wait_ended([run])
    crew.wait_nothing_left()

    assert healer.alive
    assert len(crew.diary.starts(run)) == 2


def test_redis_comes_back_from_its_file_and_nobody_has_lost_or_doubled_anything(crew: Crew) -> None:
    check_outage(crew, running=25, reserved=30, seconds=12)

    check_healing(crew)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_redis_is_away_for_twenty_seconds_under_fifty_tasks(crew: Crew) -> None:
    check_outage(crew, running=50, reserved=60, seconds=20)

    check_healing(crew)


def test_a_body_that_ends_while_redis_is_away_has_ended(crew: Crew) -> None:
    """Whether its result is wanted or not: what cannot be stored or released now is so later."""
    crew.settings = dict(SHORT_TTL)  # the outage shall be longer than the TTL, the test not much
    _, slots = start_both_kinds(crew, 8)
    gate = crew.gate()
    run = [
        crew.load(f"{node}-{n}", gate, queue=node, ignore_result=n % 2 == 0)
        for node, count in slots.items()
        for n in range(count)
    ]
    crew.wait_started(run)

    crew.server.kill()
    time.sleep(1)
    gate.open()
    crew.wait_ended(run)
    time.sleep(4)
    crew.server.restart()
    back_at = time.monotonic()
    crew.wait_nothing_left()
    crew.wait("two TTLs pass", lambda: time.monotonic() > back_at + 6)

    crew.check_each_ran_once()
    assert {crew.result(task_id) for task_id in run if int(task_id[3:]) % 2} == {"loaded"}


def test_nobody_is_taken_for_dead_when_redis_stood_still_for_longer_than_the_ttl(crew: Crew) -> None:
    """Its kernel took commands all the while: beats, sweeps and fetches whose senders gave up run when it goes on."""
    crew.settings = dict(SHORT_TTL)
    _, slots = start_both_kinds(crew, 4)
    gate = crew.gate()
    run = [crew.load(f"{node}-{n}", gate, queue=node) for node, count in slots.items() for n in range(count)]
    crew.wait_started(run)
    wait = [crew.ship(f"reserved-{n}") for n in range(8)]
    crew.wait_held(8)

    crew.server.pause()
    time.sleep(5)
    crew.server.resume()
    back_at = time.monotonic()
    crew.wait("every running task has its lease again", lambda: crew.leased() == set(run))
    crew.wait("two TTLs pass", lambda: time.monotonic() > back_at + 6)
    gate.open()
    crew.wait_ended([*run, *wait])
    crew.wait_nothing_left()

    crew.check_each_ran_once()


def test_running_tasks_outlive_a_redis_that_comes_back_empty(new_crew: Callable[..., Crew]) -> None:
    """What waited in it is lost with it; what runs has its lease again, and ends."""
    with RedisServer() as server:
        crew = new_crew(server=server)
        crew.settings = dict(SHORT_TTL)
        _, slots = start_both_kinds(crew, 4)
        gate = crew.gate()
        run = [crew.load(f"{node}-{n}", gate, queue=node) for node, count in slots.items() for n in range(count)]
        crew.wait_started(run)

        server.kill()
        time.sleep(1)
        server.restart()
        crew.wait("every running task has its lease again", lambda: crew.leased() == set(run))
        gate.open()
        crew.wait_ended(run)
        after = [crew.ship(f"after-{n}") for n in range(4)]
        crew.wait_ended(after)
        crew.wait_nothing_left()

        crew.check_each_ran_once()
        assert {crew.result(task_id) for task_id in run} == {"loaded"}
        crew.close()
