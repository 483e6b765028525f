"""A worker whose loop hangs: it beats, and does nothing else."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from celery_selfheal.clock import monotonic

logger = logging.getLogger("celery_selfheal")


class LoopWatch:
    """Tells a loop that hangs from one that waits.

    Args:
        patience: So long it may take for one turn.
    """

    def __init__(self, *, patience: timedelta) -> None:
        self._patience = patience.total_seconds()
        self._turned_at: float | None = None
        self._is_told = False
        self._entry: Any = None

    def connected(self, timer: Any) -> None:
        """The loop begins; ``timer`` is called in its turns."""
        self.disconnected()
        self._turned_at = monotonic()
        self._entry = timer.call_repeatedly(self._patience / 9, self._turn)

    def disconnected(self) -> None:
        """The loop has ended: while a worker waits for its broker, nothing turns."""
        entry, self._entry = self._entry, None
        if entry is not None:
            entry.cancel()
        self._turned_at = None

    def has_just_hung(self, *, is_free: bool) -> bool:
        """Whether the loop was found hanging now, and not before.

        Args:
            is_free: There is a child that could run something. One that has none to ask need not turn.
        """
        if self._turned_at is None or not is_free or monotonic() - self._turned_at < self._patience:
            return False
        is_new, self._is_told = not self._is_told, True
        return is_new

    def _turn(self) -> None:
        self._turned_at = monotonic()
        if self._is_told:
            self._is_told = False
            logger.warning("the worker's loop turns again")
