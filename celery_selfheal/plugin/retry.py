"""Retries: what a task declares, and how its next attempt takes the place of the held delivery."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from kombu.utils.json import dumps

from celery_selfheal.backoff import (
    RetryPolicy,
    check_backoff,
    check_exception_classes,
    check_seconds,
)
from celery_selfheal.clock import utc_now
from celery_selfheal.errors import SettingsError
from celery_selfheal.sessions.redis import RedisDeliveryStore


def policy_of(task: Any, *, base: type, default_retry_for: tuple[type[BaseException], ...]) -> RetryPolicy:
    """Check what a task declares about its retries, and freeze it.

    Args:
        task: A task class.
        base: Up to this class a declaration is the user's own.
        default_retry_for: For tasks that do not declare ``autoretry_for``.

    Raises:
        SettingsError: an option is wrong; it names task, option and value.
    """
    where = f"task {task.name}"
    declared = _declared(task, base, "autoretry_for")
    retry_for = default_retry_for if declared is None else check_exception_classes(where, "autoretry_for", declared)
    retry_kwargs = getattr(task, "retry_kwargs", None) or {}
    if not isinstance(retry_kwargs, Mapping):
        raise SettingsError(f"{where}: retry_kwargs must be a dictionary, got {retry_kwargs!r}", "retry_kwargs")
    max_retries = retry_kwargs.get("max_retries", task.max_retries)
    if max_retries is not None and (
        isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0
    ):
        raise SettingsError(
            f"{where}: max_retries must be a whole number, 0 or more, or None (for ever), got {max_retries!r}",
            "max_retries",
        )
    countdown = retry_kwargs.get("countdown")
    max_age = task.retry_max_age
    backoff = check_backoff(
        where,
        base=task.retry_backoff,
        cap=task.retry_backoff_max,
        floor=task.retry_backoff_min,
        jitter=task.retry_jitter,
    )
    return RetryPolicy(
        retry_for=retry_for,
        give_up_for=check_exception_classes(where, "dont_autoretry_for", task.dont_autoretry_for),
        max_retries=max_retries,
        # As in Celery, a countdown in retry_kwargs is a fixed wait, unless a back-off is declared beside it.
        backoff=None if countdown is not None and _declared(task, base, "retry_backoff") is None else backoff,
        fixed_seconds=check_seconds(
            where, "retry_kwargs['countdown']", task.default_retry_delay if countdown is None else countdown
        ),
        max_age=None
        if max_age is None
        else timedelta(seconds=check_seconds(where, "retry_max_age", max_age, positive=True)),
    )


def age_of(first_published_at: str | None) -> timedelta:
    """Since the message was first published, by this host's clock; zero where the producer did not say."""
    if not first_published_at:
        return timedelta(0)
    try:
        return max(timedelta(0), utc_now() - datetime.fromisoformat(first_published_at))
    except (ValueError, TypeError):
        return timedelta(0)


def replace_delivery(
    app: Any, signature: Any, *, deliveries: RedisDeliveryStore, session: str, tag: str, prefix: str
) -> bool:
    """Let the next attempt take the place of the held delivery, in one step.

    Celery routes and serializes the message as ever; only its last step, the push to a Redis list, is ours.

    Returns:
        ``False`` when the delivery is not ours any more: then nothing was sent.

    Raises:
        StoreError: Redis did not answer; a repeat is safe.
    """
    with app.producer_or_acquire() as producer, _captured(producer.channel) as pushes:
        signature.apply_async(producer=producer)
    if not pushes:
        # A fanout exchange has no list; it was published at once.
        return True
    (list_key, payload), *others = pushes
    held = deliveries.named(session, [tag])
    if not held or not deliveries.settle(
        dataclasses.replace(held[0], list_key=prefix + list_key),
        session=session,
        message=payload,
        dead=False,
        front=False,
    ):
        return False
    for other_key, other in others:
        deliveries.push(prefix + other_key, other)
    return True


@contextmanager
def _captured(channel: Any) -> Iterator[list[tuple[str, bytes]]]:
    pushes: list[tuple[str, bytes]] = []

    def put(queue: str, message: Any, **_: Any) -> None:
        priority = channel._get_message_priority(message, reverse=False)
        pushes.append((channel._q_for_pri(queue, priority), dumps(message).encode()))  # type: ignore[no-untyped-call]  # kombu is untyped

    channel._put = put
    try:
        yield pushes
    finally:
        del channel._put


def _declared(task: Any, base: type, name: str) -> Any:
    """What the user's own classes say, ``None`` if they are silent."""
    for one in task.__mro__:
        if one is base:
            return None
        if name in vars(one):
            return vars(one)[name]
    return None
