"""Bodies that run too long or show no progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from integration.endings.yard import Yard

KINDS = ["redis", "classic"]
ONE_RETRY = {"selfheal_loss_grace": 0.5, "task_annotations": {"*": {"max_retries": 1, "retry_backoff": 0.1}}}


def assert_tried_twice_and_dead_lettered(yard: Yard, task_id: str, figures: Any, limit: float, what: str) -> None:
    starts = yard.wait_noted("start", task_id, times=2)
    yard.wait("it has failed", lambda: yard.state(task_id) == "FAILURE")
    assert [entry.retries for entry in starts] == [0, 1]
    letters: list[Any] = []
    yard.wait("its dead letter", lambda: letters.extend(yard.deaths()) or letters)
    assert [(one.id, one.reason, one.attempts) for one in letters] == [(task_id, "deadline", 2)]
    yard.wait_nothing_left()
    assert yard.counted("stalls") == 0
    left = yard.entries("left", task_id)
    if left:
        figures(f"{what}: over the limit by", [left[0].at - starts[0].at - limit])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_body_past_its_max_runtime_is_ended_retried_and_dead_lettered(
    new_yard: Callable[..., Yard], kind: str, pool: str, figures: Any
) -> None:
    yard = new_yard(kind)
    yard.settings |= {**ONE_RETRY, "selfheal_max_runtime": 1}
    yard.start("first", pool=pool)
    yard.send("load", 30, task_id="task")

    assert_tried_twice_and_dead_lettered(yard, "task", figures, 1, f"{kind}, {pool}")
    assert {entry.seen["by"] for entry in yard.entries("left")} == {"LeaseLost"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", ["selfheal_max_runtime", "task_time_limit"])
def test_a_body_in_c_is_killed_at_its_limit_which_is_an_attempt(
    new_yard: Callable[..., Yard], kind: str, limit: str, figures: Any
) -> None:
    yard = new_yard(kind)
    yard.settings |= {**ONE_RETRY, limit: 1}
    yard.start("first")
    yard.send("compute", "never", task_id="task")

    assert_tried_twice_and_dead_lettered(yard, "task", figures, 1, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_body_without_progress_is_ended_and_the_next_start_goes_on_from_there(
    new_yard: Callable[..., Yard], kind: str, pool: str
) -> None:
    yard = new_yard(kind)
    yard.settings |= {"task_annotations": {"*": {"stall_after": 1}}, "selfheal_heartbeat_interval": 0.3}
    worker = yard.start("first", pool=pool)

    yard.send("step", {"row": 7}, 5, task_id="task")

    starts = yard.wait_noted("start", "task", times=2)
    yard.wait_noted("end", "task")
    yard.wait_nothing_left()
    assert [entry.seen["last"] for entry in starts] == [None, {"row": 7}]
    assert yard.counted("stalls") == 1
    worker.wait_log("task stalled: dock.step[task]")
    assert not yard.leases.exists(yard.keys.progress("task"))


def test_progress_outlives_a_killed_worker(new_yard: Callable[..., Yard]) -> None:
    yard = new_yard("redis")
    yard.settings |= {"selfheal_heartbeat_interval": 0.3}
    first = yard.start("first")
    yard.send("step", [1, 2], 60, task_id="task")
    yard.wait_noted("start", "task")
    yard.wait("it is in the store", lambda: yard.leases.exists(yard.keys.progress("task")))

    first.kill_group()
    yard.start("second")

    yard.wait_noted("end", "task")
    assert [entry.seen["last"] for entry in yard.entries("start", "task")] == [None, [1, 2]]
    yard.wait_nothing_left()
