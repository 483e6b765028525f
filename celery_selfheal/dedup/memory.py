"""Claims in this process: for eager mode and for tests, with the contract of the Redis store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.port import Answer, Granted, Held, Job, Status
from celery_selfheal.dedup.record import Record, judge, owner_of


@dataclass(slots=True)
class _Claim:
    task_name: str
    payload_hash: str | None
    owner: Owner
    fence: int
    since: float
    expires: float
    status: Status = Status.IN_PROGRESS
    payload: Any = None
    dispatched: bool = False


class MemoryClaims:
    """``ClaimStore`` in a plain dictionary.

    Args:
        clock: Seconds; only differences count. The store's clock is this one.
        ttl: ``selfheal_idempotency_ttl``.
    """

    def __init__(self, *, clock: Callable[[], float], ttl: timedelta) -> None:
        self._clock = clock
        self._ttl = ttl.total_seconds()
        self._claims: dict[str, _Claim] = {}
        self._lock = threading.Lock()

    def claim(self, job: Job) -> Answer:
        """See ``ClaimStore.claim``."""
        with self._lock:
            claim = self._find(job)
            if claim is None:
                self._take(job)
                return Granted()
            return judge(
                job,
                Record(
                    status=claim.status,
                    task_name=claim.task_name,
                    owner=claim.owner,
                    fence=claim.fence,
                    payload_hash=claim.payload_hash,
                    age=timedelta(seconds=self._clock() - claim.since),
                    payload=claim.payload,
                    dispatched=claim.dispatched,
                ),
            )

    def inherit(self, job: Job, held: Held, *, doubt: bool) -> bool:
        """See ``ClaimStore.inherit``."""
        with self._lock:
            claim = self._find(job)
            if claim is None:
                return False
            status = Status.IN_DOUBT if doubt else Status.IN_PROGRESS
            is_as_read = claim.status is Status.IN_PROGRESS and (claim.owner, claim.fence) == (
                Owner(held.task_id, held.token),
                held.fence,
            )
            if not is_as_read or held.fence > job.fence:
                return claim.owner == owner_of(job) and claim.status is status
            claim.owner, claim.fence, claim.status = owner_of(job), job.fence, status
            claim.since = self._clock()
            claim.expires = claim.since + self._ttl
            return True

    def complete(self, job: Job, payload: Any) -> bool:
        """See ``ClaimStore.complete``."""
        with self._lock:
            claim = self._find(job) or self._take(job)
            if claim.owner != owner_of(job) or claim.status is Status.IN_DOUBT:
                return False
            if claim.status is Status.IN_PROGRESS:
                claim.status, claim.payload = Status.COMPLETED, payload
            return True

    def withdraw(self, job: Job) -> None:
        """See ``ClaimStore.withdraw``."""
        with self._lock:
            claim = self._find(job)
            if claim and claim.owner == owner_of(job) and claim.status is Status.IN_PROGRESS:
                del self._claims[job.key]

    def mark_dispatched(self, job: Job) -> None:
        """See ``ClaimStore.mark_dispatched``."""
        with self._lock:
            claim = self._find(job)
            if claim and claim.status is Status.COMPLETED:
                claim.dispatched = True

    def _find(self, job: Job) -> _Claim | None:
        claim = self._claims.get(job.key)
        return claim if claim and claim.expires > self._clock() else None

    def _take(self, job: Job) -> _Claim:
        now = self._clock()
        # A process that runs eager tasks for months must not remember each of them.
        for key in [key for key, claim in self._claims.items() if claim.expires <= now]:
            del self._claims[key]
        claim = _Claim(job.task_name, job.payload_hash, owner_of(job), job.fence, since=now, expires=now + self._ttl)
        self._claims[job.key] = claim
        return claim
