"""Whether a start that holds an idempotency key is gone, and what its successor does then."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

from celery_selfheal.dedup.port import Held, IsHeld, Job
from celery_selfheal.errors import StoreError

OnInDoubt: TypeAlias = Literal["takeover", "hold"]


@dataclass(frozen=True, slots=True)
class Park:
    """The holder may be alive: ask again after ``wait``."""

    wait: timedelta


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The holder is gone: ``ClaimStore.inherit``, then run."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """The holder is gone and its effect may be there: ``ClaimStore.inherit`` with ``doubt``, then a person looks."""


Decision: TypeAlias = Park | TakeOver | Doubt


def decide(
    held: Held,
    job: Job,
    *,
    is_held: IsHeld,
    lease_ttl: timedelta,
    takeover_after: timedelta,
    on_in_doubt: OnInDoubt,
) -> Decision:
    """Judge the holder of a key for a start that has its own lease and wants the key.

    Args:
        is_held: Asked once at most, and not at all for an earlier start of the same task; may raise ``StoreError``.
        takeover_after: So old is the claim of a start that is gone, where its lease cannot be asked.
    """
    wait = _time_to_wait(held, job, is_held=is_held, lease_ttl=lease_ttl, takeover_after=takeover_after)
    if wait is not None:
        return Park(wait)
    return Doubt() if on_in_doubt == "hold" else TakeOver()


def _time_to_wait(
    held: Held, job: Job, *, is_held: IsHeld, lease_ttl: timedelta, takeover_after: timedelta
) -> timedelta | None:
    """``None`` when the holder is gone."""
    if held.fence > job.fence:
        # A later start has the key: it is this one whose time is over.
        return lease_ttl
    if not held.token:
        return _until(takeover_after, held, lease_ttl=lease_ttl)
    if held.task_id == job.task_id:
        # One lease a task id, and this start has it.
        return None
    try:
        if is_held(held.task_id, held.token):
            return lease_ttl
    except StoreError:
        return _until(takeover_after, held, lease_ttl=lease_ttl)
    # "Not held" by a store that was emptied says nothing, until the beats have filled it again.
    return _until(lease_ttl, held, lease_ttl=lease_ttl)


def _until(age: timedelta, held: Held, *, lease_ttl: timedelta) -> timedelta | None:
    # At most a TTL: meanwhile the holder may finish, or the store may answer again.
    return min(age - held.age, lease_ttl) if held.age <= age else None
