"""How far a task has come, kept for its next start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from celery_selfheal.keys import Keys
from celery_selfheal.leases.port import JOURNAL_TTL
from celery_selfheal.leases.redis import PACKAGE
from celery_selfheal.leases.scripts import Script, answering
from celery_selfheal.redis_wire import milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one start has said last, as JSON."""

    task_id: str
    token: str
    text: bytes


class RedisProgress:
    """Progress beside the leases. Every method raises ``StoreError`` when Redis did not answer, and may be repeated."""

    def __init__(self, client: redis.Redis, keys: Keys, *, address: str) -> None:
        self._client: Any = client  # its types differ between the versions of redis-py that we support
        self._keys = keys
        self._address = address
        self._save = Script(client, PACKAGE, "progress", address=address)

    def save(self, said: Sequence[Progress]) -> None:
        """Keep it, in one round trip; what a start says that has ended is dropped."""
        self._save.each(
            [
                (
                    [self._keys.journal(one.task_id), self._keys.progress(one.task_id)],
                    [one.token, one.text, milliseconds(JOURNAL_TTL)],
                )
                for one in said
            ]
        )

    def last(self, task_id: str) -> bytes | None:
        """What the last start has said; ``None`` if none has said anything."""
        with answering(self._address, "last progress"):
            found: bytes | None = self._client.get(self._keys.progress(task_id))
        return found

    def forget(self, task_id: str) -> None:
        """The task has come to its end."""
        with answering(self._address, "forget progress"):
            self._client.delete(self._keys.progress(task_id))
