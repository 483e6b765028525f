"""``DeadLetterQueue`` on kombu's in-memory transport, which keeps nothing but what it is told to."""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue
from kombu.message import Message

from celery_selfheal import DeadLetterQueue, headers
from celery_selfheal.clock import utc_now
from celery_selfheal.dead_letter import DEATH_HEADER, Death
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.plugin.publisher import Outgoing, copy_of, least_countdown

BODY = b'[[7], {}, {"chain": null}]'


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app whose queues are its own: the memory of the transport is shared by all of the process."""
    name = f"shop-{uuid.uuid4().hex[:8]}"
    app = Celery(name, broker="memory://", set_as_current=False)
    app.conf.task_default_queue = f"{name}-orders"
    yield app
    app.close()


@pytest.fixture
def dlq(app: Celery) -> DeadLetterQueue:
    return DeadLetterQueue(app)


def bury(app: Celery, task_id: str, *, into: str | None = None, **changes: Any) -> None:
    known = {"task": "shop.charge", "reason": "exhausted", "exception": "ConnectionError", "attempts": 6}
    origin = {"queue": app.conf.task_default_queue, "routing_key": app.conf.task_default_queue}
    death = Death(**{"id": task_id, **known, **origin, "died_at": utc_now().isoformat(), **changes})
    message = Outgoing(
        body=BODY,
        content_type="application/json",
        content_encoding="utf-8",
        headers={"id": task_id, "task": death.task, "retries": 5, "customer": "7", DEATH_HEADER: death.header()},
        properties={"correlation_id": task_id, "reply_to": "r1", "priority": 3, "delivery_mode": 2},
        exchange="",
        routing_key=into or plugin_of(app).dead_letter_queue,
    )
    plugin_of(app).publisher.send_all([message])


def take(app: Celery, queue: str | None = None) -> list[Any]:
    found = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        while (message := Queue(queue or app.conf.task_default_queue, channel=channel).get(no_ack=True)) is not None:
            found.append(message)
    return found


def test_a_queue_that_is_not_there_yet_is_empty(dlq: DeadLetterQueue) -> None:
    assert len(dlq) == 0
    assert list(dlq.list()) == []
    assert dlq.get("a1") is None
    assert dlq.replay().matched == 0
    assert dlq.drop() == 0


def test_reading_takes_nothing_out_and_changes_no_order(app: Celery, dlq: DeadLetterQueue) -> None:
    for n in range(250):
        bury(app, f"a{n}")

    for _ in range(2):
        assert [letter.id for letter in dlq.list()] == [f"a{n}" for n in range(250)]
    assert len(dlq) == 250


def test_a_reading_that_is_broken_off_leaves_everything_there(app: Celery, dlq: DeadLetterQueue) -> None:
    for n in range(3):
        bury(app, f"a{n}")

    assert [letter.id for letter in dlq.list(limit=1)] == ["a0"]
    letters = dlq.list()
    next(letters)
    letters.close()

    assert {letter.id for letter in dlq.list()} == {"a0", "a1", "a2"}


def test_an_entry_tells_all_that_is_known(app: Celery, dlq: DeadLetterQueue) -> None:
    bury(app, "a1", text="no bank", stalls=1)

    letter = dlq.get("a1")

    assert letter is not None
    assert (letter.task, letter.reason, letter.exception, letter.text) == (
        *("shop.charge", "exhausted", "ConnectionError"),
        "no bank",
    )
    assert (letter.attempts, letter.stalls, letter.replays) == (6, 1, 0)
    assert letter.queue == app.conf.task_default_queue
    assert letter.body == BODY


def test_filters_are_meant_together(app: Celery, dlq: DeadLetterQueue) -> None:
    day_ago = (utc_now() - timedelta(days=1)).isoformat()
    bury(app, "a1", died_at=day_ago)
    bury(app, "a2", died_at=day_ago, reason="stalled")
    bury(app, "a3", task="shop.ship")

    def ids(**filters: Any) -> list[str]:
        return [letter.id for letter in dlq.list(**filters)]

    assert ids(id="a1") == ["a1"]
    assert ids(id=["a1", "a3"]) == ["a1", "a3"]
    assert ids(older_than=timedelta(hours=1)) == ids(older_than=3600) == ["a1", "a2"]
    assert ids(newer_than=3600) == ["a3"]
    assert ids(older_than=3600, reason="stalled") == ["a2"]
    assert ids(task="*.ship", limit=5) == ["a3"]


def test_a_replay_sends_the_message_back_as_it_was_published(app: Celery, dlq: DeadLetterQueue) -> None:
    bury(app, "a1")
    bury(app, "a2")

    report = dlq.replay(id="a2")

    (back,) = take(app)
    assert report.replayed == 1
    assert back.body == BODY
    assert back.headers == {
        "id": "a2",
        "task": "shop.charge",
        "customer": "7",
        "retries": 0,
        "eta": None,
        "expires": None,
        headers.REPLAYS: 1,
    }
    assert back.properties["priority"] == 3
    assert (back.properties["correlation_id"], back.properties["reply_to"]) == ("a2", "r1")
    assert back.delivery_info["routing_key"] == app.conf.task_default_queue
    assert [letter.id for letter in dlq.list()] == ["a1"]


def test_a_replay_goes_to_no_other_queue_that_its_exchange_feeds(app: Celery, dlq: DeadLetterQueue) -> None:
    news = Exchange(f"{app.main}-news", type="fanout")
    app.conf.task_queues = [Queue(f"{app.main}-{n}", news) for n in range(2)]
    with app.connection_for_write() as connection:
        for queue in app.conf.task_queues:
            queue(connection.default_channel).declare()
    bury(app, "a1", exchange=news.name, routing_key="any", queue=f"{app.main}-1")

    dlq.replay()

    assert [message.headers["id"] for message in take(app, f"{app.main}-1")] == ["a1"]
    assert take(app, f"{app.main}-0") == []


def test_twins_of_one_message_are_shown_and_replayed_once(app: Celery, dlq: DeadLetterQueue) -> None:
    for died_at in ("2026-07-01T11:00:00+00:00", "2026-07-01T11:00:05+00:00"):
        bury(app, "a1", died_at=died_at)
    bury(app, "a1", replays=1)

    assert [(letter.id, letter.replays) for letter in dlq.list()] == [("a1", 0), ("a1", 1)]
    assert dlq.replay(limit=1).replayed == 1
    assert [(letter.id, letter.replays) for letter in dlq.list()] == [("a1", 1)]
    assert len(take(app)) == 1


def test_a_message_of_a_stranger_is_shown_and_dropped_but_not_replayed(app: Celery, dlq: DeadLetterQueue) -> None:
    with app.producer_or_acquire() as producer:
        producer.publish(b"hello", routing_key=dlq.queue, content_type="text/plain", content_encoding="utf-8")

    (letter,) = dlq.list()
    assert (letter.id.partition(":")[0], letter.reason, letter.body) == ("raw", "", b"hello")
    assert dlq.replay(force=True).unroutable == 1
    assert dlq.drop(id=letter.id) == 1
    assert len(dlq) == 0


def test_dropping_counts_first_if_asked(app: Celery, dlq: DeadLetterQueue) -> None:
    for n in range(3):
        bury(app, f"a{n}")

    assert dlq.drop(dry_run=True) == 3
    assert dlq.drop(limit=2) == 2
    assert [letter.id for letter in dlq.list()] == ["a2"]


def test_an_export_holds_the_whole_message(app: Celery, dlq: DeadLetterQueue) -> None:
    bury(app, "a1")

    (line,) = map(json.loads, dlq.export())

    assert (line["id"], line["reason"]) == ("a1", "exhausted")
    assert base64.b64decode(line["message"]["body"]) == BODY
    assert line["message"]["headers"]["customer"] == "7"
    assert line["message"]["properties"]["reply_to"] == "r1"
    assert len(dlq) == 1


def test_another_queue_may_be_named(app: Celery) -> None:
    bury(app, "a1", into=f"{app.main}-other")

    assert [letter.id for letter in DeadLetterQueue(app, f"{app.main}-other").list()] == ["a1"]
    assert len(DeadLetterQueue(app)) == 0


def test_a_copy_of_a_compressed_message_says_that_it_is_unpacked() -> None:
    packed = zlib.compress(BODY)

    def message(body: bytes) -> Message:
        return Message(body=body, headers={"compression": "application/x-gzip", "id": "a1"})

    unpacked = copy_of(message(packed), headers=message(packed).headers, exchange="", routing_key="q")
    broken = copy_of(message(packed[:-9]), headers=message(packed).headers, exchange="", routing_key="q")

    assert (unpacked.body, unpacked.headers) == (BODY, {"id": "a1"})
    assert (broken.body, broken.headers["compression"]) == (packed[:-9], "application/x-gzip")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "binary", "no-such", None])
def test_a_body_that_the_driver_has_decoded_is_encoded_again(encoding: str | None) -> None:
    message = Message(body="Grüße", content_encoding=encoding)

    body = copy_of(message, headers={}, exchange="", routing_key="q").body

    assert body == "Grüße".encode("latin-1" if encoding == "latin-1" else "utf-8")


@pytest.mark.parametrize(("seconds", "sent"), [(None, None), (0, 0), (0.3, 1.0), (1.5, 1.5)])
def test_quorum_queues_are_asked_for_whole_seconds_only(app: Celery, seconds: Any, sent: Any) -> None:
    app.conf.update(broker_url="amqp://", task_default_queue_type="quorum")

    assert least_countdown(app, seconds) == sent


def test_other_queues_wait_for_fractions(app: Celery) -> None:
    assert least_countdown(app, 0.3) == 0.3
