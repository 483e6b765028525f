"""Redis dies under running tasks and comes back, with what it knew or without."""

from __future__ import annotations

import time

import pytest

from celery_selfheal.testing import RedisServer
from integration.outages.crew import SHORT_TTL, Crew

LEASE_TTL_SECONDS = 10  # the default
RECONNECT_SECONDS = 90.0  # Celery waits longer after each try: 2, 4, 6 ... seconds


def check_outage(crew: Crew, *, running: int, reserved: int, seconds: float) -> None:
    """Kill Redis while two workers, one of each kind of pool, run and hold all that they can.

    A third of the bodies end during the outage, the others after it.
    """
    half = running // 2
    slots = {"w0": half, "w1": running - half}
    workers = [
        crew.start("w0", concurrency=slots["w0"], prefetch=2, queues="celery,w0"),
        crew.start("w1", pool="threads", concurrency=slots["w1"], prefetch=2, queues="celery,w1"),
    ]
    processes = [worker.child_pids() for worker in workers]
    during, after = crew.gate("during"), crew.gate("after")
    run = [
        crew.load(f"{node}-{n}", during if n % 3 == 0 else after, queue=node)
        for node, count in slots.items()
        for n in range(count)
    ]
    crew.wait_started(run)
    due = [crew.ship("due", countdown=seconds)]
    wait = [crew.ship(f"reserved-{n}") for n in range(reserved)]
    crew.wait_held(running + min(reserved, running) + len(due))
    assert crew.leased() == set(run)

    crew.server.kill()
    time.sleep(seconds / 2)
    during.open()
    time.sleep(seconds / 2)
    crew.server.restart()
    back_at = time.monotonic()

    still_running = {task_id for task_id in run if int(task_id[3:]) % 3}
    crew.wait(
        "every running task has its lease again, and no other has",
        lambda: crew.leased() == still_running,
        seconds=RECONNECT_SECONDS,
    )
    # Whoever takes the living for dead does it in this time.
    crew.wait("a TTL passes", lambda: time.monotonic() > back_at + LEASE_TTL_SECONDS + 3)
    assert crew.leased() == still_running
    after.open()
    crew.wait_ended([*run, *wait, *due], seconds=RECONNECT_SECONDS)
    crew.wait_nothing_left()

    assert set(crew.diary.counts("start").values()) == {1}
    assert set(crew.diary.counts("end").values()) == {1}
    assert {crew.result(task_id) for task_id in run} == {"loaded"}
    assert {crew.result(task_id) for task_id in [*wait, *due]} == {"shipped"}
    assert [worker.child_pids() for worker in workers] == processes
    for worker in workers:
        assert worker.alive
        assert "stalled" not in worker.log_text()


def check_healing(crew: Crew) -> None:
    """Kill w0 with a running task and reserved ones; w1 goes on with them."""
    victim, other = crew.workers
    other.pause()
    gate = crew.gate("healing")
    run = crew.load("healed-running", gate)
    crew.wait_started([run])
    wait = [crew.ship(f"healed-{n}") for n in range(2)]
    crew.wait_held(3)
    other.resume()

    victim.kill_group()
    gate.open()
    crew.wait_ended([run, *wait])
    crew.wait_nothing_left()


def test_redis_comes_back_from_its_file_and_nobody_has_lost_or_doubled_anything(crew: Crew) -> None:
    check_outage(crew, running=25, reserved=30, seconds=12)

    check_healing(crew)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_redis_is_away_for_twenty_seconds_under_fifty_tasks(crew: Crew) -> None:
    check_outage(crew, running=50, reserved=60, seconds=20)

    check_healing(crew)
