"""``SelfHealTask``: one start, from the owner check to the release."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from time import sleep
from typing import Any

from celery import Celery, Task, states
from celery.exceptions import Ignore, Reject

from celery_selfheal.agents.envelope import Envelope
from celery_selfheal.clock import jitter, monotonic, utc_now
from celery_selfheal.errors import StalledTooOften, StoreError
from celery_selfheal.leases.port import (
    Acquired,
    AlreadyDone,
    Busy,
    Lease,
    LeaseStore,
    NotMine,
    Outcome,
    StalledOut,
    Start,
)
from celery_selfheal.plugin.install import Plugin, install, is_built_in, plugin_of
from celery_selfheal.telemetry.events import TaskStalled

logger = logging.getLogger("celery_selfheal")

PREDECESSOR_HEADER = "selfheal-predecessor"
"""Token of the start whose retry a message is."""

CONTEXT_KEY = "selfheal"
"""Where the main process puts what it knows of the start, inside the request's properties."""

SUCCESSOR_PATIENCE = timedelta(milliseconds=500)  # the holder is another attempt of the id, about to release


STORE_PAUSE_SECONDS = (0.1, 0.5)  # between two tries of a store that is away


@dataclass(frozen=True, slots=True)
class _Running:
    """What a start must remember until it ends."""

    start: Start
    lease: Lease
    leases: LeaseStore


class SelfHealTask(Task):  # type: ignore[misc]  # Celery is untyped
    """Base of tasks that heal: ``@app.task(base=SelfHealTask)``, or ``Celery(task_cls=SelfHealTask)`` for all.

    Late acknowledgement and requeue on worker loss are on. ``acks_late=False`` on a task is an explicit opt-out: such a
    task is lost with its worker, as in plain Celery.
    """

    abstract = True
    Request = "celery_selfheal.plugin.request:SelfHealRequest"
    acks_late = True
    reject_on_worker_lost = True

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Install the plugin with the first task that uses it."""
        super().on_bound(app)
        if is_built_in(cls.name or ""):
            cls.acks_late = app.conf.task_acks_late
            cls.reject_on_worker_lost = app.conf.task_reject_on_worker_lost
            cls.Request = Task.Request
        else:
            install(app)

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
        self._enter(plugin, start, leases)
        return self.run(*args, **kwargs)

    @property
    def lease(self) -> Lease | None:
        """Lease of the running start; ``None`` outside of one."""
        running: _Running | None = getattr(self.request, "selfheal_running", None)
        return running.lease if running else None

    def end_start(self, state: str | None, retval: Any) -> None:
        """Release at the very end, when callbacks are sent and the result is stored. Called by ``task_postrun``."""
        running: _Running | None = getattr(self.request, "selfheal_running", None)
        # Without a state the body was left by SystemExit or the like: the process goes down, and main counts it.
        if running is None or state is None:
            return
        self.request.selfheal_running = None
        # The result could not be stored, say: the message must come back, so nothing may say that it is done.
        unfinished = sys.exc_info()[1] is not None
        requeued = isinstance(retval, Reject) and retval.requeue
        try:
            running.leases.release(
                running.start,
                ended=True,
                marker=not unfinished and not requeued,
                state=state.lower(),
                # Failures and rejections are settled by main, from the raw message.
                acknowledge=not unfinished and state in (states.SUCCESS, states.RETRY, states.IGNORED),
            )
        except StoreError as exc:
            logger.warning("lease of %s[%s] runs out by itself: %s", self.name, running.start.task_id, exc)

    def signature_from_request(self, request: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Celery's, but a retry names its predecessor, whose lease it may take over."""
        running: _Running | None = getattr(request or self.request, "selfheal_running", None)
        if running is not None:
            headers = dict(kwargs.get("headers") or (request or self.request).headers or {})
            headers[PREDECESSOR_HEADER] = running.start.token
            kwargs["headers"] = headers
        return super().signature_from_request(request, *args, **kwargs)

    def _start(self) -> Start | None:
        """The start that main announced; in eager mode, one of our own; ``None`` without a worker that knows us."""
        request = self.request
        properties = request.properties
        if isinstance(properties, Mapping) and CONTEXT_KEY in properties:
            return Start(**properties[CONTEXT_KEY])
        if not request.is_eager:
            return None
        token = uuid.uuid4().hex
        return Start(
            task_id=request.id,
            task_name=self.name,
            token=token,
            session="eager",
            attempt=f"{self.name}:{request.retries}",
            marker=token,
            predecessor=(request.headers or {}).get(PREDECESSOR_HEADER),
        )

    def _enter(self, plugin: Plugin, start: Start, leases: LeaseStore) -> None:
        """Take the lease, or leave by Celery's ways."""
        outcome = self._acquire(leases, start, patience=plugin.settings.lease_ttl)
        if isinstance(outcome, (Acquired, StalledOut)):
            self.request.selfheal_running = _Running(start, outcome.lease, leases)
        if isinstance(outcome, Acquired):
            if outcome.overtaken:
                stall = asdict(outcome.overtaken)
                stall.pop("token")
                plugin.tell(TaskStalled(reason="lease ran out", **stall))
        elif isinstance(outcome, StalledOut):
            raise StalledTooOften(self.name, start.task_id, outcome.stalls, plugin.settings.max_stalls)
        elif isinstance(outcome, Busy):
            self._park(plugin, start, outcome)
            raise Ignore(f"parked: another start runs for another {outcome.remaining.total_seconds():.1f} s")
        elif isinstance(outcome, AlreadyDone):
            raise Ignore("a copy of this message was finished")
        elif isinstance(outcome, NotMine):
            raise Ignore("the message was given to another worker")

    def _acquire(self, leases: LeaseStore, start: Start, *, patience: timedelta) -> Outcome:
        """Try for one TTL; then the message goes back uncounted, and the worker takes none until the store answers."""
        give_up_at = monotonic() + patience.total_seconds()
        while True:
            try:
                return leases.acquire(start)
            except StoreError as exc:
                if monotonic() >= give_up_at:
                    logger.warning("%s[%s] is handed back: %s", self.name, start.task_id, exc)
                    raise Reject(str(exc), requeue=True) from exc
                sleep(jitter().uniform(*STORE_PAUSE_SECONDS))

    def _park(self, plugin: Plugin, start: Start, busy: Busy) -> None:
        """Replace the delivery by a copy that comes back when the lease may have run out."""
        is_twin = busy.attempt in ("", start.attempt)
        patience = busy.remaining if is_twin else min(busy.remaining, SUCCESSOR_PATIENCE)
        seconds = patience.total_seconds() * (1 + jitter().uniform(0, 0.25))
        eta = (utc_now() + timedelta(seconds=seconds)).isoformat()
        deliveries = plugin.stores.deliveries
        logger.info("parked: %s[%s] for %.1f s, another start runs", self.name, start.task_id, seconds)
        if deliveries is None or start.tag is None:
            self.signature_from_request(countdown=seconds, retries=self.request.retries, expires=None).apply_async()
            return
        for delivery in deliveries.named(start.session, [start.tag]):
            message = Envelope.decode(delivery.message).restored(counted=False, started=True, eta=eta)
            deliveries.settle(delivery, session=start.session, message=message, dead=False, front=False)
