"""A task that lives long is started once: as long as its worker lives, nobody takes its message for forgotten."""

from __future__ import annotations

import time

import pytest

from integration.fleet import Fleet

VISIBILITY_SECONDS = 5
# Kombu looks at every turn instead of every 100 s, so that a message that is not kept alive is restored at once.
EAGER_KOMBU = {
    "visibility_timeout": VISIBILITY_SECONDS,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


def check_one_start_each(fleet: Fleet, *, seconds: int) -> None:
    """Run three tasks that outlive timeout and leases, among workers that would take each of them at once."""
    fleet.settings = {**fleet.settings, "broker_transport_options": EAGER_KOMBU}
    workers = [fleet.start(f"w{n}", concurrency=3) for n in range(2)]
    # It has no plugin: kombu's own restore of overdue messages, of whatever queue, is at work in it.
    stock = fleet.start("stock", app="plain", queues="plain")
    due = time.time() + seconds
    fleet.shop.compute.apply_async((seconds,), task_id="computes")
    fleet.shop.charge.apply_async((100, seconds), task_id="sleeps")
    fleet.shop.charge.apply_async((100,), task_id="is-due-later", countdown=seconds)
    ids = {"computes", "sleeps", "is-due-later"}
    fleet.wait_started("computes", "sleeps")
    fleet.wait_held(len(ids))
    tags = fleet.delivery_tags()
    scores = {task_id: fleet.delivery_score(tag) for task_id, tag in tags.items()}

    fleet.wait(
        "the visibility timeout has passed",
        lambda: fleet.store_seconds() > max(scores.values()) + VISIBILITY_SECONDS,
    )
    assert set(fleet.delivery_tags()) == ids
    for task_id, tag in tags.items():
        assert fleet.delivery_score(tag) > scores[task_id]
    fleet.wait_ended(*ids)

    assert fleet.diary.start_counts() == dict.fromkeys(ids, 1)
    (start,) = fleet.diary.starts("is-due-later")
    assert start.clock > due - 0.1
    silence = fleet.shop.app.AsyncResult("computes").get(timeout=10)
    assert silence >= seconds, "the call did not keep the interpreter's lock"
    assert fleet.counted("stalls") == 0
    assert all(worker.alive for worker in (*workers, stock))
    fleet.wait_nothing_left()


def test_a_long_task_a_long_call_of_c_and_a_late_eta_start_once_each(fleet: Fleet) -> None:
    fleet.settings = {"selfheal_lease_ttl": 3, "selfheal_heartbeat_interval": 1, "selfheal_reaper_interval": 0.5}

    check_one_start_each(fleet, seconds=12)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_in_c_is_no_stall(fleet: Fleet) -> None:
    check_one_start_each(fleet, seconds=60)
