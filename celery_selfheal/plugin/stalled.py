"""The end of a task whose starts died too often, as main stores it."""

from __future__ import annotations

import logging
from typing import Any

from celery import signals

from celery_selfheal.clock import utc_now
from celery_selfheal.dead_letter import Death
from celery_selfheal.errors import StalledTooOften
from celery_selfheal.plugin.death import death_of_request, reason_of
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.plugin.once import has_effect

logger = logging.getLogger("celery_selfheal")


class StalledFailure:
    """The end of a task that stalled too often, as main stores it."""

    def __init__(self, request: Any, max_stalls: int) -> None:
        self._request = request
        self._max_stalls = max_stalls
        self._stored = False
        self.queue: str | None = request.task.dead_letter_queue
        started = request.time_start
        self.age_seconds = utc_now().timestamp() - started if started else 0.0

    def has_effect(self) -> bool:
        """Whether only its end was never reported: then its next start answers, instead of failing.

        Raises:
            StoreError: the database did not answer.
        """
        return has_effect(self._request, plugin_of(self._request.task.app))

    def store(self, unfinished_starts: int) -> StalledTooOften:
        """Store FAILURE, run errbacks, tell chord and chain; once, also when what follows is repeated."""
        request = self._request
        exc = StalledTooOften(request.type, request.id, unfinished_starts, self._max_stalls)
        if self._stored:
            return exc
        request.task.backend.mark_as_failure(
            request.id, exc, request=request._context, store_result=request.store_errors
        )
        self._stored = True
        signals.task_failure.send(
            sender=request.task,
            task_id=request.id,
            exception=exc,
            args=request.args,
            kwargs=request.kwargs,
            traceback=None,
            einfo=None,
        )
        logger.error("%s", exc)
        return exc

    def death(self, exc: StalledTooOften, *, worker: str) -> Death | None:
        """Its envelope; ``None`` where the task wants no dead letters."""
        reason = reason_of(exc, self._request.task, attempt=0, first_published_at=None)
        return death_of_request(self._request, exc, "", reason, worker=worker) if reason else None
