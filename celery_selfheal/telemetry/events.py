"""Events of healing: one event, one log line, one signal, one counter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from celery_selfheal.dead_letter import Death


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStalled:
    """A start neither finished nor was handed over.

    Attributes:
        reason: Why we believe so: ``process died``, ``worker gone``, ``lease ran out``.
        owner: Node name of the worker that ran it.
        age_seconds: From its acquisition to its discovery.
        unfinished_starts: How many starts of the task are unfinished now.
    """

    task_name: str
    task_id: str
    reason: str
    owner: str
    age_seconds: float
    unfinished_starts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecovered:
    """A message that a dead or forgetful worker held is back in its queue.

    Attributes:
        reason: ``process died``, ``worker gone``, ``forgotten``, ``visibility timeout``.
        owner: Node name of the worker that held it.
        age_seconds: From its receipt by that worker to its restoration; 0 where unknown.
        started: Its body had begun there.
    """

    task_name: str
    task_id: str
    reason: str
    owner: str
    age_seconds: float
    started: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseWasLost:
    """Another start has taken the lease of a start that still runs here.

    Attributes:
        reason: ``taken over``; ``commit refused`` and the like, if it tried to record its effect after that.
        owner: Node name of the worker that lost it.
        age_seconds: How long the start has run.
    """

    task_name: str
    task_id: str
    reason: str
    owner: str
    age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDeadLettered:
    """A message was moved to a dead letter queue: it will not run again by itself.

    Attributes:
        death: Why, and where it came from.
        queue: The dead letter queue.
    """

    task_name: str
    task_id: str
    death: Death
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateSuppressed:
    """A message came again whose effect was there already: its body did not run.

    Attributes:
        reason: ``completed``.
        owner: Id of the task whose effect it is.
        age_seconds: 0.
    """

    task_name: str
    task_id: str
    reason: str
    owner: str
    age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSetAside:
    """A message of the outbox cannot be sent; its row is kept, and tried again after a minute.

    Attributes:
        task_name: Empty where the message cannot be read.
        reason: What the broker or the reader said.
        owner: Table and id of the row.
        age_seconds: Since the row was written.
    """

    task_name: str
    task_id: str
    reason: str
    owner: str
    age_seconds: float


Event: TypeAlias = DuplicateSuppressed | TaskDeadLettered | TaskStalled | TaskRecovered | LeaseWasLost | MessageSetAside
Observer: TypeAlias = Callable[[Event], None]
"""Called in the thread that noticed; must not raise."""
