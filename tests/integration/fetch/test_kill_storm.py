"""A kill every second or so while there is work: every task ends, and only what a kill cut off starts again."""

from __future__ import annotations

import random
import socket
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from celery_selfheal.testing import WorkerProcess
from integration.fetch.mill import Mill

SEED = 20_261_201
WORKERS = 3
CONCURRENCY = 2
TASK_SECONDS = 0.002
TASKS_A_LIFE = 20  # at least, on average
KILLS = 150  # at most, about
RECENT = 2_000  # lines of the diary: more than three workers do in a life
NODE = socket.gethostname()


def storm(mill: Mill, tasks: int, record_property: Callable[[str, object], None]) -> None:
    chance = random.Random(SEED)
    mill.send(tasks, args=(TASK_SECONDS,))
    victims: list[str] = []
    alive = [start(mill, n) for n in range(WORKERS)]
    mill.wait("they are busy", lambda: mill.diary.ids("start"))
    while mill.redis.llen("celery"):
        victim = alive.pop(0)
        # Counted in tasks, not in seconds: on a slow machine none would live long enough to do anything.
        life = chance.uniform(0, 2 * max(TASKS_A_LIFE, tasks // KILLS))
        mill.wait(
            f"{victim.name} is busy",
            lambda victim=victim, life=life: done_by(mill, victim) > life or not mill.redis.llen("celery"),
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


def done_by(mill: Mill, worker: WorkerProcess) -> int:
    return Counter(line.node for line in mill.diary.lines("end")[-RECENT:])[f"{worker.name}@{NODE}"]


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
