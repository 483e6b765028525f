"""Whether the stores answer this worker: no answer is no loss, but it is said, and others must know."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from celery_selfheal.clock import utc_now
from celery_selfheal.errors import StoreError
from celery_selfheal.plugin.slots import Slots

logger = logging.getLogger("celery_selfheal")


class StoreAnswers:
    """Remembers the last silence.

    Attributes:
        answers: The last call was answered.
        silent_at: Unix seconds of the last call that was not.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self.answers = True
        self.silent_at = float("-inf")

    def answering(self, step: Callable[[], bool | None]) -> Callable[[], bool]:
        """A step that says once that the store is silent, and goes on when it is back."""

        def run() -> bool:
            again = False
            try:
                again = step() is True
            except StoreError as exc:
                if self.answers:
                    logger.warning("the store does not answer; what is held stays held: %s", exc)
                self.answers = False
                self._slots.tell_silent(True)
                self.silent_at = utc_now().timestamp()
            else:
                if not self.answers:
                    logger.warning("the store answers again")
                    self._slots.tell_silent(False)
                self.answers = True
            return again

        return run

    def was_heard_for(self, ttl: timedelta) -> bool:
        """Whether it has answered for so long that leases which have run out prove something.

        Leases may live on a server of their own, which knows no pulse of the fleet: all others must have beaten, too.
        """
        return utc_now().timestamp() - self.silent_at > ttl.total_seconds()
