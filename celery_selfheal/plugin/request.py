"""``SelfHealRequest``: what the worker's main process decides about a task of ours."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import Terminated, WorkerLostError
from celery.exceptions import TimeLimitExceeded
from celery.worker import state
from celery.worker.request import Request

from celery_selfheal import headers as names
from celery_selfheal.clock import monotonic
from celery_selfheal.errors import DeadlineExceeded
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.body import HandBack
from celery_selfheal.plugin.death import AlreadyFailed, death_of_failed_before, death_of_request, failure_of, reason_of
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.plugin.interrupt import Interruption
from celery_selfheal.plugin.retry_in_main import retry_in_main
from celery_selfheal.plugin.slots import Doom

CLOCK_PATIENCE_SECONDS = 0.1  # both are read on this host, but an adjustment of its clock may lie between


class SelfHealRequest(Request):  # type: ignore[misc]  # Celery is untyped
    """A request whose start is announced to the child, and whose end is settled from the raw message.

    Attributes:
        context_of_start: What the child must know of earlier attempts.
        is_settled: Main has ended the start, and settled its message.
    """

    start: Start | None = None
    context_of_start: dict[str, Any]
    is_settled = False

    _is_dead_lettered = False
    #: What is left to do for whoever gets a copy of the message, should this worker die before it is done.
    _failure = ""

    def __init__(self, message: Any, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        given = dict(self._request_dict)
        # Ours and the broker's must not travel on into retries and child tasks; the message itself keeps them.
        for name in given.keys() - names.of_the_user(given).keys():
            del self._request_dict[name]
        self.context_of_start = names.history_of(given)
        worker = self._worker
        if worker is not None:
            self.start = worker.announce(self, predecessor=given.get(names.PREDECESSOR), context=self.context_of_start)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Settle a final failure before Celery acknowledges it.

        A child that died is a stall, not a failure: it is counted and its message restored, or failed for good.
        """
        worker = self._worker
        if worker is None or self.start is None:
            return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        exc = _unwrapped(exc_info.exception)
        if self._was_ended_by_main(exc, self.start):
            state.task_ready(self)
            self.send_event("task-rejected", requeue=True)
            return None
        if isinstance(exc, TimeLimitExceeded):
            # A prefork pool reports it twice; what follows at once is on_timeout.
            return None
        if self._is_loss(exc):
            if not self._stored_success() and self.task.acks_late:
                state.task_ready(self)
                worker.child_died(self)
                self.send_event("task-rejected", requeue=True)
                return None
            worker.ended_from_outside(self.start, state="failure")
        elif not self._already_cancelled and not self._already_revoked:
            self._dead_letter(exc, exc_info.traceback)
        if isinstance(exc, MemoryError):
            # Celery would raise it once more, and end the whole worker with the message unsettled.
            exc_info = _told_as(OutOfMemory(str(exc)))
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def acknowledge(self) -> None:
        """Settle the message; and the lease as well, where the child may have tried to in vain."""
        super().acknowledge()
        worker = self._worker
        if worker is not None and self.task.acks_late and worker.was_silent_since(self.time_start):
            self._ended(state="ended")

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """The child is killed at its hard limit, so nobody but main can settle its message and give its lease back."""
        if soft or state.should_terminate:
            return super().on_timeout(soft, timeout)
        if self.is_settled:
            return None
        exc = TimeLimitExceeded(timeout)
        if self._is_retried(exc):
            state.task_ready(self)
            return None
        self._dead_letter(exc, "")
        result = super().on_timeout(soft, timeout)
        self._ended(state="failure")
        return result

    def _announce_revoked(self, reason: Any, terminated: Any, signum: Any, expired: Any) -> None:
        if self._worker is not None and self.start is not None:
            self._worker.acknowledges_at_once(self.start.tag)
        super()._announce_revoked(reason, terminated, signum, expired)
        if terminated:
            self._ended(state="revoked")

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """A child has begun: from now on it is watched."""
        super().on_accepted(pid, time_accepted)
        if self._worker is not None and self.start is not None:
            self._worker.accepted(self)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:  # Celery's own arguments
        """End the start in our way, in every pool: told, rolled back, handed over; killed only if it must be."""
        worker = self._worker
        if worker is None or self.start is None or not self.task.acks_late:
            super().cancel(pool, signal, emit_retry=emit_retry)
        elif self.time_start:
            self.send_event("task-cancelled")
            worker.interrupt(self, Doom.CANCELLED)

    def _was_ended_by_main(self, exc: BaseException, start: Start) -> bool:
        """Whether main told the start to end, and it did, or was killed; it is settled then."""
        worker = self._worker
        if self.is_settled:
            return True
        told = worker.interruptions.of(start.token)
        if isinstance(exc, HandBack):
            told = worker.interruptions.close(start.token) or Interruption(self, exc.doom, monotonic())
        elif told is not None and isinstance(exc, (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)):
            worker.interruptions.close(start.token)
        else:
            return False
        if told.why is Doom.DEADLINE:
            return self._ran_out_of_time(DeadlineExceeded(self.type, self.id, start.deadline_seconds or 0.0))
        worker.settle_ended(told)
        return True

    def _ran_out_of_time(self, exc: DeadlineExceeded) -> bool:
        """The child was killed at its deadline: that was an attempt."""
        if self._is_retried(exc):
            return True
        self.is_settled = True
        self._dead_letter(exc, "")
        super().on_failure(_told_as(exc))
        self._ended(state="failure")
        return True

    def _is_retried(self, exc: Exception) -> bool:
        """Whether the next attempt is on its way."""
        worker = self._worker
        if worker is None or self.start is None or not self.task.acks_late:
            return False
        self.is_settled = retry_in_main(self, exc, worker)
        return self.is_settled

    @property
    def _worker(self) -> Any:
        return plugin_of(self._app).worker

    def _dead_letter(self, exc: BaseException, trace: str) -> None:
        # Celery reports some failures twice: a hard time limit, for one.
        worker = self._worker
        if self._is_dead_lettered or worker is None or self.start is None:
            return
        if isinstance(exc, AlreadyFailed):
            self._is_dead_lettered = True
            self._failure = exc.args[0]
            worker.dead_letter(self, death_of_failed_before(self, exc, worker=worker.node))
            return
        reason = reason_of(
            exc,
            self.task,
            attempt=self._attempt,
            first_published_at=self._first_published_at,
        )
        if reason is not None:
            self._is_dead_lettered = True
            self._failure = failure_of(
                exc, self.task, attempt=self._attempt, first_published_at=self._first_published_at
            )
            worker.dead_letter(self, death_of_request(self, exc, trace, reason, worker=worker.node))

    @property
    def _attempt(self) -> int:
        return int(self._request_dict.get("retries") or 0)

    @property
    def _first_published_at(self) -> str | None:
        found: str | None = self.context_of_start["first_published_at"]
        return found

    def _ended(self, *, state: str) -> None:
        if self._worker is not None and self.start is not None:
            self._worker.ended_from_outside(self.start, state=state, failure=self._failure)

    def _is_loss(self, exc: BaseException) -> bool:
        if self._already_cancelled or self._already_revoked:
            return False
        # Billiard 4.3 and later report an exit of the child as what it raised.
        return isinstance(exc, (WorkerLostError, SystemExit, KeyboardInterrupt))

    def _stored_success(self) -> bool:
        # Celery 5.7 asks the backend; before, a child lost after its result was stored runs again.
        ask = getattr(self, "_success_was_stored", None)
        found = ask() if ask is not None else None
        return bool(found) and not _is_older(found, self.time_start)


class OutOfMemory(Exception):
    """A body had no memory left: what Celery's loop is told of it."""


def _told_as(exc: Exception) -> Any:
    try:
        raise exc
    except Exception:  # noqa: BLE001  # the one of the line before
        return ExceptionInfo()


def _is_older(meta: Any, started: float | None) -> bool:
    """Whether a stored result is from before this start: of an earlier message with the same id."""
    done = meta.get("date_done") if isinstance(meta, dict) else None
    try:
        at = done if isinstance(done, datetime) else datetime.fromisoformat(str(done))
    except ValueError:
        return False
    at = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
    return started is not None and at.timestamp() < started - CLOCK_PATIENCE_SECONDS


def _unwrapped(exc: Any) -> BaseException:
    inner: BaseException = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
    return inner
