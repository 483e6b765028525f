"""Leases in Redis: one Lua call for each step."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import redis

from celery_selfheal.keys import Keys
from celery_selfheal.leases import record
from celery_selfheal.leases.port import (
    JOURNAL_TTL,
    Acquired,
    AlreadyDone,
    Busy,
    Lease,
    NotMine,
    Outcome,
    OverBudget,
    Renewal,
    Stall,
    StalledOut,
    Start,
)
from celery_selfheal.leases.scripts import Script, answering, text
from celery_selfheal.retry_budget import RetryBudget

BOOKKEEPING_TTL = timedelta(days=7)
"""Life of indexes and counters after the last beat of any worker: a fleet that is gone leaves nothing for ever."""

PACKAGE = "celery_selfheal.leases"


def milliseconds(duration: timedelta) -> int:
    """Whole milliseconds, for ``PX``."""
    return round(duration.total_seconds() * 1000)


@dataclass(frozen=True, slots=True)
class UnackedKeys:
    """Where kombu keeps unacknowledged deliveries, with its global prefix applied."""

    unacked: str
    index: str


class RedisLeaseStore:
    """``LeaseStore`` and ``LeaseInquiry`` on one Redis server.

    Args:
        client: With a socket timeout well below ``ttl``; owned by the caller.
        address: Names the server in errors, without a password.
        unacked: Given when the broker is the same server and database: ownership of the delivery is then checked
            by ``acquire`` and settled by ``release`` in the same step.
        budget: Retries above it wait longer; ``None`` for no limit.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        ttl: timedelta,
        max_stalls: int,
        done_ttl: timedelta,
        address: str,
        unacked: UnackedKeys | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        self._client: Any = client  # its types differ between the versions of redis-py that we support
        self._keys = keys
        self._ttl_ms = milliseconds(ttl)
        self._max_stalls = max_stalls
        self._done_ttl_ms = milliseconds(done_ttl)
        self._address = address
        self._unacked = unacked
        self._epoch: str | None = None
        self._budget: list[float | str] = ["", 0, 0]
        if budget is not None:
            self._budget = [budget.share, budget.per_second, budget.burst]
        self._acquire = Script(client, PACKAGE, "acquire", address=address)
        self._release = Script(client, PACKAGE, "release", address=address)
        self._beat = Script(client, PACKAGE, "beat", address=address)
        self._abandon = Script(client, PACKAGE, "abandon", address=address)
        self._expire = Script(client, PACKAGE, "expire", address=address)

    def acquire(self, start: Start) -> Outcome:
        """See ``LeaseStore.acquire``: one round trip, the ownership of the delivery included."""
        names = self._keys
        keys = [
            names.lease(start.task_id),
            names.journal(start.task_id),
            names.done(start.marker),
            names.inflight,
            names.index,
            names.held(start.session),
            names.fence,
            names.counters,
            names.budget(start.task_name),
            names.wait(start.token),
        ]
        tag = self._tag_of(start)
        if tag and self._unacked:
            keys += [self._unacked.unacked, names.owned(start.session)]
        reply = self._acquire(
            keys,
            [
                start.token,
                start.task_id,
                self._ttl_ms,
                self._max_stalls,
                start.session,
                start.attempt,
                start.predecessor or "",
                milliseconds(JOURNAL_TTL),
                tag,
                start.task_name,
                record.encode(start),
                start.turn,
                *self._budget,
            ],
        )
        state = text(reply[0])
        if state == "not mine":
            return NotMine()
        if state == "done":
            return AlreadyDone(text(reply[1]).partition(" ")[2])
        if state == "over budget":
            return OverBudget(wait=timedelta(milliseconds=reply[1]))
        if state == "busy":
            return Busy(remaining=timedelta(milliseconds=max(0, reply[1])), attempt=text(reply[2] or b""))
        lease = Lease(task_id=start.task_id, token=start.token, fence=int(reply[1]))
        if state == "stalled":
            return StalledOut(lease=lease, stalls=reply[2])
        overtaken = record.InFlight.decode(text(reply[3])) if reply[3] else None
        return Acquired(
            lease=lease,
            stalls=reply[2],
            overtaken=overtaken.stall(start.task_id, now_ms=lease.fence // 1000, unfinished_starts=reply[2])
            if overtaken
            else None,
        )

    def release(
        self, start: Start, *, ended: bool, marker: bool, state: str, acknowledge: bool = False, failure: str = ""
    ) -> bool:
        """See ``LeaseStore.release``: one round trip, acknowledgement included."""
        names = self._keys
        keys = [
            names.lease(start.task_id),
            names.journal(start.task_id),
            names.done(start.marker),
            names.inflight,
            names.index,
            names.held(start.session),
            names.counters,
        ]
        tag = self._tag_of(start) if acknowledge else ""
        if tag and self._unacked:
            keys += [self._unacked.unacked, self._unacked.index, names.owned(start.session)]
        return bool(
            self._release(
                keys,
                [
                    start.token,
                    start.task_id,
                    "ended" if ended else "handed over",
                    self._done_ttl_ms if marker else "",
                    f"{state}|{start.task_name}",
                    tag,
                    f" {failure}" if failure else "",
                    start.session,
                ],
            )
        )

    def renew(self, starts: Sequence[Start]) -> list[Renewal]:
        """See ``LeaseStore.renew``: one round trip for all of them."""
        session = starts[0].session if starts else ""
        reply = self._beat(*renewal_call(self._keys, starts, ttl_ms=self._ttl_ms, session=session, mode="none"))
        epoch, _, *answers = map(text, reply)
        renewals = [Renewal(answer) for answer in answers]
        if self._epoch not in (None, epoch):
            # The store was emptied: what runs takes its lease anew, under the token that its child knows.
            for n, start in enumerate(starts):
                if renewals[n] is Renewal.IDLE and isinstance(self.acquire(start), Acquired):
                    renewals[n] = Renewal.HELD
        self._epoch = epoch
        return renewals

    def abandon(self, start: Start) -> int | None:
        """See ``LeaseStore.abandon``."""
        names = self._keys
        unfinished = self._abandon(
            [
                names.lease(start.task_id),
                names.journal(start.task_id),
                names.done(start.marker),
                names.inflight,
                names.index,
                names.held(start.session),
                names.counters,
            ],
            [start.token, start.task_id, milliseconds(JOURNAL_TTL), start.task_name, start.session],
        )
        return None if unfinished < 0 else int(unfinished)

    def expire(self, *, session: str | None, limit: int) -> list[Stall]:
        """See ``LeaseStore.expire``: by index, so that its cost follows what has expired, not what lives."""
        with answering(self._address, "expire"):
            seconds, micros = self._client.time()
            now_ms = seconds * 1000 + micros // 1000
            if session is None:
                ids = self._client.zrangebyscore(self._keys.index, "-inf", now_ms, start=0, num=limit)
            else:
                ids = list(self._client.sscan_iter(self._keys.held(session), count=limit))
            records = self._client.hmget(self._keys.inflight, ids) if ids else []
        stalls = self._expire_each(session, zip(map(text, ids), records, strict=True), now_ms=now_ms)
        return list(islice(stalls, limit))

    def is_held(self, task_id: str, token: str) -> bool:
        """See ``LeaseInquiry.is_held``."""
        with answering(self._address, "is_held"):
            holder = self._client.hget(self._keys.lease(task_id), "token")
        return holder is not None and text(holder) == token

    def forget(self, task_ids: Sequence[str]) -> None:
        """See ``Journals.forget``."""
        with answering(self._address, "forget"):
            self._client.delete(*map(self._keys.journal, task_ids))

    def _expire_each(
        self, session: str | None, found: Iterable[tuple[str, bytes | None]], *, now_ms: int
    ) -> Iterable[Stall]:
        names = self._keys
        for task_id, raw in found:
            start = record.InFlight.decode(text(raw)) if raw else None
            unfinished = self._expire(
                [
                    names.lease(task_id),
                    names.journal(task_id),
                    names.inflight,
                    names.index,
                    names.held(session or (start.session if start else "")),
                    names.counters,
                    names.session(session or ""),
                ],
                [task_id, session or "", f"stalls|{start.task_name if start else ''}", raw or ""],
            )
            if start and unfinished >= 0:
                yield start.stall(task_id, now_ms=now_ms, unfinished_starts=unfinished)

    def _tag_of(self, start: Start) -> str:
        return start.tag if start.tag and self._unacked else ""


def renewal_call(
    keys: Keys,
    starts: Sequence[Start],
    *,
    ttl_ms: int,
    session: str,
    mode: str,
    host: str = "",
    about: str = "",
    unacked: UnackedKeys | None = None,
    tags: Sequence[str] = (),
) -> tuple[list[str], list[str | int]]:
    """Keys and arguments of ``beat.lua``; ``mode`` is ``join``, ``stay``, or ``none`` for leases without a session."""
    names = [
        keys.session(session),
        keys.sessions,
        keys.about,
        keys.host(host),
        keys.owned(session),
        keys.pulse,
        keys.grace,
        keys.epoch,
        keys.inflight,
        keys.index,
        keys.held(session),
        unacked.unacked if unacked else keys.owned(session),
        unacked.index if unacked else keys.sessions,
        keys.counters,
    ]
    arguments: list[str | int] = [
        session,
        ttl_ms,
        about,
        mode,
        uuid.uuid4().hex,
        milliseconds(BOOKKEEPING_TTL),
        len(starts),
    ]
    for start in starts:
        names += [keys.lease(start.task_id), keys.journal(start.task_id)]
        arguments += [start.token, start.task_id, start.task_name]
    return names, [*arguments, *tags]
