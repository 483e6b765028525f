"""Leases in this process: for eager mode and for tests, with the contract of the Redis store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from celery_selfheal.leases.port import (
    Acquired,
    AlreadyDone,
    Busy,
    Lease,
    NotMine,
    Outcome,
    OverBudget,
    Renewal,
    Stall,
    StalledOut,
    Start,
)
from celery_selfheal.retry_budget import Bucket, RetryBudget

_NEVER_HELD = 10**16  # far above every fence


@dataclass(slots=True)
class _Held:
    start: Start
    fence: int
    acquired: float
    expires: float


@dataclass(slots=True)
class _Task:
    lease: _Held | None = None
    journal: dict[str, int] = field(default_factory=dict)
    inflight: _Held | None = None
    locking: tuple[str, str] | None = None  # token and lock key of the last start that has one


class MemoryLeaseStore:
    """``LeaseStore`` and ``LeaseInquiry`` in plain dictionaries.

    Args:
        clock: Seconds; only differences count. The store's clock is this one.
        deliveries: Tags that this worker still owns; ``None`` where ownership is not checked.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        ttl: timedelta,
        max_stalls: int,
        done_ttl: timedelta,
        deliveries: set[str] | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        self._clock = clock
        self._ttl = ttl.total_seconds()
        self._max_stalls = max_stalls
        self._done_ttl = done_ttl.total_seconds()
        self._deliveries = deliveries
        self._budget = budget
        self._buckets: dict[str, Bucket] = {}
        self._waits: dict[str, timedelta] = {}
        self._tasks: dict[str, _Task] = {}
        self._done: dict[str, tuple[str, float, str]] = {}
        self._locks: dict[str, _Held] = {}
        self._fence = 0
        self._lock = threading.RLock()
        self.counters: Counter[str] = Counter()

    def acquire(self, start: Start) -> Outcome:
        """See ``LeaseStore.acquire``."""
        with self._lock:
            if start.tag and self._deliveries is not None and start.tag not in self._deliveries:
                return NotMine()
            task = self._task(start.task_id)
            stalls = len(task.journal.keys() - {start.token})
            holder = task.lease
            if holder and holder.start.token == start.token:
                # Its lock key is held for as long as this very record is.
                holder.expires = self._clock() + self._ttl
                return self._answer(start, holder.fence, stalls)
            if self._finished_by(start.marker):
                return AlreadyDone(self._done[start.marker][2])
            predecessor = start.predecessor
            follows = predecessor is not None and (
                holder.start.token == predecessor if holder else predecessor in task.journal
            )
            if holder and not follows:
                return Busy(remaining=timedelta(seconds=holder.expires - self._clock()), attempt=holder.start.attempt)
            key = start.lock_key if follows or stalls <= self._max_stalls else None
            owner = self._owner(key) if key is not None else None
            if owner and owner.start.task_id != start.task_id:
                task.journal.pop(start.token, None)
                remaining = timedelta(seconds=owner.expires - self._clock())
                return Busy(remaining=remaining, attempt="", key=key, holder=owner.start.node)
            wait = self._wait_for_budget(start)
            if wait is not None:
                return OverBudget(wait=wait)
            overtaken = None
            if follows:
                task.journal.clear()
                stalls = 0
            elif task.inflight and task.inflight.start.token != start.token:
                overtaken = self._stall(start.task_id, task, task.inflight)
                self.counters[f"stalls|{start.task_name}"] += 1
            fence = self._next_fence()
            now = self._clock()
            self._give_up(task)
            task.lease = task.inflight = _Held(start, fence, acquired=now, expires=now + self._ttl)
            if key is not None:
                self._locks[key] = task.lease
                task.locking = (start.token, key)
            if stalls <= self._max_stalls:
                task.journal[start.token] = fence
                self.counters[f"starts|{start.task_name}"] += 1
            return self._answer(start, fence, stalls, overtaken)

    def release(
        self, start: Start, *, ended: bool, marker: bool, state: str, acknowledge: bool = False, failure: str = ""
    ) -> bool:
        """See ``LeaseStore.release``."""
        with self._lock:
            task = self._task(start.task_id)
            if not self._is_last_holder(task, start.token):
                task.journal.pop(start.token, None)
                self._forget(start.task_id, task)
                finished_by = self._finished_by(start.marker)
                return task.lease is None and finished_by in (None, start.token)
            self._give_up(task)
            task.locking = None
            if ended:
                task.journal.clear()
            else:
                task.journal.pop(start.token, None)
            if marker:
                self._done[start.marker] = (start.token, self._clock() + self._done_ttl, failure)
            if task.inflight and task.inflight.start.token == start.token:
                task.inflight = None
            self.counters[f"{state}|{start.task_name}"] += 1
            if acknowledge and self._deliveries is not None and start.tag:
                self._deliveries.discard(start.tag)
            self._forget(start.task_id, task)
            return True

    def renew(self, starts: Sequence[Start]) -> list[Renewal]:
        """See ``LeaseStore.renew``."""
        with self._lock:
            return [self._renew(start) for start in starts]

    def abandon(self, start: Start) -> int | None:
        """See ``LeaseStore.abandon``."""
        with self._lock:
            if self._finished_by(start.marker) == start.token:
                return None
            task = self._task(start.task_id)
            counted = start.token not in task.journal
            if task.lease and task.lease.start.token == start.token:
                self._give_up(task)
            if task.inflight and task.inflight.start.token == start.token:
                task.inflight = None
                counted = True
            if start.token not in task.journal:
                # Below every start that has held the lease: it is no later start than they are.
                task.journal[start.token] = self._next_fence() - _NEVER_HELD
            if counted:
                self.counters[f"stalls|{start.task_name}"] += 1
            return len(task.journal)

    def expire(self, *, session: str | None, limit: int) -> list[Stall]:
        """See ``LeaseStore.expire``."""
        with self._lock:
            stalls: list[Stall] = []
            for task_id, task in self._tasks.items():
                start = task.inflight
                if start is None or len(stalls) >= limit:
                    continue
                lease = self._task(task_id).lease
                if session is None and (lease or start.expires > self._clock()):
                    continue
                if session is not None and start.start.session != session:
                    continue
                if lease and lease.start.token == start.start.token:
                    self._give_up(task)
                task.inflight = None
                self.counters[f"stalls|{start.start.task_name}"] += 1
                stalls.append(self._stall(task_id, task, start))
            return stalls

    def is_held(self, task_id: str, token: str) -> bool:
        """See ``LeaseInquiry.is_held``."""
        with self._lock:
            task = self._tasks.get(task_id)
            lease = task.lease if task else None
            return lease is not None and lease.start.token == token and lease.expires > self._clock()

    def _wait_for_budget(self, start: Start) -> timedelta | None:
        if self._budget is None:
            return None
        if start.token in self._waits:
            return self._waits[start.token]
        bucket = self._buckets.get(start.task_name)
        bucket, seconds = self._budget.take(bucket, start.turn, now=self._clock())
        self._buckets[start.task_name] = bucket
        if not seconds:
            return None
        self.counters[f"over_budget|{start.task_name}"] += 1
        self._waits[start.token] = timedelta(seconds=seconds)
        return self._waits[start.token]

    def _task(self, task_id: str) -> _Task:
        task = self._tasks.setdefault(task_id, _Task())
        if task.lease and task.lease.expires <= self._clock():
            task.lease = None
        return task

    def _owner(self, key: str) -> _Held | None:
        owner = self._locks.get(key)
        if owner and owner.expires <= self._clock():
            del self._locks[key]
            return None
        return owner

    def _give_up(self, task: _Task) -> None:
        """End the lease, and what it holds of a lock key."""
        lease, task.lease = task.lease, None
        if lease and task.locking and self._locks.get(task.locking[1]) is lease:
            del self._locks[task.locking[1]]

    def _keeps_lock(self, task: _Task, held: _Held) -> bool:
        """Take the lock key of a start again, if it is free; ``False`` when another task has it."""
        if task.locking is None or task.locking[0] != held.start.token:
            return True
        owner = self._owner(task.locking[1])
        if owner and owner.start.task_id != held.start.task_id:
            return False
        self._locks[task.locking[1]] = held
        return True

    def _forget(self, task_id: str, task: _Task) -> None:
        """A process that runs eager tasks for months must not remember each of them."""
        if not (task.lease or task.journal or task.inflight):
            self._tasks.pop(task_id, None)

    def _renew(self, start: Start) -> Renewal:
        task = self._task(start.task_id)
        if self._is_last_holder(task, start.token):
            if task.lease is None:
                if task.journal[start.token] < 0:
                    return Renewal.LOST
                now = self._clock()
                again = _Held(start, task.journal[start.token], acquired=now, expires=now)
                if not self._keeps_lock(task, again):
                    return Renewal.LOST
                task.lease = again
                task.inflight = task.inflight or task.lease
            elif not self._keeps_lock(task, task.lease):
                return Renewal.LOST
            task.lease.expires = self._clock() + self._ttl
            if task.inflight and task.inflight.start.token == start.token:
                task.inflight.expires = task.lease.expires
            return Renewal.HELD
        return Renewal.LOST if start.token in task.journal else Renewal.IDLE

    def _is_last_holder(self, task: _Task, token: str) -> bool:
        if task.lease:
            return task.lease.start.token == token
        return bool(task.journal) and max(task.journal, key=task.journal.__getitem__) == token

    def _finished_by(self, marker: str) -> str | None:
        token, until, _ = self._done.get(marker, (None, 0.0, ""))
        return token if token and until > self._clock() else None

    def _next_fence(self) -> int:
        self._fence = max(self._fence + 1, int(self._clock() * 1_000_000))
        return self._fence

    def _answer(self, start: Start, fence: int, stalls: int, overtaken: Stall | None = None) -> Outcome:
        lease = Lease(task_id=start.task_id, token=start.token, fence=fence)
        if stalls > self._max_stalls:
            return StalledOut(lease=lease, stalls=stalls)
        return Acquired(lease=lease, stalls=stalls, overtaken=overtaken)

    def _stall(self, task_id: str, task: _Task, held: _Held) -> Stall:
        return Stall(
            task_id=task_id,
            task_name=held.start.task_name,
            token=held.start.token,
            owner=held.start.node or held.start.session,
            age_seconds=self._clock() - held.acquired,
            unfinished_starts=len(task.journal),
        )
