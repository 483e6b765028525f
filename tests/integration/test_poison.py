"""A task that kills whatever runs it is started three times, never a fourth, and whoever waits for it is told."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord
from celery.exceptions import ChordError

from celery_selfheal import StalledTooOften
from celery_selfheal.testing import WorkerProcess
from integration.fleet import Fleet

STARTS = 3  # selfheal_max_stalls is 2
OTHERS = [f"other-{n}" for n in range(6)]


def send_others(fleet: Fleet) -> None:
    for task_id in OTHERS:
        fleet.shop.charge.apply_async((100, 0.05), task_id=task_id)


def wait_failed(fleet: Fleet, task_id: str, worker: WorkerProcess) -> Any:
    """Wait for the failure, and start the worker again whenever it was killed, as a service manager does."""
    result = fleet.shop.app.AsyncResult(task_id)
    fleet.wait(
        f"{task_id} has failed", lambda: result.state == "FAILURE", meanwhile=lambda: worker.alive or worker.start()
    )
    return result.result


def test_tasks_that_kill_or_leave_their_child_fail_after_two_recoveries_and_others_finish_meanwhile(
    fleet: Fleet,
) -> None:
    worker = fleet.start("w0", concurrency=2)
    main = worker.pid
    poisons = {"kills": "self", "leaves": "exit"}
    for task_id, victim in poisons.items():
        fleet.shop.poison.apply_async((victim,), task_id=task_id)
    send_others(fleet)

    failures = {task_id: wait_failed(fleet, task_id, worker) for task_id in poisons}

    fleet.wait_ended(*OTHERS)
    fleet.wait_nothing_left()
    for task_id, failure in failures.items():
        assert isinstance(failure, StalledTooOften)
        assert (failure.task_id, failure.starts, failure.max_stalls) == (task_id, STARTS, 2)
        assert min(end.at for end in fleet.diary.ends()) < fleet.diary.starts(task_id)[-1].at
    assert fleet.diary.start_counts() == {**dict.fromkeys(poisons, STARTS), **dict.fromkeys(OTHERS, 1)}
    assert sorted(fleet.dead_letters()) == sorted(poisons)
    assert (worker.alive, worker.pid) == (True, main)


@pytest.mark.parametrize(
    ("pool", "victim"),
    [("prefork", "parent"), ("solo", "self"), ("threads", "self"), ("gevent", "self")],
)
def test_a_task_that_kills_its_worker_fails_after_two_recoveries_and_others_finish(
    pool: str, victim: str, fleet: Fleet
) -> None:
    worker = fleet.start("w0", pool=pool, concurrency=1)
    fleet.shop.poison.apply_async((victim,), task_id="poison")
    send_others(fleet)

    failure = wait_failed(fleet, "poison", worker)

    fleet.wait_ended(*OTHERS)
    fleet.wait_nothing_left()
    assert isinstance(failure, StalledTooOften)
    assert (failure.task_id, failure.starts, failure.max_stalls) == ("poison", STARTS, 2)
    # With one slot a worker, nothing else was running where the poison struck.
    assert fleet.diary.start_counts() == {"poison": STARTS, **dict.fromkeys(OTHERS, 1)}
    assert fleet.dead_letters() == ["poison"]


@pytest.mark.parametrize(("victim", "concurrency"), [("self", 2), ("parent", 1)], ids=["child", "worker"])
def test_chord_and_chain_around_a_poison_task_fail_and_each_errback_runs_once(
    victim: str, concurrency: int, fleet: Fleet
) -> None:
    fleet.settings = {"selfheal_max_stalls": 1}
    poison, charge, total, tell = fleet.shop.poison, fleet.shop.charge, fleet.shop.total, fleet.shop.tell_support
    header = [poison.s(victim).set(task_id="poison-1"), charge.s(100).set(task_id="beside")]
    body = total.s().set(task_id="total").on_error(tell.si().set(task_id="told-of-chord"))
    step = poison.si(victim).set(task_id="poison-2").on_error(tell.si().set(task_id="told-of-chain"))
    steps = [charge.si(100).set(task_id="before"), step, charge.si(100).set(task_id="after")]
    # With one slot, a poison that takes the whole worker down takes nothing else that runs.
    worker = fleet.start("w0", concurrency=concurrency)
    chord(header)(body)
    chain(*steps)()

    chord_failure = wait_failed(fleet, "total", worker)
    chain_failure = wait_failed(fleet, "after", worker)

    fleet.wait_started("told-of-chord", "told-of-chain")
    fleet.wait_nothing_left()
    assert isinstance(chord_failure, ChordError)
    assert "StalledTooOften" in str(chord_failure)
    assert isinstance(chain_failure, StalledTooOften)
    for task_id in ("poison-1", "poison-2"):
        assert isinstance(fleet.shop.app.AsyncResult(task_id).result, StalledTooOften)
    assert fleet.diary.start_counts() == {
        **dict.fromkeys(("poison-1", "poison-2"), 2),
        **dict.fromkeys(("beside", "before", "told-of-chord", "told-of-chain"), 1),
    }
