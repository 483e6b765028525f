"""A task's body while it runs: how it is told to end, as far as its pool allows, and by no accident another one.

Facts of each pool: a process is interrupted by a signal, at once unless C code keeps it; a thread when it next runs
Python code; a greenlet when it next waits. Whoever cannot be interrupted is asked to call ``self.check()``.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from celery.exceptions import Reject

from celery_selfheal.clock import monotonic
from celery_selfheal.errors import DeadlineExceeded, LeaseLost
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin import native
from celery_selfheal.plugin.slots import Doom, Slot, Slots, encode_progress

#: Free in Celery's pool processes: SIGUSR1 is their soft time limit.
INTERRUPT = getattr(signal, "SIGUSR2", None)


class HandBack(Reject):  # type: ignore[misc]  # Celery is untyped
    """The start was ended from outside: main gives its message back.

    Args:
        reason: Name of a ``Doom``.
    """

    def __init__(self, reason: str = Doom.TAKEN_OVER.name, requeue: bool = True) -> None:  # Celery's own arguments
        super().__init__(reason, requeue)

    @property
    def doom(self) -> Doom:
        """Why."""
        return Doom[self.reason]


class Body:
    """One start in the process that runs it, from before its lease is taken until its last word.

    This one cannot be interrupted. As a context manager it turns ``LeaseLost`` into ``HandBack``.

    Attributes:
        fence: Of its lease, once it has one.
    """

    def __init__(self, start: Start, slots: Slots | None = None) -> None:
        self.start = start
        self.fence = 0
        self._slots = slots
        self._told = False

    @property
    def doom(self) -> Doom | None:
        """Why this start must end, if it must."""
        return None

    @property
    def is_confirmed(self) -> bool:
        """Whether the last heartbeat was answered."""
        return self._slots is None or not self._slots.is_silent

    def check(self) -> None:
        """Leave, if this start must end.

        Raises:
            LeaseLost: it must.
        """
        if self.doom is not None:
            self._told = True
            raise LeaseLost(self.start.task_id, self.fence)

    def show_life(self, progress: Any = None) -> None:
        """The work goes on.

        Raises:
            ValueError: ``progress`` is no JSON, or too long.
        """

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the user's code; only in here may it be interrupted.

        Raises:
            LeaseLost: it was.
            DeadlineExceeded: it was, since it ran too long.
        """
        try:
            try:
                self._arm()
                return function(*args, **kwargs)
            finally:
                self._disarm()
        except LeaseLost as lost:
            raise self._as_told(lost) from None
        except Exception as exc:
            # What a body's own cleaning-up raises must not make a failure of an interruption.
            if self._told:
                raise self._as_told(LeaseLost(self.start.task_id, self.fence)) from exc
            raise

    def __enter__(self) -> Body:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None) -> None:
        doom = None
        if isinstance(exc, LeaseLost):
            doom = self.doom or Doom.TAKEN_OVER
        elif isinstance(exc, HandBack):
            doom = exc.doom
        self._leave(handed_back=doom is not None)
        # In eager mode it is the outer task's.
        if isinstance(exc, LeaseLost) and doom is not None and self._slots is not None:
            raise HandBack(doom.name) from None

    def refuse_while_draining(self) -> None:
        """Begin nothing on a worker that stops.

        Raises:
            HandBack: it stops.
        """
        # After the start has made itself known: so main finds it, or it finds that main stops.
        if self._slots is not None and self._slots.is_draining:
            raise HandBack(Doom.SHUTDOWN.name)

    def _as_told(self, lost: LeaseLost) -> BaseException:
        self._obey()
        if self.doom is Doom.DEADLINE:
            return DeadlineExceeded(self.start.task_name, self.start.task_id, self.start.deadline_seconds or 0.0)
        return LeaseLost(self.start.task_id, self.fence) if isinstance(lost, _Interruption) else lost

    def _arm(self) -> None:
        self.check()

    def _disarm(self) -> None:
        pass

    def _obey(self) -> None:
        pass

    def _leave(self, *, handed_back: bool) -> None:
        pass


_armed: list[SlotBody] = []
"""The body that may be interrupted by a signal, if one runs in this process's first thread."""


class SlotBody(Body):
    """A start in the first thread of its process, a pool child or a solo worker: interrupted by a signal."""

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


def body_of(start: Start, slots: Slots | None) -> Body:
    """The body of a start in this thread, as its pool can have it; a plain one outside of a worker."""
    if slots is None:
        return Body(start)
    if native.is_patched():
        return GreenBody(start, slots) if native.is_gevent() else LocalBody(start, slots)
    if threading.current_thread() is not threading.main_thread():
        return ThreadBody(start, slots)
    slot = slots.mine
    return Body(start, slots) if slot is None else SlotBody(start, slots, slot)
