"""Workers are killed in the middle of a crowd of retries: no task is lost, and none is doubled."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from celery_selfheal.testing import WorkerProcess
from integration.retries.crew import Bank

SEED = 20_260_702
CONCURRENCY = 2
FAILS = 3


def kill_in_a_crowd(bank: Bank, tasks: int, kills: int) -> None:
    """Let all tasks fail together, and kill one of two workers again and again, at any instant."""
    chance = random.Random(SEED)
    bank.settings = {"selfheal_reaper_interval": 0.5, "selfheal_retry_budget": None}
    workers = [bank.start(f"w{n}", concurrency=CONCURRENCY, prefetch=4) for n in range(2)]
    ids = [f"pay-{n}" for n in range(tasks)]
    gate = bank.folder / "gate"
    for task_id in ids:
        bank.send("pay", FAILS, str(gate), task_id=task_id)
    bank.wait("bodies wait", lambda: len(bank.entries("start")) >= 2 * CONCURRENCY)

    gate.touch()
    for n in range(kills):
        time.sleep(chance.uniform(0.1, 1))
        victim = workers[n % 2]
        victim.kill_group()
        revive(victim)

    bank.wait_ended(ids)
    bank.wait_nothing_left()
    ends = bank.counts("end")
    assert {task_id for task_id, _ in ends} == set(ids)
    assert {retries for _, retries in ends} == {FAILS}
    starts = bank.counts("start")
    assert set(starts) == {(task_id, retries) for task_id in ids for retries in range(FAILS + 1)}
    # What a killed process ran, runs again. A chain that was doubled would show in each attempt that follows.
    again = sum(count - 1 for count in starts.values())
    assert again <= kills * CONCURRENCY
    assert all(bank.result(task_id) == "paid" for task_id in ids)
    assert bank.redis.keys(bank.keys.budget("*")) == []


def revive(worker: WorkerProcess) -> None:
    """As a service manager does."""
    worker.start()
    worker.wait_ready(timeout=60)


def test_no_retry_is_lost_or_doubled_when_workers_are_killed(new_bank: Callable[[], Bank]) -> None:
    kill_in_a_crowd(new_bank(), tasks=30, kills=2)


@pytest.mark.slow
def test_no_retry_is_lost_or_doubled_however_often_workers_are_killed(
    new_bank: Callable[[], Bank], rounds: Callable[[int], int]
) -> None:
    count = rounds(100)
    kill_in_a_crowd(new_bank(), tasks=20 * count, kills=count)
