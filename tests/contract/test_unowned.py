"""Deliveries without an owner record: of plain workers, whose duty kombu's own sweep no longer does on our channels."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Exchange, Queue

from celery_selfheal.keys import Keys
from celery_selfheal.plugin.brokers.layout import layout_of
from celery_selfheal.plugin.brokers.unowned import UnownedDeliveries
from celery_selfheal.sessions.redis import RedisDeliveryStore
from celery_selfheal.testing import RedisServer
from contract.benches import ADDRESS, KEYS, UNACKED, Broker, a_tag

HOURS = timedelta(hours=2)  # the visibility timeout is one


@pytest.fixture
def broker(client: redis.Redis) -> Broker:
    return Broker(client)


@pytest.fixture
def unowned(server: RedisServer, client: redis.Redis, keys: Keys) -> UnownedDeliveries:
    app = Celery("shop", broker=server.url(), set_as_current=False)
    topic = Exchange("news", type="topic")
    app.conf.task_queues = [Queue("q"), Queue("sport", topic, "#.sport"), Queue("all", topic, "#")]
    with app.connection_for_write() as connection:
        for queue in app.conf.task_queues:
            queue(connection.default_channel).declare()
    layout = layout_of(app)
    assert layout is not None
    return UnownedDeliveries(app, RedisDeliveryStore(client, keys, unacked=UNACKED, address=ADDRESS), layout)


def hold(broker: Broker, entry: object, *, tag: str = "kombu-tag", age: timedelta = HOURS) -> str:
    """As a worker without the plugin keeps a message that it has taken."""
    seconds, _ = broker.client.time()
    broker.client.zadd(UNACKED.index, {tag: seconds - age.total_seconds()})
    if entry is not None:
        broker.client.hset(UNACKED.unacked, tag, entry if isinstance(entry, bytes) else json.dumps(entry))
    return tag


def message(task_id: str = "t1", *, priority: int = 0) -> dict[str, Any]:
    return {"body": "W10=", "headers": {"id": task_id, "task": "shop.pay"}, "properties": {"priority": priority}}


def waiting(broker: Broker, name: str = "q") -> list[str]:
    return [json.loads(raw)["headers"]["id"] for raw in broker.waiting(name)]


def test_message_of_a_dead_plain_worker_goes_back_to_its_queue(unowned: UnownedDeliveries, broker: Broker) -> None:
    tag = hold(broker, [message(), "", "q"])

    ((envelope, restored_tag),) = unowned.restore_overdue(limit=10)

    assert (envelope.task_id, restored_tag) == ("t1", tag)
    assert waiting(broker) == ["t1"]
    assert broker.held() == {}
    assert unowned.restore_overdue(limit=10) == []


def test_topic_message_goes_to_every_queue_that_its_key_reaches(unowned: UnownedDeliveries, broker: Broker) -> None:
    """Stock kombu keeps exchange and key, and of several holders each restores to all of them."""
    hold(broker, [message(), "news", "de.sport"])

    unowned.restore_overdue(limit=10)

    assert (waiting(broker, "sport"), waiting(broker, "all")) == (["t1"], ["t1"])


def test_priority_is_kept(unowned: UnownedDeliveries, broker: Broker) -> None:
    hold(broker, [message(priority=9), "", "q"])

    unowned.restore_overdue(limit=10)

    assert waiting(broker, "q\x06\x169") == ["t1"]


def test_message_in_time_stays_where_it_is(unowned: UnownedDeliveries, broker: Broker) -> None:
    hold(broker, [message(), "", "q"], age=timedelta(minutes=59))

    assert unowned.restore_overdue(limit=10) == []
    assert len(broker.held()) == 1


def test_delivery_with_an_owner_is_left_to_its_owner(unowned: UnownedDeliveries, broker: Broker) -> None:
    tag = hold(broker, [message(), "", "q"], tag=a_tag("w1"))
    broker.client.hset(KEYS.owned("w1"), tag, "1 q")

    assert unowned.restore_overdue(limit=10) == []
    assert set(broker.held()) == {tag}


@pytest.mark.parametrize("body", [json.dumps(message()).encode(), b'{"cut', b"\xff", b"[" * 100_000])
def test_our_own_delivery_whose_owner_record_is_gone_comes_back_as_it_was(
    unowned: UnownedDeliveries, broker: Broker, body: bytes
) -> None:
    hold(broker, b"[" + body + b',"","q"]', tag=a_tag("w1"))

    assert len(unowned.restore_overdue(limit=10)) == 1

    (raw,) = broker.waiting()
    assert raw == body or waiting(broker) == ["t1"]


@pytest.mark.parametrize("entry", [None, b"", b"no entry", b"[1]", b"7", b'{"a": 1}'], ids=repr)
def test_what_cannot_be_restored_does_not_keep_the_others(
    unowned: UnownedDeliveries, broker: Broker, entry: bytes | None
) -> None:
    """A hash that somebody deleted leaves its index behind; and every sweep would fail at it."""
    strange = hold(broker, entry, tag="strange", age=2 * HOURS)
    hold(broker, [message(), "", "q"])

    assert len(unowned.restore_overdue(limit=10)) == 1

    assert waiting(broker) == ["t1"]
    assert set(broker.held()) == ({strange} if entry is not None else set())


def test_place_in_the_index_of_nothing_is_taken_away(unowned: UnownedDeliveries, broker: Broker) -> None:
    hold(broker, None)

    unowned.restore_overdue(limit=10)

    assert broker.client.zcard(UNACKED.index) == 0


def test_message_without_a_known_queue_is_kept(unowned: UnownedDeliveries, broker: Broker) -> None:
    tag = hold(broker, [message(), "nobody's exchange", "nowhere"])

    assert unowned.restore_overdue(limit=10) == []

    assert set(broker.held()) == {tag}
