"""The fetch decodes nothing: what no worker can read leaves its queue unharmed, and the worker lives on."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from celery_selfheal.agents.envelope import Envelope
from integration.fetch.mill import DEAD_LETTERS, QUEUE, Mill

LARGE_BYTES = 8 * 1024 * 1024


def message_of(mill: Mill, **changes: Any) -> bytes:
    """A message as kombu would have written it, but for the changes."""
    mill.send(1, queue="scratch")
    fields = json.loads(mill.redis.rpop("scratch"))
    mill.sent.pop()
    return json.dumps({**fields, **changes}).encode()


def unreadable(mill: Mill, kind: str) -> bytes:
    cut = base64.b64encode(b'[[0.0], {}, {"callbacks": null}]')[:-5].decode()
    return {
        "text": lambda: b"no message at all",
        "empty": lambda: b"",
        "binary": lambda: bytes(range(256)),
        "number": lambda: b"7",
        "no properties": lambda: b'{"body": "", "headers": {}}',
        "nested": lambda: b"[" * 100_000,
        "truncated base64": lambda: message_of(mill, body=cut),
        "no json in it": lambda: message_of(mill, body=base64.b64encode(b"[[0.0], {}, ").decode()),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["text", "empty", "binary", "number", "no properties", "nested", "truncated base64", "no json in it"]
)
def test_the_unreadable_becomes_a_dead_letter_as_it_was(kind: str, mill: Mill) -> None:
    raw = unreadable(mill, kind)
    worker = mill.start()
    before = mill.send(2)
    mill.redis.lpush(QUEUE, raw)
    after = mill.send(2)

    mill.wait_ended([*before, *after])
    mill.wait("it is a dead letter", lambda: mill.redis.llen(DEAD_LETTERS) == 1)

    envelope = Envelope.decode(mill.redis.lindex(DEAD_LETTERS, 0))
    assert envelope.death.reason == "undecodable"
    assert envelope.death.queue == QUEUE
    if kind in ("truncated base64", "no json in it"):
        assert envelope.fields["body"] == json.loads(raw)["body"]
    else:
        assert base64.b64decode(envelope.fields["body"]) == raw
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
