"""Main announces a start: it makes the token, and puts what the child must know into the request."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any

from celery_selfheal.keys import session_of_tag
from celery_selfheal.leases.port import Start
from celery_selfheal.plugin.running import CONTEXT_KEY
from celery_selfheal.retry_budget import Turn
from celery_selfheal.settings import SelfHealSettings

_START_FIELDS = tuple(field.name for field in fields(Start))  # asdict copies deeply, once for each message


def announce(
    request: Any,
    *,
    predecessor: str | None,
    context: Mapping[str, Any],
    session: str,
    node: str,
    limit: float | None,
) -> Start:
    """Make the start of a request and put it where the child finds it.

    Args:
        session: Of the worker; a delivery that an earlier incarnation took keeps that one's.
        limit: Seconds that it may run.
    """
    headers = request.request_dict
    tag = getattr(request.message, "delivery_tag", None)
    session_of_delivery = session_of_tag(tag) if isinstance(tag, str) else None
    attempt = f"{request.type}:{headers.get('retries') or 0}"
    start = Start(
        task_id=request.id,
        task_name=request.type,
        token=uuid.uuid4().hex,
        session=session_of_delivery or session,
        attempt=attempt,
        marker=f"{request.id}:{attempt}:{context['replays']}:{context['published_at'] or ''}",
        turn=turn_of(headers, context),
        predecessor=predecessor,
        tag=tag if session_of_delivery and request.task.acks_late else None,
        node=node,
        pid=os.getpid(),
        deadline_seconds=limit,
    )
    # A copy: what is put into the shared dictionary would travel on into retries.
    properties = dict(headers.get("properties") or {})
    properties[CONTEXT_KEY] = {**context, "start": {name: getattr(start, name) for name in _START_FIELDS}}
    headers["properties"] = properties
    return start


def own_limit_of(task: Any, settings: SelfHealSettings) -> float | None:
    """``max_runtime`` of a task, seconds; ``None`` where only a time limit of Celery's may hold."""
    limit = getattr(task, "max_runtime", None) or settings.max_runtime
    return limit.total_seconds() if isinstance(limit, timedelta) else limit


def limit_of(request: Any, settings: SelfHealSettings, conf: Any) -> float | None:
    """Seconds that a start of this request may run; ``None`` without any limit."""
    time_limit = (request.time_limits or (None, None))[0] or request.task.time_limit or conf.task_time_limit
    limit: float | None = own_limit_of(request.task, settings) or time_limit
    return limit


def turn_of(headers: Mapping[str, Any], context: Mapping[str, Any]) -> Turn:
    """Which turn of its task a message is, for the retry budget."""
    if not headers.get("retries"):
        return "first"
    return "paid" if context.get("budget_paid") else "retry"
