"""Bodies in threads and greenlets of the worker's own process.

A thread is interrupted when it next runs Python code, a greenlet when it next waits. Whoever cannot be interrupted is
asked to call ``self.check()``.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from celery_selfheal.clock import monotonic
from celery_selfheal.errors import LeaseLost
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.body import Body
from celery_selfheal.plugin.slots import Doom, Slots, encode_progress

#: Starts in threads and greenlets of this process, by token.
local: dict[str, LocalBody] = {}


class LocalBody(Body):
    """A start in a thread or greenlet beside main's own: main looks at it directly."""

    def __init__(self, start: Start, slots: Slots) -> None:
        super().__init__(start, slots)
        self.alive_at = monotonic()
        self.progress: tuple[int, bytes] | None = None
        self.returned = self.ended = self.obeys = False
        self._doom: Doom | None = None

    @property
    def doom(self) -> Doom | None:
        """See ``Body.doom``."""
        return self._doom

    def show_life(self, progress: Any = None) -> None:
        """See ``Body.show_life``."""
        self.alive_at = monotonic()
        if progress is not None:
            version, _ = self.progress or (0, b"")
            self.progress = (version + 1, encode_progress(progress))

    def interrupt(self, why: Doom) -> None:
        """Tell it to end; called by main's agents. Without help of its pool it notices at its next ``check``."""
        self._doom = why

    def __enter__(self) -> Body:
        local[self.start.token] = self
        return self

    def _obey(self) -> None:
        self.obeys = True

    def _leave(self, *, handed_back: bool) -> None:
        self.returned, self.ended = handed_back, not handed_back
        local.pop(self.start.token, None)


class _Interruption(LeaseLost):
    """What Python raises in another thread: it makes it from the class alone."""

    def __init__(self) -> None:
        super().__init__("", 0)


class ThreadBody(LocalBody):
    """A start in a thread of a pool."""

    def __init__(self, start: Start, slots: Slots) -> None:
        super().__init__(start, slots)
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_armed = self._is_sent = False

    def interrupt(self, why: Doom) -> None:
        """See ``LocalBody.interrupt``: it leaves when it next runs Python code."""
        super().interrupt(why)
        with self._lock:
            if self._is_armed and not self._is_sent:
                self._is_sent = self._told = True
                _raise_in(self._thread, _Interruption)

    def _arm(self) -> None:
        with self._lock:
            self._is_armed = True
        self.check()

    def _disarm(self) -> None:
        # What is on its way may arrive in here; after this, nothing can.
        while True:
            try:
                with self._lock:
                    self._is_armed = False
                    if self._is_sent:
                        _raise_in(self._thread, None)
                return
            except _Interruption:
                continue


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Let a thread raise ``kind`` soon; ``None`` takes back what it has not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)


class GreenBody(LocalBody):
    """A start in a greenlet of gevent's."""

    def __init__(self, start: Start, slots: Slots) -> None:
        super().__init__(start, slots)
        from gevent import get_hub, getcurrent

        self._hub, self._greenlet = get_hub(), getcurrent()
        self._is_armed = False

    def interrupt(self, why: Doom) -> None:
        """See ``LocalBody.interrupt``: it leaves when it next waits."""
        super().interrupt(why)
        # The agents' thread is one of the operating system's: gevent's own must do it.
        self._hub.loop.run_callback_threadsafe(self._throw)

    def _throw(self) -> None:
        # In the hub, so the greenlet waits for something; and as long as it is armed, inside of its body.
        if self._is_armed:
            self._is_armed = False
            self._told = True
            self._greenlet.throw(LeaseLost(self.start.task_id, self.fence))

    def _arm(self) -> None:
        self._is_armed = True
        self.check()

    def _disarm(self) -> None:
        self._is_armed = False
