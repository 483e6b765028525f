"""What a start must remember from its acquisition to its release, and what main has told it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from celery.exceptions import Reject

from celery_selfheal.dedup.port import Job
from celery_selfheal.errors import LeaseBusy, StalledTooOften, StoreError
from celery_selfheal.leases.port import Lease, LeaseStore, Renewal, Start
from celery_selfheal.plugin.body import Body
from celery_selfheal.plugin.next_attempt import NextAttempt
from celery_selfheal.plugin.on_commit import AfterCommit
from celery_selfheal.telemetry.events import LeaseWasLost, Observer

CONTEXT_KEY = "selfheal"
"""Where the main process puts what it knows of the start, inside the request's properties."""


@dataclass(slots=True)
class Running:
    """What a start must remember until it ends.

    Attributes:
        retries: Next attempts that the body asked for; sent when it has ended.
        asks_retry: ``self.retry()`` is under way: its signature is ours to send.
        gave_up: What ``self.retry()`` raised when it found its attempts used up.
        is_disowned: The message is somebody else's now, and its next attempt, too.
        stalled: Why the body must not run: too many starts of it never ended.
        refused: Why the body must not run: another task has the lock key. There is no lease then.
        session: Of SQLAlchemy, while the body runs in a transaction of ours.
        job: What the start has an effect on record for.
        body: Calls the user's code, and knows whether it must end.
        after_commit: What waits for the commit; without a transaction, for the end of the body.
        is_parked: A copy of the message comes back later; this start has not taken place.
        has_progress: The body has said how far it is.
        has_asked_progress: ``last_progress`` has been read: what an earlier start of the task had said.
        is_replaced: Another task was put in this one's place.
    """

    start: Start
    lease: Lease
    leases: LeaseStore
    tell: Observer
    after_commit: AfterCommit
    body: Body
    retries: list[NextAttempt] = field(default_factory=list)
    asks_retry: bool = False
    gave_up: Exception | None = None
    is_disowned: bool = False
    stalled: StalledTooOften | None = None
    refused: LeaseBusy | None = None
    session: Any = None
    job: Job | None = None
    is_parked: bool = False
    has_progress: bool = False
    has_asked_progress: bool = False
    last_progress: Any = None
    is_replaced: bool = False

    def is_confirmed(self) -> bool:
        """Ask the store whether the lease is ours; ``False`` also when it does not answer."""
        try:
            return self.leases.renew([self.start]) == [Renewal.HELD]
        except StoreError:
            return False

    def is_overtaken(self) -> bool:
        """Ask the store whether another start has taken the task; ``False`` also when it does not answer."""
        try:
            return self.leases.renew([self.start]) != [Renewal.HELD]
        except StoreError:
            return False

    def lost(self, reason: str) -> Exception:
        """Tell that the start came too late; returns how to leave it: the message goes back while it is ours."""
        self.tell(
            LeaseWasLost(
                task_name=self.start.task_name,
                task_id=self.start.task_id,
                reason=reason,
                owner=self.start.node,
                age_seconds=0.0,
            )
        )
        leave: Exception = Reject(reason, requeue=True)
        return leave


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentLease:
    """The lease of a running start, as its body may see it.

    Attributes:
        token: Proves who holds it.
        key: The lock key; ``None`` for a task without ``lease_key``.
        fence: Grows with each acquisition: hand it to whatever you write to, and let that refuse a smaller one.
        expires_at: Until then nobody else can take it, by this host's clock: reckoned from the last heartbeat that
            was answered.
    """

    task_id: str
    token: str
    key: str | None
    fence: int
    expires_at: datetime

    @classmethod
    def of(cls, running: Running, plugin: Any) -> CurrentLease:
        """Read it."""
        # The fence is the store's time of acquisition, in microseconds, or a little more.
        taken_at = running.lease.fence / 1e6
        confirmed_at = max(taken_at, plugin.slots.confirmed_at if plugin.slots is not None else 0.0)
        return cls(
            task_id=running.start.task_id,
            token=running.lease.token,
            key=running.start.lock_key,
            fence=running.lease.fence,
            expires_at=datetime.fromtimestamp(confirmed_at, timezone.utc) + plugin.settings.lease_ttl,
        )


def running_of(request: Any) -> Running | None:
    """The start that a request is in the midst of; ``None`` before and after it."""
    running: Running | None = getattr(request, "selfheal_running", None)
    return running


def context_of(request: Any) -> Mapping[str, Any]:
    """What main knows of the start; empty without a worker that knows us."""
    properties = request.properties
    context = properties.get(CONTEXT_KEY) if isinstance(properties, Mapping) else None
    return context if isinstance(context, Mapping) else {}
