"""A task's body while it runs, in the process that runs it: from outside of its user's code, all that may end it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from celery.exceptions import Reject

from celery_selfheal.errors import DeadlineExceeded, LeaseLost
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.slots import Doom, Slots


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
        # What a thread raises of itself cannot name its task.
        return lost if lost.task_id else LeaseLost(self.start.task_id, self.fence)

    def _arm(self) -> None:
        self.check()

    def _disarm(self) -> None:
        pass

    def _obey(self) -> None:
        pass

    def _leave(self, *, handed_back: bool) -> None:
        pass
