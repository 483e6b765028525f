"""``SelfHealRequest``: what the worker's main process decides about a task of ours."""

from __future__ import annotations

from typing import Any

from billiard.einfo import ExceptionWithTraceback
from billiard.exceptions import WorkerLostError
from celery.worker import state
from celery.worker.request import Request

from celery_selfheal.agents.envelope import RESTORES_HEADER
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.install import PUBLISHED_HEADER, plugin_of
from celery_selfheal.plugin.task import PREDECESSOR_HEADER

OUR_HEADERS = (PUBLISHED_HEADER, PREDECESSOR_HEADER, RESTORES_HEADER)


class SelfHealRequest(Request):  # type: ignore[misc]  # Celery is untyped
    """A request whose start is announced to the child, and whose lost child is healed at once."""

    start: Start | None = None

    def __init__(self, message: Any, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        # Ours must not travel on into retries and child tasks; the message itself keeps them.
        ours = {name: self._request_dict.pop(name, None) for name in OUR_HEADERS}
        worker = plugin_of(self._app).worker
        if worker is not None:
            self.start = worker.announce(
                self, published_at=ours[PUBLISHED_HEADER], predecessor=ours[PREDECESSOR_HEADER]
            )

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """A child that died is a stall, not a failure: count it and restore its message, or fail it for good."""
        worker = plugin_of(self._app).worker
        if worker is None or self.start is None or not self._is_loss(exc_info):
            return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        if self._stored_success() or not self.task.acks_late:
            self._ended(state="failure")
            return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        state.task_ready(self)
        worker.child_died(self)
        self.send_event("task-rejected", requeue=True)
        return None

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """The child is killed at its hard limit, so nobody but main can give its lease back."""
        result = super().on_timeout(soft, timeout)
        if not soft:
            self._ended(state="failure")
        return result

    def _announce_revoked(self, reason: Any, terminated: Any, signum: Any, expired: Any) -> None:
        super()._announce_revoked(reason, terminated, signum, expired)
        if terminated:
            self._ended(state="revoked")

    def _announce_cancelled(self, emit_retry: bool = True) -> None:
        super()._announce_cancelled(emit_retry=emit_retry)
        worker = plugin_of(self._app).worker
        if worker is not None and self.start is not None and self.task.acks_late:
            worker.cancelled(self.start)

    def _ended(self, *, state: str) -> None:
        worker = plugin_of(self._app).worker
        if worker is not None and self.start is not None:
            worker.ended_from_outside(self.start, state=state)

    def _is_loss(self, exc_info: Any) -> bool:
        exc = exc_info.exception
        if isinstance(exc, ExceptionWithTraceback):
            exc = exc.exc
        if self._already_cancelled or self._already_revoked:
            return False
        # Billiard 4.3 and later report an exit of the child as what it raised.
        return isinstance(exc, (WorkerLostError, SystemExit, KeyboardInterrupt))

    def _stored_success(self) -> bool:
        # Celery 5.7 asks the backend; before, a child lost after its result was stored runs again.
        ask = getattr(self, "_success_was_stored", None)
        return bool(ask and ask())
