"""What is special about claims in Redis: keys that run out, and scripts that may run twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_selfheal.dedup.port import Finished, Granted, Held
from celery_selfheal.dedup.redis import RedisClaims
from celery_selfheal.errors import StoreError
from celery_selfheal.redis_url import make_client
from celery_selfheal.testing import RedisServer, TcpProxy
from contract.benches import ADDRESS, KEYS, commands, everything
from contract.claims.benches import KEY_TTL, RedisClaimBench, a_job


@pytest.fixture
def bench(client: redis.Redis) -> RedisClaimBench:
    return RedisClaimBench(client)


def test_no_key_stays_for_ever(bench: RedisClaimBench) -> None:
    running, finished, doubtful, late, taken, heir = (a_job(f"key {n}") for n in range(6))
    for job in (running, finished, doubtful, taken):
        bench.store.claim(job)
    bench.store.complete(finished, 1)
    bench.store.mark_dispatched(finished)
    bench.store.complete(late, 1)
    for job, doubt in ((doubtful, True), (taken, False)):
        heir = a_job(job.key)
        held = bench.store.claim(heir)
        assert isinstance(held, Held)
        bench.store.inherit(heir, held, doubt=doubt)

    keys = everything(bench.client)

    assert set(keys) == {KEYS.claim(job.key) for job in (running, finished, doubtful, late, taken)}
    for key in keys:
        assert 0 < bench.client.pttl(key) <= KEY_TTL.total_seconds() * 1000


def test_each_step_is_one_round_trip(bench: RedisClaimBench) -> None:
    bench.store.claim(a_job("warm"))  # the script is loaded
    bench.store.complete(a_job("warm too"), 1)

    with commands(bench.client) as seen:
        job = a_job()
        bench.store.claim(job)
        bench.store.complete(job, 1)

    assert len(seen) == 2


def test_people_see_what_it_is(bench: RedisClaimBench) -> None:
    job = a_job()
    bench.store.claim(job)
    assert bench.client.hget(KEYS.claim(job.key), "status") == b"PROCESSING"

    bench.store.complete(job, {"paid": True})

    assert bench.client.hget(KEYS.claim(job.key), "status") == b"COMPLETED"
    assert bench.client.hget(KEYS.claim(job.key), "payload") == b'{"paid": true}'


@pytest.fixture
def lossy(server: RedisServer, client: redis.Redis) -> Iterator[tuple[RedisClaims, TcpProxy]]:
    """A store behind a network that swallows the reply to the next script, and the network."""
    with TcpProxy("127.0.0.1", server.port) as proxy:
        far: Any = make_client(f"redis://127.0.0.1:{proxy.port}/0", timeout=5.0)
        yield RedisClaims(far, KEYS, ttl=KEY_TTL, address=ADDRESS), proxy
        far.close()


def test_steps_are_repeated_when_their_replies_are_lost(lossy: tuple[RedisClaims, TcpProxy]) -> None:
    """By the client, as it is made for the stores."""
    store, proxy = lossy
    job, heir, failed = a_job(), a_job(), a_job("another")

    def lost(step: Any) -> Any:
        proxy.drop_reply(1, request=b"EVALSHA")
        return step()

    assert lost(lambda: store.claim(job)) == Granted()
    held = store.claim(heir)
    assert isinstance(held, Held)
    assert lost(lambda: store.inherit(heir, held, doubt=False))
    assert lost(lambda: store.complete(heir, "receipt"))
    lost(lambda: store.mark_dispatched(heir))
    store.claim(failed)
    lost(lambda: store.withdraw(failed))

    assert proxy.replies_dropped == 5
    assert store.claim(job) == Finished(payload="receipt", task_id="t1", dispatched=True)
    assert store.claim(a_job("another")) == Granted()


def test_server_that_is_away_is_named(lossy: tuple[RedisClaims, TcpProxy]) -> None:
    store, proxy = lossy
    proxy.refuse()

    with pytest.raises(StoreError, match="claim"):
        store.claim(a_job())
