"""The worker dies while it moves a message to the dead letters: there is never none of it, and one to be seen."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest

from integration.dead_letters.desk import KINDS, Desk

SEED = 20_260_702
STEPS = ("before the move", "published, unconfirmed", "after the move", "child, after its release", "any moment")
BATCH = 8
DRAIN_EVERY = 10  # kills: a message that is taken from dead workers 50 times is another kind of dead letter


def steps_of(kind: str) -> list[str]:
    """On Redis publication and acknowledgement are one step."""
    return [step for step in STEPS if kind != "redis" or step != "published, unconfirmed"]


def check_kills(desk: Desk, steps: list[str]) -> None:
    """Kill one worker after the other in the midst of failures, at one step each.

    Each finds what the one before has left; the last one is spared.
    """
    desk.settings["selfheal_max_stalls"] = 50  # it is no poison that kills them here
    chance = random.Random(SEED)
    buried: Counter[str] = Counter()
    for n, step in enumerate(steps):
        batch = {f"{n}-{k}" for k in range(BATCH)}
        for k, task_id in enumerate(sorted(batch)):
            task, args = (desk.orders.refuse, ()) if k % 2 else (desk.orders.charge, (str(desk.gate), k))
            task.apply_async(args, task_id=task_id)
        buried.update(batch)
        worker = desk.start(f"w{n}", ready=False, die_at=step, concurrency=2, prefetch=2)
        if step == "any moment":
            desk.wait("some start", lambda batch=batch: batch & desk.events().keys())
            time.sleep(chance.uniform(0, 0.3))
        elif step == "child, after its release":
            # The worker lives on, and finishes what its child has left.
            desk.wait("all have started", lambda batch=batch: batch <= desk.events().keys())
        else:
            assert worker.wait(timeout=60) == -signal.SIGKILL
        worker.kill_group()
        if n % DRAIN_EVERY == DRAIN_EVERY - 1:
            spared = desk.start(f"spared{n}", concurrency=2)
            wait_buried(desk, buried)
            spared.stop()
    desk.start("last", concurrency=2)
    wait_buried(desk, buried)
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


def wait_buried(desk: Desk, buried: Counter[str]) -> None:
    desk.wait("all are dead letters", lambda: Counter(one.id for one in desk.dlq.list()) == buried)


@pytest.mark.parametrize("kind", ["redis", "classic"])
def test_a_worker_that_is_killed_in_the_move_loses_no_dead_letter(kind: str, new_desk: Callable[[str], Desk]) -> None:
    check_kills(new_desk(kind), steps_of(kind))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kind", "step"), [(kind, step) for kind in KINDS for step in steps_of(kind)])
def test_many_workers_that_are_killed_in_the_move_lose_no_dead_letter(
    kind: str, step: str, new_desk: Callable[[str], Desk], rounds: Callable[[int], int]
) -> None:
    check_kills(new_desk(kind), [step] * rounds(100))
