"""A message that waits is the one that Celery would have sent, and survives as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from kombu.entity import Exchange, Queue

from celery_selfheal import SelfHealTask
from celery_selfheal import headers as names
from celery_selfheal.plugin.install import install
from celery_selfheal.plugin.unsent import Unsent, make_unsent


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = "shop-unsent"
    install(app)
    with app.connection_for_write() as connection:
        # The broker in memory is the process' own.
        connection.default_channel.queue_declare("shop-unsent")
        connection.default_channel.queue_purge("shop-unsent")

    @app.task(base=SelfHealTask, shared=False, name="shop.add")
    def add(x: int, y: int = 0) -> int:
        return x + y

    @app.task(base=SelfHealTask, shared=False, name="shop.total")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    yield app
    app.close()


def waiting(app: Celery) -> int:
    """Messages in the queue."""
    with app.connection_for_read() as connection:
        return int(connection.default_channel._size("shop-unsent"))


def add(app: Celery) -> Any:
    return app.tasks["shop.add"]


def total(app: Celery) -> Any:
    return app.tasks["shop.total"]


def canvases(app: Celery) -> dict[str, Any]:
    one, two = add(app).s(1, 1), add(app).s(2, 2)
    return {
        "task": one,
        "chain": chain(one, add(app).s(3)),
        "group": group(one, two),
        "chord": chord([one, two], total(app).s()),
        "chain with a chord": chain(group(one, two), total(app).s(), add(app).s(1)),
        "map": add(app).map([1, 2]),
        "chunks": add(app).chunks([(1, 2), (3, 4)], 1).group(),
    }


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("task", 1),
        ("chain", 1),
        ("group", 2),
        ("chord", 2),
        ("chain with a chord", 2),
        ("map", 1),
        ("chunks", 2),
    ],
)
def test_nothing_of_a_canvas_reaches_the_broker(app: Celery, name: str, count: int) -> None:
    result, made = make_unsent(app, canvases(app)[name].apply_async)

    assert waiting(app) == 0
    assert len(made) == count
    assert result.id
    assert len({one.task_id for one in made}) == count


def test_a_message_is_the_same_as_the_one_that_celery_sends(app: Celery) -> None:
    signature = add(app).s(1, y=2).set(task_id="pay-1", priority=3, countdown=60, expires=600, headers={"tenant": "x"})
    _, (made,) = make_unsent(app, signature.apply_async)

    signature.apply_async()
    with app.connection_for_read() as connection:
        sent = connection.default_channel._get("shop-unsent")

    unsteady = ("eta", "expires", names.PUBLISHED)
    assert {k: v for k, v in made.outgoing.headers.items() if k not in unsteady} == {
        k: v for k, v in sent["headers"].items() if k not in unsteady
    }
    assert json.loads(made.outgoing.body) == [[1], {"y": 2}, json.loads(made.outgoing.body)[2]]
    assert made.outgoing.content_type == sent["content-type"]
    assert made.outgoing.properties["priority"] == 3
    assert made.outgoing.properties["expiration"] == pytest.approx(600, abs=1)
    assert made.outgoing.routing_key == sent["properties"]["delivery_info"]["routing_key"]


def test_the_instant_of_publication_is_fixed_when_the_message_is_made(app: Celery) -> None:
    before = datetime.now(timezone.utc)

    _, (made,) = make_unsent(app, add(app).s(1).apply_async)

    published = datetime.fromisoformat(made.outgoing.headers[names.PUBLISHED])
    assert before <= published <= datetime.now(timezone.utc)
    assert Unsent.decode(made.encode()).outgoing.headers[names.PUBLISHED] == made.outgoing.headers[names.PUBLISHED]


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_message_survives_as_text_whatever_its_coding(app: Celery, serializer: str, compression: str | None) -> None:
    signature = add(app).s("ü").set(serializer=serializer, compression=compression, headers={"since": "2026"})

    _, (made,) = make_unsent(app, signature.apply_async)

    assert Unsent.decode(made.encode()) == made


def test_a_queue_of_its_own_is_remembered_with_its_arguments(app: Celery) -> None:
    arguments = {"x-max-length": 5}
    exchange = Exchange("orders", "topic")
    queue = Queue("orders", exchange, routing_key="order.#", queue_arguments=arguments, max_priority=4)

    _, (made,) = make_unsent(app, add(app).s(1).set(queue=queue).apply_async)
    (read,) = Unsent.decode(made.encode()).entities()

    assert (read.name, read.routing_key, read.max_priority) == ("orders", "order.#", 4)
    assert read.queue_arguments == {"x-max-length": 5}
    assert (read.exchange.name, read.exchange.type) == ("orders", "topic")


def test_arguments_that_cannot_be_serialized_fail_at_once(app: Celery) -> None:
    with pytest.raises(Exception, match="not JSON serializable"):
        make_unsent(app, add(app).s(object()).apply_async)

    add(app).delay(1)

    assert waiting(app) == 1


def test_other_threads_publish_meanwhile_as_ever(app: Celery) -> None:
    import threading

    def publish() -> Any:
        thread = threading.Thread(target=add(app).delay, args=(2,))
        thread.start()
        thread.join()
        return add(app).s(1).apply_async()

    _, made = make_unsent(app, publish)

    assert waiting(app) == 1
    assert len(made) == 1


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"format": 2}', '{"format": 1}', '{"format": 1, "body": 3, "declares": 4}', "not json"],
)
def test_what_is_no_message_of_ours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Unsent.decode(text)
