"""Replays dead letters: at a rate, each at most so often, with a line in the log for each."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from celery_selfheal.agents.dead_letters import DeadLetter, DeadLetterStore, Entry, Filters, Outcome, Reading, printable

logger = logging.getLogger("celery_selfheal.dlq")

BATCH_SIZE = 100  # entries a round trip: an answer comes within a fraction of a second, and so does Ctrl-C
BATCH_SECONDS = 0.05  # between two batches of a high rate
CATCH_UP_SECONDS = 1.0  # what a slow broker may cost and be made good again


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """What one replay did, or with a dry run would do.

    Attributes:
        replayed: Sent back to where they came from.
        refused: Replayed too often already; ``force`` replays them all the same.
        unroutable: Their queue or exchange is gone, or nobody knows what it was. They stay.
        gone: Taken by somebody else in between.
    """

    replayed: int = 0
    refused: int = 0
    unroutable: int = 0
    gone: int = 0

    @property
    def matched(self) -> int:
        """How many were meant."""
        return self.replayed + self.refused + self.unroutable + self.gone

    @property
    def is_complete(self) -> bool:
        """Whether each that was meant was replayed by this replay or another."""
        return not self.refused and not self.unroutable


class Pace:
    """A schedule: entry *n*, counted from 0, is due ``n / rate`` seconds after the first.

    Args:
        rate: Entries a second; ``None`` for no limit.
    """

    def __init__(self, rate: float | None, *, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._begun: float | None = None
        self._sent = 0

    def wait(self, *, limit: int) -> int:
        """Wait until at least one is due, and return how many may go now, ``limit`` at most. They count as sent."""
        if self._rate is None:
            return limit
        now = self._clock()
        if self._begun is None:
            self._begun = now
        due_at = self._begun + self._sent / self._rate
        if now < due_at:
            # A high rate goes in batches, so that it does not cost a round trip an entry.
            is_high = self._rate * BATCH_SECONDS > 1
            self._sleep(max(due_at - now, BATCH_SECONDS if is_high else 0.0))
            now = self._clock()
        late = now - due_at
        if late > CATCH_UP_SECONDS:
            self._begun += late - CATCH_UP_SECONDS
        due = int((now - self._begun) * self._rate) + 1 - self._sent
        count = max(1, min(limit, due))
        self._sent += count
        return count


class Replayer:
    """Sends dead letters back to where they came from.

    Args:
        max_replays: Above it a replay needs force.
        forget: Removes what is remembered of the ids' earlier starts: a replay has fresh budgets.
        by: Who replays, for the log.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        store: DeadLetterStore,
        *,
        max_replays: int,
        forget: Callable[[Sequence[str]], None],
        by: str,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._store = store
        self._max_replays = max_replays
        self._forget = forget
        self._by = by
        self._clock = clock
        self._sleep = sleep

    def run(
        self,
        filters: Filters,
        *,
        now: datetime,
        limit: int | None = None,
        rate: float | None = None,
        force: bool = False,
        dry_run: bool = False,
        progress: Callable[[ReplayReport], None] = lambda report: None,
    ) -> ReplayReport:
        """Replay those that ``filters`` mean, oldest first.

        Args:
            now: Ages are measured from here.
            limit: So many at most, those that are refused not counted.
            progress: Called after each batch.

        Raises:
            StoreError: the broker did not answer. What was replayed stays so; a second run does the rest.
        """
        pace = Pace(None if dry_run else rate, clock=self._clock, sleep=self._sleep)
        report = ReplayReport()
        with self._store.reading() as reading:
            for page in reading.pages():
                meant = [entry for entry in page if filters.match(entry.letter, now=now)]
                wanted = self._sort_out(meant, report, force=force)
                left = len(wanted) if limit is None else min(len(wanted), limit - report.replayed)
                wanted = wanted[:left]
                while wanted:
                    count = pace.wait(limit=min(len(wanted), BATCH_SIZE))
                    batch, wanted = wanted[:count], wanted[count:]
                    if dry_run:
                        report.replayed += len(batch)
                    else:
                        with deferred_interrupt():
                            self._replay(reading, batch, report)
                    progress(report)
                if limit is not None and report.replayed >= limit:
                    break
        progress(report)
        return report

    def _sort_out(self, entries: Sequence[Entry], report: ReplayReport, *, force: bool) -> list[Entry]:
        wanted = []
        for entry in entries:
            letter = entry.letter
            if not letter.has_origin:
                report.unroutable += 1
                logger.warning("not replayed: %s, nobody knows where it came from", name_of(letter))
            elif letter.replays >= self._max_replays and not force:
                report.refused += 1
                logger.warning("not replayed: %s, replayed %d times before", name_of(letter), letter.replays)
            else:
                wanted.append(entry)
        return wanted

    def _replay(self, reading: Reading, batch: Sequence[Entry], report: ReplayReport) -> None:
        # Before they go: a start of the replayed task must not lose what is remembered of it.
        self._forget([entry.letter.id for entry in batch])
        for entry, outcome in zip(batch, reading.replay(batch), strict=True):
            letter = entry.letter
            if outcome is Outcome.MOVED:
                report.replayed += 1
                queue, number = printable(letter.queue), letter.replays + 1
                logger.info("replayed by %s: %s to %s, replay %d", self._by, name_of(letter), queue, number)
            elif outcome is Outcome.GONE:
                report.gone += 1
                logger.info("not replayed: %s, somebody else has taken it", name_of(letter))
            else:
                report.unroutable += 1
                logger.warning("not replayed: %s, %s takes no message", name_of(letter), printable(letter.queue))


def name_of(letter: DeadLetter) -> str:
    """A dead letter for the log: which task, and how and when it died."""
    return printable(f"{letter.task}[{letter.id}] ({letter.reason or 'no reason'}, {letter.died_at or 'no date'})")


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, so that what is sent is also settled."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        # Handled as it would have been, by a handler of the caller's too.
        signal.raise_signal(signal.SIGINT)
