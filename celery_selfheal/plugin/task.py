"""``SelfHealTask``: one start, from the owner check to the release."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from time import sleep
from typing import TYPE_CHECKING, Any

from celery import Celery, Task, states
from celery.canvas import Signature
from celery.exceptions import Reject, Retry

from celery_selfheal import headers as names
from celery_selfheal.arguments import KeyTemplate, body_of
from celery_selfheal.backoff import RetryPolicy
from celery_selfheal.classify import Verdict, classify
from celery_selfheal.clock import jitter, monotonic, utc_now
from celery_selfheal.errors import SelfHealError, StoreError
from celery_selfheal.leases.port import LeaseStore
from celery_selfheal.plugin import eager
from celery_selfheal.plugin.bodies import body_of as body_of_start
from celery_selfheal.plugin.body import HandBack
from celery_selfheal.plugin.death import failure_of
from celery_selfheal.plugin.duplicates import Replaced
from celery_selfheal.plugin.entrance import enter, start_of
from celery_selfheal.plugin.install import Plugin, install, is_built_in, plugin_of
from celery_selfheal.plugin.lock_key import SKIPPED, check_lock_options, with_lock_key
from celery_selfheal.plugin.next_attempt import STORE_PAUSE_SECONDS, NextAttempt, send_retries
from celery_selfheal.plugin.on_commit import AfterCommit
from celery_selfheal.plugin.once import check_options, mark_dispatched, run_body, run_or_fail
from celery_selfheal.plugin.progress import last_progress
from celery_selfheal.plugin.retry import age_of, mark, policy_now, policy_of
from celery_selfheal.plugin.running import CurrentLease, Running, context_of, running_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

logger = logging.getLogger("celery_selfheal")


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
        dedup: ``"transaction"``: body and dedup row commit together, through ``self.session``. ``"claim"``: a row is
            claimed before the body, for effects outside of the database. ``"redis"``: the same without a database.
            ``None``: no idempotency key.
        idempotency_key: What the effect is known by: a template over the arguments, ``"payment:{payment_id}"``, or a
            callable that gets them; by default the task's name and id.
        on_in_doubt: What becomes of a claim whose start died: ``"takeover"`` runs the body again, ``"hold"`` leaves
            it to a person (dead letter ``in_doubt``).
        store_result: ``False``: the result is not kept for duplicates, which then return ``None``.
        commit_on_ignore: ``True``: a body that raises ``Ignore`` is committed; by default it is rolled back.
        max_runtime: Seconds that one start may run; then it is ended, which counts as an attempt. By default
            ``selfheal_max_runtime``, else the time limit.
        stall_after: Seconds without ``self.heartbeat()`` after which a start is taken for hung, and ended.
        lease_key: No two tasks with the same key run at the same time: a template over the arguments,
            ``"account:{account_id}"``, or a callable that gets them. Tasks of other names that give the same key count.
        lease_busy: While another task has the key: ``"wait"`` comes back later and uses no retry, ``"skip"`` returns
            ``SKIPPED``, ``"fail"`` raises ``LeaseBusy``.
        lease_wait_max: Seconds since the message was first published after which waiting ends in ``LeaseBusy``;
            ``None``: it waits for ever.
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

    dedup: str | None = None
    idempotency_key: KeyTemplate | None = None
    on_in_doubt: str = "takeover"
    store_result: bool = True
    commit_on_ignore: bool = False

    max_runtime: float | None = None
    stall_after: float | None = None

    lease_key: KeyTemplate | None = None
    lease_busy: str = "wait"
    lease_wait_max: float | None = None

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
        check_options(cls, f"task {cls.name}", body_of(cls))
        check_lock_options(cls, plugin, f"task {cls.name}", body_of(cls))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under a lease. A direct call, ``task(...)``, runs the plain body."""
        request = self.request
        if request.called_directly or is_built_in(self.name):
            return super().__call__(*args, **kwargs)
        plugin = plugin_of(self.app)
        start = start_of(self)
        if start is None:
            return self.run(*args, **kwargs)
        leases: LeaseStore = plugin.eager_leases if request.is_eager else plugin.stores.leases
        with body_of_start(start, None if request.is_eager else plugin.slots) as body:
            running = enter(self, plugin, with_lock_key(self, start, args, kwargs), leases, body)
            return SKIPPED if running is None else self._attempt(plugin, running, args, kwargs)

    def _attempt(self, plugin: Plugin, running: Running, args: Any, kwargs: Any) -> Any:
        """Run the body, and judge how it ends."""
        try:
            if running.refused is not None:
                raise running.refused
            if running.stalled is not None:
                return run_or_fail(self, plugin, running, running.stalled, args, kwargs)
            result = run_body(self, plugin, running, args, kwargs)
        except Exception as exc:
            running.after_commit.clear()
            retry = self._judge(plugin, running, exc)
            send_retries(self, plugin, running, raised=retry or exc)
            if retry is not None:
                raise retry from exc
            raise
        send_retries(self, plugin, running, raised=None)
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
    def lease(self) -> CurrentLease | None:
        """Lease of the running start; ``None`` outside of one."""
        running = running_of(self.request)
        return CurrentLease.of(running, plugin_of(self.app)) if running and not running.refused else None

    @property
    def is_draining(self) -> bool:
        """Whether the worker stops: a long body may come to a good end, before it is interrupted and handed over."""
        slots = plugin_of(self.app).slots
        return slots is not None and slots.is_draining

    def check(self) -> str:
        """Leave the body if this start must end: for loops in code that nothing else can interrupt. Costs no call.

        Returns:
            ``"held"``; or ``"unconfirmed"`` while the store does not answer: nobody can have taken over knowingly,
            but whoever guards something that knows no fence may want to stop.

        Raises:
            LeaseLost: the lease is lost, or the worker ends this start for another reason. Do not catch it.
        """
        running = running_of(self.request)
        if running is None:
            return "held"
        running.body.check()
        return "held" if running.body.is_confirmed else "unconfirmed"

    @property
    def last_progress(self) -> Any:
        """What the last start of this task has said of its progress; ``None`` if there was none. Asks once a start."""
        running = running_of(self.request)
        if running is None or self.request.is_eager:
            return None
        if not running.has_asked_progress:
            running.last_progress = last_progress(plugin_of(self.app).stores.progress, running.start.task_id)
            running.has_asked_progress = True
        return running.last_progress

    def heartbeat(self, progress: Any = None) -> None:
        """The work goes on: a task with ``stall_after`` must say so at least that often. Costs no call.

        Args:
            progress: Something small that JSON can hold; the next start finds the last one in ``last_progress``.

        Raises:
            LeaseLost: as ``check``.
            ValueError: ``progress`` is no JSON, or longer than 1800 bytes.
        """
        running = running_of(self.request)
        if running is not None:
            running.body.check()
            running.body.show_life(progress)
            running.has_progress |= progress is not None

    @property
    def session(self) -> Session:
        """The session of the transaction that the body runs in, and its dedup row with it.

        It is committed when the body returns, and rolled back when it raises; ``commit()`` is not the body's.

        Raises:
            SelfHealError: no transaction of ours is open.
        """
        running = running_of(self.request)
        if running is None or running.session is None:
            raise SelfHealError(
                f"task {self.name}: self.session is there while the body runs with dedup='transaction',"
                " in a worker or by task.apply(); a direct call has none"
            )
        session: Session = running.session
        return session

    def on_commit(self, function: Callable[[], object]) -> None:
        """Call ``function`` after the commit; without a transaction, when the body has returned. Not after a failure.

        What it raises is logged and changes nothing: the effect is there.
        """
        self._after_commit("on_commit").add(function)

    def send_on_commit(self, signature: Signature) -> Any:
        """Send a task after the commit; without a transaction, when the body has returned. Not after a failure.

        With ``selfheal_outbox`` the message is a row of the same transaction, and no crash loses it.

        Returns:
            The ``AsyncResult`` of the message that is to be sent.
        """
        return self._after_commit("send_on_commit").send(signature)

    def _after_commit(self, name: str) -> AfterCommit:
        running = running_of(self.request)
        if running is None:
            raise SelfHealError(
                f"task {self.name}: self.{name}() is there while the body runs in a worker or by task.apply()"
            )
        return running.after_commit

    def on_replace(self, sig: Signature) -> Any:
        """As Celery's, but inside of a claim the replacement is sent when the claim is settled."""
        running = running_of(self.request)
        if running is None or self.dedup is None or self.request.is_eager:
            return super().on_replace(sig)
        raise Replaced(sig)

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
        running = running_of(self.request)
        if running is None:
            return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        policy = policy_now(self)
        if not eta and countdown is None:
            countdown = policy.delay(self.request.retries, chance=jitter()).total_seconds()
        if policy.is_too_old(age_of(context_of(self.request).get("first_published_at"))):
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
        running = running_of(self.request)
        if running is None or not running.asks_retry:
            return super().signature_from_request(request, *args, **kwargs)
        context = context_of(self.request)
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
        running = running_of(self.request)
        # Without a state the body was left by SystemExit or the like: the process goes down, and main counts it. An
        # eager one lives on, and Celery gives none to what it lets through.
        if running is None or (state is None and not self.request.is_eager):
            return
        if isinstance(retval, HandBack):
            # Main gives the lease back, with the message.
            return
        self.request.selfheal_running = None
        if running.refused is not None:
            return
        # The result could not be stored, say: the message must come back, so nothing may say that it is done.
        unfinished = sys.exc_info()[1] is not None
        requeued = isinstance(retval, Reject) and retval.requeue
        if state == states.SUCCESS or running.is_replaced:
            mark_dispatched(self, plugin_of(self.app), running)
        failure = ""
        if state in (states.FAILURE, states.REJECTED) and not unfinished and not self.request.is_eager:
            # Main moves the message; if it dies before it can, the next worker that gets the message must know.
            failure = failure_of(
                retval,
                self,
                attempt=self.request.retries,
                first_published_at=context_of(self.request).get("first_published_at"),
            )
        give_up_at = monotonic() + plugin_of(self.app).settings.lease_ttl.total_seconds()
        while True:
            try:
                running.leases.release(
                    running.start,
                    # A marker that all is done would make whoever has the message now drop it.
                    ended=not (running.is_disowned or running.is_parked),
                    # An eager start has no message of which a copy could come.
                    marker=not (
                        unfinished or requeued or running.is_disowned or running.is_parked or self.request.is_eager
                    ),
                    state="parked" if running.is_parked else (state or "raised").lower(),
                    # Failures and rejections are settled by main, from the raw message.
                    acknowledge=not unfinished and state in (states.SUCCESS, states.RETRY, states.IGNORED),
                    failure=failure,
                )
                if (running.has_progress or running.last_progress is not None) and not (requeued or unfinished):
                    self._forget_progress(running, state)
                return
            except StoreError as exc:
                if monotonic() >= give_up_at:
                    logger.warning("lease of %s[%s] is left to main: %s", self.name, running.start.task_id, exc)
                    return
                sleep(jitter().uniform(*STORE_PAUSE_SECONDS))

    def _forget_progress(self, running: Running, state: str | None) -> None:
        # Another attempt goes on from where this one came; a task that is over leaves nothing.
        store = plugin_of(self.app).stores.progress
        if store is not None and state != states.RETRY and not self.request.is_eager and not running.is_disowned:
            store.forget(running.start.task_id)

    def _judge(self, plugin: Plugin, running: Running, exc: Exception) -> Retry | None:
        """The retry that this failure deserves; ``None`` lets the exception go its way."""
        policy = policy_now(self)
        verdict = classify(
            exc,
            policy,
            attempt=self.request.retries,
            age=age_of(context_of(self.request).get("first_published_at")),
            unrecoverable=plugin.unrecoverable,
        )
        if running.gave_up is not None and (running.gave_up is exc or verdict is Verdict.RETRY):
            verdict = Verdict.EXHAUSTED
        if verdict is not Verdict.RETRY:
            mark(exc, verdict)
            return None
        retry: Retry = self.retry(**{"max_retries": policy.max_retries, **policy.options}, exc=exc, throw=False)
        return retry
