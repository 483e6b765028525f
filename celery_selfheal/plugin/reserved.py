"""Messages that a worker has reserved and not begun, given back where only the loop may speak to the broker."""

from __future__ import annotations

import logging
from typing import Any

from celery.worker import state

from celery_selfheal.keys import session_of_tag
from celery_selfheal.plugin.request import SelfHealRequest

logger = logging.getLogger("celery_selfheal")


def hand_over_reserved(c: Any) -> int:
    """Requeue what waits here for a child or for its time; returns how many.

    For brokers that redeliver by themselves, in the loop's own thread: what our agents hold on Redis they give back.
    The consumer is cancelled before, or the messages would come straight back. To be called before Celery closes the
    consumer, since it forgets then what it holds.
    """
    try:
        c.task_consumer.cancel()
    except Exception as exc:  # noqa: BLE001  # whatever the broker says: its connection ends, and it redelivers
        logger.warning("the broker redelivers what is reserved here when the connection ends: %s", exc)
        return 0
    handed_over = 0
    for request in {*state.reserved_requests, *state.scheduled_requests} - {*state.active_requests}:
        if not isinstance(request, SelfHealRequest) or request.acknowledged or not request.task.acks_late:
            continue
        tag = getattr(request.message, "delivery_tag", None)
        if isinstance(tag, str) and session_of_tag(tag) is not None:
            continue
        request.acknowledged = request.is_settled = True
        request.message.reject_log_error(logger, request.connection_errors, requeue=True)
        handed_over += 1
    return handed_over
