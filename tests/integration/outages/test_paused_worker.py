"""A worker is paused or cut off past its TTL, taken for dead, and comes back; then the one that took over is killed.

With kombu's own restore the late acknowledgements of the first one delete what the second one holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from celery_selfheal.testing import TcpProxy
from integration.outages.crew import SHORT_TTL, Crew

SEED = 20_260_702
FAULTS = ["paused", "paused and cut", "cut off"]


def take_over_rounds(crew: Crew, proxy: TcpProxy, fault: str, count: int) -> None:
    """Take everything from w0 while it cannot answer, let it come back and acknowledge, and kill w1, who took it."""
    chance = random.Random(SEED)
    crew.start("w0", via=proxy)
    for n in range(count):
        take_over(crew, proxy, fault, str(n), reserved=chance.randint(1, 3))


def take_over(crew: Crew, proxy: TcpProxy, fault: str, name: str, *, reserved: int) -> None:
    first = crew.workers[0]
    gate = crew.gate(f"gate-{name}")
    running = crew.load(f"{name}-running", gate)
    crew.wait_started([running])
    waiting = [crew.ship(f"{name}-reserved-{k}") for k in range(reserved)]
    tasks = [running, *waiting]
    crew.wait_held(len(tasks))
    (session,) = crew.sessions_of("w0")
    second = crew.start(f"heir-{name}")

    if fault == "cut off":
        proxy.refuse()
        proxy.cut()
    else:
        first.pause()
    crew.wait_started([running], times=2)
    assert not crew.is_alive(session)
    assert crew.diary.starts(running)[1].node == second.name

    # All that w0 still does about these tasks, it does now: its body ends, its reserved copies are looked at.
    if fault == "paused and cut":
        proxy.cut()
    if fault == "cut off":
        proxy.refuse(on=False)
    else:
        first.resume()
    gate.open("w0")
    # It may be told to stop before it sees the gate; either way it settles a delivery that another worker has.
    settled = (f"[{running}] succeeded", f"[{running}] reject requeue=True")
    crew.wait("its body has ended", lambda: any(text in first.log_text() for text in settled))
    if fault == "paused":
        # With its connection, it has given its reserved copies up.
        for task_id in waiting:
            first.wait_log(f"[{task_id}] ignored")
    crew.wait("w0 goes on under another session", lambda: set(crew.sessions_of("w0")) - {session})

    assert running in crew.held()
    second.kill_group()
    gate.open()
    crew.wait_started([running], times=3)
    crew.wait_ended(tasks)
    crew.wait_nothing_left()

    assert [entry.node for entry in crew.diary.starts(running)] == ["w0", second.name, "w0"]
    assert crew.diary.ends(running)[-1].node == "w0"
    for task_id in waiting:
        assert len(crew.diary.starts(task_id)) == 1
    assert [crew.result(task_id) for task_id in tasks] == ["loaded", *["shipped"] * reserved]


@pytest.mark.parametrize("fault", FAULTS)
def test_all_finishes_though_a_worker_that_was_taken_for_dead_acknowledges_late(
    fault: str, crew: Crew, proxy: TcpProxy, rounds: Callable[[int], int]
) -> None:
    crew.settings = dict(SHORT_TTL)  # with the default each round would wait ten seconds

    take_over_rounds(crew, proxy, fault, rounds(2 if fault == "paused" else 1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS)
def test_all_finishes_in_many_rounds_with_the_default_ttl(
    fault: str, crew: Crew, proxy: TcpProxy, rounds: Callable[[int], int]
) -> None:
    take_over_rounds(crew, proxy, fault, rounds(20))
