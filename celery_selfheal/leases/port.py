"""What a lease store promises, and the values that cross its border."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeAlias

from celery_selfheal.retry_budget import Turn

JOURNAL_TTL = timedelta(hours=72)
"""How long unfinished starts are remembered: longer than a weekend without any worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One entry into a task's body, as the worker's main process announced it.

    Attributes:
        token: Random, one per delivery; proves who holds the lease. Compared by value, in the store.
        session: Worker session that received the message.
        attempt: Task name and number of the try; tells a duplicate from a successor with the same id.
        marker: Names this very message: a copy of it has the same marker, a retry or a replay has not.
        turn: First attempt, retry, or a retry that has waited for its place in the budget.
        predecessor: Token of the start whose retry this is; its lease may be taken over.
        tag: Delivery tag whose ownership is checked in the same step; ``None`` where the broker has no such record.
        node: Worker node name. For people; never compared.
        pid: Process that runs the worker's main loop. For people.
        lock_key: No two tasks with the same one run at the same time. Main does not know it; whoever acquires must.
        deadline_seconds: Longest run time after which the lease is not renewed; ``None`` without a limit.
    """

    task_id: str
    task_name: str
    token: str
    session: str
    attempt: str
    marker: str
    turn: Turn = "first"
    predecessor: str | None = None
    tag: str | None = None
    node: str = ""
    pid: int = 0
    deadline_seconds: float | None = None
    lock_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One start's claim on one task.

    Attributes:
        fence: Grows with each acquisition, so that a late writer is told from the current one.

    Source: Gray and Cheriton, "Leases", SOSP 1989 (claims that expire by themselves).
    """

    task_id: str
    token: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A start that neither finished nor was handed over.

    Attributes:
        owner: Node name of the worker that ran it.
        age_seconds: From its acquisition to its removal, by the store's clock.
        unfinished_starts: How many starts of the task are unfinished now.
    """

    task_id: str
    task_name: str
    token: str
    owner: str
    age_seconds: float
    unfinished_starts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """The start may run.

    Attributes:
        stalls: Unfinished starts before this one.
        overtaken: The start whose lease had run out unnoticed and was taken over now.
    """

    lease: Lease
    stalls: int
    overtaken: Stall | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledOut:
    """Too many starts never ended. The lease is taken all the same, so that the failure is stored once."""

    lease: Lease
    stalls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Another start holds the lease, or another task the lock key.

    Attributes:
        remaining: Until its lease expires, if nobody renews it.
        attempt: Which attempt holds it; empty where it is another task.
        key: The lock key that another task has; ``None`` where another start has the id.
        holder: Node name of the worker where that task runs; empty where nobody knows. For people.
    """

    remaining: timedelta
    attempt: str
    key: str | None = None
    holder: str = ""


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """A copy of this very message was finished.

    Attributes:
        failure: What it left for whoever has to move the message to the dead letters; empty if that needs nobody.
    """

    failure: str = ""


@dataclass(frozen=True, slots=True)
class NotMine:
    """The delivery was taken away from this worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverBudget:
    """The fleet has retried this task name too often lately; this retry has a place after ``wait``."""

    wait: timedelta


Outcome: TypeAlias = Acquired | StalledOut | Busy | AlreadyDone | NotMine | OverBudget


class Renewal(enum.Enum):
    """What became of a lease at a beat."""

    HELD = "held"
    LOST = "lost"
    IDLE = "idle"
    """This start has not begun, or has ended: there is nothing to renew."""


def renewal_of(outcome: Outcome) -> Renewal:
    """What it means for a start that runs to acquire once more, after the store was emptied."""
    if isinstance(outcome, Acquired):
        return Renewal.HELD
    # Another start was quicker, or another task has the lock key now.
    return Renewal.LOST if isinstance(outcome, Busy) else Renewal.IDLE


class LeaseStore(Protocol):
    """Keeps leases, the journal and the done markers. Its own clock judges expiry.

    Every method is one atomic step a lease, repeatable by token, and raises ``StoreError`` when the store did not
    answer: the effect is unknown then, and the call may be repeated.
    """

    def acquire(self, start: Start) -> Outcome:
        """Take the lease of the start's task, and its lock key with it, or neither.

        Tested in this order: mine already, done, busy, lock key of another task, budget, stalled, free. A start that
        stalled too often takes no lock key. All other methods know the lock key by the lease.
        """

    def release(
        self, start: Start, *, ended: bool, marker: bool, state: str, acknowledge: bool = False, failure: str = ""
    ) -> bool:
        """Give the lease back; ``False`` when another start holds it or has finished the task since.

        Args:
            ended: The start came to an end of its own: the journal is cleared. Else it is a hand-over.
            marker: Leave a done marker, on which copies of the message end.
            state: What the end is counted as.
            acknowledge: Settle the delivery ``start.tag`` in the same step.
            failure: Kept with the marker, for a copy that finds it: see ``AlreadyDone``.
        """

    def renew(self, starts: Sequence[Start]) -> list[Renewal]:
        """Set the expiry of each lease to the store's now plus the TTL; a lease that ran out untaken is taken again.

        A start whose lock key another task has is lost, though it has its lease.
        """

    def abandon(self, start: Start) -> int | None:
        """Count a start whose process died and free its lease.

        Returns:
            The number of unfinished starts; ``None`` when the start had finished its message before it died.
        """

    def expire(self, *, session: str | None, limit: int) -> list[Stall]:
        """Remove up to ``limit`` stalled starts and say which: each is told to one caller only.

        Args:
            session: A dead session, whose leases end now; ``None`` for leases that have run out by themselves.
        """


class LeaseInquiry(Protocol):
    """Tells others who hold something of their own for as long as their lease lasts."""

    def is_held(self, task_id: str, token: str) -> bool:
        """Whether this very start holds the lease of its task now. Changes nothing.

        ``False`` also where the store has lost the lease, until the next beat has taken it again.

        Raises:
            StoreError: the store did not answer.
        """


class Journals(Protocol):
    """What is remembered of starts that never ended; ``StoreError`` as above."""

    def forget(self, task_ids: Sequence[str]) -> None:
        """Remove the journals of tasks: a replay is not judged by what went before it."""
