from __future__ import annotations

import base64
import json
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from celery import Celery
from celery.signals import before_task_publish
from kombu.transport import memory

from celery_selfheal.plugin.brokers.unsent import message_of

NOWHERE = "redis://127.0.0.1:1/0"  # nothing listens there, and nothing may ask


@pytest.fixture
def app() -> Any:
    app = Celery("shop", broker=NOWHERE, set_as_current=False)

    @app.task(name="shop.pay", shared=False)
    def pay(*args: Any, **kwargs: Any) -> None: ...

    app.finalize()
    return app


def sign(app: Any, *args: Any, **options: Any) -> Any:
    return app.tasks["shop.pay"].signature(args, **options)


def test_message_is_whole_and_no_server_was_asked(app: Any) -> None:
    message = message_of(app, sign(app, 7, task_id="pay-1", priority=3, queue="slow", headers={"tenant": "acme"}))

    assert json.loads(base64.b64decode(message["body"]))[0] == [7]
    assert message["content-type"] == "application/json"
    assert {name: message["headers"][name] for name in ("id", "task", "retries", "tenant")} == {
        "id": "pay-1",
        "task": "shop.pay",
        "retries": 0,
        "tenant": "acme",
    }
    properties = message["properties"]
    assert properties["delivery_info"] == {"exchange": "", "routing_key": "slow"}
    assert (properties["priority"], properties["delivery_mode"], properties["body_encoding"]) == (3, 2, "base64")
    assert properties["delivery_tag"]


def test_each_message_has_a_delivery_tag_of_its_own(app: Any) -> None:
    tags = {message_of(app, sign(app))["properties"]["delivery_tag"] for _ in range(20)}

    assert len(tags) == 20


def test_options_of_the_transport_are_heeded(app: Any) -> None:
    app.conf.broker_transport_options = {"body_encoding": None, "visibility_timeout": 60}

    message = message_of(app, sign(app, 7))

    assert json.loads(message["body"])[0] == [7]
    assert message["properties"]["body_encoding"] is None


def test_serializer_and_compression_are_heeded(app: Any) -> None:
    message = message_of(app, sign(app, 7, compression="zlib", serializer="pickle"))

    assert message["headers"]["compression"] == "application/x-gzip"
    assert message["content-type"] == "application/x-python-serialize"


def test_receivers_of_the_publication_may_still_add_headers(app: Any) -> None:
    def stamp(headers: Any = None, **_: Any) -> None:
        headers["stamped"] = True

    before_task_publish.connect(stamp)
    try:
        assert message_of(app, sign(app))["headers"]["stamped"] is True
    finally:
        before_task_publish.disconnect(stamp)


def test_what_cannot_be_serialized_is_told(app: Any) -> None:
    with pytest.raises(Exception, match="not JSON serializable"):
        message_of(app, sign(app, object()))


def test_event_of_the_publication_goes_out_by_the_applications_own_producer(app: Any) -> None:
    app.conf.task_send_sent_event = True
    producer = mock.MagicMock()

    @contextmanager
    def producer_or_acquire(given: Any = None) -> Any:
        yield given or producer

    with mock.patch.object(app, "producer_or_acquire", producer_or_acquire):
        message = message_of(app, sign(app, task_id="pay-1"))

    assert message["headers"]["id"] == "pay-1"
    (publication,) = producer.channel.basic_publish.call_args_list
    assert publication.kwargs["routing_key"] == "task.sent"
    assert json.loads(publication.args[0]["body"])["uuid"] == "pay-1"


def test_brokers_in_memory_of_the_same_process_are_left_alone(app: Any) -> None:
    """Kombu's own transport in memory empties all its queues when any channel closes."""
    with Celery("other", broker="memory://", set_as_current=False).connection() as connection:
        connection.SimpleQueue("waiting").put({"kept": True})
        before = dict(memory.Channel.queues)

        message_of(app, sign(app))

        assert memory.Channel.queues == before
        assert connection.SimpleQueue("waiting").get(timeout=1).payload == {"kept": True}
