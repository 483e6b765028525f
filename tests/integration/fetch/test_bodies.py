"""The fetch decodes nothing: what no worker can read leaves its queue unharmed, and the worker lives on."""

from __future__ import annotations

import base64
import json
from typing import Any

from celery_selfheal.agents.envelope import Envelope
from integration.fetch.mill import DEAD_LETTERS, QUEUE, Mill

LARGE_BYTES = 8 * 1024 * 1024


def message_of(mill: Mill, body: str) -> bytes:
    """A message as kombu would have written it, but for its body."""
    mill.send(1, queue="scratch")
    mill.sent.pop()
    return json.dumps({**json.loads(mill.redis.rpop("scratch")), "body": body}).encode()


def test_whatever_is_unreadable_becomes_a_dead_letter_as_it_was(mill: Mill) -> None:
    cut = base64.b64encode(b'[[0.0], {}, {"callbacks": null}]')[:-5].decode()
    no_json = base64.b64encode(b"[[0.0], {}, ").decode()
    # Kept byte for byte: not even their envelope can be understood.
    no_messages = [
        b"no message at all",
        b"",
        bytes(range(256)),
        b"7",
        b"null",
        b"[" * 100_000,
        b'{"body": "", "headers": [], "properties": {}}',
    ]
    # Kept as they are, with the reason in their headers.
    bad_bodies = [
        message_of(mill, cut),
        message_of(mill, no_json),
        b'{"body": "no properties", "headers": {}}',
        b'{"body": 7, "headers": {}, "properties": {}}',
    ]
    worker = mill.start()
    good = mill.send(1)
    for raw in (*no_messages, *bad_bodies):
        mill.redis.lpush(QUEUE, raw)
        good += mill.send(1)

    mill.wait_ended(good)
    mill.wait("all are dead letters", lambda: mill.redis.llen(DEAD_LETTERS) >= len(no_messages) + len(bad_bodies))

    envelopes = [Envelope.decode(entry) for entry in reversed(mill.redis.lrange(DEAD_LETTERS, 0, -1))]
    assert [envelope.death.reason for envelope in envelopes] == ["undecodable"] * len(envelopes)
    assert {envelope.death.queue for envelope in envelopes} == {QUEUE}
    bodies: list[Any] = [envelope.fields["body"] for envelope in envelopes]
    for raw in no_messages:
        bodies.remove(base64.b64encode(raw).decode())
    for raw in bad_bodies:
        bodies.remove(json.loads(raw)["body"])
    assert bodies == []
    mill.wait_drained()
    assert worker.alive
    mill.wait_ended(mill.send(1))


def test_a_body_of_eight_mebibytes_is_run(mill: Mill) -> None:
    worker = mill.start()

    ids = mill.send(2, task="weigh", args=("x" * LARGE_BYTES, LARGE_BYTES))
    mill.wait_ended([*ids, *mill.send(1)])

    mill.wait_drained()
    assert mill.dead() == []
    assert worker.alive
