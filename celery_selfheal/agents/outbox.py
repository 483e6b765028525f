"""The courier: publishes what a crash has left in the outbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from celery_selfheal.telemetry.events import MessageSetAside, Observer

PAGE_SIZE = 100  # rows are locked for as long as their page is published
MAX_PAGES_A_STEP = 10
#: Younger rows are being published by whoever wrote them.
FRESH = timedelta(seconds=5)
#: So long nobody tries again what could not be sent: a queue may be made meanwhile.
ASIDE_SECONDS = 60.0


class Row(Protocol):
    """One message that waits."""

    @property
    def id(self) -> int:
        """Grows with each row."""

    @property
    def task_id(self) -> str:
        """Celery's message id."""

    @property
    def message(self) -> str:
        """The whole message."""

    @property
    def age(self) -> timedelta:
        """Since it was written."""


class Hold(Protocol):
    """Rows that nobody else publishes meanwhile."""

    @property
    def rows(self) -> Sequence[Row]:
        """Oldest first."""

    def remove(self, ids: Sequence[int]) -> None:
        """Remove rows when the hold ends."""


class OutboxStore(Protocol):
    """Where the messages wait."""

    def hold(self, *, limit: int, older_than: timedelta, but_not: Sequence[int] = ()) -> AbstractContextManager[Hold]:
        """Hold the oldest rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What became of one message.

    Attributes:
        refusal: Why it cannot be sent; empty when it was.
        task_name: Empty where it cannot be read.
    """

    refusal: str = ""
    task_name: str = ""


@dataclass(slots=True, kw_only=True)
class CourierReport:
    """What one round did."""

    sent: int = 0
    set_aside: int = 0
    unfinished: bool = False
    """There is more to do at once."""


class Courier:
    """Publishes old rows, in the order in which they were written, and removes them. Any number may run at once.

    At least once: if it dies between the two, the next one publishes them again, as the same messages. What cannot be
    sent is left where it is, told, and passed over for a minute.

    Args:
        send: Sends messages in their order, and says what became of each; raises ``StoreError`` when the broker does
            not answer.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        outbox: OutboxStore,
        *,
        send: Callable[[Sequence[str]], Sequence[Sent]],
        tell: Observer,
        now: Callable[[], float],
        fresh: timedelta = FRESH,
    ) -> None:
        self._outbox = outbox
        self._send = send
        self._tell = tell
        self._now = now
        self._fresh = fresh
        self._aside_until: dict[int, float] = {}

    def deliver(self) -> CourierReport:
        """Publish what has waited too long, a bounded number of pages.

        Raises:
            StoreError: database or broker did not answer; what was not removed is published the next time.
        """
        report = CourierReport()
        for _ in range(MAX_PAGES_A_STEP):
            report.unfinished = self._deliver_page(report)
            if not report.unfinished:
                break
        return report

    def _deliver_page(self, report: CourierReport) -> bool:
        """Returns whether the page was full."""
        now = self._now()
        self._aside_until = {one: until for one, until in self._aside_until.items() if until > now}
        with self._outbox.hold(limit=PAGE_SIZE, older_than=self._fresh, but_not=tuple(self._aside_until)) as held:
            if not held.rows:
                return False
            outcomes = self._send([row.message for row in held.rows])
            held.remove([row.id for row, sent in zip(held.rows, outcomes, strict=True) if not sent.refusal])
        for row, sent in zip(held.rows, outcomes, strict=True):
            if sent.refusal:
                report.set_aside += 1
                self._set_aside(row, sent)
            else:
                report.sent += 1
        return len(held.rows) == PAGE_SIZE

    def _set_aside(self, row: Row, sent: Sent) -> None:
        self._aside_until[row.id] = self._now() + ASIDE_SECONDS
        self._tell(
            MessageSetAside(
                task_name=sent.task_name,
                task_id=row.task_id,
                reason=sent.refusal,
                owner=f"selfheal_outbox row {row.id}",
                age_seconds=row.age.total_seconds(),
            )
        )
