"""What a dead letter queue holds: an entry, which ones are meant, and the port to a broker that keeps them."""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, Protocol

from celery_selfheal.agents.envelope import Envelope, wrapped
from celery_selfheal.dead_letter import Death


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter(Death):
    """One entry of a dead letter queue. What was not known is empty or 0.

    Attributes:
        id: Celery's message id; for what could not be read a name made from its bytes, ``raw:<digest>``.
        message: The whole message in kombu's envelope: ``body``, ``content-type``, ``content-encoding``, ``headers``
            and ``properties``. The body is text, in the encoding that ``properties["body_encoding"]`` names.
    """

    message: Mapping[str, Any]

    @classmethod
    def read(cls, raw: bytes) -> DeadLetter:
        """Take an entry apart; whatever lies in the queue can be read."""
        envelope = Envelope.decode(raw)
        death = envelope.death
        known = replace(
            death,
            id=death.id or envelope.task_id or f"raw:{hashlib.sha256(raw).hexdigest()[:16]}",
            task=death.task or envelope.task_name,
        )
        return cls(**asdict(known), message=envelope.fields or wrapped(raw, queue=""))

    @property
    def has_origin(self) -> bool:
        """Whether it is known where it came from; a message that others put into the queue has none."""
        return bool(self.queue or self.routing_key)

    @property
    def body(self) -> bytes:
        """The body as its producer sent it; undecoded where its encoding is broken."""
        text = str(self.message.get("body") or "").encode("utf-8", "surrogatepass")
        properties = self.message.get("properties")
        if not isinstance(properties, Mapping) or properties.get("body_encoding") != "base64":
            return text
        try:
            return base64.b64decode(text)
        except binascii.Error:
            return text

    def about(self) -> dict[str, Any]:
        """Everything but the message, for programs."""
        return {name: value for name, value in asdict(self).items() if name != "message"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which dead letters are meant: those that meet every condition; none at all means every one.

    Attributes:
        ids: One of these.
        task: Name of the task; ``*``, ``?`` and ``[...]`` as in a shell.
        reason: Reason code, ``exhausted`` say.
        exception: Name of its class; patterns as for ``task``.
        older_than: Died longer ago.
        newer_than: Died since then.
    """

    ids: frozenset[str] = frozenset()
    task: str | None = None
    reason: str | None = None
    exception: str | None = None
    older_than: timedelta | None = None
    newer_than: timedelta | None = None

    def match(self, letter: DeadLetter, *, now: datetime) -> bool:
        """Whether ``letter`` is meant. One whose time of death cannot be read has no age, and meets none."""
        return (
            (not self.ids or letter.id in self.ids)
            and (self.task is None or fnmatchcase(letter.task, self.task))
            and (self.reason is None or letter.reason == self.reason)
            and (self.exception is None or fnmatchcase(letter.exception, self.exception))
            and ((self.older_than is None and self.newer_than is None) or self._has_age(letter, now))
        )

    def _has_age(self, letter: DeadLetter, now: datetime) -> bool:
        try:
            age = now - datetime.fromisoformat(letter.died_at)
        except (ValueError, TypeError):
            return False
        return (self.older_than is None or age > self.older_than) and (self.newer_than is None or age < self.newer_than)


@dataclass(frozen=True, slots=True)
class Entry:
    """A dead letter, and where its store finds it again.

    Attributes:
        raw: As it lies in the queue, in kombu's envelope.
        place: The store's own; valid while the reading lasts.
    """

    raw: bytes
    letter: DeadLetter
    place: Any


def printable(text: str) -> str:
    """The text for a terminal or a log: what could move the cursor or forge a line is shown as its escape."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode("ascii") for one in text
    )


class Outcome(enum.Enum):
    """What became of one entry."""

    MOVED = "moved"
    GONE = "gone"
    """It was not there any more: somebody else has taken it."""
    UNROUTABLE = "unroutable"
    """Its origin takes no messages: it stays where it is."""


class Reading(Protocol):
    """One pass over a queue. ``StoreError`` when the broker did not answer."""

    def pages(self) -> Iterator[Sequence[Entry]]:
        """Entries in the order of their death, a page at a time. Nothing is taken out by reading."""

    def replay(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Send entries of the last page back to where they came from, each instead of its entry here.

        Whoever is killed in between loses none. On Redis none is doubled either; on another broker its entry can stay
        here, and a second replay sends a copy that carries the same replay count, by which workers tell it.
        """

    def drop(self, entries: Sequence[Entry]) -> list[Outcome]:
        """Delete entries of the last page, for good."""


class DeadLetterStore(Protocol):
    """A broker's dead letter queue."""

    def reading(self) -> AbstractContextManager[Reading]:
        """Begin a pass. What was neither replayed nor dropped is in the queue when it ends, whatever ends it."""

    def __len__(self) -> int:
        """So many messages wait in the queue."""
