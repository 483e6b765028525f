"""``SelfHealRequest``: what the worker's main process decides about a task of ours."""

from __future__ import annotations

from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import WorkerLostError
from celery.exceptions import TimeLimitExceeded
from celery.worker import state
from celery.worker.request import Request

from celery_selfheal import headers as names
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.death import AlreadyFailed, death_of_failed_before, death_of_request, failure_of, reason_of
from celery_selfheal.plugin.install import plugin_of


class SelfHealRequest(Request):  # type: ignore[misc]  # Celery is untyped
    """A request whose start is announced to the child, and whose end is settled from the raw message.

    Attributes:
        context_of_start: What the child must know of earlier attempts.
    """

    start: Start | None = None
    context_of_start: dict[str, Any]

    _is_dead_lettered = False

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
        if self._is_loss(exc):
            if not self._stored_success() and self.task.acks_late:
                state.task_ready(self)
                worker.child_died(self)
                self.send_event("task-rejected", requeue=True)
                return None
            worker.ended_from_outside(self.start, state="failure")
        elif not self._already_cancelled and not self._already_revoked:
            self._dead_letter(exc, exc_info.traceback)
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
        exc = TimeLimitExceeded(timeout)
        self._dead_letter(exc, "")
        result = super().on_timeout(soft, timeout)
        failure = failure_of(exc, self.task, attempt=self._attempt, first_published_at=self._first_published_at)
        self._ended(state="failure", failure=failure)
        return result

    def _announce_revoked(self, reason: Any, terminated: Any, signum: Any, expired: Any) -> None:
        if self._worker is not None and self.start is not None:
            self._worker.acknowledges_at_once(self.start.tag)
        super()._announce_revoked(reason, terminated, signum, expired)
        if terminated:
            self._ended(state="revoked")

    def _announce_cancelled(self, emit_retry: bool = True) -> None:
        super()._announce_cancelled(emit_retry=emit_retry)
        worker = self._worker
        if worker is not None and self.start is not None and self.task.acks_late:
            worker.cancelled(self.start)

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
            worker.dead_letter(self, death_of_request(self, exc, trace, reason, worker=worker.node))

    @property
    def _attempt(self) -> int:
        return int(self._request_dict.get("retries") or 0)

    @property
    def _first_published_at(self) -> str | None:
        found: str | None = self.context_of_start["first_published_at"]
        return found

    def _ended(self, *, state: str, failure: str = "") -> None:
        if self._worker is not None and self.start is not None:
            self._worker.ended_from_outside(self.start, state=state, failure=failure)

    def _is_loss(self, exc: BaseException) -> bool:
        if self._already_cancelled or self._already_revoked:
            return False
        # Billiard 4.3 and later report an exit of the child as what it raised.
        return isinstance(exc, (WorkerLostError, SystemExit, KeyboardInterrupt))

    def _stored_success(self) -> bool:
        # Celery 5.7 asks the backend; before, a child lost after its result was stored runs again.
        ask = getattr(self, "_success_was_stored", None)
        return bool(ask and ask())


def _unwrapped(exc: Any) -> BaseException:
    inner: BaseException = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
    return inner
