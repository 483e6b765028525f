"""Lease stores on a bench: what a test must do to one from outside, be it Redis or plain dictionaries."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import redis

from celery_selfheal.keys import Keys, delivery_tag
from celery_selfheal.leases.memory import MemoryLeaseStore
from celery_selfheal.leases.port import LeaseStore, Start
from celery_selfheal.leases.redis import RedisLeaseStore, UnackedKeys
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


class LeaseBench(Protocol):
    """A lease store and the hand of fate."""

    store: LeaseStore

    def run_out(self, task_id: str) -> None:
        """The lease of the task expires now."""

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

    def owned_tags(self) -> set[str]:
        """Tags of all deliveries that are unsettled."""

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
        self.client.delete(KEYS.lease(task_id))
        self.client.zadd(KEYS.index, {task_id: 1}, xx=True)

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

    def owned_tags(self) -> set[str]:
        with self.client.pipeline() as pipe:
            pipe.hkeys(UNACKED.unacked).zrange(UNACKED.index, 0, -1).hkeys(KEYS.owned("w1")).hkeys(KEYS.owned("w2"))
            unacked, index, first, second = (set(tags) for tags in pipe.execute())
        assert unacked == index == first | second, "a delivery is settled in all of its three records or in none"
        return {tag.decode() for tag in unacked}

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

    def lose_marker(self, marker: str) -> None:
        self.store._done.pop(marker, None)

    def leave_marker(self, marker: str, token: str) -> None:
        self.store._done[marker] = (token, self.now + 60)

    def deliver(self, start: Start) -> None:
        self.deliveries.add(str(start.tag))

    def take_away(self, start: Start) -> None:
        self.deliveries.discard(str(start.tag))

    def owns(self, start: Start) -> bool:
        return start.tag in self.deliveries

    def owned_tags(self) -> set[str]:
        return self.deliveries

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
