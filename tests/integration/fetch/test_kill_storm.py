"""A kill every second or so while there is work: every task ends, and only what a kill cut off starts again."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from celery_selfheal.testing import WorkerProcess
from integration.fetch.mill import Mill

SEED = 20_261_201
WORKERS = 3
CONCURRENCY = 2
TASK_SECONDS = 0.002


def storm(mill: Mill, tasks: int, record_property: Callable[[str, object], None]) -> None:
    chance = random.Random(SEED)
    mill.send(tasks, args=(TASK_SECONDS,))
    victims: list[str] = []
    alive = [start(mill, n) for n in range(WORKERS)]
    mill.wait("they are busy", lambda: mill.diary.ids("start"))
    while mill.redis.llen("celery"):
        time.sleep(chance.uniform(0.5, 1.5))
        victim = alive.pop(0)
        # On a slow machine none would live long enough to do anything.
        mill.wait(
            f"{victim.name} is busy", lambda victim=victim: is_busy(mill, victim) or not mill.redis.llen("celery")
        )
        victim.kill_group()
        mill.workers.remove(victim)
        victims.append(victim.name)
        alive.append(start(mill, len(victims) + WORKERS))
    mill.wait_ended(mill.sent)
    mill.wait_drained()

    starts, ends = Counter(mill.diary.ids("start")), set(mill.diary.ids("end"))
    again = {task_id for task_id, count in starts.items() if count > 1}
    seconds = sum(starts.values()) - len(starts)
    record_property("figures", f"{tasks} tasks, {len(victims)} kills (seed {SEED}), {seconds} second starts")
    assert ends == starts.keys() == set(mill.sent)
    assert mill.dead() == []
    cut_off, at_their_end = what_kills_met(mill, victims)
    assert cut_off <= again <= cut_off | at_their_end
    assert seconds <= len(victims) * CONCURRENCY


def what_kills_met(mill: Mill, victims: list[str]) -> tuple[set[str], set[str]]:
    """Tasks in whose bodies their worker was killed, and those that were the last to end there: perhaps unreleased."""
    started, ended = defaultdict(list), defaultdict(list)
    for line in mill.diary.lines("start"):
        started[line.node.partition("@")[0]].append(line.id)
    for line in mill.diary.lines("end"):
        ended[line.node.partition("@")[0]].append(line.id)
    cut_off = {task_id for name in victims for task_id in set(started[name]) - set(ended[name])}
    return cut_off, {task_id for name in victims for task_id in ended[name][-CONCURRENCY:]}


def is_busy(mill: Mill, worker: WorkerProcess) -> bool:
    return any(line.node.startswith(f"{worker.name}@") for line in mill.diary.lines("start")[-2_000:])


def start(mill: Mill, n: int) -> WorkerProcess:
    return mill.start(f"w{n}", concurrency=CONCURRENCY, prefetch=8, ready=False, args=["-l", "WARNING"])


def test_every_task_ends_in_a_small_storm(mill: Mill, record_property: Callable[[str, object], None]) -> None:
    storm(mill, 1_000, record_property)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_task_ends_in_a_storm(
    mill: Mill, rounds: Callable[[int], int], record_property: Callable[[str, object], None]
) -> None:
    storm(mill, rounds(20_000), record_property)
