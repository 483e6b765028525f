"""A worker that stops, in every way in which one is stopped: nothing is lost or counted, and others go on at once."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from celery_selfheal.testing import WorkerProcess
from integration.endings.yard import Yard

KINDS = ("redis", "classic")
POOLS = ("prefork", "threads", "solo", "gevent")


def terminate(yard: Yard, worker: WorkerProcess) -> None:
    worker.terminate()


def terminate_group(yard: Yard, worker: WorkerProcess) -> None:
    os.killpg(worker.pid, signal.SIGTERM)


def cold(yard: Yard, worker: WorkerProcess) -> None:
    worker.quit()


def interrupt_twice(yard: Yard, worker: WorkerProcess) -> None:
    os.kill(worker.pid, signal.SIGINT)
    worker.wait_log("Hitting Ctrl+C again")
    os.kill(worker.pid, signal.SIGINT)


def by_control(yard: Yard, worker: WorkerProcess) -> None:
    yard.app.control.shutdown(destination=[f"{worker.name}@{socket.gethostname()}"])


WAYS: dict[str, Callable[[Yard, WorkerProcess], None]] = {
    "SIGTERM": terminate,
    "SIGTERM to the group": terminate_group,
    "SIGQUIT": cold,
    "SIGINT twice": interrupt_twice,
    "control shutdown": by_control,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_end_in_the_grace_runs_elsewhere_soon_and_is_not_counted(
    new_yard: Callable[[str], Yard], kind: str, way: str, figures: Any
) -> None:
    yard = new_yard(kind)
    yard.settings["selfheal_shutdown_grace"] = 1
    first = yard.start("first", concurrency=2)
    gate = yard.folder / "gate"
    ids = [f"task-{n}" for n in range(8)]
    for task_id in ids:
        yard.send("load", 60, str(gate), task_id=task_id)
    yard.wait("two run", lambda: len(yard.entries("start")) == 2)
    yard.start("second", concurrency=8)
    if kind != "redis":
        # What the first one has reserved comes back when its broker says so.
        assert len(yard.entries("start")) >= 2
    running = [entry.id for entry in yard.entries("start") if entry.node == "first"]

    WAYS[way](yard, first)

    yard.wait_over(first)
    yard.wait("all run on the second", lambda: {e.id for e in yard.entries("start") if e.node == "second"} == set(ids))
    gate.touch()
    yard.wait_noted("end", *ids)
    yard.wait_nothing_left()
    assert {e.id for e in yard.entries("start") if e.node == "first"} == set(running)
    assert yard.counts("end") == dict.fromkeys(ids, 1)
    assert yard.counted("stalls") == 0
    gaps = []
    for task_id in running:
        left = [e.at for e in yard.entries("left", task_id)]
        again = next(e.at for e in yard.entries("start", task_id) if e.node == "second")
        gaps += [again - left[0]] if left else []
    if gaps:
        assert figures(f"{kind}, {way}: left -> starts elsewhere", gaps)["max"] < 2


@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_hands_over_what_does_not_end_in_the_grace(
    new_yard: Callable[[str], Yard], pool: str, figures: Any
) -> None:
    yard = new_yard("redis")
    yard.settings["selfheal_shutdown_grace"] = 1
    first = yard.start("first", pool=pool)
    gate = yard.folder / "gate"
    for task_id in ("runs", "waits"):
        yard.send("load", 60, str(gate), task_id=task_id)
    yard.wait_noted("start", "runs")
    yard.start("second", concurrency=2)

    first.terminate()

    yard.wait("both run on the second", lambda: len([e for e in yard.entries("start") if e.node == "second"]) == 2)
    yard.wait_over(first)
    gate.touch()
    yard.wait_noted("end", "runs", "waits")
    yard.wait_nothing_left()
    (left,) = yard.entries("left")
    assert left.seen == {"by": "LeaseLost"}
    again = next(e for e in yard.entries("start", "runs") if e.node == "second")
    assert figures(f"{pool}: left -> starts elsewhere", [again.at - left.at])["max"] < 2
    assert yard.counted("stalls") == 0
    # A solo worker takes nothing while a body runs.
    handed_over = 1 if pool == "solo" else 2
    assert f"shutdown: 0 finished, {handed_over} handed over, 0 abandoned" in first.log_text()


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_body_that_cannot_be_interrupted_does_not_hold_up_the_end(new_yard: Callable[[str], Yard], pool: str) -> None:
    yard = new_yard("redis")
    yard.settings |= {"selfheal_shutdown_grace": 1, "selfheal_loss_grace": 1}
    first = yard.start("first", pool=pool)
    yard.send("deaf", 20, task_id="deaf")
    yard.wait_noted("start", "deaf")
    yard.start("second")

    first.terminate()

    yard.wait_over(first)
    yard.wait("it runs on the second", lambda: [e for e in yard.entries("start", "deaf") if e.node == "second"])
    assert yard.counts("end") == {}
    assert yard.counted("stalls") == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_a_body_may_come_to_a_good_end_when_it_sees_that_the_worker_stops(
    new_yard: Callable[[str], Yard], kind: str, pool: str
) -> None:
    yard = new_yard(kind)
    worker = yard.start("first", pool=pool)
    yard.send("polite", 60, task_id="polite")
    yard.wait_noted("start", "polite")

    worker.terminate()

    yard.wait_over(worker)
    (end,) = yard.entries("end")
    assert end.seen == {"draining": True, "check": "held"}
    yard.wait("its result is stored", lambda: yard.state("polite") == "SUCCESS")
    yard.wait_nothing_left()
    assert "shutdown: 1 finished, 0 handed over, 0 abandoned" in worker.log_text()


@pytest.mark.parametrize("kind", KINDS)
def test_celerys_soft_shutdown_lets_bodies_end_and_hands_over_the_others(
    new_yard: Callable[[str], Yard], kind: str
) -> None:
    yard = new_yard(kind)
    yard.settings["worker_soft_shutdown_timeout"] = 3
    first = yard.start("first", concurrency=3)
    yard.send("polite", 60, task_id="polite")
    yard.send("load", 60, task_id="long")
    yard.send("load", 1, task_id="short")
    yard.wait_noted("start", "polite", "long", "short")
    yard.start("second")

    first.quit()

    yard.wait_over(first)
    yard.wait("the long one runs on the second", lambda: len(yard.entries("start", "long")) == 2)
    assert yard.counts("end") == {"polite": 1, "short": 1}
    assert yard.counts("start") == {"polite": 1, "short": 1, "long": 2}
    assert yard.counted("stalls") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_for_its_time_is_given_back_at_once_while_others_run_on(
    new_yard: Callable[[str], Yard], kind: str
) -> None:
    yard = new_yard(kind)
    first = yard.start("first", prefetch=8)
    gate = yard.folder / "gate"
    yard.send("load", 60, str(gate), task_id="runs")
    yard.wait_noted("start", "runs")
    yard.send("load", 0, task_id="later", countdown=6)
    yard.send("load", 0, task_id="reserved")
    first.wait_log("later")
    first.wait_log("reserved")
    yard.start("second")

    first.terminate()

    yard.wait_noted("end", "later", "reserved")
    assert first.alive
    assert {e.node for e in yard.entries("start") if e.id != "runs"} == {"second"}
    gate.touch()
    yard.wait_over(first)
    yard.wait_nothing_left()
    assert yard.counts("end") == {"runs": 1, "later": 1, "reserved": 1}
