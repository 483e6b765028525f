"""This worker's main process: what it holds, what it must still settle, and the thread that beats."""

from __future__ import annotations

import itertools
import logging
import os
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

from celery.worker import state as worker_state

from celery_selfheal import witness
from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.agents.heartbeat import Beat, Heartbeat
from celery_selfheal.agents.reaper import Reaper
from celery_selfheal.clock import jitter, monotonic, utc_now
from celery_selfheal.dead_letter import Death
from celery_selfheal.errors import StoreError
from celery_selfheal.keys import session_of_tag
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin import native
from celery_selfheal.plugin.brokers.layout import queue_of
from celery_selfheal.plugin.install import Plugin, reaper_of
from celery_selfheal.plugin.outbox import outbox_ticker
from celery_selfheal.plugin.running import CONTEXT_KEY
from celery_selfheal.plugin.stalled import StalledFailure
from celery_selfheal.plugin.stores import Stores
from celery_selfheal.plugin.unconfirmed import UnconfirmedLetters
from celery_selfheal.retry_budget import Turn
from celery_selfheal.sessions.port import Session
from celery_selfheal.telemetry.events import LeaseWasLost, TaskDeadLettered, TaskRecovered, TaskStalled
from celery_selfheal.ticker import Step, Ticker

logger = logging.getLogger("celery_selfheal")

BULK_SIZE = 100  # acknowledgements a call: what a busy worker collects in well under a second
RESTART_JITTER = timedelta(milliseconds=300)  # tasks of one killed host must not restart at the same instant
FAREWELL_PATIENCE = timedelta(seconds=10)
OUTBOX_PATIENCE = timedelta(seconds=2)

_START_FIELDS = tuple(field.name for field in fields(Start))  # asdict copies deeply, once for each message


