"""Rounds in which a worker is killed with all that it holds, and another one heals it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

from integration.fleet import Fleet

SEED = 20_260_701
SWEEP_SECONDS = 2.0
CLOCKS_SECONDS = 0.05  # between reading Redis' clock and ours
TASKS_A_KILL = 150


@dataclass(frozen=True)
class Healing:
    """Seconds from one kill until the running task started again, and until all that was held had ended."""

    restarted: float
    ended: float


def kill_rounds(
    fleet: Fleet, count: int, *, by_expiry: bool, pool: str = "prefork", pid_namespace: bool = False
) -> list[Healing]:
    """Kill the only worker that took anything, at any phase of the other one's sweep; what is left must be nothing.

    Args:
        by_expiry: Nobody can know of the death before the session has run out, so nobody may act sooner.
    """
    chance = random.Random(SEED)
    options = {"concurrency": 1, "prefetch": 4, "pool": pool, "pid_namespace": pid_namespace}
    # With all greenlets busy, Celery's loop itself waits for one to end, and takes no more.
    reserved_count = 1 if pool == "gevent" else 3
    healings = []
    victim = fleet.start("w0", **options)
    for n in range(count):
        gate = fleet.folder / f"gate-{n}"
        running, *reserved = [f"{n}-running", *(f"{n}-reserved-{k}" for k in range(reserved_count))]
        fleet.shop.wait_for.apply_async((str(gate),), task_id=running)
        fleet.wait_started(running)
        for task_id in reserved:
            fleet.shop.charge.apply_async((100,), task_id=task_id)
        fleet.wait_held(1 + reserved_count)
        other = fleet.start(f"w{n + 1}", **options)
        time.sleep(chance.uniform(0, SWEEP_SECONDS))
        session_ends = fleet.session_ends(victim.name)

        killed = time.monotonic()
        victim.kill_group()
        gate.touch()
        fleet.wait_ended(running, *reserved)

        first, again = fleet.diary.starts(running)
        assert first.at < killed < again.at
        if by_expiry:
            assert again.at > session_ends - CLOCKS_SECONDS
        for task_id in reserved:
            (start,) = fleet.diary.starts(task_id)
            assert start.at > killed
        for task_id in (running, *reserved):
            assert len(fleet.diary.ends(task_id)) == 1
            assert fleet.shop.app.AsyncResult(task_id).get(timeout=10) in (100, str(gate))
        fleet.wait_nothing_left()
        healings.append(Healing(again.at - killed, max(entry.at for entry in fleet.diary.ends()) - killed))
        victim = other
    return healings


def busy_kill_rounds(fleet: Fleet, count: int, *, concurrency: int = 2, **options: Any) -> None:
    """Kill one of two busy workers after a random number of starts, wherever its loop is just then."""
    chance = random.Random(SEED)
    workers = [fleet.start(f"w{n}", concurrency=concurrency, **options) for n in range(2)]
    started_before = 0
    for n in range(count):
        batch = [f"{n}-{k}" for k in range(TASKS_A_KILL)]
        for task_id in batch:
            fleet.shop.charge.apply_async((100, 0.01), task_id=task_id)
        enough = started_before + chance.randint(1, TASKS_A_KILL * 2 // 3)
        fleet.wait("some have started", lambda enough=enough: len(fleet.diary.starts()) >= enough)

        victim = workers[n % 2]
        victim.kill_group()
        victim.start()
        fleet.wait_ended(*batch)

        counts = fleet.diary.start_counts()
        # Only what ran in the victim's slots may have started again.
        assert set(counts.values()) <= {1, 2}
        assert sum(counts.values()) - len(counts) <= concurrency * (n + 1)
        victim.wait_ready()
        fleet.wait_nothing_left()
        started_before = sum(counts.values())
