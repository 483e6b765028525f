"""Leases in Redis: one Lua call for each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import islice
from typing import Any

import redis

from celery_selfheal.keys import Keys, UnackedKeys
from celery_selfheal.leases import record
from celery_selfheal.leases.beat import BeatScript
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
    renewal_of,
)
from celery_selfheal.leases.scripts import Script, answering, text
from celery_selfheal.redis_wire import Word, milliseconds, packed
from celery_selfheal.retry_budget import RetryBudget

PACKAGE = "celery_selfheal.leases"

KNOWN_TASKS = 1_000  # task names whose part of a call is kept packed, half a kilobyte each
# EVALSHA, digest, number of keys, the keys that are always there, and the arguments.
ACQUIRE_WORDS = 3 + 10 + 16
RELEASE_WORDS = 3 + 7 + 9


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
        self._done_ttl_ms = milliseconds(done_ttl)
        self._address = address
        self._unacked = unacked
        self._epoch: str | None = None
        limits: list[Word] = ["", 0, 0]
        if budget is not None:
            limits = [budget.share, budget.per_second, budget.burst]
        self._limits = [self._ttl_ms, max_stalls, milliseconds(JOURNAL_TTL), *limits]
        # The greater part of each call is the same for all starts of a task.
        self._of_acquire = lru_cache(KNOWN_TASKS)(self._words_of_acquire)
        self._of_release = lru_cache(KNOWN_TASKS)(self._words_of_release)
        self._acquire = Script(client, PACKAGE, "acquire", address=address)
        self._release = Script(client, PACKAGE, "release", address=address)
        self._beat = BeatScript(client, keys, ttl_ms=self._ttl_ms, address=address)
        self._abandon = Script(client, PACKAGE, "abandon", address=address)
        self._expire = Script(client, PACKAGE, "expire", address=address)

    def acquire(self, start: Start) -> Outcome:
        """See ``LeaseStore.acquire``: one round trip, the ownership of the delivery included."""
        names = self._keys
        tag = self._tag_of(start)
        lock = () if start.lock_key is None else (packed([start.lock_key]),)
        keys, arguments = self._of_acquire(
            start.session, start.task_name, start.node, start.pid, start.deadline_seconds, bool(tag)
        )
        reply = text(
            self._acquire.send(
                ACQUIRE_WORDS + (2 if tag else 0) + len(lock),
                b"$2\r\n12\r\n" if tag else b"$2\r\n10\r\n",
                packed(
                    [
                        names.lease(start.task_id),
                        names.journal(start.task_id),
                        names.done(start.marker),
                        names.wait(start.token),
                    ]
                ),
                keys,
                packed([start.token, start.task_id, start.attempt, start.predecessor or "", tag, start.turn]),
                arguments,
                *lock,
            )
        )
        state, _, rest = reply.partition(" ")
        if state == "not-mine":
            return NotMine()
        if state == "done":
            return AlreadyDone(rest.partition(" ")[2])
        if state == "over-budget":
            return OverBudget(wait=timedelta(milliseconds=int(rest)))
        if state == "busy":
            left_ms, _, attempt = rest.partition(" ")
            return Busy(remaining=timedelta(milliseconds=max(0, int(left_ms))), attempt=attempt)
        if state == "busy-lock":
            left_ms, _, node = rest.partition(" ")
            remaining = timedelta(milliseconds=max(0, int(left_ms)))
            return Busy(remaining=remaining, attempt="", key=start.lock_key, holder=node)
        fence, unfinished, overtaken = rest.split(" ", 2)
        lease = Lease(task_id=start.task_id, token=start.token, fence=int(fence))
        stalls = int(unfinished)
        if state == "stalled":
            return StalledOut(lease=lease, stalls=stalls)
        if not overtaken:
            return Acquired(lease=lease, stalls=stalls)
        stall = record.InFlight.decode(overtaken).stall(
            start.task_id, now_ms=lease.fence // 1000, unfinished_starts=stalls
        )
        return Acquired(lease=lease, stalls=stalls, overtaken=stall)

    def release(
        self, start: Start, *, ended: bool, marker: bool, state: str, acknowledge: bool = False, failure: str = ""
    ) -> bool:
        """See ``LeaseStore.release``: one round trip, acknowledgement included."""
        names = self._keys
        tag = self._tag_of(start) if acknowledge else ""
        reply = self._release.send(
            RELEASE_WORDS + (3 if tag else 0),
            b"$2\r\n10\r\n" if tag else b"$1\r\n7\r\n",
            packed([names.lease(start.task_id), names.journal(start.task_id), names.done(start.marker)]),
            self._of_release(start.session, bool(tag)),
            packed(
                [
                    start.token,
                    start.task_id,
                    "ended" if ended else "handed over",
                    self._done_ttl_ms if marker else "",
                    f"{state}|{start.task_name}",
                    tag,
                    f" {failure}" if failure else "",
                    start.session,
                    names.root,
                ]
            ),
        )
        return bool(reply)

    def renew(self, starts: Sequence[Start]) -> list[Renewal]:
        """See ``LeaseStore.renew``: one round trip for all of them."""
        session = starts[0].session if starts else ""
        epoch, _, renewals, _ = self._beat(starts, session=session, mode="none")
        if self._epoch not in (None, epoch):
            # The store was emptied: what runs takes its lease anew, under the token that its child knows.
            for n, start in enumerate(starts):
                if renewals[n] is Renewal.IDLE:
                    renewals[n] = renewal_of(self.acquire(start))
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
            [start.token, start.task_id, milliseconds(JOURNAL_TTL), start.task_name, start.session, names.root],
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
                [task_id, session or "", f"stalls|{start.task_name if start else ''}", raw or "", names.root],
            )
            if start and unfinished >= 0:
                yield start.stall(task_id, now_ms=now_ms, unfinished_starts=unfinished)

    def _words_of_acquire(
        self, session: str, task_name: str, node: str, pid: int, deadline_seconds: float | None, has_tag: bool
    ) -> tuple[bytes, bytes]:
        names = self._keys
        keys = [names.budget(task_name), names.inflight, names.index, names.fence, names.counters, names.held(session)]
        if has_tag and self._unacked:
            keys += [self._unacked.unacked, names.owned(session)]
        about = record.encode(task_name, node=node, pid=pid, deadline_seconds=deadline_seconds)
        return packed(keys), packed([session, task_name, about, *self._limits, names.root])

    def _words_of_release(self, session: str, has_tag: bool) -> bytes:
        names = self._keys
        keys = [names.inflight, names.index, names.counters, names.held(session)]
        if has_tag and self._unacked:
            keys += [self._unacked.unacked, self._unacked.index, names.owned(session)]
        return packed(keys)

    def _tag_of(self, start: Start) -> str:
        return start.tag if start.tag and self._unacked else ""
