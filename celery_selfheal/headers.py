"""Message headers that are ours, and those of brokers, which must not travel on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_selfheal.dead_letter import DEATH_HEADER

PUBLISHED = "selfheal-published-at"
"""Instant of the publication; parked and restored copies keep it, a retry or a new publication has another."""
FIRST_PUBLISHED = "selfheal-first-published-at"
"""Instant of the first attempt's publication, for ``retry_max_age``."""
FIRST_FAILURE = "selfheal-first-failure-at"
"""Instant of the first attempt's failure, for the dead letter."""
PREDECESSOR = "selfheal-predecessor"
"""Token of the start whose retry a message is."""
RESTORES = "selfheal-restores"
"""How often the message was taken from a dead worker."""
REPLAYS = "selfheal-replays"
"""How often it was replayed from the dead letter queue."""
BUDGET_PAID = "selfheal-budget-paid"
"""The retry has waited for its place in the retry budget."""

LOCK_WAITS = "selfheal-lock-waits"
"""How often it has waited for a lock key that another task has."""

OURS = (
    PUBLISHED,
    FIRST_PUBLISHED,
    FIRST_FAILURE,
    PREDECESSOR,
    RESTORES,
    REPLAYS,
    BUDGET_PAID,
    LOCK_WAITS,
    DEATH_HEADER,
)
BROKERS = ("x-death", "x-delivery-count", "x-acquired-count", "x-first-death-", "x-last-death-")
"""What these begin with, a broker has added; and ``redelivered`` itself."""


def of_the_user(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Headers without those that brokers and we add to a delivery."""
    return {
        name: value
        for name, value in headers.items()
        if name not in OURS and name != "redelivered" and not name.startswith(BROKERS)
    }


def of_a_replay(headers: Mapping[str, Any], *, replays: int) -> dict[str, Any]:
    """Headers of a dead letter that goes back to its origin: as first published, with all its attempts before it.

    It carries no instant of publication: a copy of the same replay must have the same done marker.
    """
    fresh = {"retries": 0, "eta": None, "expires": None} if "task" in headers else {}
    return {**of_the_user(headers), **fresh, REPLAYS: replays}


def history_of(headers: Mapping[str, Any]) -> dict[str, Any]:
    """What a message tells of its earlier attempts, under the names that a start's context has for it."""
    waits = headers.get(LOCK_WAITS)
    return {
        "published_at": headers.get(PUBLISHED),
        "first_published_at": headers.get(FIRST_PUBLISHED) or headers.get(PUBLISHED),
        "first_failure_at": headers.get(FIRST_FAILURE),
        "replays": headers.get(REPLAYS) or 0,
        "budget_paid": bool(headers.get(BUDGET_PAID)),
        "lock_waits": waits if isinstance(waits, int) else 0,
    }
