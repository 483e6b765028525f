"""``SelfHealTask``: one start, from the owner check to the release."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from time import sleep
from typing import Any

from celery import Celery, Task, states
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError

from celery_selfheal import headers as names
from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.backoff import RetryPolicy
from celery_selfheal.classify import Verdict, classify
from celery_selfheal.clock import jitter, monotonic, utc_now
from celery_selfheal.errors import StalledTooOften, StoreError
from celery_selfheal.leases.port import (
    AlreadyDone,
    Busy,
    Lease,
    LeaseStore,
    NotMine,
    Outcome,
    OverBudget,
    StalledOut,
    Start,
)
from celery_selfheal.plugin import eager
from celery_selfheal.plugin.death import failure_of, leave_as_before
from celery_selfheal.plugin.install import Plugin, install, is_built_in, plugin_of
from celery_selfheal.plugin.publisher import least_countdown
from celery_selfheal.plugin.retry import (
    NextAttempt,
    age_of,
    as_a_producer,
    mark,
    policy_now,
    policy_of,
    replace_delivery,
)
from celery_selfheal.telemetry.events import TaskStalled

logger = logging.getLogger("celery_selfheal")

CONTEXT_KEY = "selfheal"
"""Where the main process puts what it knows of the start, inside the request's properties."""

SUCCESSOR_PATIENCE = timedelta(milliseconds=500)  # the holder is another attempt of the id, about to release
STORE_PAUSE_SECONDS = (0.1, 0.5)  # between two tries of a store that is away


@dataclass(slots=True)
class _Running:
    """What a start must remember until it ends.

    Attributes:
        retries: Next attempts that the body asked for; sent when it has ended.
        asks_retry: ``self.retry()`` is under way: its signature is ours to send.
        gave_up: What ``self.retry()`` raised when it found its attempts used up.
        is_disowned: The message is somebody else's now, and its next attempt, too.
    """

    start: Start
    lease: Lease
    leases: LeaseStore
    retries: list[NextAttempt] = field(default_factory=list)
    asks_retry: bool = False
    gave_up: Exception | None = None
    is_disowned: bool = False


