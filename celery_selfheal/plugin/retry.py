"""Retries: what a task declares, and how its next attempt takes the place of the held delivery."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

from kombu.utils.json import dumps

from celery_selfheal.backoff import (
    RetryPolicy,
    check_backoff,
    check_exception_classes,
    check_seconds,
)
from celery_selfheal.classify import Verdict
from celery_selfheal.clock import utc_now
from celery_selfheal.errors import SettingsError
from celery_selfheal.plugin.brokers.layout import RedisLayout, list_of, queue_of
from celery_selfheal.plugin.brokers.unsent import message_of
from celery_selfheal.sessions.redis import RedisDeliveryStore

logger = logging.getLogger("celery_selfheal")

VERDICT_ATTRIBUTE = "_selfheal_verdict"


def policy_of(task: Any, *, base: type, default_retry_for: tuple[type[BaseException], ...] = ()) -> RetryPolicy:
    """Check what a task declares about its retries, and freeze it.

    Args:
        task: A task class.
        base: Up to this class a declaration is the user's own.
        default_retry_for: For tasks that do not declare ``autoretry_for``.

    Raises:
        SettingsError: an option is wrong; it names task, option and value.
    """
    where = f"task {task.name or f'{task.__module__}.{task.__qualname__}'}"
    backoff = check_backoff(
        where,
        base=task.retry_backoff,
        cap=task.retry_backoff_max,
        floor=task.retry_backoff_min,
        jitter=task.retry_jitter,
    )
    fixed_seconds = check_seconds(where, "default_retry_delay", task.default_retry_delay)
    options = _options(where, task)
    countdown = options.pop("countdown", None)
    if countdown is not None:
        fixed_seconds = check_seconds(where, "retry_kwargs['countdown']", countdown)
    is_fixed = countdown is not None or _declares(task, base, "default_retry_delay")
    max_retries = options.pop("max_retries", None)
    return RetryPolicy(
        retry_for=check_exception_classes(where, "autoretry_for", task.autoretry_for)
        if _declares(task, base, "autoretry_for")
        else default_retry_for,
        give_up_for=check_exception_classes(where, "dont_autoretry_for", task.dont_autoretry_for),
        # As in Celery, None in retry_kwargs leaves it to the task; None on the task is "for ever".
        max_retries=_check_max_retries(where, task.max_retries if max_retries is None else max_retries),
        # As in Celery, a fixed wait holds unless a back-off is declared beside it; our default is no declaration.
        backoff=None if is_fixed and not _declares(task, base, "retry_backoff") else backoff,
        fixed_seconds=fixed_seconds,
        max_age=None
        if task.retry_max_age is None
        else timedelta(seconds=check_seconds(where, "retry_max_age", task.retry_max_age, positive=True)),
        options=options,
    )


def policy_now(task: Any) -> RetryPolicy:
    """What the task declared; as in Celery, its ``max_retries`` may be another one since."""
    policy: RetryPolicy = task.retry_policy
    if policy.max_retries == task.max_retries or (task.retry_kwargs or {}).get("max_retries") is not None:
        return policy
    return dataclasses.replace(policy, max_retries=task.max_retries)


def mark(exc: BaseException, verdict: Verdict) -> None:
    """Let a failure carry what was found about it over the border of the process."""
    # Whatever a class may have against it: then it is judged again.
    with suppress(AttributeError, TypeError):
        setattr(exc, VERDICT_ATTRIBUTE, verdict.value)


def verdict_on(exc: BaseException) -> Verdict | None:
    """What ``mark`` left; ``None`` where it could leave nothing."""
    value = getattr(exc, VERDICT_ATTRIBUTE, None)
    return Verdict(value) if isinstance(value, str) else None


def age_of(first_published_at: str | None) -> timedelta:
    """Since the message was first published, by this host's clock; zero where the producer did not say."""
    if not first_published_at:
        return timedelta(0)
    try:
        return max(timedelta(0), utc_now() - datetime.fromisoformat(first_published_at))
    except (ValueError, TypeError):
        return timedelta(0)


@dataclasses.dataclass(frozen=True, slots=True)
class NextAttempt:
    """A retry that waits until the body has ended.

    Attributes:
        signature: Celery's, with all that the attempt before carried.
        route: Where the caller of ``retry`` wants it: ``queue``, or ``exchange`` and ``routing_key``; empty for where
            it came from.
    """

    signature: Any
    route: Mapping[str, Any]

    @classmethod
    def of(cls, signature: Any, options: Mapping[str, Any]) -> NextAttempt:
        """Pick the route out of the options of ``retry``."""
        route = {name: options[name] for name in ("queue", "exchange", "routing_key") if options.get(name)}
        return cls(signature, route)


@contextmanager
def as_a_producer(request: Any) -> Iterator[None]:
    """Publish as from outside of any task: else Celery makes a retry without a parent its own child."""
    request.called_directly = True
    try:
        yield
    finally:
        request.called_directly = False


def replace_delivery(
    app: Any, attempt: NextAttempt, *, deliveries: RedisDeliveryStore, session: str, tag: str, layout: RedisLayout
) -> bool:
    """Let the next attempt take the place of the held delivery, in one step.

    Without a route of its own it goes into the very queue that it came from: looked up anew, a message of a topic
    exchange would go to every queue that is bound, or to none, since a pool process does not know the exchange.

    Returns:
        ``False`` when the delivery is not ours any more: then nothing was sent.

    Raises:
        StoreError: Redis did not answer; a repeat is safe.
    """
    message = message_of(app, attempt.signature)
    held = deliveries.named(session, [tag])
    if not held:
        return False
    own = queue_of(held[0].list_key, layout)
    queue = _queue_named_by(app, attempt.route) or own
    list_key = list_of(queue, message["properties"].get("priority"), layout)
    return deliveries.settle(
        dataclasses.replace(held[0], list_key=list_key),
        session=session,
        message=dumps(message).encode(),  # type: ignore[no-untyped-call]  # kombu is untyped
        dead=False,
        front=False,
    )


def _queue_named_by(app: Any, route: Mapping[str, Any]) -> str | None:
    """Name of the queue to which a route leads, as far as this application's queues tell."""
    names = {key: getattr(value, "name", value) for key, value in route.items()}
    if "queue" in names or not names:
        return names.get("queue")
    if not names.get("exchange"):
        return names.get("routing_key")
    for queue in app.amqp.queues.values():
        if queue.exchange.name == names["exchange"] and queue.routing_key == names.get("routing_key"):
            return str(queue.name)
    logger.error("no queue is known for a retry to %s: it goes to where it came from", names)
    return None


def _declares(task: Any, base: type, name: str) -> bool:
    """Whether the user's own classes say anything about it."""
    own = itertools.takewhile(lambda one: one is not base, task.__mro__)
    return any(name in vars(one) for one in own)


def _options(where: str, task: Any) -> dict[str, Any]:
    """``retry_kwargs``, checked; ``throw`` has no meaning here, since ours are sent when the body has ended."""
    given = {} if task.retry_kwargs is None else task.retry_kwargs
    if not isinstance(given, Mapping) or "exc" in given:
        raise SettingsError(f"{where}: retry_kwargs must be a dictionary without 'exc', got {given!r}", "retry_kwargs")
    return {name: value for name, value in given.items() if name != "throw"}


def _check_max_retries(where: str, value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise SettingsError(
        f"{where}: max_retries must be a whole number, 0 or more, or None (for ever), got {value!r}", "max_retries"
    )
