"""One task at a time for each lock key, whatever dies, and whoever waits loses nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, states

from celery_selfheal import LeaseBusy
from celery_selfheal.testing import WorkerProcess
from integration.endings.yard import PATIENCE_SECONDS, Yard

PARKED = re.compile(r"^\[(\S+ \S+): .*parked: locks\.\w+\[([^]]+)\]", re.MULTILINE)


def hold(bank: Yard, task_id: str = "holder") -> Path:
    """Let a task run under the key of account 1 until the returned file is made."""
    gate = bank.folder / f"gate-{task_id}"
    bank.send("take", 1, 120, str(gate), task_id=task_id)
    bank.wait_noted("start", task_id)
    return gate


def parkings(*workers: WorkerProcess) -> dict[str, list[float]]:
    """When each task was parked, Unix seconds."""
    found: dict[str, list[float]] = {}
    for worker in workers:
        for at, task_id in PARKED.findall(worker.log_text()):
            found.setdefault(task_id, []).append(datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp())
    return {task_id: sorted(times) for task_id, times in found.items()}


def wait_parked(bank: Yard, worker: WorkerProcess, *task_ids: str) -> None:
    bank.wait(f"{len(task_ids)} tasks wait", lambda: parkings(worker).keys() >= set(task_ids))


def task(bank: Yard, name: str, *args: Any, task_id: str) -> Any:
    return bank.app.signature(f"locks.{name}", args, task_id=task_id)


def assert_one_at_a_time(bank: Yard) -> None:
    spans = sorted(
        (start.at, end.at)
        for start in bank.entries("start")
        for end in bank.entries("end", start.id)
        if end.pid == start.pid
    )
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), spans


def test_tasks_with_one_key_run_one_at_a_time_over_two_workers(bank: Yard) -> None:
    for name in ("first", "second"):
        bank.start(name, concurrency=4)
    ids = [f"task-{n}" for n in range(20)]

    for task_id in ids:
        bank.send("take", 1, task_id=task_id)

    bank.wait_noted("end", *ids)
    assert_one_at_a_time(bank)
    assert bank.counts("start") == dict.fromkeys(ids, 1)
    assert {entry.seen["key"] for entry in bank.entries("start")} == {"account:1"}
    bank.wait_nothing_left()
    assert bank.counted("stalls") == 0


def test_waiters_do_not_storm_and_lose_no_retry(bank: Yard, rounds: Callable[[int], int]) -> None:
    worker = bank.start("first", concurrency=4)
    gate = hold(bank)
    ids = [f"waiter-{n}" for n in range(rounds(30))]
    results = [bank.send("take", 1, task_id=task_id) for task_id in ids]
    wait_parked(bank, worker, *ids)
    assert {result.state for result in results} == {states.PENDING}

    gate.touch()

    assert [result.get(timeout=PATIENCE_SECONDS) for result in results] == [1] * len(ids)
    assert_one_at_a_time(bank)
    assert {entry.retries for entry in bank.entries("start")} == {0}
    gaps = [b - a for times in parkings(worker).values() for a, b in itertools.pairwise(times)]
    assert min(gaps, default=1.0) >= 0.5
    assert bank.counted("retry") == 0


def test_skipped_task_says_so_and_its_chain_goes_on(bank: Yard) -> None:
    bank.start("first", concurrency=2)
    gate = hold(bank)

    told = chain(task(bank, "skip", 1, task_id="skipped"), task(bank, "tell", task_id="told")).apply_async()

    assert told.get(timeout=PATIENCE_SECONDS) == "SKIPPED"
    assert bank.app.AsyncResult("skipped").result == "SKIPPED"
    assert bank.state("skipped") == states.SUCCESS
    gate.touch()
    bank.wait_noted("end", "holder")
    assert bank.counts("start") == {"holder": 1}
    bank.wait_nothing_left()


def test_task_that_will_not_wait_fails_as_any_other(bank: Yard) -> None:
    bank.start("first", concurrency=2)
    gate = hold(bank)

    result = bank.send("fail", 1, task_id="failing")

    with pytest.raises(LeaseBusy, match=r"lease account:1 is held by first@"):
        result.get(timeout=PATIENCE_SECONDS)
    bank.wait("its dead letter", bank.deaths)
    ((reason, attempts),) = [(death.reason, death.attempts) for death in bank.deaths()]
    assert (reason, attempts) == ("exhausted", 2)
    gate.touch()
    bank.wait_noted("end", "holder")
    assert bank.counts("start") == {"holder": 1}
    bank.wait_nothing_left()


def test_patience_ends_with_lease_wait_max(bank: Yard) -> None:
    worker = bank.start("first", concurrency=2)
    gate = hold(bank)

    result = bank.send("limited", 1, task_id="limited")

    with pytest.raises(LeaseBusy):
        result.get(timeout=PATIENCE_SECONDS)
    assert parkings(worker)["limited"]
    gate.touch()
    bank.wait_noted("end", "holder")
    assert bank.counts("start") == {"holder": 1}


def test_key_of_a_killed_worker_goes_to_the_next_task(bank: Yard) -> None:
    doomed = bank.start("doomed", concurrency=2)
    gate = hold(bank)
    worker = bank.start("heir", concurrency=2)
    bank.send("take", 1, task_id="next")
    bank.wait("the next one waits", lambda: "next" in parkings(doomed, worker))

    doomed.kill_group()

    # Whichever of the two comes first.
    gate.touch()
    bank.wait_noted("end", "next", "holder")
    assert_one_at_a_time(bank)
    bank.wait_nothing_left()


def test_chord_around_a_waiting_task_goes_on(bank: Yard) -> None:
    worker = bank.start("first", concurrency=2)
    gate = hold(bank)
    header = [task(bank, "take", account, task_id=f"take-{account}") for account in (1, 2)]

    told = chord(header)(task(bank, "tell", task_id="told"))
    wait_parked(bank, worker, "take-1")
    gate.touch()

    assert told.get(timeout=PATIENCE_SECONDS) == [1, 2]
    assert bank.counts("told") == {"told": 1}
    bank.wait_nothing_left()


def test_loss_of_the_key_ends_the_body_and_is_no_stall(bank: Yard) -> None:
    bank.start("first")
    gate = hold(bank)

    # Another task's for a moment, as after an eviction.
    lock = bank.keys.lock("account:1")
    bank.leases.hset(lock, mapping={"id": "thief", "token": "thief"})
    assert bank.leases.pttl(lock) > 0

    (left,) = bank.wait_noted("left", "holder")
    assert left.seen == {"by": "LeaseLost"}
    gate.touch()
    bank.wait_noted("end", "holder")
    assert bank.counts("start") == {"holder": 2}
    bank.wait_nothing_left()
    assert bank.counted("stalls") == 0
