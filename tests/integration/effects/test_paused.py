"""A worker is stopped inside of a body and wakes when another has taken over: its commit comes too late."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from integration.effects.office import Office


def pause_inside_the_body(office: Office, rounds: int) -> list[float]:
    """Returns how many seconds after the pause each effect was there, by the other worker."""
    waits = []
    for n in range(rounds):
        task_id = f"pause-{n}"
        gate = office.gate(task_id)
        sleeper = office.start(f"sleeper{n}")
        sent = office.ledger.book.apply_async((7,), task_id=task_id)
        office.wait("it runs", lambda task_id=task_id: office.diary("written", task_id))
        other = office.start(f"other{n}")

        sleeper.pause()
        paused_at = time.monotonic()
        gate.unlink()
        assert sent.get(timeout=90) == 7
        waits.append(time.monotonic() - paused_at)
        sleeper.resume()

        office.wait("the late commit is refused", lambda n=n: "lease lost: ledger.book" in office.log(f"sleeper{n}"))
        assert office.entries() == Counter(f"pause-{k}" for k in range(n + 1))
        sleeper.stop(grace=30)
        other.stop(grace=30)
    return waits


@pytest.fixture
def waking_office(office: Office) -> Office:
    # RabbitMQ redelivers when the connection of the paused worker has missed its heartbeats.
    office.settings["broker_heartbeat"] = 2
    return office


def test_late_commit_of_a_woken_worker_is_refused(waking_office: Office) -> None:
    waking_office.settings.update(selfheal_lease_ttl=3, selfheal_heartbeat_interval=1)
    pause_inside_the_body(waking_office, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_successor_of_a_paused_worker_waits_for_the_lease_only(
    new_office: Callable[..., Office], rounds: Callable[[int], int], figures: Callable[..., dict[str, float]]
) -> None:
    office = new_office("redis")

    waits = figures("from the pause to the effect", pause_inside_the_body(office, rounds(5)))

    assert waits["max"] <= 10 + 5  # the default TTL, and the wait for the open transaction


def test_effect_that_is_committed_before_the_pause_is_answered(redis_office: Office) -> None:
    office = redis_office
    office.settings.update(selfheal_lease_ttl=3, selfheal_heartbeat_interval=1)
    sleeper = office.start("sleeper", die_at=["0 child celery_selfheal.plugin.task:mark_dispatched pause"])
    sent = office.ledger.book.apply_async((7,), task_id="0-pause")
    office.wait("it is there", lambda: office.entries()["0-pause"])
    office.wait("it waits", office.killed)
    sleeper.pause()
    office.start("other")

    office.wait("it is answered", lambda: "duplicate suppressed" in office.log("other"))
    sleeper.resume()

    assert sent.get(timeout=60) == 7
    assert office.entries() == Counter(["0-pause"])
