"""Leases in PostgreSQL: one function call for each step."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from celery_selfheal.keys import Keys
from celery_selfheal.leases.functions import Functions, name_of
from celery_selfheal.leases.port import (
    JOURNAL_TTL,
    Acquired,
    AlreadyDone,
    Busy,
    Lease,
    Outcome,
    OverBudget,
    Renewal,
    Stall,
    StalledOut,
    Start,
)
from celery_selfheal.retry_budget import RetryBudget

CLEAN_LIMIT = 1_000  # rows of each kind in one transaction: no lock is held for long
CLEAN_PAGES = 5  # a sweep; every two seconds that keeps up with 2 500 tasks a second


def milliseconds(duration: timedelta) -> int:
    """Whole milliseconds."""
    return round(duration.total_seconds() * 1000)


class PostgresLeaseStore:
    """``LeaseStore`` in PostgreSQL. It knows no deliveries: who asks it has checked that the delivery is still his.

    Args:
        functions: On connections whose calls end well below ``ttl``; owned by the caller.
        budget: Retries above it wait longer; ``None`` for no limit.
    """

    def __init__(
        self,
        functions: Functions,
        keys: Keys,
        *,
        ttl: timedelta,
        max_stalls: int,
        done_ttl: timedelta,
        budget: RetryBudget | None = None,
    ) -> None:
        self._call = functions
        self._app = name_of(keys.root)
        self._ttl_ms = milliseconds(ttl)
        self._max_stalls = max_stalls
        self._done_ttl_ms = milliseconds(done_ttl)
        self._budget = budget
        self._epoch: str | None = None

    def acquire(self, start: Start) -> Outcome:
        """See ``LeaseStore.acquire``: one round trip."""
        budget = self._budget
        row = self._call(
            "acquire",
            self._app,
            token=start.token,
            id=name_of(start.task_id),
            ttl_ms=self._ttl_ms,
            max_stalls=self._max_stalls,
            session=start.session,
            attempt=start.attempt,
            predecessor=start.predecessor,
            journal_ms=milliseconds(JOURNAL_TTL),
            marker=name_of(start.marker),
            task=name_of(start.task_name),
            node=start.node,
            pid=start.pid,
            deadline_seconds=start.deadline_seconds,
            turn=start.turn,
            share=budget.share if budget else None,
            per_second=budget.per_second if budget else None,
            most=budget.burst if budget else None,
        )
        if row.state == "done":
            return AlreadyDone(row.detail)
        if row.state == "over budget":
            return OverBudget(wait=timedelta(milliseconds=row.wait_ms))
        if row.state == "busy":
            return Busy(remaining=timedelta(milliseconds=row.wait_ms), attempt=row.detail)
        lease = Lease(task_id=start.task_id, token=start.token, fence=row.fence)
        if row.state == "stalled":
            return StalledOut(lease=lease, stalls=row.stalls)
        overtaken = None
        if row.overtaken_token is not None:
            overtaken = Stall(
                task_id=start.task_id,
                task_name=row.overtaken_task,
                token=row.overtaken_token,
                owner=row.overtaken_owner,
                age_seconds=max(0.0, row.overtaken_seconds),
                unfinished_starts=row.stalls,
            )
        return Acquired(lease=lease, stalls=row.stalls, overtaken=overtaken)

    def release(
        self, start: Start, *, ended: bool, marker: bool, state: str, acknowledge: bool = False, failure: str = ""
    ) -> bool:
        """See ``LeaseStore.release``: one round trip. Acknowledges nothing."""
        row = self._call(
            "release",
            self._app,
            token=start.token,
            id=name_of(start.task_id),
            ended=ended,
            marker=name_of(start.marker),
            done_ms=self._done_ttl_ms if marker else None,
            failure=failure,
            event=state,
            task=name_of(start.task_name),
        )
        return bool(row[0])

    def renew(self, starts: Sequence[Start]) -> list[Renewal]:
        """See ``LeaseStore.renew``: one round trip for all of them."""
        session = starts[0].session if starts else ""
        node = starts[0].node if starts else ""
        asked = renewal_arguments(starts, ttl_ms=self._ttl_ms, session=session, node=node)
        row = self._call("beat", self._app, **asked)
        renewals = [Renewal(answer) for answer in row.answers]
        if self._epoch not in (None, row.epoch):
            # The store was emptied: what runs takes its lease anew, under the token that its child knows.
            for n, start in enumerate(starts):
                if renewals[n] is Renewal.IDLE and isinstance(self.acquire(start), Acquired):
                    renewals[n] = Renewal.HELD
        self._epoch = row.epoch
        return renewals

    def abandon(self, start: Start) -> int | None:
        """See ``LeaseStore.abandon``."""
        row = self._call(
            "abandon",
            self._app,
            token=start.token,
            id=name_of(start.task_id),
            journal_ms=milliseconds(JOURNAL_TTL),
            marker=name_of(start.marker),
            task=name_of(start.task_name),
        )
        unfinished: int | None = row[0]
        return unfinished

    def expire(self, *, session: str | None, limit: int) -> list[Stall]:
        """See ``LeaseStore.expire``: by index, so that its cost follows what has expired, not what lives.

        Without a session it also removes rows that have run out, a bounded number of them.
        """
        rows = self._call.rows("expire", self._app, session=session, limit=limit)
        if session is None:
            self._clean()
        return [
            Stall(
                task_id=row.stalled_id,
                task_name=row.stalled_task,
                token=row.stalled_token,
                owner=row.stalled_owner,
                age_seconds=max(0.0, row.stalled_seconds),
                unfinished_starts=row.unfinished,
            )
            for row in rows
        ]

    def is_held(self, task_id: str, token: str) -> bool:
        """See ``LeaseInquiry.is_held``."""
        return bool(self._call("is_held", self._app, id=name_of(task_id), token=token)[0])

    def forget(self, task_ids: Sequence[str]) -> None:
        """See ``Journals.forget``."""
        self._call("forget", self._app, ids=[name_of(task_id) for task_id in task_ids])

    def _clean(self) -> None:
        for _ in range(CLEAN_PAGES):
            if self._call.rows("clean", None, limit=CLEAN_LIMIT)[0][0] < CLEAN_LIMIT:
                break


def renewal_arguments(
    starts: Sequence[Start],
    *,
    ttl_ms: int,
    session: str,
    node: str,
    mode: str = "none",
    about: str = "",
    host: str = "",
) -> dict[str, object]:
    """Arguments of ``selfheal_beat``; ``mode`` is ``join``, ``stay``, or ``none`` for leases without a session."""
    return {
        "session": session,
        "ttl_ms": ttl_ms,
        "mode": mode,
        "about": about,
        "host": host,
        "node": node,
        "tokens": [start.token for start in starts],
        "ids": [name_of(start.task_id) for start in starts],
        "tasks": [name_of(start.task_name) for start in starts],
    }
