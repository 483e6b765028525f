"""Eager mode: all attempts of a task in this process, one after the other, without waiting."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import states
from celery.canvas import Signature
from celery.exceptions import Retry
from celery.utils import uuid

from celery_selfheal import headers as names
from celery_selfheal.clock import utc_now
from celery_selfheal.plugin.death import death_of_eager, reason_of
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.telemetry.events import TaskDeadLettered


def run_attempts(task: Any, apply: Callable[..., Any], args: Any, kwargs: Any, **options: Any) -> Any:
    """Apply a task, and each attempt that follows, until one ends for good; returns the result of that one.

    A loop, where Celery nests: hundreds of attempts must not meet the limit of recursion, and ``throw`` must hold for
    each of them.

    Args:
        apply: Celery's own way to make one attempt.

    Raises:
        Exception: what the last attempt raised, if ``throw`` or ``task_eager_propagates`` says so.
    """
    options["task_id"] = options.get("task_id") or uuid()
    throw = options.pop("throw", None)
    while True:
        try:
            outcome = apply(args, kwargs, throw=throw, **options)
        except Retry as retry:
            if retry.sig is None:
                raise
            outcome = retry.sig
        except Exception as exc:
            _bury(task, exc, "".join(traceback.format_exception(exc)), options)
            raise
        if not isinstance(outcome, Signature):
            if outcome.state in (states.FAILURE, states.REJECTED) and isinstance(outcome.result, BaseException):
                _bury(task, outcome.result, str(outcome.traceback or ""), options)
            return outcome
        args, kwargs, options = caught(outcome)


def catch(signature: Any) -> None:
    """Let ``apply`` of a next attempt return the attempt itself, for ``run_attempts`` to make."""
    signature.apply = lambda *_, **__: signature


def caught(signature: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Arguments and options of a caught attempt."""
    vars(signature).pop("apply", None)
    return signature.args, signature.kwargs, dict(signature.options)


def as_if_waited(first_published_at: str | None, *, countdown: float | None, eta: datetime | None) -> str:
    """When the first attempt was published, had the wait before the next one taken place."""
    now = utc_now()
    first = datetime.fromisoformat(first_published_at) if first_published_at else now
    if eta is not None:
        wait = (eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)) - now
    else:
        wait = timedelta(seconds=countdown or 0)
    return (first - max(timedelta(0), wait)).isoformat()


def _bury(task: Any, exc: BaseException, trace: str, options: dict[str, Any]) -> None:
    history = names.history_of(options.get("headers") or {})
    attempt = int(options.get("retries") or 0)
    reason = reason_of(exc, task, attempt=attempt, first_published_at=history["first_published_at"])
    if reason is None:
        return
    plugin = plugin_of(task.app)
    death = death_of_eager(
        exc, trace, reason, id=options["task_id"], task=task.name, attempts=attempt + 1, context=history
    )
    plugin.eager_dead_letters.append(death)
    queue = task.dead_letter_queue or plugin.dead_letter_queue
    plugin.tell(TaskDeadLettered(task_name=death.task, task_id=death.id, death=death, queue=queue))
