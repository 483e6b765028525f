"""Runs agents at their interval in one native thread."""

from __future__ import annotations

import logging
import os
import sys
import threading
from _queue import Empty, SimpleQueue
from collections.abc import Callable, Container
from dataclasses import dataclass
from datetime import timedelta

from celery_selfheal import clock

logger = logging.getLogger(__name__)

FORK_PATIENCE_SECONDS = 5.0  # a beat is bounded by its socket timeout; a fork must not wait for ever for one
ALL = "*"
STOP = "."


@dataclass(slots=True)
class Step:
    """One agent's step and when it is due.

    Attributes:
        run: ``True`` asks for another turn at once, after the other steps have had theirs; a ``timedelta`` for one
            after so long.
        next_at: Monotonic seconds.
    """

    name: str
    run: Callable[[], object]
    interval: timedelta
    next_at: float = 0.0


class Ticker:
    """Calls each step once an interval, in a thread of the operating system, until it is stopped.

    A step that raises is logged and tried again at its next turn. The thread is a real one under gevent, too: a
    greenlet would starve beside a task that computes. It is a daemon: it never keeps a process alive.

    Args:
        start_thread: Starts a native thread; the original of a patched interpreter.
        farewell: Called once in the thread, after the last step, when it is stopped.
    """

    def __init__(
        self,
        steps: list[Step],
        *,
        start_thread: Callable[[Callable[[], None]], object],
        farewell: Callable[[], object] | None = None,
    ) -> None:
        self._steps = steps
        self._farewell = Step("farewell", farewell or (lambda: None), timedelta(0))
        self._start_thread = start_thread
        # Python's C queue blocks the calling thread only, whatever a monkey patch has made of locks and events.
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._stopped: SimpleQueue[None] = SimpleQueue()
        self._fork_lock = _original_lock()
        self._held_for_fork = False
        self._pid = os.getpid()
        self._running = False

    def start(self) -> None:
        """Begin; every step runs at once, then at its interval. A second call does nothing."""
        if self._running:
            return
        self._running = True
        # A fork in the middle of a beat would leave the child with half a conversation and with our locks held.
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork_in_parent,
            after_in_child=self._after_fork_in_child,
        )
        self._start_thread(self._loop)

    def wake(self, name: str | None = None) -> None:
        """Run the step of that name now, or all of them, in the ticker's thread. Does not wait.

        Wake-ups that come while the thread is busy are one.
        """
        self._orders.put(name or ALL)

    def stop(self, *, timeout: timedelta) -> bool:
        """End the thread after its current step; ``False`` when it did not end in ``timeout``."""
        if not self._running:
            return True
        self._running = False
        self._orders.put(STOP)
        try:
            self._stopped.get(timeout=timeout.total_seconds())
        except Empty:
            return False
        return True

    def run_due(self, *, now: float, asked: Container[str] = ()) -> float:
        """Run what is due or asked for by name; returns the seconds until the next step is due."""
        for step in self._steps:
            if step.next_at <= now or step.name in asked or ALL in asked:
                pause = self._run(step)
                step.next_at = clock.monotonic() + pause.total_seconds()
        return max(0.0, min(step.next_at for step in self._steps) - clock.monotonic())

    def _loop(self) -> None:
        orders = {ALL}
        while STOP not in orders:
            pause = self.run_due(now=clock.monotonic(), asked=orders)
            orders = set()
            try:
                orders.add(self._orders.get(timeout=pause))
                while True:
                    orders.add(self._orders.get_nowait())
            except Empty:
                continue
        self._run(self._farewell)
        self._stopped.put(None)

    def _run(self, step: Step) -> timedelta:
        """Run a step; returns the pause until its next turn."""
        with self._fork_lock:
            try:
                asked = step.run()
            except Exception:  # the one place: an agent must outlive every error of its step
                logger.exception("%s failed, and will be tried again", step.name)
                asked = None
        if isinstance(asked, timedelta):
            return asked
        return timedelta(0) if asked is True else step.interval

    def _before_fork(self) -> None:
        if os.getpid() == self._pid:
            self._held_for_fork = self._fork_lock.acquire(timeout=FORK_PATIENCE_SECONDS)

    def _after_fork_in_parent(self) -> None:
        if self._held_for_fork:
            self._held_for_fork = False
            self._fork_lock.release()

    def _after_fork_in_child(self) -> None:
        self._held_for_fork = self._running = False
        self._fork_lock = _original_lock()


def _original_lock() -> threading.Lock:
    if "gevent" not in sys.modules:
        return threading.Lock()
    from gevent.monkey import get_original

    lock: threading.Lock = get_original("_thread", "allocate_lock")()
    return lock
