"""Kombu's keys can be laid out otherwise, and the leases may live elsewhere: a killed worker heals the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_selfheal.testing import RedisServer
from integration.outages.crew import SHORT_TTL, Crew

PREFIX = "yard:"
OPTIONS = {
    "global_keyprefix": PREFIX,
    "priority_steps": [0, 4, 8],
    "sep": "|",
    "queue_order_strategy": "priority",
}
PRIORITIES = [8, 0, 4, 1, 9]  # each belongs to the step at or below it


def send_in_order(crew: Crew) -> list[str]:
    """Send 50 tasks with mixed priorities; their ids in the order in which they are to run."""
    tasks = [
        (crew.ship(f"{n:02}", priority=PRIORITIES[n % len(PRIORITIES)]), PRIORITIES[n % len(PRIORITIES)])
        for n in range(50)
    ]
    steps = OPTIONS["priority_steps"]
    assert isinstance(steps, list)
    return [task_id for task_id, _ in sorted(tasks, key=lambda task: max(step for step in steps if step <= task[1]))]


@pytest.mark.parametrize("healer", ["command", "worker"])
def test_restored_messages_keep_their_order_and_priority(healer: str, new_crew: Callable[..., Crew]) -> None:
    crew = new_crew(db=5, prefix=PREFIX)
    crew.settings = {"broker_transport_options": OPTIONS, "task_queue_max_priority": 9}
    gate = crew.gate()
    run = crew.load("running", gate, priority=0)
    victim = crew.start("w0", prefetch=60)
    crew.wait_started([run])
    tasks = send_in_order(crew)
    crew.wait_held(51)
    if healer == "worker":
        crew.start("w1")

    victim.kill_group()
    if healer == "command":
        assert crew.reap() == {"sessions": 1, "stalls": 1, "restored": 51}
        assert not crew.held()
        assert crew.waiting("celery") == [run, *tasks[: len(tasks) * 2 // 5]]
        assert [*crew.waiting("celery|4"), *crew.waiting("celery|8")] == tasks[len(tasks) * 2 // 5 :]
        crew.start("w1")
    gate.open()
    crew.wait_ended([run, *tasks])
    crew.wait_nothing_left()

    again = [entry.id for entry in crew.diary.starts() if entry.node == "w1"]
    assert again == [run, *tasks]


def test_a_killed_worker_heals_with_its_leases_on_another_server(new_crew: Callable[..., Crew]) -> None:
    with RedisServer() as leases:
        crew = new_crew(leases=leases)
        crew.settings = {"selfheal_redis_url": leases.url()}
        victim = crew.start("w0")
        gate = crew.gate()
        run = crew.load("running", gate)
        crew.wait_started([run])
        wait = [crew.ship(f"reserved-{n}") for n in range(3)]
        crew.wait_held(4)
        assert crew.leased() == {run}
        assert not crew.broker.keys(crew.keys.lease("*"))
        crew.start("w1")

        victim.kill_group()
        gate.open()
        crew.wait_ended([run, *wait])
        crew.wait_nothing_left()

        assert [entry.node for entry in crew.diary.starts(run)] == ["w0", "w1"]
        counts = crew.diary.counts("start")
        assert {counts[task_id] for task_id in wait} == {1}
        assert {crew.result(task_id) for task_id in wait} == {"shipped"}
        crew.close()


def test_a_lease_server_that_is_away_stops_nobody_s_task_and_kills_nobody(new_crew: Callable[..., Crew]) -> None:
    with RedisServer(appendonly=True) as leases:
        crew = new_crew(leases=leases)
        crew.settings = dict(SHORT_TTL, selfheal_redis_url=leases.url())
        for n in range(2):
            crew.start(f"w{n}", queues=f"w{n}")
        gate = crew.gate()
        run = [crew.load(f"running-{n}", gate, queue=f"w{n}") for n in range(2)]
        crew.wait_started(run)
        wait = [crew.ship(f"reserved-{n}", queue=f"w{n % 2}") for n in range(6)]
        crew.wait_held(8)

        leases.kill()
        away_since = crew.broker.time()[0]
        crew.wait("two TTLs pass", lambda: crew.broker.time()[0] > away_since + 6)
        leases.restart()
        crew.wait("every running task has its lease again", lambda: crew.leased() == set(run))
        gate.open()
        crew.wait_ended([*run, *wait])
        crew.wait_nothing_left()

        crew.check_each_ran_once()
        for worker in crew.workers:
            for trouble in ("recovered", "session lost", "lease lost"):
                assert trouble not in worker.log_text()
        crew.close()
