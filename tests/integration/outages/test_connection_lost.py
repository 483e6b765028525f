"""The network between a worker and Redis fails while tasks run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import pytest

from celery_selfheal.leases.scripts import source
from celery_selfheal.testing import TcpProxy
from integration.outages.crew import SHORT_TTL, Crew

SEED = 20_260_703
FETCH = hashlib.sha1(source("celery_selfheal.sessions", "fetch").encode(), usedforsecurity=False).hexdigest().encode()
RELEASE = hashlib.sha1(source("celery_selfheal.leases", "release").encode(), usedforsecurity=False).hexdigest().encode()
ACQUIRE = hashlib.sha1(source("celery_selfheal.leases", "acquire").encode(), usedforsecurity=False).hexdigest().encode()
HEARTBEAT_SECONDS = 3.0  # the default


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_what_runs_over_a_lost_connection_runs_once_and_what_waited_runs(
    pool: str, crew: Crew, proxy: TcpProxy
) -> None:
    crew.start("w0", via=proxy, pool=pool, concurrency=2, prefetch=2)
    gate = crew.gate()
    run = [crew.load(f"running-{n}", gate) for n in range(2)]
    crew.wait_started(run)
    # A full pool of greenlets keeps its consumer from taking more than one, and from seeing what becomes of it.
    wait = [crew.ship(f"reserved-{n}") for n in range(1 if pool == "gevent" else 2)]
    crew.wait_held(len(run) + len(wait))
    before = crew.held()

    proxy.cut()
    if pool != "gevent":
        crew.wait("what was only reserved has gone back and is taken again", lambda: have_new_tags(crew, wait, before))
        assert [crew.held()[task_id] for task_id in run] == [before[task_id] for task_id in run]
    gate.open()
    crew.wait_ended([*run, *wait])
    crew.wait_nothing_left()

    crew.check_each_ran_once()
    assert {crew.result(task_id) for task_id in run} == {"loaded"}


def have_new_tags(crew: Crew, task_ids: list[str], before: dict[str, str]) -> bool:
    held = crew.held()
    return held.keys() >= set(task_ids) and not {held[task_id] for task_id in task_ids} & set(before.values())


def check_cuts(crew: Crew, proxy: TcpProxy, count: int) -> None:
    """Cut all connections again and again, wherever a conversation is just then."""
    chance = random.Random(SEED)
    crew.start("w0", via=proxy, concurrency=2, prefetch=4)
    tasks: list[str] = []
    for n in range(count):
        batch = [crew.ship(f"{n}-{k}", seconds=0.02) for k in range(40)]
        tasks += batch
        enough = len(tasks) - chance.randint(5, 35)
        crew.wait("some start", lambda enough=enough: len(crew.diary.starts()) >= enough)
        proxy.cut()
        crew.wait_ended(batch)
    crew.wait_nothing_left()

    crew.check_each_ran_once()
    assert {crew.result(task_id) for task_id in tasks} == {"shipped"}


def test_each_task_runs_once_however_often_the_connection_is_cut(
    crew: Crew, proxy: TcpProxy, rounds: Callable[[int], int]
) -> None:
    check_cuts(crew, proxy, rounds(3))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_task_runs_once_in_a_hundred_cuts(crew: Crew, proxy: TcpProxy, rounds: Callable[[int], int]) -> None:
    check_cuts(crew, proxy, rounds(100))


def check_lost_fetch(crew: Crew, proxy: TcpProxy) -> float:
    """Lose the answer that brings a message; returns the seconds from then on until its body starts."""
    worker = crew.start("w0", via=proxy, prefetch=1)
    gate = crew.gate()
    crew.load("first", gate)
    crew.wait_started(["first"])
    # The worker is full: it asks for nothing, so that its next question is answered with this message.
    crew.ship("taken")

    proxy.drop_reply(request=FETCH)
    gate.open()
    dropped = crew.wait("the answer is lost", lambda: proxy.replies_dropped == 1)
    assert list(crew.held()) == ["taken"]
    crew.wait_ended(["taken"])

    assert worker.wait_log("task recovered: depot.ship[taken]").endswith("forgotten")
    crew.wait_nothing_left()
    crew.check_each_ran_once()
    return crew.diary.starts("taken")[0].at - dropped


def test_a_message_whose_fetch_was_never_answered_comes_back(crew: Crew, proxy: TcpProxy) -> None:
    crew.settings = dict(SHORT_TTL)

    check_lost_fetch(crew, proxy)


@pytest.mark.slow
def test_a_message_whose_fetch_was_never_answered_comes_back_within_two_beats(crew: Crew, proxy: TcpProxy) -> None:
    seconds = check_lost_fetch(crew, proxy)

    # Unknown at one beat, it may be under way; unknown at two, nobody knows it. Then it has to be fetched again.
    assert seconds < 2 * HEARTBEAT_SECONDS + 1


@pytest.mark.parametrize("step", [ACQUIRE, RELEASE], ids=["acquire", "release"])
def test_a_step_whose_answer_was_lost_counts_once(step: bytes, crew: Crew, proxy: TcpProxy) -> None:
    crew.start("w0", via=proxy)
    crew.ship("warm")
    crew.wait_ended(["warm"])

    proxy.drop_reply(request=step)
    crew.ship("lost")
    crew.wait("the answer is lost", lambda: proxy.replies_dropped == 1)
    crew.wait_ended(["lost"])
    crew.wait_nothing_left()

    crew.check_each_ran_once()
    assert crew.result("lost") == "shipped"


def test_a_worker_whose_network_swallows_everything_loses_its_tasks_to_another_and_does_no_harm(
    crew: Crew, proxy: TcpProxy
) -> None:
    # Without a timeout a half-open connection holds plain Celery up for minutes; see its documentation.
    crew.settings = dict(SHORT_TTL, broker_transport_options={"socket_timeout": 3, "health_check_interval": 2})
    first = crew.start("w0", via=proxy)
    gate = crew.gate()
    run = crew.load("running", gate)
    crew.wait_started([run])
    wait = [crew.ship(f"reserved-{n}") for n in range(3)]
    crew.wait_held(4)
    (session,) = crew.sessions_of("w0")
    crew.start("w1")

    proxy.half_open()
    crew.wait_started([run], times=2)
    gate.open("w1")
    crew.wait_ended(wait)
    # What was sent into the hole arrives now, late.
    proxy.half_open(on=False)
    gate.open()
    first.wait_log(f"[{run}] succeeded")
    crew.wait("w0 takes messages again", lambda: set(crew.sessions_of("w0")) - {session})
    crew.workers[1].kill_group()
    after = [crew.ship(f"after-{n}") for n in range(4)]
    crew.wait_ended(after)
    crew.wait_nothing_left()

    assert [entry.node for entry in crew.diary.starts(run)] == ["w0", "w1"]
    counts = crew.diary.counts("start")
    assert {counts[task_id] for task_id in [*wait, *after]} == {1}
    assert crew.result(run) == "loaded"
