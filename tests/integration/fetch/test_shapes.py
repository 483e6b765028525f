"""Exchanges, queues, priorities, prefixes, pools and shutdowns: what works on kombu works with our fetch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from celery_selfheal.plugin.brokers.wait import GREEN_PAUSE_SECONDS, WATCHED_PAUSE_SECONDS
from celery_selfheal.testing import WorkerProcess
from integration.fetch.mill import HEALER_QUEUE, PATIENCE_SECONDS, QUEUE, Mill

SEP = "\x06\x16"  # kombu's, between queue and priority step
RESTORED_MESSAGES = 50


def test_a_topic_message_comes_back_to_the_one_queue_it_was_taken_from(new_mill: Callable[..., Mill]) -> None:
    topic = {"exchange": "orders", "exchange_type": "topic"}
    mill = new_mill(
        task_queues={
            "europe": {**topic, "routing_key": "order.eu.#"},
            "audit": {**topic, "routing_key": "order.#"},
            HEALER_QUEUE: {"exchange": HEALER_QUEUE, "routing_key": HEALER_QUEUE},
        },
    )
    gate = mill.folder / "gate"
    mill.start_healer()
    victim = mill.start("victim", queues="europe", prefetch=8)
    declare = [mill.app.amqp.queues[name] for name in ("europe", "audit")]
    to_europe = {"exchange": "orders", "routing_key": "order.eu.berlin", "declare": declare}
    running = mill.send(1, task="hold", args=(str(gate),), **to_europe)
    reserved = mill.send(5, **to_europe)
    mill.wait_started(running)
    mill.wait("all are held", lambda: len(mill.held()) == 6)

    victim.kill_group()
    mill.wait("all are restored", lambda: not mill.held())

    assert mill.waiting("europe") == [*running, *reserved]
    assert mill.waiting("audit") == [*running, *reserved]


def test_a_broadcast_reaches_every_worker_before_and_after_they_idle(new_mill: Callable[..., Mill]) -> None:
    mill = new_mill(
        task_queues={
            QUEUE: {"exchange": QUEUE, "routing_key": QUEUE},
            "news": {"exchange": "news", "exchange_type": "fanout"},
        }
    )
    workers = [mill.start(f"w{n}", queues=f"{QUEUE},news") for n in range(2)]
    # To the news, and to what remote control says.
    mill.wait("both listen", lambda: sum(int(one["psub"]) for one in mill.redis.client_list()) == 2 * 2)

    for _ in range(2):
        mill.wait_idle(workers=2)
        (news,) = mill.send(1, task="hear", queue="news")
        mill.wait("both hear", lambda news=news: mill.diary.ids("end").count(news) == 2)
        mill.wait_ended(mill.send(4))

    mill.wait_drained()
    assert all(worker.alive for worker in workers)


def test_several_queues_are_served_in_turn(mill: Mill) -> None:
    queues = ("red", "green", "blue")
    sent = {queue: mill.send(20, queue=queue) for queue in queues}

    mill.start(queues=",".join(queues), prefetch=1)
    mill.wait_ended(mill.sent)

    queue_of = {task_id: queue for queue, ids in sent.items() for task_id in ids}
    starts = mill.diary.ids("start")
    assert sorted(starts) == sorted(mill.sent)
    for queue, ids in sent.items():
        assert [task_id for task_id in starts if queue_of[task_id] == queue] == ids
    # In turn: no queue waits until another one is empty.
    assert {queue_of[task_id] for task_id in starts[:9]} == set(queues)


def test_priority_and_order_outlive_a_restore(mill: Mill) -> None:
    gate = mill.folder / "gate"
    mill.start_healer()
    (running,) = mill.send(1, task="hold", args=(str(gate),), priority=0)
    sent = {priority: list[str]() for priority in (0, 3, 6, 9)}
    for n in range(RESTORED_MESSAGES):
        priority = (9, 0, 6, 3)[n % 4]
        sent[priority] += mill.send(1, priority=priority)
    victim = mill.start("victim", prefetch=1 + RESTORED_MESSAGES)
    mill.wait("all are held", lambda: len(mill.held()) == 1 + RESTORED_MESSAGES)

    victim.kill_group()
    mill.wait("all are restored", lambda: not mill.held())

    sent[0].insert(0, running)
    assert {step: mill.waiting(f"{QUEUE}{SEP}{step}" if step else QUEUE) for step in sent} == sent
    gate.touch()
    mill.start("next", prefetch=1)
    mill.wait_ended(mill.sent)
    assert mill.diary.ids("start") == [running, *sent[0], *sent[3], *sent[6], *sent[9]]


def test_prefix_and_database_of_the_broker_are_kept_by_fetch_and_restore(new_mill: Callable[..., Mill]) -> None:
    mill = new_mill(db=3, broker_transport_options={"global_keyprefix": "acme:"})
    gate = mill.folder / "gate"
    mill.start_healer()
    victim = mill.start("victim", prefetch=8)
    mill.wait_ended(mill.send(5))
    running = mill.send(1, task="hold", args=(str(gate),))
    reserved = mill.send(5)
    mill.wait("all are held", lambda: len(mill.held()) == 6)

    victim.kill_group()
    mill.wait("all are restored", lambda: not mill.held())

    assert mill.waiting() == [*running, *reserved]
    gate.touch()
    mill.start("next")
    mill.wait_ended(mill.sent)
    mill.wait_drained()
    names = {key.decode() for key in mill.redis.keys("*")}
    assert {name for name in names if not name.startswith(("acme:", "{selfheal:mill}:"))} == set()


def test_queues_are_added_and_cancelled_while_the_worker_runs(mill: Mill) -> None:
    worker = mill.start(queues=QUEUE)
    mill.wait_ended(mill.send(3))
    late = mill.send(3, queue="late")

    assert mill.app.control.add_consumer("late", reply=True, timeout=10, limit=1)
    mill.wait_ended([*late, *mill.send(3)])

    assert mill.app.control.cancel_consumer("late", reply=True, timeout=10, limit=1)
    left = mill.send(3, queue="late")
    mill.wait_ended(mill.send(3))
    assert mill.waiting("late") == left
    assert worker.alive


def test_a_full_worker_takes_no_more_and_asks_for_no_more(mill: Mill) -> None:
    gate = mill.folder / "gate"
    worker = mill.start(concurrency=2, prefetch=3)
    mill.send(2, task="hold", args=(str(gate),))
    rest = mill.send(20)
    mill.wait("it is full", lambda: len(mill.held()) == 6)

    asked, used = asked_of(mill), cpu_seconds(worker)
    full_seconds = 2.0
    time.sleep(full_seconds)

    assert len(mill.held()) == 6
    assert mill.waiting() == rest[4:]
    # What it may still ask for is the end of one wait, and what its heart and sweep do.
    assert asked_of(mill) - asked <= 4 * 2 + full_seconds * 10
    if used is not None:
        assert (cpu_seconds(worker) or 0.0) - used < full_seconds / 2
    gate.touch()
    mill.wait_ended(mill.sent)


@pytest.mark.parametrize(
    ("pool", "pause_seconds"),
    [
        ("prefork", WATCHED_PAUSE_SECONDS),
        ("threads", WATCHED_PAUSE_SECONDS),
        ("solo", WATCHED_PAUSE_SECONDS),
        ("gevent", GREEN_PAUSE_SECONDS),
    ],
)
def test_each_pool_takes_a_message_when_it_comes_and_not_when_the_clock_says(
    pool: str, pause_seconds: float, new_mill: Callable[..., Mill]
) -> None:
    mill = new_mill(broker_transport_options={"priority_steps": [0]})
    mill.start(pool=pool)
    mill.wait_ended(mill.send(1))

    waited = []
    for n in range(7):
        mill.wait_idle()
        time.sleep(0.03 * n)  # at another phase of the clock each time
        sent_at = time.monotonic()
        (task_id,) = mill.send(1)
        mill.wait_ended([task_id])
        waited += [line.at - sent_at for line in mill.diary.lines("start") if line.id == task_id]

    assert len(waited) == 7
    assert median(waited) < pause_seconds / 4


def test_a_worker_that_shuts_down_leaves_nothing_to_be_found(new_mill: Callable[..., Mill]) -> None:
    # Far beyond the patience of the test: nobody may have to wait for its session to run out.
    mill = new_mill(selfheal_lease_ttl=600)
    gate = mill.folder / "gate"
    leaving = mill.start("leaving", prefetch=8)
    running = mill.send(1, task="hold", args=(str(gate),))
    mill.wait_started(running)
    reserved = mill.send(5)
    mill.wait("all are held", lambda: len(mill.held()) == 6)

    leaving.terminate()
    gate.touch()
    leaving.wait(PATIENCE_SECONDS)

    # Before anybody could have healed it: there is no other worker.
    assert mill.held() == []
    done = mill.diary.ids("end")
    assert done[:1] == running
    assert [*done[1:], *mill.waiting()] == reserved
    mill.start("next")
    mill.wait_ended(mill.sent)
    assert sorted(mill.diary.ids("start")) == sorted(mill.sent)


def asked_of(mill: Mill) -> int:
    """Calls that could be part of a poll for messages."""
    stats: dict[str, Any] = mill.redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "blmove", "brpop"))


def cpu_seconds(worker: WorkerProcess) -> float | None:
    """Processor time of the main process; ``None`` where there is no ``/proc``."""
    stat = Path(f"/proc/{worker.pid}/stat")
    if not stat.exists():
        return None
    # The command in field 2 may itself hold spaces and parentheses; no field after it does.
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
