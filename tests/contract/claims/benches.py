"""Claim stores on a bench: a database, Redis or a dictionary, and the hand of fate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import pytest
import redis
from sqlalchemy import Engine, delete, event, select, update

from celery_selfheal.database.tables import ProcessedJob as Row
from celery_selfheal.dedup.claim import SqlClaims
from celery_selfheal.dedup.memory import MemoryClaims
from celery_selfheal.dedup.owner import Owner
from celery_selfheal.dedup.port import ClaimStore, Job, Status
from celery_selfheal.dedup.redis import RedisClaims
from contract.benches import ADDRESS, KEYS

DATABASES = ("sqlite", "postgresql", "mariadb")
EXPIRING = ("memory", "redis")
KINDS = (*EXPIRING, *DATABASES)

KEY_TTL = timedelta(hours=24)
HASH = "a" * 64

_numbers = itertools.count(1)


def a_job(key: str = "payment:7", *, task_id: str = "t1", **changes: Any) -> Job:
    """A start with a token of its own; each has a larger fence than those before."""
    number = next(_numbers)
    job = Job(
        key=key,
        task_name="shop.pay",
        task_id=task_id,
        token=f"token-{number}",
        fence=1_760_000_000_000_000 + number,
        payload_hash=HASH,
    )
    return replace(job, **changes)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the store keeps of a key."""

    status: Status
    owner: Owner
    fence: int
    dispatched: bool
    payload: Any


class ClaimBench(Protocol):
    """A claim store, and what only a test may do to it."""

    store: ClaimStore

    def look(self, key: str) -> Seen | None:
        """What is kept of the key."""

    def age(self, key: str, duration: timedelta) -> None:
        """So much time has passed since the key was written."""

    def lose(self, key: str) -> None:
        """The key is gone, as from a store that was emptied."""


class MemoryClaimBench:
    def __init__(self) -> None:
        self.now = 1_000.0
        self.store = MemoryClaims(clock=lambda: self.now, ttl=KEY_TTL)

    def look(self, key: str) -> Seen | None:
        claim = self.store._claims.get(key)
        if claim is None or claim.expires <= self.now:
            return None
        return Seen(claim.status, claim.owner, claim.fence, claim.dispatched, claim.payload)

    def age(self, key: str, duration: timedelta) -> None:
        self.store._claims[key].since -= duration.total_seconds()
        self.store._claims[key].expires -= duration.total_seconds()

    def lose(self, key: str) -> None:
        self.store._claims.pop(key, None)


class RedisClaimBench:
    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client
        self.store = RedisClaims(client, KEYS, ttl=KEY_TTL, address=ADDRESS)

    def look(self, key: str) -> Seen | None:
        import json

        found = {name.decode(): value.decode() for name, value in self.client.hgetall(KEYS.claim(key)).items()}
        if not found:
            return None
        return Seen(
            Status({"PROCESSING": "IN_PROGRESS"}.get(found["status"], found["status"])),
            Owner.parse(found["owner"]),
            int(found["fence"]),
            found.get("dispatched") == "1",
            json.loads(found.get("payload", "null")),
        )

    def age(self, key: str, duration: timedelta) -> None:
        milliseconds = round(duration.total_seconds() * 1000)
        self.client.hincrby(KEYS.claim(key), "at_ms", -milliseconds)
        self.client.pexpire(KEYS.claim(key), max(0, self.client.pttl(KEYS.claim(key)) - milliseconds))

    def lose(self, key: str) -> None:
        self.client.delete(KEYS.claim(key))


class SqlClaimBench:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.store = SqlClaims(engine)
        with engine.begin() as connection:
            connection.execute(delete(Row))

    def look(self, key: str) -> Seen | None:
        with self.engine.connect() as connection:
            row = connection.execute(
                select(Row.status, Row.owner, Row.fence, Row.dispatched, Row.response_payload).where(
                    Row.idempotency_key == key
                )
            ).one_or_none()
        return row and Seen(Status(row[0]), Owner.parse(row[1]), *row[2:])

    def age(self, key: str, duration: timedelta) -> None:
        its = Row.idempotency_key == key
        with self.engine.begin() as connection:
            at = connection.execute(select(Row.updated_at).where(its)).scalar_one()
            connection.execute(update(Row).where(its).values(updated_at=at - duration))

    def lose(self, key: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(delete(Row).where(Row.idempotency_key == key))


class LostReplies:
    """The store behind a network that loses the reply to every first call."""

    def __init__(self, store: ClaimStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        step = getattr(self._store, name)

        def twice(*args: Any, **kwargs: Any) -> Any:
            step(*args, **kwargs)
            return step(*args, **kwargs)

        return twice


def a_bench(kind: str, request: pytest.FixtureRequest) -> ClaimBench:
    """An empty store of that kind."""
    if kind == "memory":
        return MemoryClaimBench()
    if kind == "redis":
        client: redis.Redis = request.getfixturevalue("client")
        client.flushdb()
        return RedisClaimBench(client)
    return SqlClaimBench(request.getfixturevalue(f"{kind}_engine"))


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """Collect what the stores send."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)
