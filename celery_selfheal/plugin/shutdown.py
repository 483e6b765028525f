"""A worker that stops: begins nothing, hands over what has not begun, and gives what runs its grace."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from celery_selfheal.clock import monotonic
from celery_selfheal.errors import StoreError
from celery_selfheal.plugin.slots import Doom

if TYPE_CHECKING:
    from celery_selfheal.plugin.worker import Worker

logger = logging.getLogger("celery_selfheal")

LOOK = timedelta(milliseconds=200)  # between two looks at what is left


class Drain:
    """The way from the first signal to the last word.

    Args:
        grace: How long running starts may go on; ``None`` for as long as they like.
    """

    def __init__(self, worker: Worker, *, grace: timedelta | None) -> None:
        self._worker = worker
        self._grace = grace
        self._began_at: float | None = None
        self._begun: set[str] | None = None
        self._ended: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether the worker stops."""
        return self._began_at is not None

    def begin(self, *, has_grace: bool = True) -> None:
        """Begin to stop. Safe in a signal handler; a second call changes nothing.

        Args:
            has_grace: ``False``: Celery itself ends what runs, when it has waited for long enough.
        """
        if self._began_at is None:
            if not has_grace:
                self._grace = None
            self._began_at = monotonic()
            self._worker.slots.drain()
            self._worker.wake("watch")

    def step(self) -> timedelta | None:
        """Go on with it, in the agents' thread; returns when to be called again."""
        if self._began_at is None:
            return None
        running = self._worker.requests_running()
        if self._begun is None:
            self._begun = {request.start.token for request in running}
            logger.info("shutdown: %d tasks run on, everything else is handed over", len(running))
        with suppress(StoreError):  # told already; and what runs must not wait for the store
            self._worker.hand_over_unstarted()
        if self._grace is not None and monotonic() - self._began_at >= self._grace.total_seconds():
            for request in running:
                # Acknowledged early, a message could not be given back.
                if request.task.acks_late:
                    self._worker.interrupt(request, Doom.SHUTDOWN)
        if any(one.why in (Doom.SHUTDOWN, Doom.CANCELLED) for one in self._worker.interruptions.out_of_reach()):
            self._worker.leave_by_force()
        if self._grace is None:
            return LOOK
        left = self._grace.total_seconds() - (monotonic() - self._began_at)
        return timedelta(seconds=min(LOOK.total_seconds(), left)) if left > 0 else LOOK

    def has_ended(self, token: str) -> None:
        """A start was ended from here, and handed over."""
        self._ended.add(token)

    def sum_up(self, *, handed_over: int, abandoned: int) -> None:
        """Say in one line what became of everything."""
        begun = self._begun or set()
        finished = max(0, len(begun - self._ended) - abandoned)
        logger.info("shutdown: %d finished, %d handed over, %d abandoned", finished, handed_over, abandoned)
