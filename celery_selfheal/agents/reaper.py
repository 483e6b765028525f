"""The reaper: finds dead sessions and expired leases, restores their messages, counts stalls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from celery_selfheal import clock, witness
from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.leases.port import LeaseStore, Stall
from celery_selfheal.sessions.port import Delivery, DeliveryStore, Peer, Session, SessionStore
from celery_selfheal.telemetry.events import Observer, TaskRecovered, TaskStalled

BATCH_SIZE = 100  # sessions or leases asked for at a time: no call holds a small server up
MAX_RESTORES_OF_A_MESSAGE = 50  # it kills workers before any start could be counted
MAX_STALLS_A_SWEEP = 2_000
MAX_RESTORES_A_SWEEP = 2_000  # about half a second: then the heartbeat of this worker has its turn


@dataclass(slots=True, kw_only=True)
class SweepReport:
    """What one sweep did."""

    sessions: int = 0
    stalls: int = 0
    restored: int = 0
    led: bool = False
    unfinished: bool = False
    """There is more to do at once."""

    def __bool__(self) -> bool:
        return bool(self.sessions or self.stalls or self.restored)


class Graveyard(Protocol):
    """Where a message goes that kills every worker before it starts."""

    def bury(self, envelope: Envelope, delivery: Delivery, *, owner: str) -> tuple[Delivery, bytes]:
        """Store its failure, and say where and how to move it."""


class Unowned(Protocol):
    """Deliveries of workers without the plugin, which have no owner record."""

    def restore_overdue(self, *, limit: int) -> list[tuple[Envelope, str]]:
        """Put back those whose visibility timeout has passed; envelope and tag of each."""


class Reaper:
    """Heals what dead workers left behind. Any number may sweep at once: every action is a compare-and-set.

    Args:
        session: The worker whose thread sweeps; it competes for the lead of the fleet. ``None`` sweeps at once.
        deliveries: ``None`` where the broker redelivers by itself.
        lead: How long a leader leads without sweeping.
        may_judge_leases: ``False`` while a lease that has run out proves nothing, since its store was away.
    """

    def __init__(
        self,
        sessions: SessionStore,
        leases: LeaseStore,
        *,
        deliveries: DeliveryStore | None,
        unowned: Unowned | None,
        graveyard: Graveyard | None = None,
        session: Callable[[], Session | None],
        lead: timedelta,
        tell: Observer,
        may_judge_leases: Callable[[], bool] = lambda: True,
        is_gone: Callable[[witness.ProcessIdentity], bool | None] = witness.is_gone,
    ) -> None:
        self._sessions = sessions
        self._leases = leases
        self._deliveries = deliveries
        self._unowned = unowned
        self._graveyard = graveyard
        self._session = session
        self._lead_ms = round(lead.total_seconds() * 1000)
        self._tell = tell
        self._may_judge_leases = may_judge_leases
        self._is_gone = is_gone

    def sweep(self) -> SweepReport:
        """Heal once.

        Raises:
            StoreError: no answer; what was done is done, the next sweep goes on.
        """
        me = self._session()
        census = self._sessions.census(session=me, lead_ms=self._lead_ms, limit=BATCH_SIZE)
        report = SweepReport(led=census.lead)
        dead = {peer.name: peer for peer in census.expired}
        for peer in census.neighbours:
            if peer.name not in dead and self._seen_off(peer) and self._sessions.condemn(peer):
                dead[peer.name] = peer
        for peer in dead.values():
            self._heal_session(peer, report)
        if census.lead:
            if not census.grace and self._may_judge_leases():
                self._heal_expired_leases(report)
            self._heal_unowned(report)
        return report

    def _seen_off(self, peer: Peer) -> bool:
        return peer.identity is not None and self._is_gone(peer.identity) is True

    def _heal_session(self, peer: Peer, report: SweepReport) -> None:
        # Leases first: a restored message must not meet the lease of its own dead start.
        stalled = self._expire(peer.name, reason="worker gone", report=report)
        if self._deliveries is not None:
            owned = self._deliveries.owned(peer.name)
            # Newest first: each goes to the end that is taken next, so the oldest ends up in front.
            newest = list(reversed(owned))[:MAX_RESTORES_A_SWEEP]
            self._restore(newest, peer, {stall.task_id: stall for stall in stalled}, report)
            report.unfinished |= len(owned) > len(newest)
        host = peer.identity.host if peer.identity else ""
        if self._sessions.bury(peer.name, host=host):
            report.sessions += 1

    def _restore(
        self, deliveries: Sequence[Delivery], peer: Peer, stalled: Mapping[str, Stall], report: SweepReport
    ) -> None:
        if self._deliveries is None:
            return
        now_us = clock.utc_now().timestamp() * 1e6
        for page in (deliveries[n : n + BATCH_SIZE] for n in range(0, len(deliveries), BATCH_SIZE)):
            envelopes = [Envelope.decode(delivery.message) for delivery in page]
            moved = self._deliveries.settle_all(
                [
                    self._move(delivery, envelope, owner=peer.node, started=envelope.task_id in stalled)
                    for delivery, envelope in zip(page, envelopes, strict=True)
                ],
                session=peer.name,
                dead=True,
                front=True,
            )
            for delivery, envelope, is_moved in zip(page, envelopes, moved, strict=True):
                if is_moved:
                    report.restored += 1
                    self._tell(
                        TaskRecovered(
                            task_name=envelope.task_name,
                            task_id=envelope.task_id,
                            reason="worker gone",
                            owner=peer.node,
                            age_seconds=max(0.0, now_us - delivery.received_us) / 1e6,
                            started=envelope.task_id in stalled,
                        )
                    )

    def _move(self, delivery: Delivery, envelope: Envelope, *, owner: str, started: bool) -> tuple[Delivery, bytes]:
        if self._graveyard is not None and envelope.restores >= MAX_RESTORES_OF_A_MESSAGE:
            return self._graveyard.bury(envelope, delivery, owner=owner)
        return delivery, envelope.restored(counted=True, started=started)

    def _heal_expired_leases(self, report: SweepReport) -> None:
        self._expire(None, reason="lease ran out", report=report)

    def _expire(self, session: str | None, *, reason: str, report: SweepReport) -> list[Stall]:
        found: list[Stall] = []
        while len(found) < MAX_STALLS_A_SWEEP:
            page = self._leases.expire(session=session, limit=BATCH_SIZE)
            found += page
            for stall in page:
                report.stalls += 1
                self._tell(
                    TaskStalled(
                        task_name=stall.task_name,
                        task_id=stall.task_id,
                        reason=reason,
                        owner=stall.owner,
                        age_seconds=stall.age_seconds,
                        unfinished_starts=stall.unfinished_starts,
                    )
                )
            if len(page) < BATCH_SIZE:
                break
        return found

    def _heal_unowned(self, report: SweepReport) -> None:
        if self._unowned is None:
            return
        for envelope, tag in self._unowned.restore_overdue(limit=BATCH_SIZE):
            report.restored += 1
            self._tell(
                TaskRecovered(
                    task_name=envelope.task_name,
                    task_id=envelope.task_id,
                    reason="visibility timeout",
                    owner=tag,
                    age_seconds=0,
                    started=False,
                )
            )