class Worker:
    """One worker process.

    ``announce`` and ``child_died`` are called by Celery's loop and do no I/O; the ticker's thread owns the
    connections and settles what they ask for, until it is settled.
    """

    def __init__(self, plugin: Plugin, *, node: str, stores: Stores) -> None:
        self._plugin = plugin
        self.node = node
        self._stores = stores
        self._settings = plugin.settings
        self._requests: dict[str, weakref.ref[Any]] = {}
        self._messages: dict[str, weakref.ref[Any]] = {}
        self._pending: deque[Callable[[], None]] = deque()
        self._pending_tags: set[str] = set()
        self._started_tags: set[str] = set()
        self._acknowledged: deque[str] = deque()
        # Over all channels: a tag that came again would overwrite what an earlier channel's running task still holds.
        self._delivery_numbers = itertools.count(1)
        self._unconfirmed = UnconfirmedLetters(plugin, timer=lambda: self.timer, queue_of=self.queue_of_consumer)
        self.timer: Any = None
        self.consumer: Any = None
        self._told_lost: set[str] = set()
        self._last_beat = float("-inf")
        self._answered = True
        self._silent_at = float("-inf")
        self._closing = False
        self.heartbeat = Heartbeat(
            stores.sessions,
            stores.leases,
            self,
            new_session=self._new_session,
            together=stores.together,
        )
        self._reaper: Reaper = reaper_of(
            plugin, stores, lambda: self.heartbeat.session, may_judge_leases=self._has_heard_the_store_for_a_ttl
        )
        self._ticker = Ticker(
            [
                Step("heartbeat", self._answering(self._beat), self._settings.heartbeat_interval),
                Step("settling", self._answering(self._settle), self._settings.heartbeat_interval),
                Step("sweep", self._answering(self._sweep), self._settings.reaper_interval),
            ],
            start_thread=native.start_thread,
            farewell=self._answering(self._farewell),
        )
        self._outbox = outbox_ticker(plugin)

    # -- called by Celery's loop

    @property
    def session(self) -> Session:
        """The session of this incarnation."""
        return self.heartbeat.session

    @property
    def may_fetch(self) -> bool:
        """Whether the stores answered lately: a message that is taken now could not be started else."""
        return monotonic() - self._last_beat < self._settings.lease_ttl.total_seconds()

    def start(self) -> None:
        """Begin to beat and to sweep."""
        self._ticker.start()
        if self._outbox is not None:
            self._outbox.start()

    def stop(self) -> None:
        """Settle, hand over what is left, and say good-bye. Waits ten seconds at most."""
        self._closing = True
        if self._outbox is not None:
            # What it cannot end now, the database lets go, and another worker publishes.
            self._outbox.stop(timeout=OUTBOX_PATIENCE)
        if not self._ticker.stop(timeout=FAREWELL_PATIENCE):
            logger.warning("the store does not answer: what is held is left to the reaper of another worker")

    def wake(self) -> None:
        """Beat, settle and sweep now."""
        self._ticker.wake()

    def announce(self, request: Any, *, predecessor: str | None, context: Mapping[str, Any]) -> Start:
        """Make the start of a request and put it where the child finds it."""
        headers = request.request_dict
        tag = getattr(request.message, "delivery_tag", None)
        session = session_of_tag(tag) if isinstance(tag, str) else None
        attempt = f"{request.type}:{headers.get('retries') or 0}"
        token = uuid.uuid4().hex
        time_limit = (request.time_limits or (None, None))[0] or request.task.time_limit
        limit = getattr(request.task, "max_runtime", None) or self._settings.max_runtime
        start = Start(
            task_id=request.id,
            task_name=request.type,
            token=token,
            session=session or self.session.name,
            attempt=attempt,
            marker=f"{request.id}:{attempt}:{context['replays']}:{context['published_at'] or ''}",
            turn=turn_of(headers, context),
            predecessor=predecessor,
            tag=tag if session and request.task.acks_late else None,
            node=self.node,
            pid=os.getpid(),
            deadline_seconds=limit.total_seconds() if isinstance(limit, timedelta) else limit or time_limit,
        )
        # A copy: what is put into the shared dictionary would travel on into retries.
        properties = dict(headers.get("properties") or {})
        properties[CONTEXT_KEY] = {**context, "start": {name: getattr(start, name) for name in _START_FIELDS}}
        headers["properties"] = properties
        if start.tag is not None:
            self._started_tags.add(start.tag)
        self._requests[token] = weakref.ref(request, lambda _: self._requests.pop(token, None))
        return start

    def next_delivery(self) -> int:
        """Number of the next delivery; none comes twice in this process."""
        return next(self._delivery_numbers)

    def queue_of_consumer(self, message: Any) -> str | None:
        """The queue that an AMQP message came from, which its routing key need not tell."""
        tag = (message.delivery_info or {}).get("consumer_tag")
        queues = getattr(self.consumer, "_active_tags", {})
        return next((queue for queue, one in queues.items() if one == tag), None) if tag else None

    def remember(self, tag: str, message: Any) -> None:
        """A delivery has come; it is known for as long as anybody holds its message."""

        def forget(_: object) -> None:
            self._messages.pop(tag, None)
            self._started_tags.discard(tag)

        self._messages[tag] = weakref.ref(message, forget)

    def child_died(self, request: Any) -> None:
        """The process that ran ``request`` is gone: count the start and bring its message back."""
        start: Start = request.start
        request.acknowledged = True
        message = request.message
        release_slot = getattr(message.channel, "selfheal_forget", None)
        if release_slot is not None and start.tag is not None:
            release_slot(start.tag)
        else:
            # The broker redelivers at once: after a moment, so that its copy does not meet the dead start's lease.
            request.acknowledged = False
            delay = RESTART_JITTER.total_seconds() * (1 + jitter().random())
            self.timer.call_after(delay, request.reject, (), {"requeue": True})
        stopping = worker_state.should_stop is not None or worker_state.should_terminate is not None
        failure = StalledFailure(request, self._settings.max_stalls)
        self._later(lambda: self._heal_child(start, failure, handed_over=stopping), tag=start.tag)

    def cancelled(self, start: Start) -> None:
        """Celery itself ended the start, at a shutdown or after a lost connection: a hand-over, never a stall."""

        def hand_back() -> None:
            self._release(start, ended=False, marker=False, state="handed-over")
            self._give_back(start, reason="cancelled")

        self._later(hand_back, tag=start.tag)

    def dead_letter(self, request: Any, death: Death) -> None:
        """Move the request's message to its dead letter queue before anything acknowledges it."""
        queue = request.task.dead_letter_queue or self._plugin.dead_letter_queue
        if request.acknowledged:
            # Acknowledged early: there is no delivery to be moved any more.
            self._unconfirmed.add_acknowledged(request.message, death, queue)
        else:
            self.dead_letter_message(request.message, death, queue=queue)

    def dead_letter_message(self, message: Any, death: Death, *, queue: str | None = None) -> None:
        """Move a raw message to a dead letter queue. On Redis in one step, soon; else published now, then acked."""
        queue = queue or self._plugin.dead_letter_queue
        tag = getattr(message, "delivery_tag", None)
        if self._stores.deliveries is not None and isinstance(tag, str) and session_of_tag(tag) is not None:
            self._later(lambda: self._move_to_dead_letters(tag, death, queue), tag=tag)
        else:
            self._unconfirmed.add(message, death, queue)

    def dead_letter_raw(self, tag: str, death: Death) -> None:
        """Move a delivery of which not even a message could be made."""
        queue = self._plugin.dead_letter_queue
        self._later(lambda: self._move_to_dead_letters(tag, death, queue), tag=tag)

    def is_pending(self, tag: str) -> bool:
        """The agents' thread settles the delivery; nobody else may."""
        return tag in self._pending_tags

    def ended_from_outside(self, start: Start, *, state: str, failure: str = "") -> None:
        """Main ended the start (time limit, revocation): give its lease back.

        Args:
            failure: For a copy of the message, should this worker die before its dead letter is sent.
        """
        self._later(lambda: self._release(start, ended=True, marker=True, state=state, failure=failure), tag=None)

    def was_silent_since(self, started: float | None) -> bool:
        """Whether the store left a call unanswered since a start was accepted (Unix seconds)."""
        return started is not None and self._silent_at >= started

    def acknowledges_in_bulk(self, tag: str) -> bool:
        """Take the acknowledgement over, if the delivery belongs to a start of ours.

        Its release has settled the delivery in the same step, or left a done marker on which a copy ends: so one call
        for many does, and a death before it costs nothing.
        """
        if tag not in self._started_tags:
            return False
        self._started_tags.discard(tag)
        self._acknowledged.append(tag)
        if len(self._acknowledged) == BULK_SIZE:
            self._ticker.wake("settling")
        return True

    def acknowledges_at_once(self, tag: str | None) -> None:
        """No start of ours has settled this delivery, nor will one."""
        if tag is not None:
            self._started_tags.discard(tag)

    def acknowledge_later(self, tag: str) -> None:
        """An acknowledgement did not go through: repeat it until it does."""
        self._later(lambda: self._acknowledge(tag), tag=tag)

    def hand_over_later(self, tags: Iterable[str]) -> None:
        """Give deliveries back that have not begun here."""
        tags = list(tags)
        if tags and not self._closing:
            self._later(lambda: self._hand_over(tags, reason="handed over"), tag=None)

    def is_running(self, message: Any) -> bool:
        """Whether a body is under way for the message."""
        return any(request.message is message for request in tuple(worker_state.active_requests))

    # -- ``Holdings``, read by the heartbeat in the ticker's thread

    def running(self) -> Sequence[Start]:
        """Starts that a child has accepted and not reported, within their deadline."""
        starts = []
        for reference in list(self._requests.values()):
            request = reference()
            if request is None or request.time_start is None or request not in worker_state.active_requests:
                continue
            start = request.start
            deadline = start.deadline_seconds
            ran = utc_now().timestamp() - request.time_start
            if deadline is None or ran <= deadline + self._settings.loss_grace.total_seconds():
                starts.append(start)
        return starts

    def tags(self) -> Iterable[str]:
        """Deliveries that somebody in this process still holds, or that wait to be settled."""
        return {*self._messages, *self._pending_tags, *self._acknowledged}

    # -- steps, run in the ticker's thread

    def _beat(self) -> None:
        found: Beat = self.heartbeat.beat()
        self._last_beat = monotonic()
        if found.session_lost:
            logger.warning("session lost: this worker was taken for dead; it goes on as %s", self.session.name)
        if found.emptied:
            logger.warning("the store has lost its data; leases of running tasks are taken again")
        for start in found.lost:
            if start.token not in self._told_lost:
                self._told_lost.add(start.token)
                self._tell_lost(start)
        if found.forgotten:
            self._hand_over(found.forgotten, reason="forgotten")

    def _settle(self) -> None:
        self._acknowledge_in_bulk()
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

    def _sweep(self) -> bool:
        report = self._reaper.sweep()
        if report:
            logger.info(
                "sweep: %d dead sessions, %d stalls, %d messages restored",
                report.sessions,
                report.stalls,
                report.restored,
            )
        return report.unfinished

    def _farewell(self) -> None:
        self._settle()
        for reference in list(self._requests.values()):
            request = reference()
            if request is not None and request.time_start and request in worker_state.active_requests:
                self._release(request.start, ended=False, marker=False, state="handed-over")
        if self._stores.deliveries is not None:
            left = [delivery.tag for delivery in self._stores.deliveries.owned(self.session.name)]
            self._hand_over(left, reason="handed over")
        self.heartbeat.leave()

    # -- settlements

    def _later(self, settle: Callable[[], None], *, tag: str | None) -> None:
        if tag is not None:
            self._pending_tags.add(tag)

        def run() -> None:
            settle()
            if tag is not None:
                self._pending_tags.discard(tag)

        self._pending.append(run)
        self._ticker.wake("settling")

    def _heal_child(self, start: Start, failure: StalledFailure, *, handed_over: bool) -> None:
        if handed_over:
            self._release(start, ended=False, marker=False, state="handed-over")
            self._give_back(start, reason="worker stops")
            return
        unfinished = self._stores.leases.abandon(start)
        if unfinished is None:
            # It had ended, and left a marker: whoever gets the message finds it, and does what is left to do.
            self._give_back(start, reason="process died")
            return
        self._plugin.tell(
            TaskStalled(
                task_name=start.task_name,
                task_id=start.task_id,
                reason="process died",
                owner=self.node,
                age_seconds=failure.age_seconds,
                unfinished_starts=unfinished,
            )
        )
        if unfinished > self._settings.max_stalls and start.tag and not failure.has_effect():
            exc = failure.store(unfinished)
            death = failure.death(exc, worker=self.node)
            if death is not None:
                queue = failure.queue or self._plugin.dead_letter_queue
                self._move_to_dead_letters(start.tag, death, queue)
            else:
                self._acknowledge(start.tag)
            # Last: a marker without the move would make a copy of the message vanish.
            self._release(start, ended=True, marker=True, state="failure")
        else:
            self._give_back(start, reason="process died", age_seconds=failure.age_seconds)

    def _give_back(self, start: Start, *, reason: str, age_seconds: float = 0.0) -> None:
        deliveries = self._stores.deliveries
        if deliveries is None or start.tag is None:
            return
        delay = timedelta(seconds=jitter().uniform(0, RESTART_JITTER.total_seconds()))
        for delivery in deliveries.named(start.session, [start.tag]):
            message = Envelope.decode(delivery.message).restored(
                counted=False, started=True, eta=(utc_now() + delay).isoformat()
            )
            if deliveries.settle(delivery, session=start.session, message=message, dead=False, front=True):
                self._plugin.tell(
                    TaskRecovered(
                        task_name=start.task_name,
                        task_id=start.task_id,
                        reason=reason,
                        owner=self.node,
                        age_seconds=age_seconds,
                        started=True,
                    )
                )

    def _hand_over(self, tags: Sequence[str], *, reason: str) -> None:
        deliveries = self._stores.deliveries
        if deliveries is None:
            return
        for session in {session_of_tag(tag) for tag in tags} - {None}:
            mine = [tag for tag in tags if session_of_tag(tag) == session]
            for delivery in reversed(deliveries.named(str(session), mine)):
                envelope = Envelope.decode(delivery.message)
                message = envelope.restored(counted=False, started=False)
                moved = deliveries.settle(delivery, session=str(session), message=message, dead=False, front=True)
                if moved and reason == "forgotten":
                    self._plugin.tell(
                        TaskRecovered(
                            task_name=envelope.task_name,
                            task_id=envelope.task_id,
                            reason=reason,
                            owner=self.node,
                            age_seconds=0.0,
                            started=False,
                        )
                    )

    def _move_to_dead_letters(self, tag: str, death: Death, queue: str) -> None:
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

    def _acknowledge(self, tag: str) -> None:
        session = session_of_tag(tag)
        if self._stores.deliveries is not None and session is not None:
            self._stores.deliveries.acknowledge(tag, session=session)

    def _acknowledge_in_bulk(self) -> None:
        tags = [self._acknowledged[n] for n in range(len(self._acknowledged))]
        if tags and self._stores.deliveries is not None:
            self._stores.deliveries.acknowledge_all(tags)
        for _ in tags:
            self._acknowledged.popleft()

    def _release(self, start: Start, *, ended: bool, marker: bool, state: str, failure: str = "") -> None:
        self._stores.leases.release(start, ended=ended, marker=marker, state=state, failure=failure)

    def _tell_lost(self, start: Start) -> None:
        reference = self._requests.get(start.token)
        request = reference() if reference else None
        self._plugin.tell(
            LeaseWasLost(
                task_name=start.task_name,
                task_id=start.task_id,
                reason="taken over",
                owner=self.node,
                age_seconds=utc_now().timestamp() - request.time_start if request and request.time_start else 0.0,
            )
        )

    def _answering(self, step: Callable[[], bool | None]) -> Callable[[], bool]:
        """No answer is no loss: say it once, and go on when the store is back."""

        def run() -> bool:
            again = False
            try:
                again = step() is True
            except StoreError as exc:
                if self._answered:
                    logger.warning("the store does not answer; what is held stays held: %s", exc)
                self._answered = False
                self._silent_at = utc_now().timestamp()
            else:
                if not self._answered:
                    logger.warning("the store answers again")
                self._answered = True
            return again

        return run

    def _has_heard_the_store_for_a_ttl(self) -> bool:
        # Leases may live on a server of their own, which knows no pulse of the fleet: all others must have beaten, too.
        return utc_now().timestamp() - self._silent_at > self._settings.lease_ttl.total_seconds()

    def _new_session(self) -> Session:
        return Session(
            name=f"{self.node}:{os.getpid()}:{uuid.uuid4().hex[:12]}",
            node=self.node,
            identity=witness.identify(),
        )


def turn_of(headers: Mapping[str, Any], context: Mapping[str, Any]) -> Turn:
    """Which turn of its task a message is, for the retry budget."""
    if not headers.get("retries"):
        return "first"
    return "paid" if context.get("budget_paid") else "retry"
