"""What a failure means: another attempt, the dead letter queue, or nothing of ours."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta

from celery_selfheal.backoff import RetryPolicy
from celery_selfheal.errors import InDoubt, PayloadMismatch, StalledTooOften, UnrecoverableError

PRODUCER_PATIENCE = timedelta(seconds=10)
"""How long a producer may take to commit: until then "not found" may only mean "not yet"."""

CONTROL_FLOW = (
    ("celery.exceptions", ("Retry", "Ignore", "Reject", "TaskPredicate", "Terminated", "WorkerShutdown")),
    ("celery_selfheal.errors", ("LeaseLost",)),
)
GAVE_UP = (("celery.exceptions", ("MaxRetriesExceededError",)),)
UNRECOVERABLE = (
    ("kombu.exceptions", ("ContentDisallowed", "DecodeError", "SerializationError")),
    ("pydantic", ("ValidationError",)),
    ("pydantic_core", ("ValidationError",)),
    ("marshmallow", ("ValidationError",)),
)
NOT_FOUND = (
    ("sqlalchemy.exc", ("NoResultFound",)),
    ("django.core.exceptions", ("ObjectDoesNotExist",)),
)


class Verdict(enum.Enum):
    """What to do with a failure."""

    RETRY = "retry"
    EXHAUSTED = "exhausted"
    UNRECOVERABLE = "unrecoverable"
    PROPAGATE = "propagate"
    """It is no failure: a way of Celery's or ours to leave a body."""


def classify(
    exc: BaseException,
    policy: RetryPolicy,
    *,
    attempt: int,
    age: timedelta,
    unrecoverable: tuple[type[BaseException], ...] = (),
    modules: Mapping[str, object] | None = None,
) -> Verdict:
    """Judge one failure.

    Args:
        attempt: Which attempt failed, counted from 0.
        age: Since the message was first published.
        unrecoverable: Classes that ``selfheal_unrecoverable`` adds.
        modules: Loaded modules: an error of a library that is not loaded cannot have been raised.
    """
    loaded = sys.modules if modules is None else modules
    if not isinstance(exc, Exception) or isinstance(exc, _loaded_classes(CONTROL_FLOW, loaded)):
        return Verdict.PROPAGATE
    if isinstance(exc, (UnrecoverableError, PayloadMismatch, InDoubt, StalledTooOften)):
        return Verdict.UNRECOVERABLE
    if isinstance(exc, (policy.give_up_for, unrecoverable)):
        return Verdict.UNRECOVERABLE
    if isinstance(exc, _loaded_classes(GAVE_UP, loaded)):
        return Verdict.EXHAUSTED
    # A class that the task itself lists by name wins over the built-in lists; (Exception,) lists nothing by name.
    listed = tuple(one for one in policy.retry_for if one not in (Exception, BaseException))
    if not isinstance(exc, listed):
        if isinstance(exc, _loaded_classes(UNRECOVERABLE, loaded)):
            return Verdict.UNRECOVERABLE
        is_early = attempt == 0 and age <= PRODUCER_PATIENCE
        if isinstance(exc, _loaded_classes(NOT_FOUND, loaded)) and not is_early:
            return Verdict.UNRECOVERABLE
    if not isinstance(exc, policy.retry_for):
        return Verdict.UNRECOVERABLE
    if not policy.allows_retry(attempt, age=age):
        return Verdict.EXHAUSTED
    return Verdict.RETRY


def _loaded_classes(
    named: Iterable[tuple[str, Iterable[str]]], modules: Mapping[str, object]
) -> tuple[type[BaseException], ...]:
    found = []
    for module_name, names in named:
        module = modules.get(module_name)
        for name in names if module is not None else ():
            one = getattr(module, name, None)
            if isinstance(one, type) and issubclass(one, BaseException):
                found.append(one)
    return tuple(found)
