"""Parking: a start that cannot run now leaves a copy of its message that comes back."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from celery import Task

from celery_selfheal import headers as names
from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.clock import jitter, utc_now
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.publisher import least_countdown
from celery_selfheal.plugin.running import context_of

logger = logging.getLogger("celery_selfheal")


def park(task: Any, plugin: Plugin, start: Start, patience: timedelta, *, paid: bool, for_lock: bool = False) -> None:
    """Replace the delivery by a copy that comes back after ``patience`` and a little chance.

    Args:
        paid: The copy has its place in the retry budget.
        for_lock: It waits for a lock key, which is counted.
    """
    seconds = patience.total_seconds() * (1 + jitter().uniform(0, 0.25))
    lock_waits = int(context_of(task.request).get("lock_waits") or 0) + for_lock
    deliveries = plugin.stores.deliveries
    logger.info("parked: %s[%s] for %.1f s", task.name, start.task_id, seconds)
    if deliveries is None or start.tag is None:
        signature = Task.signature_from_request(
            task,
            countdown=least_countdown(task.app, seconds),
            retries=task.request.retries,
            expires=None,
            headers={**_parked_headers(task, start, paid=paid), names.LOCK_WAITS: lock_waits},
        )
        with plugin.publisher.producer() as producer:
            signature.apply_async(producer=producer)
        return
    eta = (utc_now() + timedelta(seconds=seconds)).isoformat()
    for delivery in deliveries.named(start.session, [start.tag]):
        message = Envelope.decode(delivery.message).parked(
            eta=eta, paid=paid, lock_waits=lock_waits if for_lock else None
        )
        deliveries.settle(delivery, session=start.session, message=message, dead=False, front=False)


def _parked_headers(task: Any, start: Start, *, paid: bool) -> dict[str, Any]:
    context = context_of(task.request)
    return {
        **names.of_the_user(task.request.headers or {}),
        names.PUBLISHED: context.get("published_at"),
        names.FIRST_PUBLISHED: context.get("first_published_at"),
        names.FIRST_FAILURE: context.get("first_failure_at"),
        names.REPLAYS: context.get("replays") or 0,
        names.PREDECESSOR: start.predecessor,
        names.BUDGET_PAID: paid or bool(context.get("budget_paid")),
    }
