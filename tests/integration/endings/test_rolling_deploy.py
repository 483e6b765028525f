"""A deploy under load: every worker is restarted, one after the other, and nobody notices."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from integration.endings.yard import Yard

WORKERS, TASKS = 3, 50
CONCURRENCY = 25  # two workers can run all of them, so what is handed over need not wait for a free child


def deploy(yard: Yard, number: int, chance: random.Random) -> tuple[list[float], list[float], list[float]]:
    """Restart all workers under load.

    Returns:
        How late a start began after SIGTERM, how soon others took over, and how long a worker took to end.
    """
    ids = [f"task-{number}-{n}" for n in range(TASKS)]
    for task_id in ids:
        yard.send("load", chance.uniform(4, 20), task_id=task_id)
    yard.wait("all run", lambda: set(ids) <= set(yard.counts("start")))
    late: list[float] = []
    gaps: list[float] = []
    ends: list[float] = []
    for worker in yard.workers:
        worker.terminate()
        stopped_at = time.monotonic()
        yard.wait_over(worker)
        ends.append(time.monotonic() - stopped_at)
        mine = [e.at - stopped_at for e in yard.entries("start") if e.node == worker.name and e.id in ids]
        late += [max(0.0, at) for at in mine if at < 60]
        worker.start()
        worker.wait_ready(timeout=60)
    yard.wait("all have ended", lambda: set(ids) <= set(yard.counts("end")), seconds=180)
    for left in yard.entries("left"):
        if left.id in ids:
            again = [e.at for e in yard.entries("start", left.id) if e.at > left.at]
            gaps.append(min(again) - left.at)
    assert {task_id: yard.counts("end")[task_id] for task_id in ids} == dict.fromkeys(ids, 1)
    return late, gaps, ends


def roll(yard: Yard, rounds: int, figures: Any, *, judged: str) -> None:
    yard.settings["selfheal_shutdown_grace"] = 1
    for n in range(WORKERS):
        yard.start(f"worker{n}", concurrency=CONCURRENCY, prefetch=1)
    chance = random.Random(11)
    late: list[float] = []
    gaps: list[float] = []
    ends: list[float] = []
    for number in range(rounds):
        found = deploy(yard, number, chance)
        late += found[0]
        gaps += found[1]
        ends += found[2]
    yard.wait_nothing_left()
    figures(f"{yard.kind}: SIGTERM -> worker is gone", ends)
    assert yard.counted("stalls") == 0
    assert figures(f"{yard.kind}: SIGTERM -> last start there", late)["max"] < 1
    if gaps:
        assert figures(f"{yard.kind}: handed over -> starts elsewhere", gaps)[judged] < 2


@pytest.mark.parametrize("kind", ["redis", "classic"])
def test_one_deploy_loses_and_repeats_and_counts_nothing(
    new_yard: Callable[..., Yard], kind: str, figures: Any
) -> None:
    """The usual case, since a machine that does much else may be slow at times."""
    roll(new_yard(kind), 1, figures, judged="p50")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["redis", "classic", "quorum"])
def test_many_deploys_lose_and_repeat_and_count_nothing(
    new_yard: Callable[..., Yard], kind: str, rounds: Callable[[int], int], figures: Any
) -> None:
    roll(new_yard(kind), rounds(20), figures, judged="max")
