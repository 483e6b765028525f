"""Everything that can go wrong lands in the dead letter queue, unchanged, with its reason."""

from __future__ import annotations

import base64
import json
from typing import Any

from celery_selfheal.dead_letter import Reason
from integration.dead_letters.desk import Desk


def kept(envelope: dict[str, Any]) -> dict[str, Any]:
    """Of a message what must come through: its body, who it is, and who waits for it."""
    headers, properties = envelope["headers"], envelope["properties"]
    body = envelope["body"]
    body = body.encode() if isinstance(body, str) else body
    return {
        "body": base64.b64decode(body) if properties.get("body_encoding") == "base64" else body,
        "headers": {
            name: value
            for name, value in headers.items()
            if not name.startswith(("selfheal-", "x-")) and name not in ("redelivered", "retries", "eta", "origin")
        },
        "properties": {name: properties.get(name) for name in ("priority", "correlation_id", "reply_to")},
    }


def test_every_final_failure_is_a_dead_letter_with_its_reason_and_the_worker_lives_on(desk: Desk) -> None:
    desk.settings["selfheal_max_stalls"] = 0
    orders = desk.orders
    for name in ("exhaust", "refuse", "acked_early", "reject", "hang", "poison", "not_kept"):
        getattr(orders, name).apply_async(task_id=name, priority=3, headers={"customer": "7"})
    orders.charge.s(str(desk.gate), 7).set(task_id="stamped", stamped_headers=["shop"], shop="berlin").apply_async()
    orders.app.send_task("orders.unknown", (1,), task_id="unknown")
    task = {"task": "orders.ship", "lang": "py"}
    for task_id, body, content_type, encoding in (
        ("not-json", b"not json", "application/json", "utf-8"),
        ("truncated", b'[[7], {}, {"callb', "application/json", "utf-8"),
        ("pickled", b"\x80\x04.", "application/x-python-serialize", "binary"),
    ):
        desk.publish(body, headers={**task, "id": task_id}, content_type=content_type, content_encoding=encoding)
    sent = {envelope["headers"]["id"]: kept(envelope) for envelope in desk.deliveries(desk.queue)}

    worker = desk.start(concurrency=2)
    desk.wait_dead(11)

    letters = {letter.id: letter for letter in desk.dlq.list()}
    assert {task_id: letter.reason for task_id, letter in letters.items()} == {
        "exhaust": "exhausted",
        "refuse": "unrecoverable",
        "acked_early": "exhausted",
        "reject": "rejected",
        "hang": "deadline",
        "poison": "stalled",
        "stamped": "exhausted",
        "unknown": "unknown_task",
        "not-json": "undecodable",
        "truncated": "undecodable",
        "pickled": "undecodable",
    }
    # A retry is a new message, and its body is written anew.
    for task_id in letters.keys() - {"exhaust"}:
        assert kept(dict(letters[task_id].message)) == sent[task_id]
    assert {letter.queue for letter in letters.values()} == {desk.queue}
    assert (letters["exhaust"].attempts, letters["exhaust"].exception) == (2, "ConnectionError")
    assert (letters["poison"].attempts, letters["poison"].stalls) == (0, 1)
    assert letters["stamped"].message["headers"]["stamps"] == {"shop": "berlin"}
    assert letters["reject"].priority == 3
    assert "no bank" in letters["exhaust"].text
    assert "Traceback" in letters["exhaust"].trace
    assert worker.alive
    assert orders.ship.apply_async((8,), task_id="good").get(timeout=30) == 8
    assert orders.app.AsyncResult("exhaust").state == "FAILURE"
    assert isinstance(orders.app.AsyncResult("exhaust").result, ConnectionError)
    # The worker has been there all the time and has left them alone.
    assert len(list(desk.dlq.list())) == 11


def test_what_is_no_message_is_kept_byte_for_byte_and_replayed_as_it_was(redis_desk: Desk) -> None:
    desk = redis_desk
    desk.orders.ship.apply_async((7,), task_id="cut")
    (cut,) = desk.deliveries(desk.queue)
    cut["body"] = cut["body"][:-3]
    desk.redis.delete(desk.queue)
    garbage = [b"\xff\x00garbage", b"[1, 2]", json.dumps(cut).encode(), b"[" * 100_000]
    desk.redis.lpush(desk.queue, *garbage)

    worker = desk.start()
    desk.wait_dead(4)

    letters = list(desk.dlq.list())
    assert {letter.reason for letter in letters} == {Reason.UNDECODABLE.value}
    assert [letter.id.partition(":")[0] for letter in letters] == ["raw", "raw", "cut", "raw"]
    assert letters[2].task == "orders.ship"
    assert [letter.body for letter in letters if letter.id != "cut"] == [garbage[0], garbage[1], garbage[3]]
    assert worker.alive
    worker.stop()

    assert desk.dlq.replay().replayed == 4

    lying = desk.redis.lrange(desk.queue, 0, -1)[::-1]
    assert [lying[0], lying[1], lying[3]] == [garbage[0], garbage[1], garbage[3]]
    assert json.loads(lying[2])["body"] == cut["body"]


def test_a_worker_that_is_told_to_consume_its_dead_letters_refuses_to_start(redis_desk: Desk) -> None:
    worker = redis_desk.start(ready=False, queues=f"{redis_desk.queue},{redis_desk.dlq_name}")

    assert worker.wait(timeout=60) != 0
    assert f"told to consume the dead letter queue '{redis_desk.dlq_name}'" in worker.log_text()


def test_a_dead_letter_that_the_broker_refuses_keeps_its_message_and_is_sent_later_once(classic_desk: Desk) -> None:
    desk = classic_desk
    # An existing queue is used as it is, whatever its arguments.
    with desk.orders.app.connection_for_write() as connection, connection.channel() as channel:
        channel.queue_declare(
            desk.dlq_name,
            durable=True,
            auto_delete=False,
            arguments={"x-max-length": 1, "x-overflow": "reject-publish"},
        )
    desk.orders.refuse.apply_async(task_id="first")
    worker = desk.start()
    desk.wait_dead(1)

    desk.orders.refuse.apply_async(task_id="second")
    worker.wait_log("dead letter of orders.refuse[second] waits")

    assert [letter.id for letter in desk.dlq.list()] == ["first"]
    assert desk.dlq.drop(id="first") == 1
    desk.wait_dead(1)
    assert [letter.id for letter in desk.dlq.list()] == ["second"]
    worker.stop()
    assert desk.deliveries(desk.queue) == []
