"""Why a task died, as main sees it: reason code and envelope."""

from __future__ import annotations

import json
from typing import Any

import celery
from celery.exceptions import Ignore, Reject, Retry, Terminated, TimeLimitExceeded

import celery_selfheal
from celery_selfheal import headers as names
from celery_selfheal.classify import Verdict, classify
from celery_selfheal.clock import utc_now
from celery_selfheal.dead_letter import Death, Reason
from celery_selfheal.errors import DeadlineExceeded, InDoubt, PayloadMismatch, StalledTooOften
from celery_selfheal.plugin.install import plugin_of
from celery_selfheal.plugin.retry import age_of, policy_now, verdict_on

_NAMED = (
    (StalledTooOften, Reason.STALLED),
    ((TimeLimitExceeded, DeadlineExceeded), Reason.DEADLINE),
    (PayloadMismatch, Reason.PAYLOAD_MISMATCH),
    (InDoubt, Reason.IN_DOUBT),
    (Reject, Reason.REJECTED),
)

MAX_KEPT_TEXT = 500  # characters of a failure that a done marker keeps: it lives for an hour, and there may be many


class AlreadyFailed(Ignore):  # type: ignore[misc]  # Celery is untyped
    """A copy of the message has failed for good, and its worker died before it could move the message.

    Its one argument is the ``failure`` of the done marker.
    """


def failure_of(exc: BaseException, task: Any, *, attempt: int, first_published_at: str | None) -> str:
    """What main needs to dead-letter the message, as text; empty where it need not."""
    reason = reason_of(exc, task, attempt=attempt, first_published_at=first_published_at)
    if reason is None:
        return ""
    return json.dumps({"reason": reason.value, **_told(exc, attempt), "text": _text_of(exc)[:MAX_KEPT_TEXT]})


def leave_as_before(failure: str) -> Ignore | Reject:
    """How a start ends whose message has failed before, as ``failure`` says."""
    known = json.loads(failure)
    if known["reason"] == Reason.REJECTED.value:
        # Main stores the failure of what was rejected.
        return Reject(known["text"], requeue=False)
    return AlreadyFailed(failure)


def versions() -> str:
    """Of Celery and of us."""
    return f"celery {celery.__version__}, celery_selfheal {celery_selfheal.__version__}"


def reason_of(exc: BaseException, task: Any, *, attempt: int, first_published_at: str | None) -> Reason | None:
    """Reason code of a final failure; ``None`` where the exception is none, or the task wants no dead letter."""
    if isinstance(exc, (Retry, Ignore, Terminated)) or (isinstance(exc, Reject) and exc.requeue):
        return None
    wanted = isinstance(exc, (task.dead_letter_for, Reject)) and not isinstance(exc, task.dont_dead_letter_for)
    if not task.dead_letter or not wanted:
        return None
    for kind, reason in _NAMED:
        if isinstance(exc, kind):
            return reason
    # What the child has found counts: it knows of self.retry(max_retries=...), say.
    verdict = verdict_on(exc) or classify(
        exc,
        policy_now(task),
        attempt=attempt,
        age=age_of(first_published_at),
        unrecoverable=plugin_of(task.app).unrecoverable,
    )
    return Reason.UNRECOVERABLE if verdict is Verdict.UNRECOVERABLE else Reason.EXHAUSTED


def death_of_request(request: Any, exc: BaseException, trace: str, reason: Reason, *, worker: str) -> Death:
    """Envelope of a task that failed for good."""
    return _death(
        request.context_of_start,
        request.delivery_info,
        reason,
        id=str(request.id),
        task=str(request.type),
        trace=trace or "",
        worker=worker,
        **_told(exc, _number(request.request_dict.get("retries"))),
    )


def death_of_failed_before(request: Any, failed: AlreadyFailed, *, worker: str) -> Death:
    """Envelope of a task that failed for good in an earlier start of the same message."""
    known = json.loads(failed.args[0])
    reason = Reason(known.pop("reason"))
    context, info = request.context_of_start, request.delivery_info
    return _death(context, info, reason, id=str(request.id), task=str(request.type), worker=worker, **known)


def death_of_eager(exc: BaseException, trace: str, reason: Reason, *, context: Any, **known: Any) -> Death:
    """Envelope of a task that failed for good in eager mode: it came from no queue."""
    return _death(
        context, {}, reason, exception=type(exc).__name__, text=_text_of(exc), trace=trace, worker="eager", **known
    )


def death_of_message(message: Any, exc: BaseException | None, reason: Reason, *, worker: str) -> Death:
    """Envelope of a message that no task could be made of."""
    headers = message.headers if isinstance(message.headers, dict) else {}
    return _death(
        {"replays": headers.get(names.REPLAYS)},
        {**(message.delivery_info or {}), "priority": (message.properties or {}).get("priority")},
        reason,
        id=str(headers.get("id") or ""),
        task=str(headers.get("task") or ""),
        exception=type(exc).__name__ if exc else "",
        text=str(exc) if exc else "",
        worker=worker,
    )


def death_of_bytes(exc: BaseException, *, queue: str, worker: str) -> Death:
    """Envelope of something in a queue that is no message."""
    return _death(
        {},
        {"routing_key": queue},
        Reason.UNDECODABLE,
        id="",
        task="",
        exception=type(exc).__name__,
        text=str(exc),
        worker=worker,
    )


def _death(context: Any, delivery_info: Any, reason: Reason, **known: Any) -> Death:
    now = utc_now().isoformat()
    return Death(
        reason=reason.value,
        first_failure=context.get("first_failure_at") or now,
        died_at=now,
        queue=str(delivery_info.get("queue") or delivery_info.get("routing_key") or ""),
        exchange=str(delivery_info.get("exchange") or ""),
        routing_key=str(delivery_info.get("routing_key") or ""),
        priority=_number(delivery_info.get("priority")),
        replays=_number(context.get("replays")),
        versions=versions(),
        **known,
    )


def _told(exc: BaseException, retries: int) -> dict[str, Any]:
    is_stall = isinstance(exc, StalledTooOften)
    return {
        "exception": type(exc).__name__,
        "text": _text_of(exc),
        "attempts": retries + (0 if is_stall else 1),
        "stalls": exc.starts if isinstance(exc, StalledTooOften) else 0,
    }


def _text_of(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001  # a user's exception that cannot even be printed must not keep its letter back
        return "(its text cannot be had)"


def _number(given: object) -> int:
    """A number out of a message; 0 for whatever is none, since anybody can send anything."""
    return given if isinstance(given, int) and not isinstance(given, bool) else 0
