"""Tells events of healing to people (one log line) and to programs (one signal)."""

from __future__ import annotations

import logging
from dataclasses import asdict

from celery import Celery

from celery_selfheal import signals
from celery_selfheal.telemetry.events import (
    DuplicateSuppressed,
    Event,
    LeaseWasLost,
    MessageSetAside,
    Observer,
    TaskDeadLettered,
    TaskRecovered,
    TaskStalled,
)

logger = logging.getLogger("celery_selfheal")

_VOICES = {
    TaskStalled: (
        logging.WARNING,
        signals.task_stalled,
        "task stalled: %(task_name)s[%(task_id)s] on %(owner)s after %(age_seconds).1f s: %(reason)s",
    ),
    TaskRecovered: (
        logging.WARNING,
        signals.task_recovered,
        "task recovered: %(task_name)s[%(task_id)s] from %(owner)s after %(age_seconds).1f s: %(reason)s",
    ),
    TaskDeadLettered: (
        logging.ERROR,
        signals.task_dead_lettered,
        "task dead-lettered: %(task_name)s[%(task_id)s] to %(queue)s: %(reason)s",
    ),
    DuplicateSuppressed: (
        logging.INFO,
        signals.duplicate_suppressed,
        "duplicate suppressed: %(task_name)s[%(task_id)s]: its effect is there, by %(owner)s",
    ),
    LeaseWasLost: (
        logging.WARNING,
        signals.lease_lost,
        "lease lost: %(task_name)s[%(task_id)s] on %(owner)s after %(age_seconds).1f s: %(reason)s",
    ),
    MessageSetAside: (
        logging.ERROR,
        signals.message_set_aside,
        "message set aside: %(task_name)s[%(task_id)s] in %(owner)s after %(age_seconds).1f s: %(reason)s",
    ),
}


def observer(app: Celery) -> Observer:
    """Observer that logs each event once and sends its signal once."""

    def tell(event: Event) -> None:
        level, signal, line = _VOICES[type(event)]
        fields = asdict(event)
        if isinstance(event, TaskDeadLettered):
            fields["reason"] = event.death.reason
            logger.log(level, line, fields, extra={"selfheal": fields})
            signal.send(sender=app, **dict(fields, death=event.death))
            return
        logger.log(level, line, fields, extra={"selfheal": fields})
        # A dictionary of its own: under gevent the record is formatted later. What a receiver raises, send swallows.
        told = {name: value for name, value in fields.items() if name != "age_seconds"}
        signal.send(sender=app, age=fields["age_seconds"], **told)

    return tell
