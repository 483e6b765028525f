"""This worker's main process: what it holds, what it must still settle, and the thread that beats."""

from __future__ import annotations

import itertools
import logging
import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from time import sleep
from typing import Any

from celery.worker import state as worker_state

from celery_selfheal import witness
from celery_selfheal.agents.heartbeat import Beat, Heartbeat
from celery_selfheal.agents.reaper import Reaper
from celery_selfheal.clock import jitter, monotonic, utc_now
from celery_selfheal.dead_letter import Death
from celery_selfheal.keys import session_of_tag
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin import native
from celery_selfheal.plugin.announcement import announce, limit_of, own_limit_of
from celery_selfheal.plugin.ended_by_main import settle
from celery_selfheal.plugin.install import Plugin, reaper_of
from celery_selfheal.plugin.interrupt import LOOK, Interruption, Interruptions
from celery_selfheal.plugin.lock_key import completed
from celery_selfheal.plugin.outbox import outbox_ticker
from celery_selfheal.plugin.progress import ProgressKeeper
from celery_selfheal.plugin.settling import RESTART_JITTER, Settling
from celery_selfheal.plugin.shutdown import Drain
from celery_selfheal.plugin.slots import Doom, Slots
from celery_selfheal.plugin.stalled import StalledFailure
from celery_selfheal.plugin.store_answers import StoreAnswers
from celery_selfheal.plugin.stores import Stores
from celery_selfheal.plugin.unconfirmed import UnconfirmedLetters
from celery_selfheal.plugin.watch import Watch
from celery_selfheal.plugin.wedged import LoopWatch
from celery_selfheal.sessions.port import Session
from celery_selfheal.telemetry.events import LeaseWasLost
from celery_selfheal.ticker import Step, Ticker

logger = logging.getLogger("celery_selfheal")

