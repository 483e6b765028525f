"""A replayed task ends well, and only once; a replay that is killed loses and doubles nothing."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
from celery import chain

from celery_selfheal import headers
from celery_selfheal.dead_letter import DEATH_HEADER
from celery_selfheal.keys import Keys
from integration.dead_letters.desk import Desk


def test_a_replayed_task_succeeds_and_its_chain_goes_on(desk: Desk) -> None:
    orders = desk.orders
    rest = orders.ship.si(8).set(task_id="rest")
    failing = orders.charge.s(str(desk.gate), 7).set(
        task_id="failing", priority=3, headers={"customer": "7"}, link_error=orders.tell_support.s()
    )
    chain(failing, rest).apply_async()
    desk.start()
    desk.wait_dead(1)
    desk.wait("support is told", lambda: desk.events("support told"))
    (letter,) = desk.dlq.list()
    assert orders.app.AsyncResult("failing").state == "FAILURE"

    desk.gate.touch()
    report = desk.dlq.replay(id="failing")

    assert (report.replayed, report.is_complete) == (1, True)
    desk.wait("the rest of the chain starts", lambda: desk.events()["rest"])
    assert orders.app.AsyncResult("rest").get(timeout=30) == 8
    assert orders.app.AsyncResult("failing").get(timeout=30) == 7
    assert desk.events() == Counter({"failing": 2, "rest": 1})
    assert sum(desk.events("support told").values()) == 1
    assert list(desk.dlq.list()) == []
    assert (letter.priority, letter.replays) == (3, 0)


def test_a_replay_restores_what_was_published_and_counts(desk: Desk) -> None:
    orders = desk.orders
    orders.exhaust.apply_async(task_id="exhaust", priority=3, headers={"customer": "7"}, expires=3600)
    (sent,) = desk.deliveries(desk.queue)
    worker = desk.start()
    desk.wait_dead(1)
    worker.stop()
    journal = Keys(prefix="selfheal", app=desk.name).journal("exhaust")
    desk.leases.zadd(journal, {"of a start that never ended": 1})

    desk.dlq.replay()

    assert not desk.leases.exists(journal)
    (back,) = desk.deliveries(desk.queue)
    assert back["headers"][headers.REPLAYS] == 1
    assert back["headers"]["id"] == "exhaust"
    assert (back["headers"]["retries"], back["headers"]["eta"], back["headers"]["expires"]) == (0, None, None)
    assert back["headers"]["customer"] == "7"
    assert DEATH_HEADER not in back["headers"]
    for name in ("priority", "correlation_id", "reply_to"):
        assert back["properties"].get(name) == sent["properties"].get(name)
    assert list(desk.dlq.list()) == []


def test_a_task_that_always_fails_is_replayed_three_times_and_then_by_force_only(redis_desk: Desk) -> None:
    desk = redis_desk
    desk.orders.charge.apply_async((str(desk.gate), 7), task_id="failing")
    desk.start()
    for replays in range(3):
        desk.wait("it is dead", lambda replays=replays: [one.replays for one in desk.dlq.list()] == [replays])
        assert desk.dlq.replay().replayed == 1
    desk.wait("it is dead", lambda: [one.replays for one in desk.dlq.list()] == [3])

    refused = desk.dlq.replay()

    assert (refused.replayed, refused.refused, refused.is_complete) == (0, 1, False)
    assert desk.dlq.replay(force=True).replayed == 1
    desk.wait("it is dead", lambda: [one.replays for one in desk.dlq.list()] == [4])
    assert desk.events() == Counter({"failing": 5})


def test_what_stalled_too_often_begins_with_all_its_starts_again(redis_desk: Desk) -> None:
    desk = redis_desk
    desk.settings["selfheal_max_stalls"] = 0
    desk.orders.poison.apply_async(task_id="poison")
    desk.start()
    desk.wait_dead(1)
    assert desk.events() == Counter({"poison": 1})

    desk.dlq.replay()

    desk.wait("it is dead again", lambda: [one.replays for one in desk.dlq.list()] == [1])
    assert desk.events() == Counter({"poison": 2})


def check_rate(desk: Desk, count: int, rate: float, *, most: float) -> None:
    """Replays are never sooner than asked for; how much later they may be is a matter of the machine."""
    desk.orders.app.amqp.queues[desk.queue](desk.orders.app.connection_for_write().default_channel).declare()
    ids = desk.bury(count)

    began = time.monotonic()
    report = desk.dlq.replay(rate=rate)
    took = time.monotonic() - began

    assert report.replayed == count
    # The first goes at once.
    assert (count - 1) / rate <= took <= most * count / rate
    assert Counter(envelope["headers"]["id"] for envelope in desk.deliveries(desk.queue)) == Counter(ids)
    assert list(desk.dlq.list()) == []


def test_a_replay_keeps_its_rate(desk: Desk) -> None:
    check_rate(desk, 500, 250, most=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_long_replay_keeps_its_rate(desk: Desk) -> None:
    check_rate(desk, 10_000, 500, most=1.1)


def check_killed_replay(desk: Desk, count: int, rate: float) -> None:
    """A worker takes what is replayed, so that a message that was sent twice shows by its second start."""
    worker = desk.start(concurrency=2, prefetch=20)
    ids = desk.bury(count)
    replaying = desk.start_cli("replay", "--rate", str(rate))
    desk.wait("half of them are replayed", lambda: len(desk.dlq) <= count // 2)

    replaying.kill()
    replaying.wait(timeout=30)
    again = desk.cli("replay", "--json")

    assert again.returncode == 0, again.stderr
    assert 0 < json.loads(again.stdout)["replayed"] < count
    desk.wait("all have started", lambda: len(desk.events()) == count, patience=60 + count / 20)
    desk.wait("nothing is left", lambda: desk.deliveries(desk.queue) == [] and len(desk.dlq) == 0)
    for task_id in ids[:: max(1, count // 20)]:
        assert desk.orders.app.AsyncResult(task_id).get(timeout=30) == task_id
    # A copy that came twice would have started by now, or would wait for the lease of the first.
    worker.stop()
    assert desk.events() == Counter(ids)


@pytest.mark.parametrize("kind", ["redis", "classic"])
def test_a_replay_that_is_killed_half_way_and_started_again_loses_and_doubles_nothing(kind, new_desk) -> None:
    check_killed_replay(new_desk(kind), 500, 100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_long_replay_that_is_killed_half_way_loses_and_doubles_nothing(desk: Desk) -> None:
    check_killed_replay(desk, 10_000, 500)
