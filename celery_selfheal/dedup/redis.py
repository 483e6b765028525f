"""Claims in Redis, for ``dedup="redis"``: the same without a database, for as long as a key lives."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import redis

from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.port import Answer, Granted, Held, Job, Status
from celery_selfheal.dedup.record import Record, judge, owner_of
from celery_selfheal.keys import Keys
from celery_selfheal.leases.scripts import Script, ScriptArgument, text

PACKAGE = "celery_selfheal.dedup"

# A key that runs is PROCESSING to people who look at Redis.
_TO_REDIS = {Status.IN_PROGRESS: "PROCESSING", Status.COMPLETED: "COMPLETED", Status.IN_DOUBT: "IN_DOUBT"}
_FROM_REDIS = {word: status for status, word in _TO_REDIS.items()}


class RedisClaims:
    """``ClaimStore`` on one Redis server.

    A claim lives for ``ttl`` from when it was made, taken over or put in doubt, whatever becomes of it; then the key
    is free. An emptied store has forgotten its keys: what is running still records its end.

    Args:
        client: With a socket timeout well below the TTL of a lease; owned by the caller.
        ttl: ``selfheal_idempotency_ttl``.
        address: Names the server in errors, without a password.
    """

    def __init__(self, client: redis.Redis, keys: Keys, *, ttl: timedelta, address: str) -> None:
        self._keys = keys
        self._ttl_ms = round(ttl.total_seconds() * 1000)
        self._claim = Script(client, PACKAGE, "claim", address=address)
        self._inherit = Script(client, PACKAGE, "inherit", address=address)
        self._complete = Script(client, PACKAGE, "complete", address=address)
        self._withdraw = Script(client, PACKAGE, "withdraw", address=address)
        self._mark_dispatched = Script(client, PACKAGE, "mark_dispatched", address=address)

    def claim(self, job: Job) -> Answer:
        """See ``ClaimStore.claim``."""
        reply = self._claim(self._key(job), self._arguments(job))
        if not reply:
            return Granted()
        status, task_name, owner, fence, payload_hash, payload, dispatched = (text(part or b"") for part in reply[:7])
        return judge(
            job,
            Record(
                status=_FROM_REDIS[status],
                task_name=task_name,
                owner=Owner.parse(owner),
                fence=int(fence),
                payload_hash=payload_hash or None,
                age=timedelta(milliseconds=reply[7]),
                payload=json.loads(payload) if payload else None,
                dispatched=bool(dispatched),
            ),
        )

    def inherit(self, job: Job, held: Held, *, doubt: bool) -> bool:
        """See ``ClaimStore.inherit``."""
        if held.fence > job.fence:
            # Decided here, since the script insists on the owner and the fence that we have read.
            return False
        status = _TO_REDIS[Status.IN_DOUBT if doubt else Status.IN_PROGRESS]
        before = Owner(held.task_id, held.token)
        return bool(self._inherit(self._key(job), [*self._arguments(job), status, str(before), held.fence]))

    def complete(self, job: Job, payload: Any) -> bool:
        """See ``ClaimStore.complete``."""
        return bool(self._complete(self._key(job), [*self._arguments(job), json.dumps(payload)]))

    def withdraw(self, job: Job) -> None:
        """See ``ClaimStore.withdraw``."""
        self._withdraw(self._key(job), [str(owner_of(job))])

    def mark_dispatched(self, job: Job) -> None:
        """See ``ClaimStore.mark_dispatched``."""
        self._mark_dispatched(self._key(job), [])

    def _key(self, job: Job) -> list[str]:
        return [self._keys.claim(job.key)]

    def _arguments(self, job: Job) -> list[ScriptArgument]:
        return [str(owner_of(job)), job.fence, job.task_name, job.payload_hash or "", self._ttl_ms]