FAREWELL_PATIENCE = timedelta(seconds=10)
OUTBOX_PATIENCE = timedelta(seconds=2)


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
        self._settling = Settling(plugin, stores, node=node, wake=lambda: self._ticker.wake("settling"))
        self._started_tags: set[str] = set()
        # Over all channels: a tag that came again would overwrite what an earlier channel's running task still holds.
        self._delivery_numbers = itertools.count(1)
        self._unconfirmed = UnconfirmedLetters(plugin, timer=lambda: self.timer, queue_of=self.queue_of_consumer)
        self.timer: Any = None
        self.consumer: Any = None
        self.pool: Any = None
        self.hub: Any = None
        self.max_stalls = self._settings.max_stalls
        self.idle_watch = self._settings.heartbeat_interval
        self.slots: Slots = plugin.slots or Slots()
        self.interruptions = Interruptions(
            self.slots,
            grace=self._settings.loss_grace,
            terminate=self._terminate,
            settle=self.settle_ended,
        )
        self._progress = ProgressKeeper(self.slots, stores.progress)
        self.drain = Drain(self, grace=self._settings.shutdown_grace)
        self.loop = LoopWatch(patience=3 * self._settings.lease_ttl)
        self._watch = Watch(self)
        self._told_lost: set[str] = set()
        self._last_beat = float("-inf")
        self._store = StoreAnswers(self.slots)
        self._closing = False
        self._abandoned = 0
        self.heartbeat = Heartbeat(
            stores.sessions,
            stores.leases,
            self,
            new_session=self._new_session,
            together=stores.together,
            completed=self._completed,
        )
        self._reaper: Reaper = reaper_of(
            plugin,
            stores,
            lambda: self.heartbeat.session,
            may_judge_leases=lambda: self._store.was_heard_for(self._settings.lease_ttl),
        )
        self._ticker = Ticker(
            [
                Step("heartbeat", self._store.answering(self._beat), self._settings.heartbeat_interval),
                Step("watch", self._watch.step, self._settings.heartbeat_interval),
                Step("settling", self._store.answering(self._settling.settle), self._settings.heartbeat_interval),
                Step("sweep", self._store.answering(self._sweep), self._settings.reaper_interval),
            ],
            start_thread=native.start_thread,
            farewell=self._store.answering(self._farewell),
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
        is_answered = monotonic() - self._last_beat < self._settings.lease_ttl.total_seconds()
        return is_answered and not self.slots.is_draining

    @property
    def must_interrupt(self) -> bool:
        """The lease store is silent for so long that leases may be gone soon, and the user does not want to wait."""
        limit = max(timedelta(0), self._settings.lease_ttl - self._settings.loss_grace)
        wanted = self._settings.on_store_outage == "interrupt" and not self._store.answers
        return wanted and monotonic() - self._last_beat >= limit.total_seconds()

    def start(self) -> None:
        """Begin to beat and to sweep."""
        self._ticker.start()
        if self._outbox is not None:
            self._outbox.start()

    def shutting_down(self, how: str = "Warm", **_: Any) -> None:
        """A signal has told the worker to stop. Called in Celery's signal handler: sets flags only."""
        self.drain.begin(has_grace=how == "Warm")

    def stop(self) -> None:
        """Settle, hand over what is left, and say good-bye. Waits ten seconds at most."""
        self._closing = True
        if self._outbox is not None:
            # What it cannot end now, the database lets go, and another worker publishes.
            self._outbox.stop(timeout=OUTBOX_PATIENCE)
        give_up_at = monotonic() + self._settings.loss_grace.total_seconds() + 1
        while not self.interruptions.is_idle and monotonic() < give_up_at:
            sleep(LOOK.total_seconds())
        if not self._ticker.stop(timeout=FAREWELL_PATIENCE):
            logger.warning("the store does not answer: what is held is left to the reaper of another worker")
        self.drain.sum_up(handed_over=self._settling.handed_over, abandoned=self._abandoned)

    def wake(self, name: str | None = None) -> None:
        """Beat, settle and sweep now, or run the step of that name."""
        self._ticker.wake(name)

    def accepted(self, request: Any) -> None:
        """A child has begun with a request: look in time whether it runs too long."""
        if self._watch.is_too_late_for(request):
            self._ticker.wake("watch")

    def interrupt(self, request: Any, why: Doom) -> None:
        """Tell a start to end; its process is killed if it does not in ``selfheal_loss_grace``. Once."""
        self.interruptions.begin(request, why)
        self._ticker.wake("watch")

    def grace_of_limit(self, request: Any) -> float:
        """Seconds by which a hard time limit of the pool's own comes first, where it has one."""
        has_own = own_limit_of(request.task, self._settings) is not None
        enforces = type(self.pool).__module__.endswith((".prefork", ".gevent"))
        return 0.0 if has_own or not enforces else self._settings.loss_grace.total_seconds()

    @property
    def stores(self) -> Stores:
        """Stores of the agents' thread: to be used in what ``settle_later`` is given."""
        return self._stores

    def settle_later(self, settle: Callable[[], object], *, tag: str | None) -> None:
        """Let the agents' thread do something that speaks to the stores, until it is done."""
        self._settling.later(settle, tag=tag)

    def settle_ended(self, one: Interruption) -> None:
        """A start has ended since main told it to: settle its message and lease. Once."""
        settle(one, worker=self, settling=self._settling, progress=self._progress)

    def announce(self, request: Any, *, predecessor: str | None, context: Mapping[str, Any]) -> Start:
        """Make the start of a request and put it where the child finds it."""
        start = announce(
            request,
            predecessor=predecessor,
            context=context,
            session=self.session.name,
            node=self.node,
            limit=limit_of(request, self._settings, self._plugin.app.conf),
        )
        if start.tag is not None:
            self._started_tags.add(start.tag)
        self._requests[start.token] = weakref.ref(request, lambda _: self._requests.pop(start.token, None))
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
        if self.slots.is_draining:
            # Whoever has stopped the worker has stopped its children, too.
            self._settling.later(lambda: self._hand_over_started(request), tag=start.tag)
            return
        failure = StalledFailure(request, self._settings.max_stalls)

        def heal() -> None:
            self._progress.save_last(request)
            self._settling.heal_stalled(start, failure, reason="process died")

        self._settling.later(heal, tag=start.tag)

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
            self._settling.later(lambda: self._settling.move_to_dead_letters(tag, death, queue), tag=tag)
        else:
            self._unconfirmed.add(message, death, queue)

    def dead_letter_raw(self, tag: str, death: Death) -> None:
        """Move a delivery of which not even a message could be made."""
        queue = self._plugin.dead_letter_queue
        self._settling.later(lambda: self._settling.move_to_dead_letters(tag, death, queue), tag=tag)

    def is_pending(self, tag: str) -> bool:
        """The agents' thread settles the delivery; nobody else may."""
        return self._settling.is_pending(tag)

    def ended_from_outside(self, start: Start, *, state: str, failure: str = "") -> None:
        """Main ended the start (time limit, revocation): give its lease back.

        Args:
            failure: For a copy of the message, should this worker die before its dead letter is sent.
        """
        self._settling.later(
            lambda: self._settling.release(start, ended=True, marker=True, state=state, failure=failure), tag=None
        )

    def was_silent_since(self, started: float | None) -> bool:
        """Whether the store left a call unanswered since a start was accepted (Unix seconds)."""
        return started is not None and self._store.silent_at >= started

    def acknowledges_in_bulk(self, tag: str) -> bool:
        """Take the acknowledgement over, if the delivery belongs to a start of ours.

        Its release has settled the delivery in the same step, or left a done marker on which a copy ends: so one call
        for many does, and a death before it costs nothing.
        """
        if tag not in self._started_tags:
            return False
        self._started_tags.discard(tag)
        self._settling.acknowledge_in_bulk(tag)
        return True

    def acknowledges_at_once(self, tag: str | None) -> None:
        """No start of ours has settled this delivery, nor will one."""
        if tag is not None:
            self._started_tags.discard(tag)

    def acknowledge_later(self, tag: str) -> None:
        """An acknowledgement did not go through: repeat it until it does."""
        self._settling.later(lambda: self._settling.acknowledge(tag), tag=tag)

    def hand_over_later(self, tags: Iterable[str]) -> None:
        """Give deliveries back that have not begun here."""
        tags = list(tags)
        if tags and not self._closing:
            self._settling.later(lambda: self._settling.hand_over(tags, reason="handed over"), tag=None)

    def requests_running(self) -> list[Any]:
        """Requests whose bodies are under way: accepted by a child, and neither reported nor settled."""
        found = []
        for reference in list(self._requests.values()):
            request = reference()
            if request is None or request.time_start is None or request not in worker_state.active_requests:
                continue
            if not request.is_settled:
                found.append(request)
        return found

    def is_running(self, message: Any) -> bool:
        """Whether a body is under way for the message."""
        return any(request.message is message for request in tuple(worker_state.active_requests))

    # -- ``Holdings``, read by the heartbeat in the ticker's thread

    def running(self) -> Sequence[Start]:
        """Starts that a child has accepted and not reported, within their deadline."""
        starts = []
        for request in self.requests_running():
            start = request.start
            deadline = start.deadline_seconds
            ran = utc_now().timestamp() - request.time_start
            if deadline is None or ran <= deadline + 2 * self._settings.loss_grace.total_seconds():
                starts.append(start)
        return starts

    def tags(self) -> Iterable[str]:
        """Deliveries that somebody in this process still holds, or that wait to be settled."""
        return {*self._messages, *self._settling.tags()}

    # -- steps, run in the ticker's thread

    def _beat(self) -> None:
        # Read before the call: what it confirms is as old as this.
        asked_at = utc_now().timestamp()
        found: Beat = self.heartbeat.beat()
        self._last_beat = monotonic()
        self.slots.confirm(asked_at)
        self._progress.save(self.requests_running())
        if found.session_lost:
            logger.warning("session lost: this worker was taken for dead; it goes on as %s", self.session.name)
        if found.emptied:
            logger.warning("the store has lost its data; leases of running tasks are taken again")
        for start in found.lost:
            if start.token not in self._told_lost:
                self._told_lost.add(start.token)
                self._tell_lost(start)
        if found.forgotten:
            self._settling.hand_over(found.forgotten, reason="forgotten")

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
        self._settling.settle()
        abandoned = self.requests_running()
        for request in abandoned:
            self._settling.release_handed_over(request.start)
        if self._stores.deliveries is not None:
            left = [delivery.tag for delivery in self._stores.deliveries.owned(self.session.name)]
            self._settling.hand_over(left, reason="handed over")
        self.heartbeat.leave()
        self._abandoned = len(abandoned)

    def leave_by_force(self) -> None:
        """Hand everything over and end this process: what still runs here cannot be ended otherwise."""
        self._store.answering(self._farewell)()
        self.drain.sum_up(handed_over=self._settling.handed_over, abandoned=0)
        logging.shutdown()
        os._exit(int(worker_state.should_stop or 0))

    def handed_over(self, messages: int) -> None:
        """So many were given back by the loop."""
        self._settling.handed_over += messages

    def hand_over_unstarted(self) -> None:
        """Give back every delivery whose body has not begun here."""
        begun = {id(request.message) for request in self.requests_running()} | self._watch.begun_messages()
        tags = [
            tag
            for tag, reference in list(self._messages.items())
            if (message := reference()) is not None and id(message) not in begun and not self.is_pending(tag)
        ]
        if tags and self._stores.deliveries is not None:
            self._settling.hand_over(tags, reason="handed over")

    def _terminate(self, pid: int, signal: int) -> None:
        # As Celery would, so that the pool knows that it was meant.
        self.pool.terminate_job(pid, signal)

    def request_of(self, token: str) -> Any:
        """The request whose start has this token, while anybody holds it."""
        reference = self._requests.get(token)
        return reference() if reference else None

    def _completed(self, start: Start) -> Start:
        request = self.request_of(start.token)
        return start if request is None else completed(request)

    def _hand_over_started(self, request: Any) -> None:
        self._progress.save_last(request)
        self._settling.release_handed_over(request.start)
        self._settling.hand_over_started(request.start)

    def _tell_lost(self, start: Start) -> None:
        request = self.request_of(start.token)
        self._plugin.tell(
            LeaseWasLost(
                task_name=start.task_name,
                task_id=start.task_id,
                reason="taken over",
                owner=self.node,
                age_seconds=utc_now().timestamp() - request.time_start if request and request.time_start else 0.0,
            )
        )
        if request is not None:
            self.interrupt(request, Doom.TAKEN_OVER)

    def _new_session(self) -> Session:
        return Session(
            name=f"{self.node}:{os.getpid()}:{uuid.uuid4().hex[:12]}",
            node=self.node,
            identity=witness.identify(),
        )
