"""Which starts run too long: past their deadline, or without a sign of progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.slots import Doom

OVERDUE = timedelta(hours=1)  # without any limit nobody can tell a long task from a hung one: a person should look


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A start that runs, as main knows it.

    Attributes:
        request: Celery's.
        ran_seconds: Since it was accepted.
        quiet_seconds: Since its body last showed life; ``None`` where nobody can tell.
        grace_seconds: Its pool has a hard time limit of its own, which comes first.
    """

    request: Any
    ran_seconds: float
    quiet_seconds: float | None
    grace_seconds: float = 0.0

    @property
    def start(self) -> Start:
        """What was announced."""
        start: Start = self.request.start
        return start


class Deadlines:
    """Finds what is due.

    Args:
        tell_overdue: Told once of each start that runs for an hour without any limit.
    """

    def __init__(self, *, tell_overdue: Callable[[Watched], object]) -> None:
        self._tell_overdue = tell_overdue
        self._told: set[str] = set()

    def due(self, watched: Iterable[Watched]) -> tuple[list[tuple[Watched, Doom]], timedelta | None]:
        """Starts that must end, and when to ask again at the latest."""
        found: list[tuple[Watched, Doom]] = []
        pauses: list[float] = []
        alive: set[str] = set()
        for one in watched:
            alive.add(one.start.token)
            limit, quiet_limit = one.start.deadline_seconds, stall_after_of(one.request.task)
            left = [] if limit is None else [(limit + one.grace_seconds - one.ran_seconds, Doom.DEADLINE)]
            if quiet_limit is not None and one.quiet_seconds is not None:
                left.append((quiet_limit - one.quiet_seconds, Doom.HUNG))
            for seconds, doom in left:
                if seconds <= 0:
                    found.append((one, doom))
                    break
                pauses.append(seconds)
            if limit is None and one.ran_seconds > OVERDUE.total_seconds() and one.start.token not in self._told:
                self._told.add(one.start.token)
                self._tell_overdue(one)
        self._told &= alive
        return found, timedelta(seconds=min(pauses)) if pauses else None


def stall_after_of(task: Any) -> float | None:
    """``stall_after`` of a task in seconds."""
    given = getattr(task, "stall_after", None)
    return given.total_seconds() if isinstance(given, timedelta) else given
