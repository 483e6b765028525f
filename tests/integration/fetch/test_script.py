"""The fetch script writes before it takes: wherever it fails, the message is in its list, or owned, or both."""

from __future__ import annotations

import json

import pytest
import redis

from celery_selfheal.keys import Keys, delivery_tag
from celery_selfheal.leases.scripts import source
from celery_selfheal.testing import RedisServer

KEYS = Keys(prefix="selfheal", app="mill")
SESSION = "w1:1:abc"
TAG = delivery_tag(SESSION, 1)
LINES = source("celery_selfheal.sessions", "fetch").splitlines()
# Lua allows nothing between a return and its end.
BREAKABLE = [
    n
    for n, line in enumerate(LINES)
    if line.strip() and not line.startswith("--") and not LINES[n - 1].strip().startswith("return")
]
MESSAGE = b'{"body": "WzFd", "headers": {"id": "m1"}, "properties": {}}'


def fetch(client: redis.Redis, script: str) -> object:
    keys = [KEYS.session(SESSION), "unacked", "unacked_index", KEYS.owned(SESSION), "empty", "celery"]
    return client.eval(script, len(keys), *keys, TAG, json.dumps("empty"), json.dumps("celery"))


@pytest.fixture
def client(server: RedisServer) -> redis.Redis:
    client = server.client()
    client.flushall()
    client.set(KEYS.session(SESSION), "alive")
    client.lpush("celery", MESSAGE)
    return client


@pytest.mark.parametrize("number", BREAKABLE)
def test_an_error_before_any_line_loses_nothing(number: int, client: redis.Redis) -> None:
    script = "\n".join([*LINES[:number], "if true then error('injected') end", *LINES[number:]])

    error = None
    try:
        fetch(client, script)
    except redis.ResponseError as exc:
        error = str(exc)

    waits = client.lrange("celery", 0, -1) == [MESSAGE]
    entry = client.hget("unacked", TAG)
    is_owned = (
        entry is not None
        and json.loads(entry) == [json.loads(MESSAGE), "", "celery"]
        and client.hexists(KEYS.owned(SESSION), TAG)
        and client.zscore("unacked_index", TAG) is not None
    )
    assert waits or is_owned
    # Some lines, such as the last one, are never reached.
    assert is_owned if error is None else "injected" in error


@pytest.mark.parametrize("wrong", ["unacked", "unacked_index", KEYS.owned(SESSION)])
def test_a_key_of_a_wrong_type_loses_nothing(wrong: str, client: redis.Redis) -> None:
    client.set(wrong, "a string")

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        fetch(client, "\n".join(LINES))

    assert client.lrange("celery", 0, -1) == [MESSAGE]


def test_a_worker_whose_session_ran_out_takes_nothing(client: redis.Redis) -> None:
    client.delete(KEYS.session(SESSION))

    assert fetch(client, "\n".join(LINES)) == 0

    assert client.lrange("celery", 0, -1) == [MESSAGE]
    assert client.keys("unacked*") == []
