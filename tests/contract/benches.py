"""Stores on a bench: what a test must do to one from outside, be it Redis or plain dictionaries."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import redis

from celery_selfheal.keys import Keys, UnackedKeys, delivery_tag
from celery_selfheal.leases.memory import MemoryLeaseStore
from celery_selfheal.leases.port import LeaseStore, Start
from celery_selfheal.leases.redis import RedisLeaseStore
from celery_selfheal.leases.scripts import Script
from celery_selfheal.retry_budget import RetryBudget

KEYS = Keys(prefix="selfheal", app="shop")
UNACKED = UnackedKeys(unacked="unacked", index="unacked_index")
ADDRESS = "redis://test"

TTL = timedelta(hours=1)  # nothing runs out by itself: each test says when
DONE_TTL = timedelta(hours=2)
MAX_STALLS = 2
BUDGET = RetryBudget(share=0.5, per_second=0.1)  # six retries at once, then one in ten seconds

_numbers = itertools.count(1)


def a_start(
    task_id: str = "t1",
    *,
    session: str = "w1",
    retries: int = 0,
    message: str = "m1",
    after: Start | None = None,
    tag: str | None = None,
    **changes: Any,
) -> Start:
    """Announce a start with a token of its own; copies of one message share ``message`` and ``retries``."""
    number = next(_numbers)
    attempt = f"shop.pay:{retries}"
    start = Start(
        task_id=task_id,
        task_name="shop.pay",
        token=f"token-{number}",
        session=session,
        attempt=attempt,
        marker=f"{task_id}:{attempt}:{message}",
        predecessor=after.token if after else None,
        tag=tag,
        node=f"celery@{session}",
        pid=100 + number,
    )
    return replace(start, **changes)


def a_tag(session: str = "w1") -> str:
    """Mint a delivery tag that was not given before."""
    return delivery_tag(session, next(_numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What a store says of some tasks: an entry a task, or a counter."""

    holders: list[str | None]
    unfinished: list[set[str]]
    counts: list[int]
    owned_tags: set[str]


class LeaseBench(Protocol):
    """A lease store and the hand of fate."""

    store: LeaseStore

    def run_out(self, task_id: str) -> None:
        """The lease of the task expires now, and its lock key with it."""

    def lose_lock(self, lock_key: str) -> None:
        """The lock key alone is gone, as by an eviction."""

    def lock_holder(self, lock_key: str) -> str | None:
        """Token that has the lock key."""

    def lose_marker(self, marker: str) -> None:
        """The done marker expires now."""

    def leave_marker(self, marker: str, token: str) -> None:
        """A done marker is there, whoever left it."""

    def deliver(self, start: Start) -> None:
        """The worker has taken the message ``start.tag``."""

    def take_away(self, start: Start) -> None:
        """The message ``start.tag`` was restored or settled."""

    def owns(self, start: Start) -> bool:
        """Whether the delivery is unsettled and the worker's."""

    def look(self, task_ids: Sequence[str], events: Sequence[str]) -> Picture:
        """All of it at once."""

    def holder(self, task_id: str) -> str | None:
        """Token that holds the lease."""

    def unfinished(self, task_id: str) -> set[str]:
        """Tokens in the journal."""

    def remaining(self, task_id: str) -> timedelta:
        """Until the lease expires."""

    def shorten(self, task_id: str) -> None:
        """Nearly all of the lease's time has passed."""

    def count(self, event: str) -> int:
        """Value of a counter."""

    def earn_for(self, duration: timedelta) -> None:
        """So much time has passed for the retry budget."""


