"""Children are forked while the heartbeat's thread beats: nobody is lost, doubled or taken for dead for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from integration.outages.crew import PATIENCE_SECONDS, Crew

# As short as they go, so that forks and beats meet as often as they can.
BUSY_HEART = {"selfheal_lease_ttl": 1.5, "selfheal_heartbeat_interval": 0.05, "selfheal_reaper_interval": 0.1}


def check_no_harm(crew: Crew, tasks: list[str]) -> None:
    crew.wait_ended(tasks)
    crew.wait_nothing_left()
    crew.check_each_ran_once()
    assert crew.diary.counts("start").keys() == set(tasks)
    for worker in crew.workers:
        # "forgotten" is none: a loop that forks for two beats finds its latest message handed over, and takes it again.
        for trouble in ("worker gone", "process died", "session lost", "lease lost", "does not answer", "LostError"):
            assert trouble not in worker.log_text()


def check_recycling(crew: Crew, count: int) -> None:
    """Run so many times 60 tasks in children of which each runs three."""
    crew.settings = dict(BUSY_HEART, worker_max_tasks_per_child=3)
    crew.start("w0", concurrency=2)
    tasks: list[str] = []
    for n in range(count):
        wave = [crew.ship(f"{n}-{k}", seconds=0.02) for k in range(60)]
        crew.wait_ended(wave)
        tasks += wave

    check_no_harm(crew, tasks)
    assert len({entry.pid for entry in crew.diary.starts()}) >= len(tasks) / 3
    assert {crew.result(task_id) for task_id in tasks} == {"shipped"}


def test_children_that_are_recycled_lose_and_double_nothing(crew: Crew) -> None:
    check_recycling(crew, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_children_that_are_recycled_lose_and_double_nothing(crew: Crew, rounds: Callable[[int], int]) -> None:
    check_recycling(crew, rounds(20))


def test_a_pool_that_grows_and_shrinks_loses_and_doubles_nothing(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSCALE_KEEPALIVE", "0.5")  # Celery's own: how long it keeps a child too many
    crew.settings = dict(BUSY_HEART)
    worker = crew.start("w0", args=["--autoscale=4,1"])
    tasks = []
    for n in range(2):
        gate = crew.gate(f"gate-{n}")
        wave = [crew.load(f"{n}-{k}", gate) for k in range(4)]
        # Four bodies stand at the gate together only if the pool has grown.
        crew.wait_started(wave)
        wave += [crew.ship(f"{n}-more-{k}", seconds=0.02) for k in range(20)]
        gate.open()
        tasks += wave
        crew.wait_ended(wave)
        crew.wait("the pool shrinks", lambda: len(worker.child_pids()) == 1)

    check_no_harm(crew, tasks)


def test_celery_s_own_heartbeat_and_gossip_may_be_off(crew: Crew) -> None:
    """The harness always leaves gossip and mingle out; here goes the third."""
    crew.settings = {"selfheal_lease_ttl": 1.5, "selfheal_heartbeat_interval": 0.5, "selfheal_reaper_interval": 0.2}
    victim = crew.start("w0", args=["--without-heartbeat"])
    gate = crew.gate()
    run = crew.load("running", gate)
    crew.wait_started([run])
    wait = [crew.ship(f"reserved-{n}") for n in range(3)]
    crew.wait_held(4)
    crew.start("w1", args=["--without-heartbeat"])
    (started,) = crew.diary.starts(run)

    crew.wait("two TTLs pass", lambda: _age(crew) > 3 and crew.is_alive(crew.sessions_of("w0")[0]))
    assert crew.diary.starts() == [started]
    victim.kill_group()
    gate.open()
    crew.wait_ended([run, *wait], seconds=PATIENCE_SECONDS)
    crew.wait_nothing_left()

    assert [entry.node for entry in crew.diary.starts(run)] == ["w0", "w1"]


def _age(crew: Crew) -> float:
    """Seconds that the oldest held message has been held, by Redis' clock."""
    seconds, micros = crew.broker.time()
    return float(seconds + micros / 1e6 - _received_first(crew))


def _received_first(crew: Crew) -> float:
    ((record, *_), *_) = [crew.broker.hvals(crew.keys.owned(session)) for session in crew.sessions_of("w0")]
    return float(record.split()[0]) / 1e6
