"""What a start must remember from its acquisition to its release, and what main has told it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_selfheal.leases.port import Lease, LeaseStore, Start
from celery_selfheal.plugin.next_attempt import NextAttempt

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
    """

    start: Start
    lease: Lease
    leases: LeaseStore
    retries: list[NextAttempt] = field(default_factory=list)
    asks_retry: bool = False
    gave_up: Exception | None = None
    is_disowned: bool = False


def running_of(request: Any) -> Running | None:
    """The start that a request is in the midst of; ``None`` before and after it."""
    running: Running | None = getattr(request, "selfheal_running", None)
    return running


def context_of(request: Any) -> Mapping[str, Any]:
    """What main knows of the start; empty without a worker that knows us."""
    properties = request.properties
    context = properties.get(CONTEXT_KEY) if isinstance(properties, Mapping) else None
    return context if isinstance(context, Mapping) else {}
