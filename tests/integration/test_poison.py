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


def wait_failed(fleet: Fleet, task_id: str, *workers: WorkerProcess) -> Any:
    """Wait for the failure, starting again each worker that was killed, as a service manager does; returns it."""
    result = fleet.shop.app.AsyncResult(task_id)

    def revive() -> None:
        for worker in workers:
            if not worker.alive:
                worker.start()

    fleet.wait(f"{task_id} fails", lambda: result.state == "FAILURE", meanwhile=revive)
    fleet.wait("all workers are up", lambda: all(worker.alive and "ready." in worker.log_text() for worker in workers))
    return result.result


@pytest.mark.parametrize("how", ["self", "exit"])
def test_a_task_that_kills_its_child_fails_after_two_recoveries_and_others_finish_meanwhile(
    how: str, fleet: Fleet
) -> None:
    worker = fleet.start("w0", concurrency=1)
    main = worker.pid
    fleet.shop.poison.apply_async((how,), task_id="poison")
    send_others(fleet)

    failure = wait_failed(fleet, "poison", worker)

    # Celery sees some of the deaths 5 s late; a lost race would be a fourth start, so wait until all is over.
    fleet.wait_ended(*OTHERS)
    fleet.wait_nothing_left()
    assert isinstance(failure, StalledTooOften)
    assert (failure.task_id, failure.starts, failure.max_stalls) == ("poison", STARTS, 2)
    starts = fleet.diary.starts("poison")
    assert len(starts) == STARTS
    assert fleet.diary.start_counts() == {"poison": STARTS, **dict.fromkeys(OTHERS, 1)}
    assert min(end.at for end in fleet.diary.ends()) < starts[-1].at
    assert (worker.alive, worker.pid) == (True, main)


@pytest.mark.parametrize(
    ("pool", "victim"),
    [("prefork", "parent"), ("solo", "self"), ("threads", "self"), ("gevent", "self")],
)
def test_a_task_that_kills_its_worker_fails_after_two_recoveries_and_others_finish(
    pool: str, victim: str, fleet: Fleet
) -> None:
    workers = [fleet.start(f"w{n}", pool=pool, concurrency=1) for n in range(2)]
    fleet.shop.poison.apply_async((victim,), task_id="poison")
    send_others(fleet)

    failure = wait_failed(fleet, "poison", *workers)

    fleet.wait_ended(*OTHERS)
    fleet.wait_nothing_left()
    assert isinstance(failure, StalledTooOften)
    assert (failure.task_id, failure.starts, failure.max_stalls) == ("poison", STARTS, 2)
    # With one slot a worker, nothing else was running where the poison struck.
    assert fleet.diary.start_counts() == {"poison": STARTS, **dict.fromkeys(OTHERS, 1)}
    assert fleet.shop.app.AsyncResult("poison").state == "FAILURE"


@pytest.mark.parametrize("victim", ["self", "parent"], ids=["child", "worker"])
def test_the_chord_around_a_poison_task_fails_and_its_errback_runs_once(victim: str, fleet: Fleet) -> None:
    shop = fleet.shop
    header = [shop.poison.s(victim).set(task_id="poison"), shop.charge.s(100).set(task_id="other")]
    body = shop.total.s().set(task_id="total").on_error(shop.tell_support.si("chord").set(task_id="told"))
    worker = fleet.start("w0", concurrency=1)
    chord(header)(body)

    failure = wait_failed(fleet, "total", worker)
    fleet.wait_started("told")
    fleet.wait_nothing_left()

    assert isinstance(failure, ChordError)
    assert "StalledTooOften" in str(failure)
    assert isinstance(shop.app.AsyncResult("poison").result, StalledTooOften)
    assert fleet.diary.start_counts() == {"poison": STARTS, "other": 1, "told": 1}


@pytest.mark.parametrize("victim", ["self", "parent"], ids=["child", "worker"])
def test_the_chain_after_a_poison_task_is_told_and_its_errback_runs_once(victim: str, fleet: Fleet) -> None:
    shop = fleet.shop
    poison = shop.poison.si(victim).set(task_id="poison").on_error(shop.tell_support.si("poison").set(task_id="told"))
    steps = [shop.charge.si(100).set(task_id="before"), poison, shop.charge.si(100).set(task_id="after")]
    worker = fleet.start("w0", concurrency=1)
    chain(*steps)()

    failure = wait_failed(fleet, "after", worker)
    fleet.wait_started("told")
    fleet.wait_nothing_left()

    assert isinstance(failure, StalledTooOften)
    assert isinstance(shop.app.AsyncResult("poison").result, StalledTooOften)
    assert fleet.diary.start_counts() == {"before": 1, "poison": STARTS, "told": 1}
