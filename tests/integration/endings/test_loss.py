"""A start that lost its lease hears of it soon, and nobody else does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from celery_selfheal.testing import RedisServer, WorkerProcess
from integration.endings.yard import Yard

POOLS = ["prefork", "threads", "solo", "gevent"]
QUICK = {"selfheal_lease_ttl": 1.5, "selfheal_heartbeat_interval": 0.3}


def take_away(yard: Yard, task_id: str) -> bool:
    """Let another start take the lease, as after a pause; it runs out soon. ``False`` when there is none."""
    lease = yard.keys.lease(task_id)
    if not yard.leases.hexists(lease, "token"):
        return False
    yard.leases.hset(lease, "token", "somebody-else")
    return yard.leases.pttl(lease) > 0 or not yard.leases.delete(lease)


def told_at(worker: WorkerProcess, task: str, task_id: str) -> float:
    """When main learnt of the loss, Unix seconds."""
    line = worker.wait_log(f"lease lost: dock.{task}[{task_id}]")
    return datetime.strptime(line[1:24], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()


def end_by_loss(yard: Yard, worker: WorkerProcess, task: str, task_id: str) -> float:
    """Take the lease of a running task; returns the seconds from when main knew to when the body was left."""
    gate = yard.folder / f"gate-{task_id}"
    yard.send(task, 30, str(gate), task_id=task_id)
    yard.wait_noted("start", task_id)
    yard.wait("its lease is taken", lambda: take_away(yard, task_id))
    (left,) = yard.wait_noted("left", task_id)
    assert left.seen == {"by": "LeaseLost"}
    gate.touch()
    # Its message went back, and runs when the other start's lease has run out.
    yard.wait_noted("end", task_id)
    assert yard.counts("start")[task_id] == 2
    return left.clock - told_at(worker, task, task_id)


@pytest.mark.parametrize("pool", POOLS)
def test_a_lost_lease_ends_the_body(
    new_yard: Callable[[str], Yard], pool: str, rounds: Callable[[int], int], figures: Any
) -> None:
    yard = new_yard("redis")
    yard.settings |= QUICK
    worker = yard.start("first", pool=pool)

    delays = [end_by_loss(yard, worker, "load", f"task-{n}") for n in range(rounds(3))]

    assert figures(f"{pool}: main knows -> body left", delays)["max"] < 1
    yard.wait_nothing_left()


@pytest.mark.parametrize("pool", ["prefork", "solo", "gevent"])
def test_a_lost_lease_ends_a_body_that_waits_in_one_call(
    new_yard: Callable[[str], Yard], pool: str, rounds: Callable[[int], int], figures: Any
) -> None:
    """A thread hears of it after that call: nothing can wake it."""
    yard = new_yard("redis")
    yard.settings |= QUICK
    worker = yard.start("first", pool=pool)

    delays = [end_by_loss(yard, worker, "sleep", f"task-{n}") for n in range(rounds(3))]

    assert figures(f"{pool}: main knows -> body left", delays)["max"] < 1


@pytest.mark.parametrize("task", ["deaf", "compute"])
def test_a_body_that_does_not_obey_is_killed_with_its_process(new_yard: Callable[[str], Yard], task: str) -> None:
    yard = new_yard("redis")
    yard.settings |= {**QUICK, "selfheal_loss_grace": 0.5}
    worker = yard.start("first")
    gate = yard.folder / "gate"
    yard.send(task, *{"deaf": [6], "compute": [str(gate)]}[task], task_id="task")
    (start,) = yard.wait_noted("start", "task")
    yard.wait("its lease is taken", lambda: take_away(yard, "task"))
    gate.touch()

    second = yard.wait_noted("start", "task", times=2)[1]

    assert second.pid != start.pid
    worker.wait_log("is killed")
    assert [end.pid for end in yard.wait_noted("end", "task")] == [second.pid]
    yard.wait_nothing_left()


@pytest.mark.parametrize("pool", POOLS)
def test_no_other_task_is_ever_interrupted(
    new_yard: Callable[[str], Yard], pool: str, rounds: Callable[[int], int]
) -> None:
    """Bodies about as short as the way of the news: most have ended, and others run, when it arrives."""
    yard = new_yard("redis")
    yard.settings |= {"selfheal_lease_ttl": 0.6, "selfheal_heartbeat_interval": 0.05}
    concurrency = 1 if pool == "solo" else 2
    yard.start("first", pool=pool, concurrency=concurrency)
    chance = random.Random(7)
    ids = [f"task-{n}" for n in range(20 * rounds(2))]
    taken: set[str] = set()
    for task_id in ids:
        yard.send("load", chance.uniform(0.02, 0.3), task_id=task_id)

    def all_ended() -> bool:
        running = yard.counts("start") - yard.counts("end") - yard.counts("left")
        for task_id in running:
            if task_id not in taken and chance.random() < 0.3 and take_away(yard, task_id):
                taken.add(task_id)
        time.sleep(chance.uniform(0, 0.05))
        return set(yard.counts("end")) == set(ids)

    yard.wait("all have ended", all_ended, seconds=120)
    yard.wait_nothing_left()
    left = set(yard.counts("left"))
    assert left
    assert left <= taken
    assert {task_id for task_id in set(ids) - taken if yard.counts("start")[task_id] != 1} == set()


@pytest.mark.parametrize("kind", ["redis", "classic"])
def test_a_silent_store_interrupts_nothing(new_yard: Callable[..., Yard], lease_server: RedisServer, kind: str) -> None:
    yard = new_yard(kind, leases=lease_server)
    yard.settings |= QUICK
    worker = yard.start("first")
    yard.send("load", 8, task_id="task")
    yard.wait_noted("start", "task")

    lease_server.pause()
    time.sleep(5)
    lease_server.resume()

    yard.wait_noted("end", "task")
    assert yard.counts("start") == {"task": 1}
    assert "the store does not answer" in worker.log_text()
    yard.wait("its result is stored", lambda: yard.state("task") == "SUCCESS")


def test_a_worker_whose_loop_hangs_gives_up_what_it_has_not_begun(new_yard: Callable[..., Yard]) -> None:
    yard = new_yard("redis")
    yard.settings |= {"selfheal_lease_ttl": 1, "selfheal_heartbeat_interval": 0.3}
    first = yard.start("first", prefetch=4)
    yard.send("load", 2, task_id="runs")
    yard.wait_noted("start", "runs")
    for task_id in ("waits", "waits-too"):
        yard.send("load", 0, task_id=task_id)
        first.wait_log(f"{task_id}] received")

    yard.app.control.broadcast("hang", arguments={"seconds": 20})
    yard.start("second")

    yard.wait_noted("end", "runs", "waits", "waits-too")
    first.wait_log("the worker's loop turns again")
    yard.wait_nothing_left()
    assert set(yard.counts("start").values()) == {1}
    assert {e.node for e in yard.entries("start") if e.id.startswith("waits")} == {"second"}
    assert "the worker's loop hangs" in first.log_text()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_silent_store_interrupts_where_that_is_asked_for(
    new_yard: Callable[..., Yard], lease_server: RedisServer, pool: str
) -> None:
    yard = new_yard("redis", leases=lease_server)
    yard.settings |= {**QUICK, "selfheal_on_store_outage": "interrupt", "selfheal_loss_grace": 0.5}
    yard.start("first", pool=pool)
    gate = yard.folder / "gate"
    yard.send("load", 60, str(gate), task_id="task")
    yard.wait_noted("start", "task")

    lease_server.pause()
    (left,) = yard.wait_noted("left", "task")
    gate.touch()
    lease_server.resume()

    assert left.seen == {"by": "LeaseLost"}
    yard.wait_noted("end", "task")
    assert yard.counted("stalls") == 0
