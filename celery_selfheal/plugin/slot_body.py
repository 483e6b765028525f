"""Bodies in the first thread of their process, a pool child or a solo worker: a signal interrupts them.

At once, unless C code keeps the interpreter: main kills a child that does not obey.
"""

from __future__ import annotations

import signal
from typing import Any

from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.body import Body
from celery_selfheal.plugin.slots import Doom, Slot, Slots, encode_progress

#: Free in Celery's pool processes: SIGUSR1 is their soft time limit.
INTERRUPT = getattr(signal, "SIGUSR2", None)

_armed: list[SlotBody] = []
"""The body that may be interrupted by a signal, if one runs in this process's first thread."""


class SlotBody(Body):
    """A start whose slot in the shared memory says what main wants."""

    def __init__(self, start: Start, slots: Slots, slot: Slot) -> None:
        super().__init__(start, slots)
        self._slot = slot

    @property
    def doom(self) -> Doom | None:
        """See ``Body.doom``: read from what main has written."""
        return self._slot.doom_of(self.start.token)

    def show_life(self, progress: Any = None) -> None:
        """See ``Body.show_life``."""
        self._slot.show_life()
        if progress is not None:
            self._slot.write_progress(encode_progress(progress))

    def __enter__(self) -> Body:
        self._slot.enter(self.start.token)
        return self

    def _arm(self) -> None:
        if INTERRUPT is not None and signal.getsignal(INTERRUPT) is not _interrupt:
            signal.signal(INTERRUPT, _interrupt)
            self._slot.listen()
        _armed[:] = [self]
        # What came before this could not be heard.
        self.check()

    def _disarm(self) -> None:
        _armed.clear()

    def _obey(self) -> None:
        self._slot.obey()

    def _leave(self, *, handed_back: bool) -> None:
        self._slot.leave(handed_back=handed_back)


def _interrupt(_signal: int, _frame: object) -> None:
    """Leave the body that runs, if it is the one that is meant, once."""
    for body in _armed:
        if body.doom is not None:
            _armed.clear()
            body.check()