class RedisBench:
    """``LeaseBench`` on a real server."""

    def __init__(self, client: redis.Redis, *, budget: RetryBudget | None = None, ttl: timedelta = TTL) -> None:
        self.client: Any = client
        self.store = RedisLeaseStore(
            client,
            KEYS,
            ttl=ttl,
            max_stalls=MAX_STALLS,
            done_ttl=DONE_TTL,
            address=ADDRESS,
            unacked=UNACKED,
            budget=budget,
        )

    def run_out(self, task_id: str) -> None:
        lock_key = self.client.hget(KEYS.lease(task_id), "lock")
        if lock_key:
            self.client.delete(KEYS.lock(lock_key.decode()))
        self.client.delete(KEYS.lease(task_id))
        self.client.zadd(KEYS.index, {task_id: 1}, xx=True)

    def lose_lock(self, lock_key: str) -> None:
        self.client.delete(KEYS.lock(lock_key))

    def lock_holder(self, lock_key: str) -> str | None:
        token = self.client.hget(KEYS.lock(lock_key), "token")
        return token.decode() if token else None

    def lose_marker(self, marker: str) -> None:
        self.client.delete(KEYS.done(marker))

    def leave_marker(self, marker: str, token: str) -> None:
        self.client.set(KEYS.done(marker), token, px=60_000)

    def deliver(self, start: Start) -> None:
        self.client.hset(UNACKED.unacked, start.tag, '[{},"","q"]')
        self.client.zadd(UNACKED.index, {start.tag: 1})
        self.client.hset(KEYS.owned(start.session), start.tag, "1 q")

    def take_away(self, start: Start) -> None:
        self.client.hdel(UNACKED.unacked, start.tag)
        self.client.zrem(UNACKED.index, start.tag)
        self.client.hdel(KEYS.owned(start.session), start.tag)

    def owns(self, start: Start) -> bool:
        found = {
            bool(self.client.hexists(UNACKED.unacked, start.tag)),
            self.client.zscore(UNACKED.index, start.tag) is not None,
            bool(self.client.hexists(KEYS.owned(start.session), start.tag)),
        }
        assert len(found) == 1, "a delivery is settled in all of its three records or in none"
        return found.pop()

    def look(self, task_ids: Sequence[str], events: Sequence[str]) -> Picture:
        with self.client.pipeline() as pipe:
            pipe.hgetall(KEYS.counters)
            pipe.hkeys(UNACKED.unacked).zrange(UNACKED.index, 0, -1).hkeys(KEYS.owned("w1")).hkeys(KEYS.owned("w2"))
            for task_id in task_ids:
                pipe.hget(KEYS.lease(task_id), "token").zrange(KEYS.journal(task_id), 0, -1)
            counts, unacked, index, first, second, *tasks = pipe.execute()
        assert set(unacked) == set(index) == {*first, *second}, "settled in all of its three records, or in none"
        return Picture(
            holders=[token.decode() if token else None for token in tasks[::2]],
            unfinished=[{token.decode() for token in journal} for journal in tasks[1::2]],
            counts=[
                sum(int(count) for name, count in counts.items() if name.startswith(f"{event}|".encode()))
                for event in events
            ],
            owned_tags={tag.decode() for tag in unacked},
        )

    def holder(self, task_id: str) -> str | None:
        token = self.client.hget(KEYS.lease(task_id), "token")
        return token.decode() if token else None

    def unfinished(self, task_id: str) -> set[str]:
        return {token.decode() for token in self.client.zrange(KEYS.journal(task_id), 0, -1)}

    def remaining(self, task_id: str) -> timedelta:
        return timedelta(milliseconds=self.client.pttl(KEYS.lease(task_id)))

    def shorten(self, task_id: str) -> None:
        self.client.pexpire(KEYS.lease(task_id), 60_000)
        self.client.zadd(KEYS.index, {task_id: 1}, xx=True)

    def count(self, event: str) -> int:
        return int(self.client.hget(KEYS.counters, f"{event}|shop.pay") or 0)

    def earn_for(self, duration: timedelta) -> None:
        self.client.hincrby(KEYS.budget("shop.pay"), "at_ms", -round(duration.total_seconds() * 1000))


class MemoryBench:
    """``LeaseBench`` in this process, with a clock that stands still."""

    def __init__(self, *, budget: RetryBudget | None = None) -> None:
        self.now = 1_000.0
        self.deliveries: set[str] = set()
        self.store = MemoryLeaseStore(
            clock=lambda: self.now,
            ttl=TTL,
            max_stalls=MAX_STALLS,
            done_ttl=DONE_TTL,
            deliveries=self.deliveries,
            budget=budget,
        )

    def run_out(self, task_id: str) -> None:
        task = self.store._tasks.get(task_id)
        if task and task.lease:
            task.lease.expires = self.now
        if task and task.inflight:
            task.inflight.expires = self.now

    def lose_lock(self, lock_key: str) -> None:
        self.store._locks.pop(lock_key, None)

    def lock_holder(self, lock_key: str) -> str | None:
        owner = self.store._owner(lock_key)
        return owner.start.token if owner else None

    def lose_marker(self, marker: str) -> None:
        self.store._done.pop(marker, None)

    def leave_marker(self, marker: str, token: str) -> None:
        self.store._done[marker] = (token, self.now + 60, "")

    def deliver(self, start: Start) -> None:
        self.deliveries.add(str(start.tag))

    def take_away(self, start: Start) -> None:
        self.deliveries.discard(str(start.tag))

    def owns(self, start: Start) -> bool:
        return start.tag in self.deliveries

    def look(self, task_ids: Sequence[str], events: Sequence[str]) -> Picture:
        return Picture(
            holders=[self.holder(task_id) for task_id in task_ids],
            unfinished=[self.unfinished(task_id) for task_id in task_ids],
            counts=[self.count(event) for event in events],
            owned_tags=set(self.deliveries),
        )

    def holder(self, task_id: str) -> str | None:
        lease = self.store._task(task_id).lease
        return lease.start.token if lease else None

    def unfinished(self, task_id: str) -> set[str]:
        return set(self.store._task(task_id).journal)

    def remaining(self, task_id: str) -> timedelta:
        lease = self.store._task(task_id).lease
        assert lease
        return timedelta(seconds=lease.expires - self.now)

    def shorten(self, task_id: str) -> None:
        lease = self.store._task(task_id).lease
        assert lease
        lease.expires = self.now + 60

    def count(self, event: str) -> int:
        return self.store.counters[f"{event}|shop.pay"]

    def earn_for(self, duration: timedelta) -> None:
        bucket = self.store._buckets["shop.pay"]
        self.store._buckets["shop.pay"] = replace(bucket, at=bucket.at - duration.total_seconds())


