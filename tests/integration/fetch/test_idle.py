"""What waiting costs a real server."""

from __future__ import annotations

import select
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
import redis

from celery_selfheal.leases.scripts import Script
from celery_selfheal.plugin.brokers.wait import PAUSES_SECONDS, Waiter
from celery_selfheal.plugin.stores import Address, open_client
from celery_selfheal.testing import RedisServer
from integration.fetch.mill import Mill

WATCH_SECONDS = 4.0
WAITERS = 20


def commands(client: redis.Redis, seconds: float) -> Counter[str]:
    """Count what clients send in so many seconds; the fetch goes by its name, and what runs inside scripts by none."""
    fetch = Script(client, "celery_selfheal.sessions", "fetch", address="").sha
    sent: Counter[str] = Counter()
    with client.monitor() as monitor:
        end = time.monotonic() + seconds
        # A living worker beats: a command comes soon.
        for command in monitor.listen():
            name, _, rest = command["command"].partition(" ")
            if command["client_type"] != "lua":
                sent["fetch" if rest.startswith(fetch) else name.upper()] += 1
            if time.monotonic() > end:
                return sent
    raise AssertionError("the monitor ended")


@pytest.mark.parametrize(("steps", "most_a_second"), [([0], 2), ([0, 3, 6, 9], 15)], ids=["one list", "priorities"])
def test_an_idle_worker_asks_seldom(
    steps: list[int],
    most_a_second: int,
    new_mill: Callable[..., Mill],
    record_property: Callable[[str, object], None],
) -> None:
    mill = new_mill(broker_transport_options={"priority_steps": steps})
    mill.start()
    mill.wait_ended(mill.send(1))
    mill.wait_idle()

    sent = commands(mill.redis, WATCH_SECONDS)

    waits = sent["fetch"] + sent["BLMOVE"]
    record_property("figures", f"idle, waiting {waits / WATCH_SECONDS:.1f}/s, all {sent.total() / WATCH_SECONDS:.1f}/s")
    # It may begin one more of each in the last moment.
    assert 0 < waits <= most_a_second * WATCH_SECONDS + 2
    assert sent["BRPOP"] == 0


def test_a_herd_of_idle_workers_is_woken_by_one_message_and_costs_one_answer_each(
    server: RedisServer, record_property: Callable[[str, object], None]
) -> None:
    client = server.client()
    client.flushall()
    address = Address(url=server.url(), ssl=None, setting="broker_url")
    waiters = [Waiter(open_client(address, ttl=timedelta(seconds=10))) for _ in range(WAITERS)]
    client.config_resetstat()
    for waiter in waiters:
        assert waiter.begin("celery")
    deadline = time.monotonic() + 10
    while client.info("clients")["blocked_clients"] < WAITERS:
        assert time.monotonic() < deadline

    before = calls(client)
    came_at = time.monotonic()
    client.lpush("celery", b"message")
    woken = []
    while len(woken) < WAITERS:
        left = [waiter for waiter in waiters if waiter not in woken]
        readable, _, _ = select.select([waiter.socket for waiter in left], [], [], 10)
        assert readable, "some waiters were not woken"
        woken += [waiter for waiter in left if waiter.socket in readable]
    seconds = time.monotonic() - came_at

    assert all(waiter.read() for waiter in waiters)
    assert client.lrange("celery", 0, -1) == [b"message"]
    after = calls(client)
    # Each has asked once, and asks no more until its fetch has looked.
    assert after["blmove"] - before["blmove"] <= WAITERS
    assert seconds < PAUSES_SECONDS[-1] * WAITERS
    record_property("figures", f"{WAITERS} waiters, one message: {WAITERS} woken in {seconds * 1000:.1f} ms")
    for waiter in waiters:
        waiter.close()


def test_a_herd_takes_one_message_once(
    new_mill: Callable[..., Mill], record_property: Callable[[str, object], None]
) -> None:
    mill = new_mill(broker_transport_options={"priority_steps": [0]})
    for n in range(3):
        mill.start(f"w{n}", pool="solo", ready=False)
    mill.wait_idle(workers=3)
    time.sleep(0.2)
    mill.redis.config_resetstat()

    (task_id,) = mill.send(1)
    mill.wait_ended([task_id])
    mill.wait_idle(workers=3)

    counted = calls(mill.redis)
    record_property("figures", f"3 workers, one message: {counted['blmove']} BLMOVE, {counted['rpop']} RPOP")
    assert mill.diary.ids("start") == [task_id]
    assert counted["rpop"] == 1


def calls(client: redis.Redis) -> Counter[str]:
    stats = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()})
