"""Retries: what a task declares, and how its next attempt takes the place of the held delivery."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from celery_selfheal.backoff import (
    RetryPolicy,
    check_backoff,
    check_exception_classes,
    check_seconds,
)
from celery_selfheal.classify import Verdict
from celery_selfheal.clock import utc_now
from celery_selfheal.errors import SettingsError

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
