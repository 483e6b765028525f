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


@dataclass(frozen=True)
class Healing:
    """Seconds from one kill until the running task started again, and until all that was held had ended."""

    restarted: float
    ended: float


def kill_rounds(fleet: Fleet, count: int, *, by_expiry: bool, **options: Any) -> list[Healing]:
    """Kill the only worker that took anything, at any phase of the other one's sweep; what is left must be nothing.

    Args:
        by_expiry: Nobody can know of the death before the session has run out, so nobody may act sooner.
        options: Of each worker, besides its concurrency of 1 and its prefetch of 4.
    """
    chance = random.Random(SEED)
    options = {"concurrency": 1, "prefetch": 4, **options}
    healings = []
    victim = fleet.start("w0", **options)
    for n in range(count):
        gate = fleet.folder / f"gate-{n}"
        running, *reserved = [f"{n}-running", *(f"{n}-reserved-{k}" for k in range(3))]
        fleet.shop.wait_for.apply_async((str(gate),), task_id=running)
        fleet.wait_started(running)
        for task_id in reserved:
            fleet.shop.charge.apply_async((100,), task_id=task_id)
        fleet.wait_held(4)
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
