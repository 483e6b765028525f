"""Whether a start still holds its lease, as others ask it."""

from __future__ import annotations

from typing import Any

import pytest

from celery_selfheal.errors import StoreError
from celery_selfheal.leases.memory import MemoryLeaseStore
from celery_selfheal.leases.port import LeaseInquiry
from celery_selfheal.leases.postgres import PostgresLeaseStore
from celery_selfheal.leases.redis import RedisLeaseStore
from celery_selfheal.redis_url import make_client
from celery_selfheal.testing import TcpProxy
from contract.benches import ADDRESS, DONE_TTL, KEYS, MAX_STALLS, TTL, LeaseBench, MemoryBench, RedisBench, a_start
from contract.postgres_bench import PostgresBench


def of_memory(store: MemoryLeaseStore) -> LeaseInquiry:
    return store


def of_redis(store: RedisLeaseStore) -> LeaseInquiry:
    return store


def of_postgres(store: PostgresLeaseStore) -> LeaseInquiry:
    return store


@pytest.fixture(params=["memory", "redis", "postgres"])
def bench(request: pytest.FixtureRequest) -> LeaseBench:
    if request.param == "postgres":
        return PostgresBench(request.getfixturevalue("engine"))
    return MemoryBench() if request.param == "memory" else RedisBench(request.getfixturevalue("client"))


def is_held(bench: LeaseBench, task_id: str, token: str) -> bool:
    store: Any = bench.store
    answer = store.is_held(task_id, token)
    assert isinstance(answer, bool)
    return answer


def test_lease_is_held_by_its_holder_only(bench: LeaseBench) -> None:
    start, twin = a_start("t1"), a_start("t1")
    bench.store.acquire(start)
    bench.store.acquire(twin)

    assert is_held(bench, "t1", start.token)
    assert not is_held(bench, "t1", twin.token)
    assert not is_held(bench, "t2", start.token)


def test_lease_that_ran_out_or_was_given_back_is_not_held(bench: LeaseBench) -> None:
    lost, ended = a_start("t1"), a_start("t2")
    for start in (lost, ended):
        bench.store.acquire(start)

    bench.run_out("t1")
    bench.store.release(ended, ended=True, marker=True, state="success")

    assert not is_held(bench, "t1", lost.token)
    assert not is_held(bench, "t2", ended.token)


def test_question_changes_nothing(bench: LeaseBench) -> None:
    start = a_start("t1")
    bench.store.acquire(start)
    bench.shorten("t1")
    before = bench.remaining("t1")

    is_held(bench, "t1", start.token)

    assert bench.remaining("t1") <= before


def test_store_that_is_away_says_neither_yes_nor_no() -> None:
    with TcpProxy("127.0.0.1", 1) as proxy:
        client = make_client(f"redis://127.0.0.1:{proxy.port}/0", timeout=1.0)
        store = RedisLeaseStore(client, KEYS, ttl=TTL, max_stalls=MAX_STALLS, done_ttl=DONE_TTL, address=ADDRESS)

        with pytest.raises(StoreError, match="is_held"):
            store.is_held("t1", "token")
