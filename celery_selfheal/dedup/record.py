"""What a store knows of an idempotency key that is taken, and what a start that asks for it is told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.port import Answer, Doubtful, Finished, Granted, Held, Job, Mismatch, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A row of ``processed_jobs`` or what stands for one.

    Attributes:
        age: Since the last change, by the store's clock.
    """

    status: Status
    task_name: str
    owner: Owner
    fence: int
    payload_hash: str | None
    age: timedelta
    payload: Any = None
    dispatched: bool = False

    def is_of(self, job: Job) -> bool:
        """Whether this very start has the key."""
        return self.owner == owner_of(job)


def owner_of(job: Job) -> Owner:
    """Name the start as records do."""
    return Owner(job.task_id, job.token)


def status_of(word: str) -> Status:
    """Read a status; one that another program wrote tells nothing of the effect: a person has to look."""
    return Status(word) if word in Status.__members__ else Status.IN_DOUBT


def unseen() -> Answer:
    """Answer for a key that somebody has in a transaction which has not ended, so that its row cannot be seen."""
    return Held(task_id="", token="", fence=0, age=timedelta(0))  # nobody's


def judge(job: Job, record: Record) -> Answer:
    """Say what ``job`` is told of a key that is taken, perhaps by itself.

    Another payload comes first: its result and its doubt are no business of this one.
    """
    if record.task_name != job.task_name or _differ(record.payload_hash, job.payload_hash):
        return Mismatch()
    match record.status:
        case Status.COMPLETED:
            return Finished(payload=record.payload, task_id=record.owner.task_id, dispatched=record.dispatched)
        case Status.IN_DOUBT:
            return Doubtful()
        case Status.IN_PROGRESS if record.is_of(job):
            return Granted()
        case Status.IN_PROGRESS:
            owner = record.owner
            # A store whose clock was set back must not make a claim younger than new.
            age = max(record.age, timedelta(0))
            return Held(task_id=owner.task_id, token=owner.token, fence=record.fence, age=age)


def _differ(stored: str | None, asked: str | None) -> bool:
    return stored is not None and asked is not None and stored != asked
