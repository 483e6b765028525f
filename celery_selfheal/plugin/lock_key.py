"""Lock keys: which key a start needs, and what becomes of it while another task has the key."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from celery_selfheal.arguments import check_template, key_of, template_of
from celery_selfheal.backoff import check_seconds
from celery_selfheal.clock import jitter
from celery_selfheal.errors import LeaseBusy, SettingsError, UnrecoverableError
from celery_selfheal.leases.port import Busy, Start
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.retry import age_of
from celery_selfheal.plugin.running import context_of

logger = logging.getLogger("celery_selfheal")

SKIPPED = "SKIPPED"
"""Result of a task with ``lease_busy="skip"`` whose body did not run."""

MODES = ("wait", "skip", "fail")
LEAST_PAUSE = timedelta(milliseconds=500)  # two questions a second and waiter, however short the holder's time is
FIRST_PAUSE = timedelta(seconds=1)  # doubled with each wait, up to what is left of the holder's lease


def check_lock_options(task: Any, plugin: Plugin, where: str, body: Any) -> None:
    """Check what a task declares about its lock key, when it is defined.

    Raises:
        SettingsError: names task, option, value and remedy.
    """
    if task.lease_busy not in MODES:
        raise SettingsError(f"{where}: lease_busy must be one of {MODES}, got {task.lease_busy!r}", "lease_busy")
    if task.lease_wait_max is not None:
        check_seconds(where, "lease_wait_max", task.lease_wait_max)
        if task.lease_busy != "wait":
            raise SettingsError(
                f"{where}: lease_wait_max has no effect with lease_busy={task.lease_busy!r}: take one of them out",
                "lease_wait_max",
            )
    if task.lease_key is None:
        if task.lease_busy != "wait" or task.lease_wait_max is not None:
            raise SettingsError(
                f"{where}: lease_busy and lease_wait_max have no effect without lease_key: add it, or take them out",
                "lease_key",
            )
        return
    check_template(where, "lease_key", task.lease_key, body)
    if plugin.settings.lease_backend == "postgres":
        raise SettingsError(
            f"{where}: lease_key needs leases in Redis, and selfheal_lease_backend is 'postgres': set it to 'redis',"
            " or take lease_key out",
            "lease_key",
        )


def with_lock_key(task: Any, start: Start, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Start:
    """The start with the lock key that its arguments give; as it is for a task without one.

    Raises:
        UnrecoverableError: ``lease_key`` gives no key for these arguments.
    """
    template = template_of(task, "lease_key")
    if template is None:
        return start
    return replace(start, lock_key=key_of(f"task {task.name}", "lease_key", template, task.run, args, kwargs))


def completed(request: Any) -> Start:
    """The start of a message with its lock key, as its worker's main process sees it; made once for each."""
    start: Start = request.start
    if start.lock_key is None and getattr(request.task, "lease_key", None) is not None:
        try:
            start = request.start = with_lock_key(request.task, start, request.args, request.kwargs)
        except UnrecoverableError as exc:
            logger.warning("%s[%s] runs on without its lock key: %s", start.task_name, start.task_id, exc)
    return start


def pause_or_refusal(task: Any, busy: Busy) -> timedelta | LeaseBusy:
    """What a start with ``lease_busy="wait"`` or ``"fail"`` does about a busy lock key: wait so long, or fail.

    Holder and waiters know nothing of each other, so each waiter asks after a while again: soon at first, for
    holders that are quick; later at times spread around the end of the holder's lease.
    """
    refusal = LeaseBusy(str(busy.key), busy.holder, busy.remaining.total_seconds())
    # In eager mode nobody would come back.
    if task.lease_busy == "fail" or task.request.is_eager:
        return refusal
    context = context_of(task.request)
    waits = min(int(context.get("lock_waits") or 0), 20)
    chance: float = jitter().uniform(0.5, 1.5)
    pause: timedelta = min(busy.remaining, FIRST_PAUSE * 2.0**waits) * chance
    if task.lease_wait_max is not None:
        left = timedelta(seconds=task.lease_wait_max) - age_of(context.get("first_published_at"))
        if left <= timedelta(0):
            return refusal
        pause = min(pause, left)
    return max(LEAST_PAUSE, pause)
