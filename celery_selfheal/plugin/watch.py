"""Looks after what runs: deadlines, signs of life, interruptions under way and, at the end, the shutdown."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery_selfheal.clock import monotonic, utc_now
from celery_selfheal.errors import StoreError
from celery_selfheal.plugin.deadlines import Deadlines, Watched, stall_after_of
from celery_selfheal.plugin.local_bodies import local
from celery_selfheal.plugin.slots import Doom

if TYPE_CHECKING:
    from celery_selfheal.plugin.worker import Worker

logger = logging.getLogger("celery_selfheal")


class Watch:
    """One step of the agents' thread, which asks for its next turn in time. It does no I/O but in a shutdown."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._deadlines = Deadlines(tell_overdue=_tell_overdue)
        self._next_at = float("inf")

    def step(self) -> timedelta | None:
        """Look once."""
        running = self._worker.requests_running()
        due, pause = self._deadlines.due([self._look_at(request) for request in running])
        for one, doom in due:
            self._worker.interruptions.begin(one.request, doom)
        if self._worker.must_interrupt:
            for request in running:
                self._worker.interruptions.begin(request, Doom.OUTAGE)
        if self._worker.loop.has_just_hung(is_free=self._has_free_child()):
            self._give_up_unstarted()
        pauses = [pause, self._worker.interruptions.press(), self._worker.drain.step()]
        wanted = min((one for one in pauses if one is not None), default=None)
        wanted = self._worker.idle_watch if wanted is None else min(wanted, self._worker.idle_watch)
        self._next_at = monotonic() + wanted.total_seconds()
        return wanted

    def is_too_late_for(self, request: Any) -> bool:
        """Whether the next look comes after a limit of this request."""
        limits = [request.start.deadline_seconds, stall_after_of(request.task)]
        known = [limit for limit in limits if limit is not None]
        return bool(known) and monotonic() + min(known) < self._next_at

    def begun_messages(self) -> set[int]:
        """Messages whose starts have entered their child, whether or not the loop has heard of it."""
        requests = [self._worker.request_of(token) for token in self._tokens_running()]
        return {id(request.message) for request in requests if request is not None}

    def _tokens_running(self) -> set[str]:
        tokens = set(local)
        info = self._worker.pool.info if self._worker.pool is not None else {}
        for pid in info.get("processes", ()):
            slot = self._worker.slots.of(pid)
            if slot is not None and slot.running:
                tokens.add(slot.running)
        return tokens

    def _has_free_child(self) -> bool:
        pool = self._worker.pool
        return pool is not None and len(self._tokens_running()) < pool.num_processes

    def _give_up_unstarted(self) -> None:
        logger.error(
            "the worker's loop hangs, though a child is free: what has not begun here is given to other workers"
            " (on brokers other than Redis, when this worker is restarted)"
        )
        with suppress(StoreError):
            self._worker.hand_over_unstarted()

    def _look_at(self, request: Any) -> Watched:
        token = request.start.token
        body = local.get(token)
        slot = None if body is not None else self._worker.slots.of(request.worker_pid)
        alive_at = body.alive_at if body is not None else None
        if slot is not None and slot.running == token:
            alive_at = slot.alive_at
        return Watched(
            request=request,
            ran_seconds=utc_now().timestamp() - request.time_start,
            quiet_seconds=None if alive_at is None else monotonic() - alive_at,
            grace_seconds=self._worker.grace_of_limit(request),
        )


def _tell_overdue(one: Watched) -> None:
    logger.warning(
        "overdue: %s[%s] has run for %.0f minutes, and nothing limits it: set max_runtime or time_limit",
        one.start.task_name,
        one.start.task_id,
        one.ran_seconds / 60,
    )
