"""The dead letter queue on a Redis broker: read in place, and changed an entry in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from celery_selfheal.agents.dead_letters import DeadLetter, Entry, Outcome
from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.leases.scripts import Script, answering
from celery_selfheal.plugin.brokers.layout import RedisLayout, list_of, lists_of

PAGE_SIZE = 200  # entries: with a traceback each they are a megabyte


class RedisDeadLetterStore:
    """``DeadLetterStore`` on the broker's Redis server.

    Args:
        client: Owned by the caller.
        address: Names the server in errors, without a password.
    """

    def __init__(self, client: Any, *, queue: str, layout: RedisLayout, address: str) -> None:
        self._client = client
        self._layout = layout
        self._address = address
        # Ours go to the first; what kombu published, since it could not be moved in place, goes by priority.
        self._lists = lists_of(queue, layout)
        self._replay = Script(client, __package__, "replay", address=address)

    @contextmanager
    def reading(self) -> Iterator[_Reading]:
        """See ``DeadLetterStore.reading``: nothing is taken out, so nothing need be given back."""
        yield _Reading(self._client, self._lists, self._layout, self._replay, self._address)

    def __len__(self) -> int:
        """See ``DeadLetterStore``."""
        with answering(self._address, "count"), self._client.pipeline(transaction=False) as pipe:
            for name in self._lists:
                pipe.llen(name)
            return sum(pipe.execute())


@dataclass(slots=True)
class _Reading:
    client: Any
    lists: Sequence[str]
    layout: RedisLayout
    script: Script
    address: str
    removed: int = 0

    def pages(self) -> Iterator[list[Entry]]:
        """See ``Reading.pages``. An entry that others move meanwhile may hide another from this pass."""
        for name in self.lists:
            kept = 0
            while page := self._page(name, kept):
                self.removed = 0
                yield page
                kept += len(page) - self.removed

    def replay(self, entries: Sequence[Entry]) -> list[Outcome]:
        """See ``Reading.replay``: one step an entry, and one round trip for all."""
        return self._remove(entries, [[self._origin(entry.raw)] for entry in entries])

    def drop(self, entries: Sequence[Entry]) -> list[Outcome]:
        """See ``Reading.drop``."""
        return self._remove(entries, [[] for _ in entries])

    def _page(self, name: str, kept: int) -> list[Entry]:
        # Counted from the tail, where the oldest are: new ones come in at the head and move no index.
        with answering(self.address, "list"):
            raws = self.client.lrange(name, -kept - PAGE_SIZE, -kept - 1)
        return [Entry(raw, DeadLetter.read(raw), name) for raw in reversed(raws)]

    def _origin(self, raw: bytes) -> tuple[str, bytes]:
        envelope = Envelope.decode(raw)
        death = envelope.death
        return list_of(death.queue or death.routing_key, envelope.priority, self.layout), envelope.replayed()

    def _remove(self, entries: Sequence[Entry], pushes: Sequence[Sequence[tuple[str, bytes]]]) -> list[Outcome]:
        removed = self.script.each(
            [
                ([entry.place, *(key for key, _ in push)], [entry.raw, *(message for _, message in push)])
                for entry, push in zip(entries, pushes, strict=True)
            ]
        )
        self.removed += sum(removed)
        return [Outcome.MOVED if one else Outcome.GONE for one in removed]
