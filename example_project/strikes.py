"""What was done to workers, what it hit, and when that was healed: pure functions over what was seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from example_project.evidence import Started

ANSWER_MS = 1000  # a body that has ended is not over before its result is stored, a second later at most


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What was done to a worker, and when: after ``until_ms`` nothing that it hit runs any more.

    Attributes:
        pid: The one process that was hit; ``None`` if the whole worker was.
        goes_on: The worker was paused only.
    """

    what: str
    worker: str
    pid: int | None
    from_ms: int
    until_ms: int
    goes_on: bool = False

    def hit(self, start: Started, *, grace_ms: int = 0) -> bool:
        """Whether it met a start that was not over, or not for longer than ``grace_ms``."""
        if start.worker != self.worker or self.pid not in (None, start.pid) or start.started_ms > self.until_ms:
            return False
        return start.ended_ms is None or start.ended_ms > self.until_ms - grace_ms


@dataclass(frozen=True)
class Recovery:
    """How a strike was healed: tasks that were held, those not restarted yet, seconds until the last of them was."""

    held: int
    missing: tuple[str, ...]
    seconds: float


def recovery(strike: Strike, starts: Sequence[Started], recovered: Collection[str]) -> Recovery:
    """What a strike has hit, running or reserved, and when it was started again.

    Args:
        recovered: Ids of tasks that the struck worker held, whether their body had begun or not.
    """
    by_id = defaultdict(list)
    for start in starts:
        by_id[start.task_id].append(start)
    running = {start.task_id for start in starts if strike.hit(start)}
    again: dict[str, int | None] = {}
    for task_id in running | set(recovered):
        later = [start.started_ms for start in by_id[task_id] if start.started_ms > strike.until_ms]
        # Nothing is to be started again if the body was through and only its message was left.
        if later or not any(start.ended_ms for start in by_id[task_id]):
            again[task_id] = min(later, default=None)
    missing = tuple(sorted(task_id for task_id, at_ms in again.items() if at_ms is None))
    last_ms = max((at_ms for at_ms in again.values() if at_ms is not None), default=strike.from_ms)
    return Recovery(held=len(again), missing=missing, seconds=(last_ms - strike.from_ms) / 1000)


def started_twice(
    starts: Sequence[Started], strikes: Sequence[Strike], stalled: Sequence[Collection[str]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Task ids that were started more than once, with their names: those with an excuse, and those without.

    The excuse is that each start but the last was under way in a process that was struck; or, for a receipt, that
    the charge which orders it was excused.

    Args:
        stalled: For each strike the ids of tasks that were under way in its worker, by the logs of the others.
    """
    by_id = defaultdict(list)
    for start in sorted(starts, key=lambda start: start.started_ms):
        by_id[start.task_id].append(start)
    twice = {task_id: own for task_id, own in by_id.items() if len(own) > 1}
    struck = set()
    for task_id, own in twice.items():
        late = [_entered_late(own, strike) for strike, ids in zip(strikes, stalled, strict=True) if task_id in ids]
        in_time = [start for start in own if start not in late]
        if all(any(strike.hit(start, grace_ms=ANSWER_MS) for strike in strikes) for start in in_time[:-1]):
            struck.add(task_id)
    charged_twice = {own[0].subject for task_id, own in twice.items() if task_id in struck and own[0].task == "charge"}
    excused: dict[str, str] = {}
    unexplained: dict[str, str] = {}
    for task_id, own in twice.items():
        follows = own[0].task == "receipt" and own[0].subject in charged_twice
        (excused if task_id in struck or follows else unexplained)[task_id] = f"{own[0].task} {own[0].subject}"
    return excused, unexplained


def _entered_late(own: Sequence[Started], strike: Strike) -> Started | None:
    """The start of a body whose door a worker had reached when it was paused, and that it entered when it went on."""
    if not strike.goes_on or any(strike.hit(start) for start in own):
        return None
    after = (start for start in own if start.worker == strike.worker and start.started_ms > strike.until_ms)
    return next(after, None)
