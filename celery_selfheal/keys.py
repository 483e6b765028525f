"""Names of every Redis key that we write: one place, one prefix, one hash tag."""

from __future__ import annotations

from dataclasses import dataclass

TAG_MARK = "/"
"""Stands between the session and the running number in a delivery tag that we minted."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one application.

    All share one hash tag, so that a script's keys live in one slot of a cluster, and one prefix, so that an
    access list can name them: ``{<prefix>:<app>}:*``.

    Attributes:
        prefix: ``selfheal_key_prefix``.
        app: Celery's name of the application.
    """

    prefix: str
    app: str

    @property
    def root(self) -> str:
        """Hash tag and prefix of all keys of the application."""
        return f"{{{self.prefix}:{self.app}}}"

    def lease(self, task_id: str) -> str:
        """Hash ``token, fence, session, attempt`` and, if there is one, ``lock``; lives as long as the lease."""
        return f"{self.root}:lease:{task_id}"

    def lock(self, lock_key: str) -> str:
        """Hash ``id, token, fence`` of the task that has the lock key; lives as long as its lease. Scripts know it."""
        return f"{self.root}:lock:{lock_key}"

    def locking(self, task_id: str) -> str:
        """Token and lock key of the last start of a task that has one. Scripts know it."""
        return f"{self.root}:locking:{task_id}"

    def journal(self, task_id: str) -> str:
        """Sorted set of the tokens of starts that have not ended, by fence."""
        return f"{self.root}:journal:{task_id}"

    def done(self, marker: str) -> str:
        """Token of the start that finished this very message."""
        return f"{self.root}:done:{marker}"

    @property
    def inflight(self) -> str:
        """Hash: task id -> record of the start that holds its lease."""
        return f"{self.root}:inflight"

    @property
    def index(self) -> str:
        """Sorted set: task id by the instant at which its lease expires (the reaper's index)."""
        return f"{self.root}:expiry"

    def held(self, session: str) -> str:
        """Set of the task ids on which starts of this session hold a lease."""
        return f"{self.root}:held:{session}"

    @property
    def fence(self) -> str:
        """The last fence that was given out."""
        return f"{self.root}:fence"

    def budget(self, task_name: str) -> str:
        """Hash ``tokens, at_ms, firsts, firsts_before``: retries that the fleet may still start for a task name."""
        return f"{self.root}:budget:{task_name}"

    def wait(self, token: str) -> str:
        """What this very start was told to wait, so that a repeat of the question takes no second place."""
        return f"{self.root}:wait:{token}"

    @property
    def counters(self) -> str:
        """Hash: event and task name -> count."""
        return f"{self.root}:counters"

    def progress(self, task_id: str) -> str:
        """What the last start of a task has said of its progress, as JSON."""
        return f"{self.root}:progress:{task_id}"

    def claim(self, idempotency_key: str) -> str:
        """Hash ``status, task, owner, fence, hash, at_ms, payload, dispatched``: what the key already did."""
        return f"{self.root}:claim:{idempotency_key}"

    def session(self, session: str) -> str:
        """Exists as long as the worker process beats."""
        return f"{self.root}:session:{session}"

    @property
    def sessions(self) -> str:
        """Sorted set: session by the instant at which it expires."""
        return f"{self.root}:sessions"

    @property
    def about(self) -> str:
        """Hash: session -> who it is, for people and for the host witness."""
        return f"{self.root}:about"

    def owned(self, session: str) -> str:
        """Owner records: hash of delivery tag -> ``microseconds of receipt, list``."""
        return f"{self.root}:owned:{session}"

    def host(self, host: str) -> str:
        """Set of the sessions on one machine and pid namespace."""
        return f"{self.root}:host:{host}"

    @property
    def pulse(self) -> str:
        """Instant of the last beat of any worker."""
        return f"{self.root}:pulse"

    @property
    def grace(self) -> str:
        """Exists while an expired session proves nothing, since nobody could beat."""
        return f"{self.root}:grace"

    @property
    def epoch(self) -> str:
        """Random value that changes when the store was emptied."""
        return f"{self.root}:epoch"

    @property
    def leader(self) -> str:
        """Session whose thread sweeps for the fleet."""
        return f"{self.root}:leader"


@dataclass(frozen=True, slots=True)
class UnackedKeys:
    """Where kombu keeps unacknowledged deliveries, with its global prefix applied."""

    unacked: str
    index: str


def delivery_tag(session: str, number: int) -> str:
    """Mint the tag of one delivery: unique for ever, and it names the session that took the message."""
    return f"{session}{TAG_MARK}{number}"


def session_of_tag(tag: str) -> str | None:
    """Session that minted ``tag``; ``None`` for a tag of a worker without the plugin."""
    session, mark, number = tag.rpartition(TAG_MARK)
    return session if mark and number.isdigit() else None
