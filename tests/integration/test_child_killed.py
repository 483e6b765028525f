"""A child of the prefork pool dies: its task starts again at once, and nobody else notices."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from datetime import datetime

import pytest

from celery_selfheal.testing import WorkerProcess
from integration.fleet import Fleet
from integration.killing import SEED

BOUND_SECONDS = 1.0
SIGNALS = [signal.SIGKILL, signal.SIGSEGV]  # out of memory, a fault in C


def child_rounds(fleet: Fleet, count: int) -> list[float]:
    """Kill a child in each round; returns the seconds from Celery's notice of it to the second start."""
    chance = random.Random(SEED)
    worker = fleet.start("w0", concurrency=2, prefetch=4)
    delays = []
    for n in range(count):
        ids = victim, bystander, *reserved = [f"{n}-victim", f"{n}-bystander", *(f"{n}-reserved-{k}" for k in range(3))]
        gates = {task_id: fleet.folder / f"gate-{task_id}" for task_id in (victim, bystander)}
        for task_id, gate in gates.items():
            fleet.shop.wait_for.apply_async((str(gate),), task_id=task_id)
        fleet.wait_started(victim, bystander)
        for task_id in reserved:
            fleet.shop.charge.apply_async((100,), task_id=task_id)
        fleet.wait_held(5)
        time.sleep(chance.uniform(0, 1))
        (first,) = fleet.diary.starts(victim)

        os.kill(first.pid, SIGNALS[n % len(SIGNALS)])
        gates[victim].touch()
        fleet.wait_ended(victim, *reserved)
        gates[bystander].touch()
        fleet.wait_ended(bystander)

        first, again = fleet.diary.starts(victim)
        assert again.pid != first.pid
        (start,) = fleet.diary.starts(bystander)
        (end,) = fleet.diary.ends(bystander)
        assert start.pid == end.pid
        assert [len(fleet.diary.starts(task_id)) for task_id in reserved] == [1, 1, 1]
        assert [len(fleet.diary.ends(task_id)) for task_id in ids] == [1] * len(ids)
        assert {fleet.shop.app.AsyncResult(task_id).get(timeout=10) for task_id in ids} == {
            100,
            *map(str, gates.values()),
        }
        fleet.wait_nothing_left()
        delays.append(again.clock - noticed(worker, first.pid))
    return delays


def noticed(worker: WorkerProcess, pid: int) -> float:
    """When Celery saw that a child was gone, in Unix seconds, as its log says to the millisecond."""
    line = worker.wait_log(f"pid:{pid} exited with")
    stamp = re.match(r"\[([\d-]+ [\d:]+),(\d+):", line)
    assert stamp is not None, line
    return datetime.fromisoformat(f"{stamp[1]}.{stamp[2]}").astimezone().timestamp()


def test_the_task_of_a_killed_child_starts_again_and_its_bystanders_are_untouched(
    fleet: Fleet, rounds: Callable[[int], int], figures: Callable[[str, list[float]], dict[str, float]]
) -> None:
    # Neither the leases nor the sessions can run out meanwhile, and no sweep comes: the worker itself heals its child.
    fleet.settings = {"selfheal_lease_ttl": 600, "selfheal_reaper_interval": 300}

    figures("from Celery's notice to the second start", child_rounds(fleet, rounds(4)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_task_of_a_killed_child_starts_again_within_a_second_of_celery_noticing(
    fleet: Fleet, rounds: Callable[[int], int], figures: Callable[[str, list[float]], dict[str, float]]
) -> None:
    delays = child_rounds(fleet, rounds(20))

    assert figures("from Celery's notice to the second start", delays)["p95"] <= BOUND_SECONDS