def time_passes(client: redis.Redis, duration: timedelta) -> None:
    """Age everything that the server holds, without anybody's beating meanwhile: an outage, or a fleet that is gone."""
    server: Any = client
    milliseconds = round(duration.total_seconds() * 1000)
    for key in list(server.scan_iter()):
        left = server.pttl(key)
        if left > milliseconds:
            server.pexpire(key, left - milliseconds)
        elif left > 0:
            server.delete(key)
    for key, step in ((KEYS.sessions, milliseconds), (KEYS.index, milliseconds), (UNACKED.index, milliseconds / 1000)):
        for member, score in server.zrange(key, 0, -1, withscores=True):
            if score > 0:
                server.zadd(key, {member: score - step})
    pulse = server.get(KEYS.pulse)
    if pulse:
        at_ms, *rest = pulse.decode().split()
        server.set(KEYS.pulse, " ".join([str(int(at_ms) - milliseconds), *rest]), keepttl=True)


def everything(client: redis.Redis) -> dict[str, Any]:
    """All that the server holds, by key."""
    server: Any = client
    return {key.decode(): _value(server, key) for key in server.scan_iter()}


def _value(server: Any, key: bytes) -> Any:
    match server.type(key):
        case b"string":
            return server.get(key)
        case b"hash":
            return server.hgetall(key)
        case b"list":
            return server.lrange(key, 0, -1)
        case b"set":
            return server.smembers(key)
        case b"zset":
            return server.zrange(key, 0, -1, withscores=True)
        case other:
            raise AssertionError(f"a key of type {other}")


@contextmanager
def commands(client: redis.Redis) -> Iterator[list[str]]:
    """Collect what clients send to the server, not what scripts do there."""
    server: Any = client
    seen: list[str] = []
    with server.monitor() as monitor:
        yield seen
        server.echo("that is all")
        for command in monitor.listen():
            if command["command"] == "ECHO that is all":
                break
            if command["client_type"] != "lua" and command["command"].split()[0] not in ("HELLO", "CLIENT", "SELECT"):
                seen.append(command["command"])


class Broker:
    """A Redis broker as the worker's main process uses it."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client
        self._fetch = Script(client, "celery_selfheal.sessions", "fetch", address=ADDRESS)

    def publish(self, *messages: bytes, to: str = "q") -> None:
        """Put messages behind what waits, as kombu does."""
        for message in messages:
            self.client.lpush(to, message)

    def fetch(self, *lists: str, session: str = "w1", tag: str | None = None) -> Any:
        """Take one message as ``session``; the script's own answer."""
        lists = lists or ("q",)
        return self._fetch(
            [KEYS.session(session), UNACKED.unacked, UNACKED.index, KEYS.owned(session), *lists],
            [tag or a_tag(session), *(json.dumps(name) for name in lists)],
        )

    def take(self, *lists: str, session: str = "w1") -> str:
        """Take one message, and return the tag of its delivery."""
        tag = a_tag(session)
        assert self.fetch(*lists, session=session, tag=tag), "there was nothing to take"
        return tag

    def waiting(self, name: str = "q") -> list[bytes]:
        """Messages in a list, the next one first."""
        return list(reversed(self.client.lrange(name, 0, -1)))

    def held(self) -> dict[str, bytes]:
        """Unacked entries by tag."""
        return {tag.decode(): entry for tag, entry in self.client.hgetall(UNACKED.unacked).items()}
