"""The end of a message that kills every worker that takes it, before any start could be counted."""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import replace
from typing import Any

from celery import Celery
from celery.app.task import Context

from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.clock import utc_now
from celery_selfheal.dead_letter import Death, Reason
from celery_selfheal.errors import StalledTooOften
from celery_selfheal.plugin.brokers.layout import RedisLayout, queue_of
from celery_selfheal.plugin.death import versions
from celery_selfheal.sessions.port import Delivery

logger = logging.getLogger("celery_selfheal")


class DeadLetterGraveyard:
    """``Graveyard`` that stores FAILURE and names the dead letter queue."""

    def __init__(self, app: Celery, layout: RedisLayout, *, queue: str, max_stalls: int) -> None:
        self._app = app
        self._layout = layout
        self._queue = queue
        self._max_stalls = max_stalls

    def bury(self, envelope: Envelope, delivery: Delivery, *, owner: str) -> tuple[Delivery, bytes]:
        """See ``Graveyard.bury``."""
        exc = StalledTooOften(envelope.task_name, envelope.task_id, envelope.restores, self._max_stalls)
        if envelope.task_id:
            self._app.backend.mark_as_failure(envelope.task_id, exc, request=_context(envelope))
        now = utc_now().isoformat()
        queue = queue_of(delivery.list_key, self._layout)
        death = Death(
            id=envelope.task_id,
            task=envelope.task_name,
            reason=Reason.STALLED.value,
            exception=type(exc).__name__,
            text=f"{exc}: its message was taken from {envelope.restores} dead workers",
            stalls=envelope.restores,
            first_failure=now,
            died_at=now,
            queue=queue,
            routing_key=queue,
            worker=owner,
            versions=versions(),
        )
        logger.error("task dead-lettered: %s[%s] to %s: %s", death.task, death.id, self._queue, death.text)
        return replace(delivery, list_key=self._layout.prefix + self._queue), envelope.dead_lettered(death)


def _context(envelope: Envelope) -> Context:
    """What errbacks, chord and chain need, as far as the body can be read without the task."""
    embed: dict[str, Any] = {}
    body = envelope.fields.get("body") or ""
    try:
        if (envelope.fields.get("properties") or {}).get("body_encoding") == "base64":
            body = base64.b64decode(body)
        args, kwargs, embed = json.loads(body)
    except (ValueError, TypeError):
        args, kwargs = (), {}
    return Context({**envelope.fields.get("headers", {}), **(embed or {}), "args": args, "kwargs": kwargs})