class SelfHealTask(Task):  # type: ignore[misc]  # Celery is untyped
    """Base of tasks that heal: ``@app.task(base=SelfHealTask)``, or ``Celery(task_cls=SelfHealTask)`` for all.

    Late acknowledgement and requeue on worker loss are on. ``acks_late=False`` on a task is an explicit opt-out: such a
    task is lost with its worker, as in plain Celery.

    Retries keep Celery's option names; all times are seconds. A failure is judged after the body has ended, whatever
    way the task was defined.

    Attributes:
        autoretry_for: Exceptions worth another attempt; by default ``selfheal_autoretry_for``.
        dont_autoretry_for: Exceptions that are not: they go to the dead letter queue at once.
        max_retries: Attempts after the first; ``None`` for ever.
        retry_backoff: The wait before retry *n*, counted from 0, is drawn from ``0 .. min(max, backoff * 2**n)``.
        retry_backoff_max: Ceiling of the wait.
        retry_backoff_min: Floor of the wait.
        retry_jitter: ``True`` or ``"full"``, ``"equal"``, ``"decorrelated"``, or ``False``.
        retry_max_age: No retry for a message first published longer ago; ``None`` for any age.
        retry_kwargs: Further arguments of ``retry`` for the retries that are sent for you.
        dead_letter: ``False``: a final failure is only stored, as in plain Celery.
        dead_letter_queue: Another queue than ``selfheal_dlq``.
        dead_letter_for: Only these exceptions are dead-lettered; by default all.
        dont_dead_letter_for: These exceptions are not.
    """

    abstract = True
    Request = "celery_selfheal.plugin.request:SelfHealRequest"
    acks_late = True
    reject_on_worker_lost = True

    max_retries = 5
    dont_autoretry_for: tuple[type[BaseException], ...] = ()
    retry_backoff: float | bool = 1.0
    retry_backoff_max: float = 600
    retry_backoff_min: float = 0
    retry_jitter: bool | str = True
    retry_max_age: float | None = None
    retry_kwargs: Mapping[str, Any] | None = None
    dead_letter: bool = True
    dead_letter_queue: str | None = None
    dead_letter_for: tuple[type[BaseException], ...] = (Exception,)
    dont_dead_letter_for: tuple[type[BaseException], ...] = ()

    retry_policy: RetryPolicy
    #: Celery wraps ``run`` of tasks that lack it; ours are retried outside of the body, by ``__call__``.
    _orig_run = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Before Celery looks at the options: its own errors name neither task nor option.
        if not cls.__dict__.get("abstract"):
            policy_of(cls, base=SelfHealTask)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Install the plugin with the first task that uses it, and check what the task declares.

        Raises:
            SettingsError: an option of the task or a setting is wrong.
        """
        super().on_bound(app)
        if is_built_in(cls.name or ""):
            cls.acks_late = app.conf.task_acks_late
            cls.reject_on_worker_lost = app.conf.task_reject_on_worker_lost
            cls.Request = Task.Request
            return
        plugin = install(app)
        cls.retry_policy = policy_of(cls, base=SelfHealTask, default_retry_for=plugin.autoretry_for)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under a lease. A direct call, ``task(...)``, runs the plain body."""
        request = self.request
        if request.called_directly or is_built_in(self.name):
            return super().__call__(*args, **kwargs)
        plugin = plugin_of(self.app)
        start = self._start()
        if start is None:
            return self.run(*args, **kwargs)
        leases: LeaseStore = plugin.eager_leases if request.is_eager else plugin.stores.leases
        running = self._enter(plugin, start, leases)
        try:
            result = self.run(*args, **kwargs)
        except Exception as exc:
            retry = self._judge(plugin, running, exc)
            self._send_retries(plugin, running, raised=retry or exc)
            if retry is not None:
                raise retry from exc
            raise
        self._send_retries(plugin, running, raised=None)
        return result

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        link: Any = None,
        link_error: Any = None,
        task_id: str | None = None,
        retries: int | None = None,
        throw: bool | None = None,
        **options: Any,
    ) -> Any:
        """As Celery's, and with as many attempts as a worker would make: at once, needing neither broker nor Redis."""
        options.update(link=link, link_error=link_error, task_id=task_id, retries=retries, throw=throw)
        if is_built_in(self.name):
            return super().apply(args, kwargs, **options)
        return eager.run_attempts(self, super().apply, args, kwargs, **options)

    @property
    def lease(self) -> Lease | None:
        """Lease of the running start; ``None`` outside of one."""
        running = self._running
        return running.lease if running else None

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: Any = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """As Celery's, but without ``countdown`` and ``eta`` the wait is drawn by the task's own policy.

        The next attempt is sent when the body has ended, never from inside it.
        """
        running = self._running
        if running is None:
            return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        policy = policy_now(self)
        if not eta and countdown is None:
            countdown = policy.delay(self.request.retries, chance=jitter()).total_seconds()
        if policy.is_too_old(age_of(self._context().get("first_published_at"))):
            max_retries = 0
        running.asks_retry = True
        try:
            ret = super().retry(args, kwargs, exc, False, eta, countdown, max_retries, **options)
        except Exception as error:
            running.gave_up = error
            raise
        finally:
            running.asks_retry = False
            self.__dict__.pop("override_max_retries", None)
        running.retries.append(NextAttempt.of(ret.sig, options))
        if throw:
            raise ret
        return ret

    def signature_from_request(self, request: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Celery's, but a retry names its predecessor, and is sent when the body has ended."""
        running = self._running
        if running is None or not running.asks_retry:
            return super().signature_from_request(request, *args, **kwargs)
        context = self._context()
        is_eager = self.request.is_eager
        first_published_at = context.get("first_published_at")
        if is_eager:
            first_published_at = eager.as_if_waited(
                first_published_at, countdown=kwargs.get("countdown"), eta=kwargs.get("eta")
            )
        user_headers = names.of_the_user(dict((request or self.request).headers or {}, **(kwargs.get("headers") or {})))
        kwargs["headers"] = {
            **user_headers,
            names.PREDECESSOR: running.start.token,
            names.FIRST_PUBLISHED: first_published_at,
            names.FIRST_FAILURE: context.get("first_failure_at") or utc_now().isoformat(),
            names.REPLAYS: context.get("replays") or 0,
        }
        signature = super().signature_from_request(request, *args, **kwargs)
        if is_eager:
            eager.catch(signature)
        else:
            # Sent when the body has ended.
            signature.apply_async = lambda: None
        return signature

    def end_start(self, state: str | None, retval: Any) -> None:
        """Release at the very end, when callbacks are sent and the result is stored. Called by ``task_postrun``."""
        running = self._running
        # Without a state the body was left by SystemExit or the like: the process goes down, and main counts it. An
        # eager one lives on, and Celery gives none to what it lets through.
        if running is None or (state is None and not self.request.is_eager):
            return
        self.request.selfheal_running = None
        # The result could not be stored, say: the message must come back, so nothing may say that it is done.
        unfinished = sys.exc_info()[1] is not None
        requeued = isinstance(retval, Reject) and retval.requeue
        failure = ""
        if state in (states.FAILURE, states.REJECTED) and not unfinished and not self.request.is_eager:
            # Main moves the message; if it dies before it can, the next worker that gets the message must know.
            failure = failure_of(
                retval,
                self,
                attempt=self.request.retries,
                first_published_at=self._context().get("first_published_at"),
            )
        give_up_at = monotonic() + plugin_of(self.app).settings.lease_ttl.total_seconds()
        while True:
            try:
                running.leases.release(
                    running.start,
                    # A marker that all is done would make whoever has the message now drop it.
                    ended=not running.is_disowned,
                    # An eager start has no message of which a copy could come.
                    marker=not (unfinished or requeued or running.is_disowned or self.request.is_eager),
                    state=(state or "raised").lower(),
                    # Failures and rejections are settled by main, from the raw message.
                    acknowledge=not unfinished and state in (states.SUCCESS, states.RETRY, states.IGNORED),
                    failure=failure,
                )
                return
            except StoreError as exc:
                if monotonic() >= give_up_at:
                    logger.warning("lease of %s[%s] is left to main: %s", self.name, running.start.task_id, exc)
                    return
                sleep(jitter().uniform(*STORE_PAUSE_SECONDS))

    @property
    def _running(self) -> _Running | None:
        running: _Running | None = getattr(self.request, "selfheal_running", None)
        return running

    def _context(self) -> Mapping[str, Any]:
        properties = self.request.properties
        context = properties.get(CONTEXT_KEY) if isinstance(properties, Mapping) else None
        return context if isinstance(context, Mapping) else {}

    def _start(self) -> Start | None:
        """The start that main announced; in eager mode, one of our own; ``None`` without a worker that knows us."""
        request = self.request
        announced = self._context().get("start")
        if announced is not None:
            return Start(**announced)
        if not request.is_eager:
            return None
        headers = request.headers or {}
        request.headers = names.of_the_user(headers) or None
        request.properties = {CONTEXT_KEY: names.history_of(headers)}
        token = uuid.uuid4().hex
        return Start(
            task_id=request.id,
            task_name=self.name,
            token=token,
            session="eager",
            attempt=f"{self.name}:{request.retries}",
            marker=token,
            predecessor=headers.get(names.PREDECESSOR),
        )

    def _enter(self, plugin: Plugin, start: Start, leases: LeaseStore) -> _Running:
        """Take the lease, or leave by Celery's ways."""
        outcome = self._acquire(leases, start, patience=plugin.settings.lease_ttl)
        if isinstance(outcome, OverBudget):
            self._park(plugin, start, outcome.wait, paid=True)
            raise Ignore(f"the retry budget is used up; the retry waits {outcome.wait.total_seconds():.1f} s longer")
        if isinstance(outcome, Busy):
            is_twin = outcome.attempt in ("", start.attempt)
            patience = outcome.remaining if is_twin else min(outcome.remaining, SUCCESSOR_PATIENCE)
            if not self.request.is_eager:
                self._park(plugin, start, patience, paid=False)
            raise Ignore(f"parked: another start runs for another {outcome.remaining.total_seconds():.1f} s")
        if isinstance(outcome, AlreadyDone):
            raise leave_as_before(outcome.failure) if outcome.failure else Ignore("a copy of this message was finished")
        if isinstance(outcome, NotMine):
            raise Ignore("the message was given to another worker")
        running = _Running(start, outcome.lease, leases)
        self.request.selfheal_running = running
        if isinstance(outcome, StalledOut):
            raise StalledTooOften(self.name, start.task_id, outcome.stalls, plugin.settings.max_stalls)
        if outcome.overtaken:
            stall = asdict(outcome.overtaken)
            stall.pop("token")
            plugin.tell(TaskStalled(reason="lease ran out", **stall))
        return running

    def _acquire(self, leases: LeaseStore, start: Start, *, patience: timedelta) -> Outcome:
        """Try for one TTL; then the message goes back uncounted, and the worker takes none until the store answers."""
        give_up_at = monotonic() + patience.total_seconds()
        while True:
            # Read before the call: a process that was stopped in it must not trust an answer older than the TTL.
            asked_at = monotonic()
            try:
                outcome = leases.acquire(start)
                if monotonic() - asked_at < patience.total_seconds():
                    return outcome
            except StoreError as exc:
                if monotonic() >= give_up_at:
                    logger.warning("%s[%s] is handed back: %s", self.name, start.task_id, exc)
                    raise Reject(str(exc), requeue=True) from exc
                sleep(jitter().uniform(*STORE_PAUSE_SECONDS))

    def _judge(self, plugin: Plugin, running: _Running, exc: Exception) -> Retry | None:
        """The retry that this failure deserves; ``None`` lets the exception go its way."""
        policy = policy_now(self)
        verdict = classify(
            exc,
            policy,
            attempt=self.request.retries,
            age=age_of(self._context().get("first_published_at")),
            unrecoverable=plugin.unrecoverable,
        )
        if running.gave_up is not None and (running.gave_up is exc or verdict is Verdict.RETRY):
            verdict = Verdict.EXHAUSTED
        if verdict is not Verdict.RETRY:
            mark(exc, verdict)
            return None
        retry: Retry = self.retry(**{"max_retries": policy.max_retries, **policy.options}, exc=exc, throw=False)
        return retry

    def _send_retries(self, plugin: Plugin, running: _Running, *, raised: Exception | None) -> None:
        """Send what ``self.retry()`` asked for, in place of the held delivery where the broker can do that.

        Args:
            raised: What the body is left by; an eager ``Retry`` is followed up by ``apply``.
        """
        waiting, running.retries = running.retries, []
        if self.request.is_eager:
            for attempt in waiting:
                if attempt.signature is not getattr(raised, "sig", None):
                    args, kwargs, options = eager.caught(attempt.signature)
                    self.apply(args, kwargs, **options)
            return
        give_up_at = monotonic() + plugin.settings.lease_ttl.total_seconds()
        start = running.start
        for number, attempt in enumerate(waiting):
            # The instance's own apply_async was the net that caught it.
            vars(attempt.signature).pop("apply_async", None)
            while True:
                try:
                    with as_a_producer(self.request):
                        sent = self._send_retry(plugin, attempt, start, in_place=number == 0)
                    break
                except (StoreError, OperationalError) as exc:
                    if monotonic() >= give_up_at:
                        # Unsettled, so the message comes back and the attempt is made again: late, but not lost.
                        logger.warning("retry of %s[%s] could not be sent: %s", self.name, start.task_id, exc)
                        raise Reject(str(exc), requeue=True) from exc
                    sleep(jitter().uniform(*STORE_PAUSE_SECONDS))
            if not sent:
                running.is_disowned = True
                raise Ignore("the message was given to another worker, which retries by itself")

    def _send_retry(self, plugin: Plugin, attempt: NextAttempt, start: Start, *, in_place: bool) -> bool:
        deliveries = plugin.stores.deliveries
        if in_place and deliveries is not None and plugin.layout is not None and start.tag is not None:
            return replace_delivery(
                self.app,
                attempt,
                deliveries=deliveries,
                session=start.session,
                tag=start.tag,
                layout=plugin.layout,
            )
        signature = attempt.signature
        signature.set(countdown=least_countdown(self.app, signature.options.get("countdown")))
        with plugin.publisher.producer() as producer:
            signature.apply_async(producer=producer)
        return True

    def _park(self, plugin: Plugin, start: Start, patience: timedelta, *, paid: bool) -> None:
        """Replace the delivery by a copy that comes back after ``patience`` and a little chance.

        Args:
            paid: The copy has its place in the retry budget.
        """
        seconds = patience.total_seconds() * (1 + jitter().uniform(0, 0.25))
        deliveries = plugin.stores.deliveries
        logger.info("parked: %s[%s] for %.1f s", self.name, start.task_id, seconds)
        if deliveries is None or start.tag is None:
            signature = super().signature_from_request(
                countdown=least_countdown(self.app, seconds),
                retries=self.request.retries,
                expires=None,
                headers=self._parked_headers(start, paid=paid),
            )
            with plugin.publisher.producer() as producer:
                signature.apply_async(producer=producer)
            return
        eta = (utc_now() + timedelta(seconds=seconds)).isoformat()
        for delivery in deliveries.named(start.session, [start.tag]):
            message = Envelope.decode(delivery.message).parked(eta=eta, paid=paid)
            deliveries.settle(delivery, session=start.session, message=message, dead=False, front=False)

    def _parked_headers(self, start: Start, *, paid: bool) -> dict[str, Any]:
        context = self._context()
        return {
            **names.of_the_user(self.request.headers or {}),
            names.PUBLISHED: context.get("published_at"),
            names.FIRST_PUBLISHED: context.get("first_published_at"),
            names.FIRST_FAILURE: context.get("first_failure_at"),
            names.REPLAYS: context.get("replays") or 0,
            names.PREDECESSOR: start.predecessor,
            names.BUDGET_PAID: paid or bool(context.get("budget_paid")),
        }
