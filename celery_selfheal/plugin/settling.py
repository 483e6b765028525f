"""What a worker must still settle: moves of messages and ends of leases, repeated until the store has taken them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta

from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.clock import jitter, utc_now
from celery_selfheal.dead_letter import Death
from celery_selfheal.errors import StoreError
from celery_selfheal.keys import session_of_tag
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.brokers.layout import queue_of
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.stalled import StalledFailure
from celery_selfheal.plugin.stores import Stores
from celery_selfheal.telemetry.events import TaskDeadLettered, TaskRecovered, TaskStalled

logger = logging.getLogger("celery_selfheal")

BULK_SIZE = 100  # acknowledgements a call: what a busy worker collects in well under a second
RESTART_JITTER = timedelta(milliseconds=300)  # tasks of one killed host must not restart at the same instant


class Settling:
    """Settlements that wait for the agents' thread, which owns the connections, and the settlements themselves.

    Args:
        wake: Wakes that thread.

    Attributes:
        handed_over: So many messages went back uncounted.
    """

    def __init__(self, plugin: Plugin, stores: Stores, *, node: str, wake: Callable[[], object]) -> None:
        self._plugin = plugin
        self._stores = stores
        self._node = node
        self._wake = wake
        self._pending: deque[Callable[[], None]] = deque()
        self._pending_tags: set[str] = set()
        self._acknowledged: deque[str] = deque()
        self.handed_over = 0

    # -- called by anybody, without I/O

    def later(self, settle: Callable[[], object], *, tag: str | None) -> None:
        """Let the agents' thread settle something, soon and until it is.

        Args:
            tag: The delivery that nobody else may settle meanwhile.
        """
        if tag is not None:
            self._pending_tags.add(tag)

        def run() -> None:
            settle()
            if tag is not None:
                self._pending_tags.discard(tag)

        self._pending.append(run)
        self._wake()

    def is_pending(self, tag: str) -> bool:
        """The agents' thread settles the delivery; nobody else may."""
        return tag in self._pending_tags

    def acknowledge_in_bulk(self, tag: str) -> None:
        """Acknowledge soon, with others."""
        self._acknowledged.append(tag)
        if len(self._acknowledged) == BULK_SIZE:
            self._wake()

    def tags(self) -> Iterable[str]:
        """Deliveries that wait to be settled."""
        return {*self._pending_tags, *self._acknowledged}

    # -- called in the agents' thread

    def settle(self) -> None:
        """Settle what waits.

        Raises:
            StoreError: no answer; what is not settled waits on, in the same order.
        """
        self._acknowledge_collected()
        for _ in range(len(self._pending)):
            settle = self._pending.popleft()
            try:
                settle()
            except StoreError:
                # The store is away: in the same order, when it is back.
                self._pending.appendleft(settle)
                raise
            except Exception:
                # It failed for a reason of its own (the result backend, say): the others must not wait for it.
                logger.exception("a settlement failed, and will be tried again")
                self._pending.append(settle)

    def holds(self, start: Start) -> bool:
        """Whether a start has the lease of its task."""
        return self._stores.leases.is_held(start.task_id, start.token)

    def release(self, start: Start, *, ended: bool, marker: bool, state: str, failure: str = "") -> None:
        """Give a lease back."""
        self._stores.leases.release(start, ended=ended, marker=marker, state=state, failure=failure)

    def release_handed_over(self, start: Start) -> None:
        """Give a lease back whose start is to run elsewhere: it is not counted."""
        self.release(start, ended=False, marker=False, state="handed-over")

    def heal_stalled(self, start: Start, failure: StalledFailure, *, reason: str) -> None:
        """Count a start that died or hung, and bring its message back, or to the dead letters."""
        unfinished = self._stores.leases.abandon(start)
        if unfinished is None:
            # It had ended, and left a marker: whoever gets the message finds it, and does what is left to do.
            self.give_back(start, reason=reason)
            return
        self._plugin.tell(
            TaskStalled(
                task_name=start.task_name,
                task_id=start.task_id,
                reason=reason,
                owner=self._node,
                age_seconds=failure.age_seconds,
                unfinished_starts=unfinished,
            )
        )
        if unfinished > self._plugin.settings.max_stalls and start.tag and not failure.has_effect():
            exc = failure.store(unfinished)
            death = failure.death(exc, worker=self._node)
            if death is not None:
                self.move_to_dead_letters(start.tag, death, failure.queue or self._plugin.dead_letter_queue)
            else:
                self.acknowledge(start.tag)
            # Last: a marker without the move would make a copy of the message vanish.
            self.release(start, ended=True, marker=True, state="failure")
        else:
            self.give_back(start, reason=reason, age_seconds=failure.age_seconds)

    def give_back(self, start: Start, *, reason: str, age_seconds: float = 0.0) -> None:
        """Restore the message of a start that broke off, after a moment; while it is held here."""
        delay = timedelta(seconds=jitter().uniform(0, RESTART_JITTER.total_seconds()))
        if self._move_back(start, eta=(utc_now() + delay).isoformat()):
            self._plugin.tell(
                TaskRecovered(
                    task_name=start.task_name,
                    task_id=start.task_id,
                    reason=reason,
                    owner=self._node,
                    age_seconds=age_seconds,
                    started=True,
                )
            )

    def hand_over_started(self, start: Start) -> None:
        """Restore the message of a start that was ended on purpose, at once; while it is held here."""
        if self._move_back(start, eta=None):
            self.handed_over += 1

    def hand_over(self, tags: Sequence[str], *, reason: str) -> None:
        """Restore messages that have not begun here."""
        deliveries = self._stores.deliveries
        if deliveries is None:
            return
        for session in {session_of_tag(tag) for tag in tags} - {None}:
            mine = [tag for tag in tags if session_of_tag(tag) == session]
            for delivery in reversed(deliveries.named(str(session), mine)):
                envelope = Envelope.decode(delivery.message)
                message = envelope.restored(counted=False, started=False)
                moved = deliveries.settle(delivery, session=str(session), message=message, dead=False, front=True)
                self.handed_over += moved
                if moved and reason == "forgotten":
                    self._plugin.tell(
                        TaskRecovered(
                            task_name=envelope.task_name,
                            task_id=envelope.task_id,
                            reason=reason,
                            owner=self._node,
                            age_seconds=0.0,
                            started=False,
                        )
                    )

    def move_to_dead_letters(self, tag: str, death: Death, queue: str) -> None:
        """Move a delivery, while it is held here, to a dead letter queue."""
        deliveries, layout, session = self._stores.deliveries, self._plugin.layout, session_of_tag(tag)
        if deliveries is None or layout is None or session is None:
            return
        for delivery in deliveries.named(session, [tag]):
            envelope = Envelope.decode(delivery.message)
            # The list knows better than the routing key, and the message better than whoever could not read it.
            known = replace(death, queue=queue_of(delivery.list_key, layout))
            known = known if death.id else envelope.completed(known)
            moved = deliveries.settle(
                replace(delivery, list_key=layout.prefix + queue),
                session=session,
                message=envelope.dead_lettered(known),
                dead=False,
                front=False,
            )
            if moved:
                self._plugin.tell(TaskDeadLettered(task_name=known.task, task_id=known.id, death=known, queue=queue))

    def acknowledge(self, tag: str) -> None:
        """Settle one delivery for good."""
        session = session_of_tag(tag)
        if self._stores.deliveries is not None and session is not None:
            self._stores.deliveries.acknowledge(tag, session=session)

    def _move_back(self, start: Start, *, eta: str | None) -> bool:
        deliveries = self._stores.deliveries
        if deliveries is None or start.tag is None:
            return False
        moved = False
        for delivery in deliveries.named(start.session, [start.tag]):
            message = Envelope.decode(delivery.message).restored(counted=False, started=True, eta=eta)
            moved |= deliveries.settle(delivery, session=start.session, message=message, dead=False, front=True)
        return moved

    def _acknowledge_collected(self) -> None:
        tags = [self._acknowledged[n] for n in range(len(self._acknowledged))]
        if tags and self._stores.deliveries is not None:
            self._stores.deliveries.acknowledge_all(tags)
        for _ in tags:
            self._acknowledged.popleft()
