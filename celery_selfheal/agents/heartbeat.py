"""The heartbeat: one call a beat for the worker session, all leases and all held deliveries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from celery_selfheal.leases.port import LeaseStore, Renewal, Start, renewal_of
from celery_selfheal.sessions.port import BeatAnswer, Session, SessionStore, Standing


class Holdings(Protocol):
    """What a worker's main process holds, asked afresh at each beat."""

    def running(self) -> Sequence[Start]:
        """Starts whose process lives and whose deadline has not passed."""

    def tags(self) -> Iterable[str]:
        """Every delivery that a live request, timer entry or rate-limit bucket knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What one beat found, for the worker to act on.

    Attributes:
        lost: Starts that run here although another start has their lease.
        forgotten: Tags of deliveries that are ours in the store and unknown to any request, two beats in a row.
        session_lost: The session was buried: everything that it held is somebody else's by now.
        emptied: The store has lost its data since the last beat.
    """

    lost: list[Start] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    session_lost: bool = False
    emptied: bool = False


class Heartbeat:
    """Renews what this worker holds.

    Args:
        sessions: Where this worker's session lives.
        leases: Where its leases live; the same object's server, and then one call does both, or another one's.
        new_session: Makes the next incarnation.
        together: Sessions and leases live in one store.
        completed: Adds the lock key to a start; asked where the store may have forgotten it.

    No answer is no loss: ``beat`` raises ``StoreError`` and nothing changes.
    """

    def __init__(
        self,
        sessions: SessionStore,
        leases: LeaseStore,
        holdings: Holdings,
        *,
        new_session: Callable[[], Session],
        together: bool,
        completed: Callable[[Start], Start] = lambda start: start,
    ) -> None:
        self._sessions = sessions
        self._leases = leases
        self._holdings = holdings
        self._new_session = new_session
        self._together = together
        self._completed = completed
        self._epoch: str | None = None
        self._unknown: set[str] = set()
        self._joined = False
        self.session = new_session()

    def beat(self) -> Beat:
        """Renew once.

        Raises:
            StoreError: no answer; whatever is held stays held until a beat says otherwise.
        """
        starts = list(self._holdings.running())
        # Read before the call: what is fetched while it is under way is unknown to it for one beat only.
        tags = list(self._holdings.tags())
        answer = self._call(starts, tags)
        lost_session = answer.standing is Standing.LOST
        if lost_session:
            self.session = self._new_session()
            self._sessions.beat(self.session, join=True)
        self._joined = True
        emptied = self._epoch is not None and answer.epoch != self._epoch
        unknown = set(answer.unknown_tags)
        forgotten = sorted(self._unknown & unknown)
        self._unknown = unknown
        if emptied:
            answer = replace(answer, renewals=self._taken_again(starts, answer.renewals))
        # Last: after an error, the next beat finds the store emptied once more.
        self._epoch = answer.epoch
        return Beat(
            lost=[start for start, renewal in zip(starts, answer.renewals, strict=True) if renewal is Renewal.LOST],
            forgotten=forgotten,
            session_lost=lost_session,
            emptied=emptied,
        )

    def leave(self) -> None:
        """Say good-bye at shutdown."""
        if self._joined:
            self._sessions.leave(self.session)

    def _call(self, starts: Sequence[Start], tags: Sequence[str]) -> BeatAnswer:
        if self._together:
            return self._sessions.beat(self.session, join=not self._joined, starts=starts, tags=tags)
        answer = self._sessions.beat(self.session, join=not self._joined, tags=tags)
        # Asked even for nothing: a lease store that is away must stop the fetching.
        renewals = self._leases.renew(list(map(self._completed, starts)))
        return BeatAnswer(
            standing=answer.standing, epoch=answer.epoch, renewals=renewals, unknown_tags=answer.unknown_tags
        )

    def _taken_again(self, starts: Sequence[Start], renewals: Sequence[Renewal]) -> list[Renewal]:
        """An emptied store knows no start: what runs takes its lease anew, under the token that its child knows."""
        return [
            # Its delivery is gone with everything else.
            renewal_of(self._leases.acquire(replace(self._completed(start), tag=None)))
            if renewal is Renewal.IDLE
            else renewal
            for start, renewal in zip(starts, renewals, strict=True)
        ]
