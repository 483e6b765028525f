"""The worker dies while it moves a message to the dead letters: there is never none of it, and one to be seen."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from integration.dead_letters.desk import Desk

SEED = 20_260_702
STEPS = ("before the move", "after the move", "child, after its release", "any moment")
BATCH = 8


def check_kills(desk: Desk, count: int) -> None:
    """Kill one worker after the other in the midst of failures, once at each step and then again.

    Each finds what the one before has left; the last one is spared.
    """
    desk.settings["selfheal_max_stalls"] = 50  # it is no poison that kills them here
    chance = random.Random(SEED)
    buried: Counter[str] = Counter()
    for n in range(count):
        step = STEPS[n % len(STEPS)]
        batch = {f"{n}-{k}" for k in range(BATCH)}
        for k, task_id in enumerate(sorted(batch)):
            task, args = (desk.orders.refuse, ()) if k % 2 else (desk.orders.charge, (str(desk.gate), k))
            task.apply_async(args, task_id=task_id)
        buried.update(batch)
        worker = desk.start(f"w{n}", die_at=step, concurrency=2, prefetch=2)
        if step.endswith("move"):
            worker.wait(timeout=60)
        elif step == "any moment":
            desk.wait("some start", lambda batch=batch: batch & desk.events().keys())
            time.sleep(chance.uniform(0, 0.3))
        else:
            # The worker lives on, and finishes what its child has left.
            desk.wait("all have started", lambda batch=batch: batch <= desk.events().keys())
        worker.kill_group()
    desk.start("last", concurrency=2)
    desk.wait("all are dead letters", lambda: Counter(one.id for one in desk.dlq.list()) == buried)
    desk.wait("nothing waits", lambda: desk.deliveries(desk.queue) == [])

    lying = Counter(letter["headers"]["id"] for letter in desk.deliveries(desk.dlq_name))
    assert lying.keys() == buried.keys()
    if desk.kind == "redis":
        assert lying == buried
    assert {(one.reason, one.exception) for one in desk.dlq.list()} == {
        ("unrecoverable", "UnrecoverableError"),
        ("exhausted", "ConnectionError"),
    }
    assert desk.dlq.drop() == len(buried)
    assert len(desk.dlq) == 0


@pytest.mark.parametrize("kind", ["redis", "classic"])
def test_a_worker_that_is_killed_in_the_move_loses_no_dead_letter(kind: str, new_desk: Callable[[str], Desk]) -> None:
    check_kills(new_desk(kind), len(STEPS))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_workers_that_are_killed_in_the_move_lose_no_dead_letter(desk: Desk, rounds: Callable[[int], int]) -> None:
    check_kills(desk, rounds(100))
