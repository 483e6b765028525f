"""What a store of idempotency keys promises, and the values that cross its border."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias


class Status(str, enum.Enum):
    """What is known of an idempotency key; the value is what its row says."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    IN_DOUBT = "IN_DOUBT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One start that asks for an idempotency key.

    Attributes:
        key: At most 128 characters.
        token: Of the start's lease.
        fence: Of the start's lease; whoever has the larger one is later.
        payload_hash: Of task name and arguments; ``None`` where they cannot be compared.
    """

    key: str
    task_name: str
    task_id: str
    token: str
    fence: int
    payload_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Granted:
    """The key is this start's: the body may run. A repeat by the same token is granted again.

    Attributes:
        taken_over: An earlier start had it and is gone.
    """

    taken_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The effect is there.

    Attributes:
        payload: The stored result as plain JSON values; ``None`` also where none was to be stored.
        task_id: Whose effect it is; a duplicate may have another id.
        dispatched: Its callbacks were sent.
    """

    payload: Any
    task_id: str
    dispatched: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Another start has the key and has not finished.

    Attributes:
        task_id: Of that start; empty where it cannot be seen.
        token: Of that start; empty where it cannot be seen.
        fence: Of that start; 0 where it cannot be seen.
        age: Since it took the key or showed a sign of life, by the store's clock.
    """

    task_id: str
    token: str
    fence: int
    age: timedelta


@dataclass(frozen=True, slots=True)
class Doubtful:
    """A start died with the key, nobody knows how far it came, and a person has to look."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key belongs to another payload."""


Answer: TypeAlias = Granted | Finished | Held | Doubtful | Mismatch


class ClaimStore(Protocol):
    """Keeps claims on idempotency keys for effects that no transaction of ours can undo.

    Each method is one atomic step and commits by itself. Everything is compared by token and fence in the store, whose
    clock counts. ``StoreError`` when the store did not answer: the effect is unknown, and the call may be repeated.
    """

    def claim(self, job: Job) -> Answer:
        """Take the key if it is free; else say what is known of it. A repeat by the same token is granted again."""

    def inherit(self, job: Job, held: Held, *, doubt: bool) -> bool:
        """Take the key from a start that is gone, or put it in doubt.

        Args:
            held: What ``claim`` answered; nothing happens if that is not so any more, or if it has a larger fence.
            doubt: Set ``IN_DOUBT`` instead of taking over.

        Returns:
            ``False`` when another start was quicker; a repeat by the same token is ``True`` again.
        """

    def complete(self, job: Job, payload: Any) -> bool:
        """Say that the effect is there, with its result as plain JSON values.

        Returns:
            ``False`` when another start has the key by now: this one came too late. A repeat is ``True`` again.
        """

    def withdraw(self, job: Job) -> None:
        """Give the key back after a failure, by token: whoever tries next may claim it anew."""

    def mark_dispatched(self, job: Job) -> None:
        """Remember that the callbacks of a finished job were sent."""


IsHeld: TypeAlias = Callable[[str, str], bool]
"""Asks the lease store whether the start with this task id and token still holds its lease."""
