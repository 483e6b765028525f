"""RabbitMQ and PostgreSQL, and no Redis: what dies is healed all the same."""

from __future__ import annotations

import os
import signal

import pytest

from celery_selfheal import StalledTooOften
from integration.leases_in_postgres.crew import SHORT_TTL, Crew

LONG_TTL = {"selfheal_lease_ttl": 600, "selfheal_heartbeat_interval": 1}  # only the kernel can have told of a death


@pytest.fixture(autouse=True)
def _no_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by accident."""
    for name in list(os.environ):
        if "REDIS" in name:
            monkeypatch.delenv(name)


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
def test_tasks_run_once_and_leave_nothing(pool: str, crew: Crew) -> None:
    ids = [f"t{n}" for n in range(20)]
    crew.start("w0", pool=pool, concurrency=2)

    for task_id in ids:
        crew.shop.charge.apply_async((100,), task_id=task_id)

    assert [crew.shop.app.AsyncResult(task_id).get(timeout=30) for task_id in ids] == [100] * 20
    crew.wait_nothing_left()
    assert set(crew.diary.start_counts().values()) == {1}
    assert (crew.counted("starts"), crew.counted("success"), crew.counted("stalls")) == (20, 20, 0)


def test_another_worker_takes_over_what_a_killed_one_ran_and_finishes_it(crew: Crew) -> None:
    crew.settings |= SHORT_TTL
    gate = crew.folder / "gate"
    first = crew.start("w0", concurrency=1)
    crew.shop.wait_for.apply_async((str(gate),), task_id="long")
    crew.wait_started("long")
    crew.start("w1", concurrency=1)

    first.kill_group()
    crew.wait_started("long", times=2)
    gate.touch()

    assert crew.shop.app.AsyncResult("long").get(timeout=30) == str(gate)
    crew.wait_nothing_left()
    assert crew.diary.start_counts() == {"long": 2}
    assert crew.counted("stalls") == 1


def test_a_worker_without_witness_is_healed_when_its_lease_has_run_out(crew: Crew) -> None:
    crew.settings |= SHORT_TTL
    gate = crew.folder / "gate"
    first = crew.start("w0", concurrency=1, pid_namespace=True)
    crew.shop.wait_for.apply_async((str(gate),), task_id="long")
    crew.wait_started("long")
    crew.start("w1", concurrency=1)

    first.kill_group()
    crew.wait_started("long", times=2)
    gate.touch()

    crew.wait_ended("long")
    crew.wait_nothing_left()
    assert crew.counted("stalls") == 1


def test_a_killed_child_is_counted_and_its_task_starts_again(crew: Crew) -> None:
    crew.settings |= LONG_TTL
    gate = crew.folder / "gate"
    crew.start("w0", concurrency=2)
    crew.shop.wait_for.apply_async((str(gate),), task_id="long")
    crew.wait_started("long")
    (start,) = crew.diary.starts("long")

    os.kill(start.pid, signal.SIGKILL)
    crew.wait_started("long", times=2)
    gate.touch()

    crew.wait_ended("long")
    crew.wait_nothing_left()
    assert (crew.counted("stalls"), crew.counted("success")) == (1, 1)


@pytest.mark.parametrize("victim", ["self", "parent"])
def test_a_poison_task_ends_in_the_dead_letters_after_three_starts(victim: str, crew: Crew) -> None:
    crew.settings |= SHORT_TTL
    worker = crew.start("w0", concurrency=1)
    crew.shop.poison.apply_async((victim,), task_id="poison")

    crew.wait(
        "the task has failed",
        lambda: crew.state_of("poison") == "FAILURE",
        meanwhile=lambda: worker.alive or worker.start(),
    )

    failure = crew.shop.app.AsyncResult("poison").result
    assert isinstance(failure, StalledTooOften)
    crew.wait("the letter has come", crew.dead_letters)
    assert crew.dead_letters() == [("poison", "stalled")]
    assert crew.diary.start_counts() == {"poison": 3}
    crew.wait_nothing_left()


def test_a_duplicate_of_a_running_task_parks_and_one_of_a_finished_task_ends(crew: Crew) -> None:
    crew.settings |= SHORT_TTL
    gate = crew.folder / "gate"
    worker = crew.start("w0", concurrency=2)
    published = {"selfheal-published-at": "2026-01-01T00:00:00+00:00"}
    crew.shop.wait_for.apply_async((str(gate),), task_id="twin", headers=published)
    crew.wait_started("twin")

    crew.shop.wait_for.apply_async((str(gate),), task_id="twin", headers=published)
    worker.wait_log("parked: shop.wait_for[twin]", timeout=30)
    gate.touch()
    crew.wait_ended("twin")
    crew.wait("the copy has ended, too", lambda: worker.log_text().count("[twin] ignored") == 2)

    crew.wait_nothing_left()
    assert crew.diary.start_counts() == {"twin": 1}
    assert crew.state_of("twin") == "SUCCESS"


def test_a_running_task_outlives_a_restart_of_postgres(crew: Crew) -> None:
    crew.settings |= SHORT_TTL
    gate = crew.folder / "gate"
    worker = crew.start("w0", concurrency=1)
    crew.start("w1", concurrency=1)
    crew.shop.wait_for.apply_async((str(gate),), task_id="long")
    crew.wait_started("long")

    crew.server.kill()
    crew.wait("a worker has noticed", lambda: any("does not answer" in w.log_text() for w in crew.workers))
    crew.engine.dispose()
    crew.server.restart()
    worker.wait_log("the store answers again", timeout=30)
    gate.touch()

    crew.wait_ended("long")
    crew.wait("its result is stored", lambda: crew.state_of("long") == "SUCCESS")
    crew.wait_nothing_left()
    assert crew.diary.start_counts() == {"long": 1}


def test_leases_in_postgres_and_a_redis_broker_heal_together(redis_crew: Crew) -> None:
    crew = redis_crew
    crew.settings |= LONG_TTL
    gate = crew.folder / "gate"
    first = crew.start("w0", concurrency=1)
    crew.shop.wait_for.apply_async((str(gate),), task_id="long")
    crew.wait_started("long")
    crew.start("w1", concurrency=1)

    first.kill_group()
    crew.wait_started("long", times=2)
    gate.touch()

    crew.wait_ended("long")
    crew.wait_nothing_left()
    assert (crew.counted("stalls"), crew.counted("success")) == (1, 1)
