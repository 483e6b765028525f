"""The entrance to a start: owner check and lease, in one call, or a way out by Celery's own means."""

from __future__ import annotations

import logging
import uuid
from dataclasses import asdict
from datetime import timedelta
from time import sleep
from typing import Any

from celery.exceptions import Ignore, Reject

from celery_selfheal import headers as names
from celery_selfheal.clock import jitter, monotonic
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
from celery_selfheal.plugin.body import Body
from celery_selfheal.plugin.death import leave_as_before
from celery_selfheal.plugin.install import Plugin
from celery_selfheal.plugin.lock_key import pause_or_refusal
from celery_selfheal.plugin.next_attempt import STORE_PAUSE_SECONDS
from celery_selfheal.plugin.on_commit import AfterCommit
from celery_selfheal.plugin.parking import park
from celery_selfheal.plugin.running import CONTEXT_KEY, Running, context_of
from celery_selfheal.telemetry.events import TaskStalled

logger = logging.getLogger("celery_selfheal")

SUCCESSOR_PATIENCE = timedelta(milliseconds=500)  # the holder is another attempt of the id, about to release


def start_of(task: Any) -> Start | None:
    """The start that main announced; in eager mode, one of our own; ``None`` without a worker that knows us."""
    request = task.request
    announced = context_of(request).get("start")
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
        task_name=task.name,
        token=token,
        session="eager",
        attempt=f"{task.name}:{request.retries}",
        marker=token,
        predecessor=headers.get(names.PREDECESSOR),
    )


def enter(task: Any, plugin: Plugin, start: Start, leases: LeaseStore, body: Body) -> Running | None:
    """Take the lease, and the lock key if the task has one; or leave by Celery's ways.

    Returns:
        ``None`` where another task has the lock key, and this one is to be skipped then.
    """
    body.refuse_while_draining()
    outcome = _acquire(task, leases, start, patience=plugin.settings.lease_ttl)
    if isinstance(outcome, OverBudget):
        park(task, plugin, start, outcome.wait, paid=True)
        raise Ignore(f"the retry budget is used up; the retry waits {outcome.wait.total_seconds():.1f} s longer")
    if isinstance(outcome, Busy) and outcome.key is not None:
        return _without_lock(task, plugin, start, leases, body, outcome)
    if isinstance(outcome, Busy):
        is_twin = outcome.attempt in ("", start.attempt)
        patience = outcome.remaining if is_twin else min(outcome.remaining, SUCCESSOR_PATIENCE)
        if not task.request.is_eager:
            park(task, plugin, start, patience, paid=False)
        raise Ignore(f"parked: another start runs for another {outcome.remaining.total_seconds():.1f} s")
    if isinstance(outcome, AlreadyDone):
        raise leave_as_before(outcome.failure) if outcome.failure else Ignore("a copy of this message was finished")
    if isinstance(outcome, NotMine):
        raise Ignore("the message was given to another worker")
    running = Running(start, outcome.lease, leases, plugin.tell, AfterCommit(task, plugin), body)
    body.fence = outcome.lease.fence
    task.request.selfheal_running = running
    if isinstance(outcome, StalledOut):
        running.stalled = StalledTooOften(task.name, start.task_id, outcome.stalls, plugin.settings.max_stalls)
    elif outcome.overtaken:
        stall = asdict(outcome.overtaken)
        stall.pop("token")
        plugin.tell(TaskStalled(reason="lease ran out", **stall))
    return running


def _without_lock(
    task: Any, plugin: Plugin, start: Start, leases: LeaseStore, body: Body, busy: Busy
) -> Running | None:
    """As the task's ``lease_busy`` says: the body does not run, and there is no lease to give back."""
    if task.lease_busy == "skip":
        return None
    decision = pause_or_refusal(task, busy)
    if isinstance(decision, timedelta):
        park(task, plugin, start, decision, paid=False, for_lock=True)
        raise Ignore(f"parked: another task has the lock key {busy.key!r}")
    nothing = Lease(task_id=start.task_id, token=start.token, fence=0)
    running = Running(start, nothing, leases, plugin.tell, AfterCommit(task, plugin), body, refused=decision)
    task.request.selfheal_running = running
    return running


def _acquire(task: Any, leases: LeaseStore, start: Start, *, patience: timedelta) -> Outcome:
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
                logger.warning("%s[%s] is handed back: %s", task.name, start.task_id, exc)
                raise Reject(str(exc), requeue=True) from exc
            sleep(jitter().uniform(*STORE_PAUSE_SECONDS))
